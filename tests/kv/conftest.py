"""Slow links for the pools."""

import time

import pytest
import torch

from furlong.kv.pools import ThreadLane


@pytest.fixture
def delays(monkeypatch):
    """Workers sleep at random before each operation."""
    submit, generator = ThreadLane.submit, torch.Generator().manual_seed(1)

    def late(self, work, after):
        pause_s = float(torch.rand((), generator=generator)) * 4e-3

        def slow():
            time.sleep(pause_s)
            work()

        return submit(self, slow, after)

    monkeypatch.setattr(ThreadLane, "submit", late)

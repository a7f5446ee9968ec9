"""Collectives between two processes on this machine."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from furlong.calibrate import measure
from furlong.cost.machine import Collective

PROGRAM = """
import json, sys, torch
from furlong.calibrate.measure import collective_links, processes
with processes(torch.device("cpu")) as is_first:
    links = collective_links(torch.device("cpu"))
if is_first:
    with open(sys.argv[1], "w") as file:
        json.dump({name: [link.latency_s, link.bytes_per_s] for name, link in links.items()}, file)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("local", "suffix"), [("2", ""), ("1", " between nodes")])
def test_every_collective_has_a_link(tmp_path, local, suffix):
    program, out = tmp_path / "program.py", tmp_path / "links.json"
    program.write_text(PROGRAM)
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 20_000)}
    children = [
        subprocess.Popen(
            [sys.executable, str(program), str(out)], stderr=subprocess.PIPE, text=True,
            env={**os.environ, **store, "RANK": str(rank), "WORLD_SIZE": "2",
                 "LOCAL_WORLD_SIZE": local},
        )
        for rank in range(2)
    ]  # fmt: skip
    for child in children:
        _, errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors
        assert "Deprecat" not in errors and "FutureWarning" not in errors
    links = json.loads(out.read_text())
    assert set(links) == {f"{name}{suffix}" for name in get_args(Collective)}
    assert all(latency >= 0 and rate > 1e6 for latency, rate in links.values())


def test_each_process_uses_its_card_alone(monkeypatch):
    """Whatever names no card would lie on the first one, in a context of each process."""
    calls = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    double = SimpleNamespace(
        init_process_group=calls.append, get_rank=lambda: 1, barrier=lambda: None,
        destroy_process_group=lambda: None,
    )  # fmt: skip
    monkeypatch.setattr(measure, "dist", double)
    with measure.processes(torch.device("cuda", 1)) as is_first:
        assert not is_first
    assert calls == [torch.device("cuda", 1), "nccl"]

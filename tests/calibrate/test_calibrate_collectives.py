"""Collectives between two processes on this machine."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from helpers.launched import Launched

from furlong.calibrate import measure
from furlong.cost.machine import Collective


def measure_links(out: Path) -> None:
    """Links of processes on one machine, then as if each were on a machine of its own."""
    device = torch.device("cpu")
    with measure.processes(device) as is_first:
        links = {}
        for local in ("2", "1"):
            os.environ["LOCAL_WORLD_SIZE"] = local
            links |= measure.collective_links(device)
    if is_first:
        out.write_text(json.dumps({n: [x.latency_s, x.bytes_per_s] for n, x in links.items()}))


@pytest.mark.slow
def test_every_collective_has_a_link(tmp_path):
    ended = Launched(tmp_path / "said", measure_links, tmp_path / "links.json").ended(120)
    for process in ended:
        assert process.code == 0, process.said
        assert "Deprecat" not in process.said and "FutureWarning" not in process.said
    links = json.loads((tmp_path / "links.json").read_text())
    suffixes = ("", " between nodes")
    assert set(links) == {f"{name}{end}" for name in get_args(Collective) for end in suffixes}
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

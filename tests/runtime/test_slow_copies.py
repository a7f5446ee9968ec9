"""Copies that come late, at random: the same bits as tensors that never left the device."""

from __future__ import annotations

import random
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import batch
from helpers.executors import executor_of
from helpers.nightly import SEED
from helpers.tiny_families import build
from torch import Tensor

from furlong.kv.arena import Arena
from furlong.kv.pools import CpuPool, DiskPool, Pools, StagedPool, Storage
from furlong.models.decoder import HFDecoder
from furlong.plan.plan import Offload
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device
from furlong.testing import take_grads

CPU = torch.device("cpu")
LENS = [29, 4, 17]
LONGEST_S = 4e-3
STAGING_BYTES = 2**16
"""Room for a few tensors of these models: buffers are waited for and reused."""
WALKS = {
    "chunk-first": {"keep": "attention"},
    "chunk-first, all": {"keep": "all", "recompute_layers": 1},
    "height 1": {"keep": "input", "order": "layer-first"},
    "height 1, attention": {"keep": "attention", "order": "layer-first"},
    "height 2": {
        "keep": "attention", "order": "layer-first", "stage_layers": 2, "recompute_layers": 2,
    },
}  # fmt: skip
MIXTURES = {
    "cpu": Offload("cpu", "cpu", "cpu", "cpu"),
    "disk": Offload("disk", "disk", "disk", "disk"),
    "mixed": Offload(kv="cpu", inputs="disk", attention="cpu", graphs="disk"),
}


TRUTHS: dict[str, tuple[float, dict[str, Tensor]]] = {}


@pytest.fixture(autouse=True)
def _small_graphs(monkeypatch):
    """Graphs leave nothing behind as too small."""
    monkeypatch.setattr("furlong.runtime.cell._MIN_BYTES", 1)


def step(options: ChunkOptions, folder: Path) -> tuple[float, dict[str, Tensor]]:
    """Summed loss and gradients of a batch, with little staging and with poison."""
    model = HFDecoder(build("mistral", torch.float32))
    pools = Pools(Arena(CPU, poison=True), Storage(poison=True))
    staging = {"staging_bytes": STAGING_BYTES, "poison": True}
    pools.opened["cpu"] = CpuPool(CPU, **staging)
    pools.opened["disk"] = DiskPool(folder, CPU, **staging)
    sequences = batch(LENS)
    plan = plan_on_device(LENS, options, num_layers=model.num_layers)
    with model.installed():
        loss_sum, _ = executor_of(model, plan, sequences, pools=pools).run()
    pools.close()
    return loss_sum, take_grads(model.model)


def delay(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[float]:
    """Let every copy of a worker sleep first; returns the seconds that were slept."""
    drawn, slept = random.Random(seed), []
    for pool, name in product((CpuPool, DiskPool), ("_copy_out", "_copy_back")):
        plain = getattr(pool, name)

        def late(self, place, staged, plain=plain):
            slept.append(drawn.choice((0.0, 0.0, drawn.uniform(0, LONGEST_S))))
            time.sleep(slept[-1])
            plain(self, place, staged)

        monkeypatch.setattr(pool, name, late)
    return slept


def same_bits(given: tuple, truth: tuple) -> bool:
    (loss, grads), (true_loss, true_grads) = given, truth
    return loss == true_loss and all(torch.equal(grads[n], true_grads[n]) for n in true_grads)


def dials_of(walk: str) -> dict[str, Any]:
    return {"size": 4, "num_retained": 0, **WALKS[walk]}


def truth_of(walk: str, folder: Path) -> tuple[float, dict[str, Tensor]]:
    """Computed once for all mixtures, on the device alone."""
    if walk not in TRUTHS:
        TRUTHS[walk] = step(ChunkOptions(**dials_of(walk)), folder)
    return TRUTHS[walk]


def check(walk: str, mixture: str, seed: int, folder: Path, monkeypatch) -> None:
    dials = dials_of(walk)
    target = MIXTURES[mixture]
    monkeypatch.setattr("furlong.kv.store.segment_tokens", lambda *_: 3)
    truth = truth_of(walk, folder)
    slept = delay(monkeypatch, seed)
    assert same_bits(step(ChunkOptions(**dials, offload=target), folder), truth)
    assert slept, "nothing has gone through a worker"


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.few(1)
def test_late_copies_change_no_bit(mixture, tmp_path, monkeypatch):
    check("height 1, attention", mixture, 0, tmp_path, monkeypatch)


WALKED = [
    *product(WALKS, ["mixed"], [0]),
    *product(["chunk-first, all", "height 2"], ["cpu", "disk"], [0]),
]
"""Every walk with both pools, every kind of tensor in each pool; the night takes them all."""


@pytest.mark.parametrize(
    ("walk", "mixture", "seed"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case in WALKED else pytest.mark.nightly)
        for case in product(WALKS, MIXTURES, (0, SEED * 10_000 + 1))
    ],
)
def test_late_copies_change_no_bit_in_any_walk(walk, mixture, seed, tmp_path, monkeypatch):
    check(walk, mixture, seed, tmp_path, monkeypatch)


@pytest.mark.parametrize("target", ["cpu", "disk"])
@pytest.mark.few(1)
def test_a_pool_that_does_not_wait_is_seen(target, tmp_path, monkeypatch):
    monkeypatch.setattr(StagedPool, "_wait", lambda *_: None)
    monkeypatch.setattr(random.Random, "choice", lambda self, values: LONGEST_S)
    with pytest.raises((AssertionError, RuntimeError)):
        check("height 1, attention", target, 0, tmp_path, monkeypatch)

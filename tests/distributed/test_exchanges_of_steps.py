"""Collectives of host values in a step: two before its first action, one after its last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.sharded_cases import llama
from helpers.batches import batch
from helpers.ranks import run_ranks

import furlong
from furlong.planners.options import ChunkOptions
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import num_labels

LENS = (23, 9, 17, 3)
HOST_ELEMENTS = 8


def count_exchanges(rank: int, sizes: tuple[int, int, int]) -> dict[str, dict[str, int]]:
    """The collectives of host values of this process, by call and by name."""
    ranks, options = make_ranks(*sizes, "cpu"), ChunkOptions(size=8, keep="kv")
    engine, sequences = furlong.Engine(llama(), ranks=ranks), batch(LENS)
    plan, own = engine.plan(LENS, options), sequences[ranks.replica :: ranks.dp]
    calls: dict[str, Callable[[], Any]] = {
        "run": lambda: engine.run(plan, sequences, num_labels(sequences)),
        "forward_backward": lambda: engine.forward_backward(own, options),
        "clip_gradients": lambda: engine.clip_gradients(1.0),
    }
    calls["run"]()  # its stages are checked
    names = Counter[str]()

    def wrap(name: str, num_elements: Callable[..., int]) -> None:
        plain = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            names[name] += num_elements(*args) <= HOST_ELEMENTS
            return plain(*args, **kwargs)

        setattr(dist, name, call)

    wrap("all_gather", lambda outputs, x: x.numel())
    wrap("all_gather_object", lambda *_: 0)
    wrap("all_reduce", lambda x: torch.as_tensor(x).numel())
    wrap("broadcast_object_list", lambda *_: 0)
    found = {}
    for name, call in calls.items():
        names.clear()
        call()
        found[name] = {own: count for own, count in names.items() if count}
    return found


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)])
def test_a_step_agrees_before_it_and_adds_up_after_it(sizes: tuple[int, int, int]) -> None:
    step = {"all_gather_object": 2, "all_reduce": 1}
    clip = {"all_gather_object": 1} | ({"all_reduce": 1} if sizes[2] > 1 else {})
    for found in run_ranks(count_exchanges, sizes, num_ranks=4, limit_s=120):
        assert found == {"run": step, "forward_backward": step, "clip_gradients": clip}

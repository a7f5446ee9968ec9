"""Sampled gradients on several processes: those of one process with the same draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.layout_cases import BOUND, Case, Grads, whole_grads
from distributed.test_pipeline_engine import STAGES
from helpers.ranks import run_ranks

import furlong
from furlong.plan.plan import ChunkPlan
from furlong.testing import Batch, take_grads, worst_relative_error

LENS = (23, 4, 17, 12)
SAMPLED: list[dict[str, Any]] = [
    {"rate": 0.4, "seed": 1},
    {"rate": 0.4, "seed": 2, "report_loss": True, "label_rate": 0.5},
    {"chunks": 2, "rule": "fixed", "seed": 3},
]
CASE = Case(ChunkPlan(LENS, (), STAGES, ((), ())), masked=(range(20),))


def options_of(sampling: dict[str, Any]) -> furlong.ChunkOptions:
    return furlong.ChunkOptions(size=5, hybrid=False, sample=sampling)


def parts(num_replicas: int) -> list[Batch]:
    """The sequences of each replica."""
    sequences = CASE.sequences()
    return [sequences[replica::num_replicas] for replica in range(num_replicas)]


def sampled_steps(rank: int, sizes: tuple[int, int, int]) -> list[tuple[float, Grads]]:
    """Loss and gradients of forward_backward with each sampling, and those of Engine.plan."""
    from furlong.runtime.distributed.mesh import make_ranks

    ranks = make_ranks(*sizes, "cpu")
    layers = CASE.layers_of(ranks.stage) if ranks.pp > 1 else None
    engine = furlong.Engine(CASE.model(layers), ranks=ranks)
    torch.manual_seed(rank)  # the processes' own generators differ
    found = []
    for sampling in (*SAMPLED, {"rate": 0.4}):
        result = engine.forward_backward(parts(ranks.dp)[ranks.replica], options_of(sampling))
        assert result.plan is not None and result.plan.sampled
        grads = whole_grads(engine.model.model)
        planned = engine.plan(LENS, options_of(sampling))
        engine.run(planned, CASE.sequences())  # agreed by all: else it is refused
        grads |= {f"planned {n}": x for n, x in whole_grads(engine.model.model).items()}
        found.append((result.loss, grads))
    return found


def check(sizes: tuple[int, int, int]) -> None:
    answers = run_ranks(sampled_steps, sizes, num_ranks=sizes[0] * sizes[1] * sizes[2], limit_s=240)
    engine = furlong.Engine(CASE.model())
    in_order = [sequence for own in parts(sizes[0]) for sequence in own]
    for index, sampling in enumerate(SAMPLED):
        loss = engine.forward_backward(in_order, options_of(sampling)).loss
        truth = take_grads(engine.model.model)
        engine.run(engine.plan(LENS, options_of(sampling)), CASE.sequences())
        truth |= {f"planned {n}": x for n, x in take_grads(engine.model.model).items()}
        grads: Grads = {}
        for own in answers:
            own_loss, own_grads = own[index]
            assert abs(own_loss / loss - 1) <= BOUND
            grads |= own_grads
        assert worst_relative_error(grads, truth) <= BOUND, sampling


@pytest.mark.parametrize(
    "sizes",
    [(2, 1, 1), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ((2, 2, 1), (1, 2, 2)))],
)
def test_the_draw_and_its_gradients_are_those_of_one_process(sizes):
    check(sizes)

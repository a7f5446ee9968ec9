"""Engine.plan and forward_backward on any layout: plans of all processes, loss and gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from distributed.layout_cases import BOUND, Case, whole_grads
from distributed.test_pipeline_engine import STAGES
from helpers.ranks import run_ranks

import furlong
from furlong.errors import ConfigError
from furlong.plan.plan import ChunkPlan
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import reference_loss, take_grads, worst_relative_error

LENS = (23, 4, 2, 17)


@dataclass(frozen=True)
class Asked:
    """Options, and how the model and its batch are."""

    options: dict[str, Any] = field(default_factory=dict)
    masked: tuple[range, ...] = ()
    frozen_layers: int = 0
    backward: bool = True

    def case(self) -> Case:
        plan = ChunkPlan(LENS, (), STAGES, ((), ()))
        return Case(plan, masked=self.masked, frozen_layers=self.frozen_layers)


Answer = tuple[float, float, dict[str, Any], str]


def asks(rank: int, asked: list[Asked], sizes: tuple[int, int, int]) -> list[Answer]:
    """For each: the losses of both ways, the gradients of both together, and a refusal."""
    ranks = make_ranks(*sizes, "cpu")
    found = []
    for each in asked:
        case, options = each.case(), furlong.ChunkOptions(**{"size": 8} | each.options)
        layers = case.layers_of(ranks.stage) if ranks.pp > 1 else None
        engine = furlong.Engine(case.model(layers), ranks=ranks)
        sequences = case.sequences()
        plan = engine.plan(LENS, options, backward=each.backward)
        assert (len(plan.actions), plan.sp_size) == (ranks.dp * ranks.pp, ranks.sp)
        first = engine.run(plan, sequences).loss
        own = sequences[ranks.replica :: ranks.dp]
        second = engine.forward_backward(own, options, backward=each.backward).loss
        grads = whole_grads(engine.model.model)
        said = ""
        if ranks.sp * ranks.pp > 1:
            try:
                engine.forward_backward(own[: rank + 1], options)
            except ConfigError as error:
                said = error.given
        found.append((first, second, grads, said))
    return found


def check(asked: list[Asked], sizes: tuple[int, int, int]) -> None:
    num_ranks = sizes[0] * sizes[1] * sizes[2]
    answers = run_ranks(asks, asked, sizes, num_ranks=num_ranks, limit_s=240)
    for index, each in enumerate(asked):
        model = each.case().model()
        loss = reference_loss(model, each.case().sequences(), backward=each.backward)
        truth = {name: 2 * grad for name, grad in take_grads(model).items()}
        grads: dict[str, Any] = {}
        for own in answers:
            first, second, own_grads, said = own[index]
            assert abs(first / loss - 1) <= BOUND and abs(second / loss - 1) <= BOUND, each
            grads |= {name: grad for name, grad in own_grads.items() if grad.any()}
            if sizes[1] * sizes[2] > 1:
                assert "sequences and options of replica 0" in said
        if each.backward:
            assert worst_relative_error(grads, truth) <= BOUND, each
        else:
            assert not grads


def test_a_pipeline():
    check([Asked(), Asked(backward=False), Asked(frozen_layers=1)], (1, 1, 2))


def test_a_pool():
    layer_first = {"order": "layer-first", "stage_layers": 2, "keep": "input"}
    check([Asked(), Asked({"num_retained": 2}, (range(21),)), Asked(layer_first)], (1, 2, 1))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 2, 1), (1, 2, 2)])
def test_four_processes(sizes):
    check([Asked(), Asked(backward=False)], sizes)

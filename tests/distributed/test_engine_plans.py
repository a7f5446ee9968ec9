"""Engine.plan and forward_backward on any layout, exact and sampled: loss and gradients of one
process."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from distributed.layout_cases import BOUND, Case, Grads, whole_grads
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

    @property
    def dials(self) -> furlong.ChunkOptions:
        return furlong.ChunkOptions(**{"size": 8} | self.options)


def sampled(sampling: dict[str, Any]) -> Asked:
    return Asked({"size": 5, "hybrid": False, "sample": sampling}, (range(20),))


SAMPLED = [
    sampled({"rate": 0.4, "seed": 1}),
    sampled({"rate": 0.4, "seed": 2, "report_loss": True, "label_rate": 0.5}),
    sampled({"chunks": 2, "rule": "fixed", "seed": 3}),
]
Answer = tuple[float, float, Grads, str]


def asks(rank: int, asked: list[Asked], sizes: tuple[int, int, int]) -> list[Answer]:
    """For each: the losses of both ways, the gradients of all, and a refusal."""
    ranks = make_ranks(*sizes, "cpu")
    torch.manual_seed(rank)  # the processes' own generators differ
    engines: dict[int, furlong.Engine] = {}
    found = []
    for each in asked:
        case, options = each.case(), each.dials
        layers = case.layers_of(ranks.stage) if ranks.pp > 1 else None
        if each.frozen_layers not in engines:
            engines[each.frozen_layers] = furlong.Engine(case.model(layers), ranks=ranks)
        engine = engines[each.frozen_layers]
        sequences = case.sequences()
        own = sequences[ranks.replica :: ranks.dp]
        plan = engine.plan(LENS, options, backward=each.backward)
        assert (len(plan.actions), plan.sp_size) == (ranks.dp * ranks.pp, ranks.sp)
        first = engine.run(plan, sequences).loss
        second = engine.forward_backward(own, options, backward=each.backward).loss
        if not plan.sampled:
            engine.run(plan, sequences, weights=[2.0] * len(LENS))
        grads, said = whole_grads(engine.model.model), ""
        if ranks.sp * ranks.pp > 1:
            try:
                engine.forward_backward(own[: rank + 1], options)
            except ConfigError as error:
                said = error.given
        if plan.sampled:  # a seed that all draw together: else the step is refused
            result = engine.forward_backward(own, sampled({"rate": 0.4}).dials)
            assert result.plan is not None and result.plan.sampled
            engine.model.model.zero_grad(set_to_none=True)
        found.append((first, second, grads, said))
    return found


@cache
def alone() -> furlong.Engine:
    """One process with the model."""
    return furlong.Engine(Asked().case().model())


def truth_of(each: Asked, num_replicas: int) -> tuple[float, float, Grads]:
    """The losses of both ways and the gradients of all: of the model itself, and of a sampled step
    those of one process with the same draw."""
    case = each.case()
    model, sequences = case.model(), case.sequences()
    if "sample" not in each.options:
        loss = reference_loss(model, sequences, backward=each.backward)
        grads = take_grads(model)
        return loss, loss, {name: 4 * grad for name, grad in grads.items()}
    engine = alone()
    first = engine.run(engine.plan(LENS, each.dials), sequences).loss
    in_order = [s for replica in range(num_replicas) for s in sequences[replica::num_replicas]]
    second = engine.forward_backward(in_order, each.dials).loss
    return first, second, take_grads(engine.model.model)


def check(asked: list[Asked], sizes: tuple[int, int, int]) -> None:
    num_ranks = sizes[0] * sizes[1] * sizes[2]
    answers = run_ranks(asks, asked, sizes, num_ranks=num_ranks, limit_s=240)
    for index, each in enumerate(asked):
        *losses, truth = truth_of(each, sizes[0])
        grads: Grads = {}
        for own in answers:
            *found, own_grads, said = own[index]
            assert found == pytest.approx(losses, rel=BOUND), each
            grads |= {name: grad for name, grad in own_grads.items() if grad.any()}
            if sizes[1] * sizes[2] > 1:
                assert "sequences and options of replica 0" in said
        if each.backward:
            assert worst_relative_error(grads, truth) <= BOUND, each
        else:
            assert not grads


def test_a_pipeline():
    check([Asked(), Asked(backward=False), Asked(frozen_layers=1), SAMPLED[0]], (1, 1, 2))


def test_a_pool():
    """In one of its chunks a process has no token."""
    layer_first = {"order": "layer-first", "stage_layers": 2, "keep": "input"}
    retained = {"num_retained": 2, "hybrid": False}
    check([Asked(), Asked(retained, (range(21),)), Asked(layer_first), *SAMPLED[1:]], (1, 2, 1))


@pytest.mark.slow
def test_replicas():
    check(SAMPLED, (2, 1, 1))


@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2), (1, 2, 2)])
@pytest.mark.few(0, 2)
def test_four_processes(sizes):
    check([Asked(), Asked(backward=False), *SAMPLED], sizes)

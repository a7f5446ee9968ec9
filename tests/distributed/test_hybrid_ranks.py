"""Models with recurrent layers, and with unlike attention, on replicas and in pipelines: the
gradients of one process that computes the same chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from distributed.layout_cases import whole_grads
from helpers.attention_families import twin_of
from helpers.batches import batch
from helpers.hybrids import build
from helpers.ranks import run_ranks
from torch import Tensor

import furlong
from furlong.models.placeholders import hold, placeholders
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import group_chunks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import idle_plan, join_replicas, plan_1f1b, plan_on_device
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import num_labels, take_grads, worst_relative_error

LENS = (40, 9, 26, 5)
DEALT = ((0, 3), (1, 2))
OPTIONS = ChunkOptions(size=16, num_retained=1)
NUM_LAYERS = 4
CUT = 2
BOUND = 1e-12
"""Families compute parts in float32: chunks are the same, sums over processes are in float64."""

Grads = dict[str, Tensor]
Make = Callable[[], torch.nn.Module]


def plan_of(*, piped: bool) -> ChunkPlan:
    if piped:
        return plan_1f1b(LENS, group_chunks(LENS, OPTIONS), stages=(CUT, NUM_LAYERS - CUT))
    plans = [
        plan_on_device([LENS[i] for i in ids], OPTIONS, num_layers=NUM_LAYERS) for ids in DEALT
    ]
    return join_replicas(plans, DEALT, LENS)


def step(rank: int, make: Make, piped: bool) -> Grads:
    """The gradients that this process has: those of its stage, or all."""
    model, sequences = make(), batch(LENS)
    ranks = make_ranks(*((1, 1, 2) if piped else (2, 1, 1)), "cpu")
    if piped:
        layers = range(CUT, NUM_LAYERS) if ranks.stage else range(CUT)
        hold(model, placeholders(model, layers))
    engine = furlong.Engine(model, ranks=ranks)
    engine.run(plan_of(piped=piped), sequences, num_labels(sequences))
    return whole_grads(engine.model.model)


def truth(make: Make, *, piped: bool) -> Grads:
    model, sequences = make(), batch(LENS)
    engine = furlong.Engine(model)
    for ids in (range(len(LENS)),) if piped else DEALT:
        own = [sequences[i] for i in ids]
        engine.forward_backward(own, OPTIONS, num_labels(sequences))
    return take_grads(model)


def check(make: Make, *, piped: bool) -> None:
    expected = truth(make, piped=piped)
    found = run_ranks(step, make, piped, num_ranks=2, limit_s=180)
    assert found[0].keys() | found[1].keys() == expected.keys()
    total = float(torch.stack([x.norm() for x in expected.values()]).norm())
    for grads in found:
        for name, grad in grads.items():
            scale = max(float(expected[name].norm()), 1e-9 * total)
            assert float((grad - expected[name]).norm()) / scale <= BOUND, name


@pytest.mark.slow
@pytest.mark.parametrize(("family", "piped"), [("lfm2", True), ("qwen3_next", False)])
def test_recurrent_layers(family: str, piped: bool) -> None:
    check(partial(build, family), piped=piped)


@pytest.mark.slow
def test_a_stage_of_attention_alone() -> None:
    check(partial(build, "bamba", attn_layer_indices=[2, 3]), piped=True)


def step_with_an_idle_replica(rank: int, families: Sequence[str]) -> list[tuple[Grads, float]]:
    """The gradients and the evaluated loss of each family, where the second replica has a dummy."""
    found = []
    ranks, sequences = make_ranks(2, 1, 1, "cpu"), batch(LENS)
    for family in families:
        engine = furlong.Engine(build(family), ranks=ranks)
        losses = []
        for backward in (True, False):
            plan = plan_on_device(LENS, OPTIONS, num_layers=NUM_LAYERS, backward=backward)
            joined = join_replicas([plan, idle_plan(plan)], [range(len(LENS)), []], LENS)
            losses.append(engine.run(joined, sequences, num_labels(sequences)).loss)
        assert losses[0] == pytest.approx(losses[1], rel=BOUND)
        found.append((whole_grads(engine.model.model), losses[1]))
    return found


@pytest.mark.slow
def test_a_replica_without_work() -> None:
    families = ["lfm2", "kimi_linear"]
    found = run_ranks(step_with_an_idle_replica, families, num_ranks=2, limit_s=180)
    for index, family in enumerate(families):
        engine = furlong.Engine(build(family))
        result = engine.forward_backward(batch(LENS), OPTIONS)
        truth = take_grads(engine.model.model)
        for answers in found:
            grads, loss = answers[index]
            assert worst_relative_error(grads, truth) <= BOUND, family
            assert loss == pytest.approx(result.loss, rel=BOUND)


@pytest.mark.slow
def test_latent_attention() -> None:
    check(partial(twin_of, "deepseek_v3"), piped=True)


@pytest.mark.slow
def test_replicas_of_layers_that_share_keys() -> None:
    make = partial(
        twin_of, "gemma4 with shared keys", num_hidden_layers=NUM_LAYERS, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    check(make, piped=False)

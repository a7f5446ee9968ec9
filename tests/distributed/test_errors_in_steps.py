"""An error on one process in the middle of a step ends it on all; one process may try again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any

import pytest
from distributed.layout_cases import BOUND, Case, whole_grads
from helpers.load import slowed
from helpers.ranks import run_ranks

import furlong
from furlong.errors import ElsewhereError, LinkError
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import group_chunks, shard_all
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_kept, plan_1f1b, plan_on_device
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import num_labels, reference_loss, take_grads, worst_relative_error

LENS = (23, 4, 17)
HEIGHTS = (1, 2)
TWO = ((23, 4), (9, 17, 3))


@dataclass(frozen=True)
class Fault:
    """Where one process fails: at the start of an action, in an attention of it, or behind it."""

    rank: int
    at: int
    how: str = "begins"
    error: type[Exception] = MemoryError


class Flaky:
    """Attention that fails in one of its calls."""

    def __init__(self, backend: Any, fail: Callable[[], None]) -> None:
        self._backend, self._fail = backend, fail

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._fail()
            return found(*args, **kwargs)

        found = getattr(self._backend, name)
        return call if callable(found) else found


def failing(fault: Fault, calls: count) -> Callable[..., None]:
    def fail(*_: object) -> None:
        if next(calls) == fault.at:
            raise fault.error("no room")

    return fail


def try_step(engine: furlong.Engine, case: Case, fault: Fault | None) -> str:
    """What a step with a fault of this process, or of another one, ends with."""
    sequences, kept = case.sequences(), engine._session.state
    own, given = {}, kept.backend
    if fault is not None and fault.how == "attends":
        kept.backend = Flaky(given, failing(fault, count()))
    elif fault is not None:
        own = {"begun" if fault.how == "begins" else "watch": failing(fault, count())}
    try:
        engine.run(case.plan, sequences, num_labels(sequences), **own)
    except (MemoryError, ValueError, ElsewhereError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        kept.backend = given
    return "nothing"


def pipelined(size: int, lens: Sequence[int] = LENS, **settings: Any) -> ChunkPlan:
    groups = group_chunks(lens, ChunkOptions(size=size))
    return plan_1f1b(lens, groups, stages=HEIGHTS, **settings)


def replicated(
    size: int, lens: Sequence[Sequence[int]], *, piped: bool = False, **settings: Any
) -> ChunkPlan:
    """Replicas, or pipelines."""
    options = ChunkOptions(size=size, **settings)
    plans = [
        pipelined(size, own) if piped else plan_on_device(own, options, num_layers=3)
        for own in lens
    ]
    stops = [*accumulate(map(len, lens))]
    ids = [range(stop - len(own), stop) for own, stop in zip(lens, stops, strict=True)]
    return join_kept(plans, ids, [n for own in lens for n in own], len(lens))


def pooled(size: int) -> ChunkPlan:
    groups = shard_all(group_chunks(LENS, ChunkOptions(size=size)), 2)
    return plan_1f1b(LENS, groups, stages=(3,), sp_size=2, num_retained=1, keep="kv")


def ends(
    rank: int, case: Case, fault: Fault, sizes: tuple[int, int, int]
) -> tuple[str, float, int, str]:
    """How a step with a fault ends, its seconds, the gradients it leaves, how the next one ends."""
    ranks = make_ranks(*sizes, "cpu")
    engine = furlong.Engine(case.model(case.layers_of(ranks.stage)), ranks=ranks)
    assert try_step(engine, case, None) == "nothing"  # stages are checked in their first step
    engine.model.model.zero_grad()
    started_s = time.monotonic()
    said = try_step(engine, case, fault if fault.rank == rank else None)
    step_s = time.monotonic() - started_s
    left = sum(p.grad is not None for p in engine.model.model.parameters())
    return said, step_s, left, try_step(engine, case, None)


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("sizes", "plan", "fault"),
    [
        ((1, 1, 2), pipelined(8), Fault(0, 0)),  # before any message
        ((2, 1, 1), replicated(8, TWO), Fault(1, 4, "attends")),
        ((1, 2, 1), pooled(8), Fault(0, 4, "attends")),
        slow((1, 1, 2), pipelined(8), Fault(1, 9, "is over", ValueError)),
        slow((1, 1, 2), pipelined(8, backward=False), Fault(1, 2)),
        slow((2, 1, 1), replicated(8, TWO), Fault(0, 7, "is over", ValueError)),
        slow((1, 2, 1), pooled(8), Fault(1, 6, error=ValueError)),
        slow((2, 1, 2), replicated(8, TWO, piped=True), Fault(1, 1, "is over")),
        slow((2, 1, 2), replicated(8, TWO, piped=True), Fault(3, 5, "attends", ValueError)),
    ],
    ids=lambda of: "plan" if isinstance(of, ChunkPlan) else str(of),
)
def test_an_error_inside_a_step_ends_all_within_seconds(
    sizes: tuple[int, int, int], plan: ChunkPlan, fault: Fault
) -> None:
    num_ranks = sizes[0] * sizes[1] * sizes[2]
    found = run_ranks(ends, Case(plan), fault, sizes, num_ranks=num_ranks, limit_s=300)
    for rank, (said, step_s, left, after) in enumerate(found):
        kind = fault.error.__name__
        if rank == fault.rank:
            assert said == f"{kind}: no room"
        else:
            assert said.startswith(f"{LinkError.__name__}: given: "), said
            assert f"process {fault.rank} left it by {kind}: no room" in said
        assert step_s < slowed(20)
        assert left == 0, "gradients of a step that failed"
        assert after.startswith(f"{LinkError.__name__}: given:    an earlier call"), after


def goes_on(
    rank: int, first: Case, smaller: Case, faults: Sequence[Fault]
) -> list[tuple[str, float, float]]:
    """For each fault: how the first case's step ends, and loss and error of the second's."""
    engine = furlong.Engine(smaller.model(), ranks=make_ranks(1, 1, 1, "cpu"), offload_weights=True)
    reference_loss(truth := smaller.model(), sequences := smaller.sequences())
    grads, found = take_grads(truth), []
    for fault in faults:
        said = try_step(engine, first, fault)
        assert not any(p.grad is not None for p in engine.model.model.parameters())
        assert engine._session.state.pools.arena.taken_bytes == 0
        loss = engine.run(smaller.plan, sequences, num_labels(sequences)).loss
        found.append((said, loss, worst_relative_error(whole_grads(engine.model.model), grads)))
    return found


@pytest.mark.slow
def test_a_process_alone_goes_on_with_its_weights_in_cpu_memory() -> None:
    """Also from where it adds gradients up: nobody waits for it there."""
    freed: Any = {"order": "layer-first", "reshard": True}
    first, second = (Case(replicated(n, TWO[:1], **freed), holds_all=True) for n in (8, 4))
    faults = [Fault(0, at, how) for at in (0, 3, 7, 12) for how in ("begins", "is over")]
    faults += [Fault(0, at, "attends", ValueError) for at in range(3, 24)]
    loss = reference_loss(second.model(), second.sequences())
    (found,) = run_ranks(goes_on, first, second, faults, num_ranks=1, limit_s=300)
    for fault, (said, own_loss, error) in zip(faults, found, strict=True):
        assert said == f"{fault.error.__name__}: no room", fault
        assert abs(own_loss / loss - 1) <= BOUND and error <= BOUND, fault

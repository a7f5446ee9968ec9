"""An error on one process in the middle of a step: all are told, and the step is taken again."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from random import Random
from typing import Any

import pytest
from distributed.layout_cases import BOUND, Case, whole_grads
from helpers.ranks import run_ranks

import furlong
from furlong.errors import ElsewhereError, NoMemoryElsewhereError
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import group_chunks, shard
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_kept, plan_1f1b, plan_on_device
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import num_labels, reference_loss, take_grads, worst_relative_error

LENS = (23, 4, 17)
HEIGHTS = (1, 2)


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


def recovers(
    rank: int, cases: tuple[Case, Case], faults: Sequence[Fault], sizes: tuple[int, int, int],
    offload_weights: bool,
) -> list[tuple[str, float, dict[str, Any]]]:  # fmt: skip
    """For each fault: how the first case's step ends, and the gradients of the second's."""
    ranks = make_ranks(*sizes, "cpu")
    first, smaller = cases
    model = first.model(first.layers_of(ranks.stage))
    engine = furlong.Engine(model, ranks=ranks, offload_weights=offload_weights)
    found = []
    for fault in faults:
        said = try_step(engine, first, fault if fault.rank == rank else None)
        left = sum(p.grad is not None for p in engine.model.model.parameters())
        assert left == 0, "gradients of a step that failed"
        assert engine._session.state.pools.arena.taken_bytes == 0
        sequences = smaller.sequences()
        loss = engine.run(smaller.plan, sequences, num_labels(sequences)).loss
        found.append((said, loss, whole_grads(engine.model.model)))
    return found


def check(
    cases: tuple[Case, Case], faults: Sequence[Fault], sizes: tuple[int, int, int], *,
    offload_weights: bool = False,
) -> None:  # fmt: skip
    model = cases[1].model()
    loss = reference_loss(model, cases[1].sequences())
    truth = take_grads(model)
    num_ranks = sizes[0] * sizes[1] * sizes[2]
    answers = run_ranks(
        recovers, cases, faults, sizes, offload_weights, num_ranks=num_ranks, limit_s=300
    )
    for index, fault in enumerate(faults):
        grads: dict[str, Any] = {}
        for rank, own in enumerate(answers):
            said, own_loss, own_grads = own[index]
            kind = fault.error.__name__
            if rank == fault.rank:
                assert said == f"{kind}: no room", (fault, said)
            elif fault.error is MemoryError:
                told = f"out of memory on process {fault.rank} (MemoryError: no room)"
                head = f"{NoMemoryElsewhereError.__name__}: given:    {told}\n"
                assert said.startswith(head), (fault, said)
            else:
                told = f"an error on process {fault.rank} ({kind}: no room)"
                assert said.startswith(f"ElsewhereError: given:    {told}\n"), (fault, said)
            assert abs(own_loss / loss - 1) <= BOUND
            # a whole model has zeros of other stages' layers
            grads |= {name: grad for name, grad in own_grads.items() if grad.any()}
        assert worst_relative_error(grads, truth) <= BOUND, fault


def drawn_faults(
    plan: ChunkPlan, num_processes: int, num: int, first: int = 0, seed: int = 0
) -> list[Fault]:
    """Faults at random actions of each process, not before the action `first`."""
    random, found, stop = Random(seed), [], min(map(len, plan.actions))
    for rank in range(num_processes):
        for at in sorted(random.sample(range(first, stop), num)):
            how = random.choice(("begins", "is over"))
            found.append(Fault(rank, at, how, random.choice((MemoryError, ValueError))))
        found.append(Fault(rank, random.randrange(3, 9), "attends"))
    return found


def pipelined(size: int, lens: Sequence[int] = LENS, **settings: Any) -> ChunkPlan:
    groups = group_chunks(lens, ChunkOptions(size=size))
    return plan_1f1b(lens, groups, stages=HEIGHTS, **settings)


def test_a_pipeline_goes_on_after_an_error_at_any_action():
    cases = Case(pipelined(8)), Case(pipelined(4))
    first = [Fault(rank, 0) for rank in range(2)]  # before it no message is expected
    check(cases, [*first, *drawn_faults(cases[0].plan, 2, 2)], (1, 1, 2))


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


TWO = ((23, 4), (9, 17, 3))


@pytest.mark.slow
def test_replicas_go_on_after_an_error_at_any_action():
    cases = Case(replicated(8, TWO)), Case(replicated(4, TWO))
    check(cases, drawn_faults(cases[0].plan, 2, 3), (2, 1, 1))


@pytest.mark.slow
def test_processes_with_weights_in_cpu_memory_go_on_too():
    """One that is alone also from where it adds gradients up: nobody waits for it there."""
    freed: Any = {"order": "layer-first", "reshard": True}
    for lens in (TWO, TWO[:1]):
        first, second = (Case(replicated(n, lens, **freed), holds_all=True) for n in (8, 4))
        faults = drawn_faults(first.plan, len(lens), 3)
        if len(lens) == 1:
            faults += [Fault(0, at, "attends") for at in range(9, 24)]
        check((first, second), faults, (len(lens), 1, 1), offload_weights=True)


@pytest.mark.slow
def test_two_pipelines_go_on_after_an_error_at_any_action():
    cases = Case(replicated(8, TWO, piped=True)), Case(replicated(4, TWO, piped=True))
    check(cases, drawn_faults(cases[0].plan, 4, 2), (2, 1, 2))
    whole = Case(cases[0].plan, holds_all=True), Case(cases[1].plan, holds_all=True)
    check(whole, [Fault(1, 1, "is over")], (2, 1, 2))


@pytest.mark.slow
def test_an_evaluation_and_tied_weights():
    tied = {"tie_word_embeddings": True}
    evaluated = Case(pipelined(8, backward=False))
    check((evaluated, Case(pipelined(8))), drawn_faults(evaluated.plan, 2, 2), (1, 1, 2))
    cases = Case(pipelined(8), settings=tied), Case(pipelined(4), settings=tied)
    check(cases, drawn_faults(cases[0].plan, 2, 2), (1, 1, 2))


def pooled(size: int) -> ChunkPlan:
    groups = shard(group_chunks(LENS, ChunkOptions(size=size)), 2)
    return plan_1f1b(LENS, groups, stages=(3,), sp_size=2, num_retained=1, keep="kv")


def ends(rank: int, case: Case, fault: Fault) -> list[str]:
    """How a step with a fault ends, and how the next one does on the process that failed."""
    engine = furlong.Engine(case.model(range(3)), ranks=make_ranks(1, 2, 1, "cpu"))
    said = []
    for own in (fault if rank == fault.rank else None, None)[: 2 if rank == fault.rank else 1]:
        try:
            said.append(try_step(engine, case, own))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_lack_of_memory_where_rows_are_exchanged_ends_the_run():
    fault = Fault(0, 4, "attends")
    failed, other = run_ranks(ends, Case(pooled(8)), fault, num_ranks=2, limit_s=100)
    assert "out of memory on process 0 while processes exchanged rows" in failed[0]
    assert failed[1].startswith("LinkError: given:    an earlier call")
    assert re.match("LinkError: given: .*: process 0 left it by ConfigError: out of mem", other[0])

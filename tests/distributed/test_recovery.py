"""An error on one process in the middle of a step: all are told, and the step is taken again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

import pytest
from distributed.layout_cases import Case, whole_grads
from distributed.test_pipeline_engine import BOUND
from distributed.test_pool_engine import NESTED, NESTED_LENS
from helpers.gradients import num_labels, reference_loss, take_grads, worst_relative_error
from helpers.placed import plan_of
from helpers.ranks import run_ranks

import furlong
from furlong.errors import ElsewhereError, NoMemoryElsewhereError
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import group_chunks, shard
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas, plan_1f1b, plan_on_device
from furlong.runtime.parallel.ranks import make_ranks

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
    sequences, kept = case.sequences(), engine._followed.kept
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
    rank: int, cases: tuple[Case, Case], faults: Sequence[Fault], sizes: tuple[int, int, int]
) -> list[tuple[str, float, dict[str, Any]]]:
    """For each fault: how the first case's step ends, and the gradients of the second's."""
    ranks = make_ranks(*sizes, "cpu")
    first, smaller = cases
    engine = furlong.Engine(first.model(first.layers_of(ranks.stage)), ranks=ranks)
    found = []
    for fault in faults:
        said = try_step(engine, first, fault if fault.rank == rank else None)
        left = sum(p.grad is not None for p in engine.model.model.parameters())
        assert left == 0, "gradients of a step that failed"
        assert engine._followed.kept.pools.arena.taken_bytes == 0
        sequences = smaller.sequences()
        loss = engine.run(smaller.plan, sequences, num_labels(sequences)).loss
        found.append((said, loss, whole_grads(engine.model.model)))
    return found


def check(cases: tuple[Case, Case], faults: Sequence[Fault], sizes: tuple[int, int, int]) -> None:
    model = cases[1].model()
    loss = reference_loss(model, cases[1].sequences())
    truth = take_grads(model)
    num_ranks = sizes[0] * sizes[1] * sizes[2]
    answers = run_ranks(recovers, cases, faults, sizes, num_ranks=num_ranks, limit_s=300)
    for index, fault in enumerate(faults):
        grads: dict[str, Any] = {}
        for rank, own in enumerate(answers):
            said, own_loss, own_grads = own[index]
            kind = fault.error.__name__
            if rank == fault.rank:
                assert said == f"{kind}: no room", (fault, said)
            elif fault.error is MemoryError:
                told = f"out of memory on process {fault.rank} (MemoryError: no room)"
                assert said == f"{NoMemoryElsewhereError.__name__}: {told}", (fault, said)
            else:
                told = f"an error on process {fault.rank}, which ended the step ({kind}: no room)"
                assert said == f"ElsewhereError: {told}", (fault, said)
            assert abs(own_loss / loss - 1) <= BOUND
            grads |= own_grads
        assert worst_relative_error(grads, truth) <= BOUND, fault


def drawn_faults(
    plan: ChunkPlan, num_processes: int, num: int, first: int = 0, seed: int = 0
) -> list[Fault]:
    """Faults at random actions of each process, not before the action `first`."""
    random, found = Random(seed), []
    for rank in range(num_processes):
        own = plan.actions[rank]
        for at in sorted(random.sample(range(first, len(own)), num)):
            how = random.choice(("begins", "is over"))
            found.append(Fault(rank, at, how, random.choice((MemoryError, ValueError))))
        found.append(Fault(rank, random.randrange(3, 9), "attends"))
    return found


def pipelined(size: int, lens: Sequence[int] = LENS, **settings: Any) -> ChunkPlan:
    groups = group_chunks(lens, ChunkOptions(size=size))
    return plan_1f1b(lens, groups, stages=HEIGHTS, **settings)


def test_a_pipeline_goes_on_after_an_error_at_any_action():
    cases = Case(pipelined(8)), Case(pipelined(4))
    check(cases, drawn_faults(cases[0].plan, 2, 5), (1, 1, 2))


def replicated(size: int, lens: Sequence[Sequence[int]], *, piped: bool) -> ChunkPlan:
    """Two replicas, or two pipelines."""
    options = ChunkOptions(size=size)
    plans = [
        pipelined(size, own) if piped else plan_on_device(own, options, num_layers=3)
        for own in lens
    ]
    ids = [range(len(lens[0])), range(len(lens[0]), len(lens[0]) + len(lens[1]))]
    return join_replicas(plans, ids, [n for own in lens for n in own])


TWO = ((23, 4), (9, 17, 3))


def test_replicas_go_on_after_an_error_at_any_action():
    cases = Case(replicated(8, TWO, piped=False)), Case(replicated(4, TWO, piped=False))
    check(cases, drawn_faults(cases[0].plan, 2, 4), (2, 1, 1))


@pytest.mark.slow
def test_two_pipelines_go_on_after_an_error_at_any_action():
    cases = Case(replicated(8, TWO, piped=True)), Case(replicated(4, TWO, piped=True))
    check(cases, drawn_faults(cases[0].plan, 4, 5), (2, 1, 2))


@pytest.mark.slow
def test_an_evaluation_and_tied_weights():
    tied = {"tie_word_embeddings": True}
    evaluated = Case(pipelined(8, backward=False))
    check((evaluated, Case(pipelined(8))), drawn_faults(evaluated.plan, 2, 3), (1, 1, 2))
    cases = Case(pipelined(8), settings=tied), Case(pipelined(4), settings=tied)
    check(cases, drawn_faults(cases[0].plan, 2, 3), (1, 1, 2))


def pooled(size: int, **settings: Any) -> ChunkPlan:
    groups = shard(group_chunks(LENS, ChunkOptions(size=size)), 2)
    dials = {"num_retained": 1, "keep": "kv"} | settings
    return plan_1f1b(LENS, groups, stages=(3,), sp_size=2, **dials)


POOLED = (pooled(8), pooled(8, keep="attention"), pooled(8, keep="input", recompute_layers=2),
          pooled(8, keep="all", recompute_layers=1))  # fmt: skip


def pool_faults(plan: ChunkPlan, num: int, seed: int = 0) -> list[Fault]:
    """Faults of both processes of a pool, before the last backward."""
    random, found = Random(seed), []
    stop = len(plan.actions[0]) - 2
    for rank in range(2):
        for at in sorted(random.sample(range(1, stop), num)):
            how = random.choice(("begins", "is over"))
            found.append(Fault(rank, at, how, random.choice((MemoryError, ValueError))))
        found += [Fault(rank, random.randrange(3, 12), "attends") for _ in range(2)]
    return found


def test_a_pool_goes_on_after_an_error_of_one_process():
    check((Case(POOLED[1]), Case(pooled(4))), pool_faults(POOLED[1], 3), (1, 2, 1))


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 2, 3])
def test_pools_with_other_keeps(number: int):
    plan = POOLED[number]
    check((Case(plan), Case(pooled(4))), pool_faults(plan, 4, number), (1, 2, 1))


def of_four(size: int, sizes: tuple[int, int, int]) -> ChunkPlan:
    """Pools of two in a pipeline, or of two replicas; or a pool of four with nested places."""
    dp, sp, pp = sizes
    if sp == 4:
        return plan_of(NESTED_LENS, NESTED, 4, ChunkOptions(size=12, keep="kv"), num_layers=3)
    stages = HEIGHTS if pp > 1 else (3,)
    dealt = [(23, 4), (9, 17, 3)] if dp > 1 else [LENS]
    plans = [
        plan_1f1b(
            lens, shard(group_chunks(lens, ChunkOptions(size=size)), 2), stages=stages, sp_size=2
        )
        for lens in dealt
    ]
    firsts = [sum(map(len, dealt[:i])) for i in range(dp)]
    ids = [range(first, first + len(lens)) for first, lens in zip(firsts, dealt, strict=True)]
    return join_replicas(plans, ids, [n for lens in dealt for n in lens])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 1), (1, 4, 1)])
def test_four_processes_with_pools(sizes: tuple[int, int, int]):
    plan, random, faults = of_four(8, sizes), Random(1), []
    for rank in range(4):
        own = plan.actions[(rank // sizes[1]) % len(plan.actions)]
        ats = random.sample(range(1, len(own) - 3), 2)
        faults += [Fault(rank, at, "begins") for at in ats]
        faults.append(Fault(rank, random.randrange(2, 6), "attends"))
    check((Case(plan), Case(of_four(4, sizes))), faults, sizes)

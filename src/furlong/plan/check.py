"""The checker: what every legal plan keeps, one function per invariant.

    I1   every token is in exactly one slice, and every loss counts once (sampled: on average)
    I2   what a chunk may hold: pieces with a prefix, places
    I7   every cell has one Forward, and one Backward (but at frozen stages, and in samples)
    I3   forwards ascend, and every cell follows its neighbour in the column
    I4   earlier K,V are there when they are read
    I5   backwards descend, so that dK,dV are complete, and nothing forgets them meanwhile
    I6   every Backward has a graph, every Recompute an input
    I8   a Backward ends its cell, and no graph is left over
    I10  messages and collectives pair up, and passes where they gather weights
    I11  no rank waits for ever
    I9   memory stays within the budget

I1 and I2 are in `rules.chunks`, I4, I5 and I8 in `rules.kv`, I10 and I11 in `rules.ranks`, the
others here. The orders are those that make a chunked backward exact (ChunkFlow, Algorithm 2, with
its second loop descending, since dK,dV of a chunk are complete only after all later chunks).

A rule is a sentence and a function that yields what breaks it: why, and the place of the guilty
action. The first break is refused: each function relies on the rules before it and on its own
earlier lines. All take time linear in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol

from furlong.errors import PlanError
from furlong.plan.grid import Breaks, Grid, Rule, refuse_chunk
from furlong.plan.rules.chunks import check_chunks
from furlong.plan.rules.kv import after_the_end, lost_kv_gradients, missing_kv
from furlong.plan.rules.ranks import RANK_RULES
from furlong.plan.values import (
    COMPUTING,
    Backward,
    ChunkPlan,
    Forward,
    Payload,
    Recompute,
    Recv,
)
from furlong.units import count_words


class Memory(Protocol):
    """The bytes that the memory check asks of a cost model."""

    def budget_bytes(self, rank: int) -> int:
        """Bytes that the rank may use."""

    def peak_bytes_of_actions(self, plan: ChunkPlan, rank: int) -> Sequence[int]:
        """For each action of the rank, the peak of bytes in use while it runs."""


def check(plan: ChunkPlan, memory: Memory | None = None) -> None:
    """Raise PlanError if the plan breaks an invariant; its text points at the guilty place.

    A plan does not change: what was found legal is noted beside its cached properties.
    """
    if memory is None and _LEGAL in vars(plan):
        return
    if min(plan.stages, default=0) < 1:
        shown = ", ".join(map(str, plan.stages)) or "none"
        raise PlanError(f"broken rule: a plan has stages of at least one layer\nlayers: {shown}")
    check_chunks(plan)
    grid = Grid(plan)
    for rule, breaks in (*_CELL_RULES, *RANK_RULES):
        for why, at in breaks(grid):
            raise grid.refuse(rule, why, at)
    for why, at in _beyond_budget(grid, memory) if memory is not None else ():
        raise grid.refuse("memory stays within the budget", why, at)
    vars(plan)[_LEGAL] = True


_LEGAL = "_is_legal"
_ONCE = "every cell has one Forward and one Backward, on one rank"


def _not_once(grid: Grid) -> Breaks:
    """I7. One Forward per cell, but for chunks of a sample whose loss nobody reports; Backwards at
    all stages of a chunk from `frozen_stages` on, for all chunks but dummies if for any."""
    plan, frozen = grid.plan, grid.plan.frozen_stages
    if not 0 <= frozen < grid.num_stages:
        of_all = count_words(grid.num_stages, "stage")
        why = f"{frozen} of {of_all} are frozen: the last one has the loss"
        raise PlanError(f"broken rule: {_ONCE}\n{why}")
    firsts = {Forward: grid.forward, Backward: grid.backward}
    for at, action, cell in grid.each(*COMPUTING):
        if firsts.get(type(action), {cell: at})[cell] != at:
            yield f"cell {grid.name(cell)} has one already", at
        if isinstance(action, Backward) and action.stage < frozen:
            yield f"the first {frozen} stages are frozen", at
        if grid.forward[cell] >= 0 and grid.rank_of_forward(cell) != grid.ranks[at]:
            yield f"the Forward of {grid.name(cell)} is on rank {grid.rank_of_forward(cell)}", at
    trained = Backward in grid.kinds and not plan.sampled
    for chunk in range(grid.num_chunks):
        cells = range(chunk, len(grid.forward), grid.num_chunks)
        forwards, backwards = (sum(firsts[kind][c] >= 0 for c in cells) for kind in firsts)
        if not plan.report_loss and forwards == backwards == 0:
            continue
        if forwards != grid.num_stages or backwards not in (0, grid.num_stages - frozen):
            why = f"chunk {chunk} has {count_words(forwards, 'Forward')} and"
            why += f" {count_words(backwards, 'Backward')}"
            over = count_words(grid.num_stages, "stage") + (
                f", {frozen} of them frozen" if frozen else ""
            )
            raise refuse_chunk(plan, _ONCE, f"{why} over {over}", chunk)
        if trained and not backwards and not plan.chunks[chunk].is_dummy:
            why = f"chunk {chunk} has no Backward, others have, and the plan is not sampled"
            raise refuse_chunk(plan, _ONCE, why, chunk)


def _odd_factors(grid: Grid) -> Breaks:
    """I1, of the losses. Only a plan that samples its chunks scales their gradients, by the same
    finite factors at all stages of a chunk; in any other plan each label counts once."""
    if not grid.plan.sampled and not grid.plan.report_loss:
        raise PlanError("broken rule: only a sampled plan leaves losses out (report_loss)")
    factors: dict[int, tuple[float, float]] = {}
    for at, action, _ in grid.each(Backward):
        assert isinstance(action, Backward)
        own = action.loss_factor, action.relay_factor
        if not grid.plan.sampled and own != (1, 1):
            yield "the plan is not sampled", at
        if not all(0 <= factor < inf for factor in own):
            yield "a factor is at least 0 and finite", at
        if factors.setdefault(action.chunk, own) != own:
            yield f"chunk {action.chunk} has other factors at another stage", at


def _out_of_order(grid: Grid) -> Breaks:
    """I3. F(c,s) after F(c,s-1) and after F of the chunk before; B(c,s) after F(c,s), B(c,s+1)."""
    received: dict[tuple[Payload, int, int], int] = {}
    for at, action, cell in grid.each(Recv):
        assert isinstance(action, Recv)
        received.setdefault((action.payload, cell, grid.ranks[at]), at)
    rows: tuple[tuple[list[int], int, Payload], ...] = (
        (grid.forward, -grid.num_chunks, "activation"),
        (grid.backward, grid.num_chunks, "gradient"),
    )
    for places, step, payload in rows:
        for cell, at in enumerate(places):
            source, rank = cell + step, grid.ranks[at]
            if at < 0 or not 0 <= source < len(places):
                continue
            if grid.ranks[places[source]] == rank:
                if places[source] > at:
                    yield f"cell {grid.name(source)} comes first", at
            elif not 0 <= received.get((payload, source, rank), -1) < at:
                yield f"the {payload} of {grid.name(source)} has not been received", at
    for cell, at in enumerate(grid.forward):
        if 0 <= grid.backward[cell] < at:
            yield "a Backward needs its Forward", grid.backward[cell]
        chunk = cell % grid.num_chunks
        for earlier in grid.before[chunk] if at >= 0 else ():
            source = cell - chunk + earlier
            if grid.forward[source] < 0:
                yield f"cell {grid.name(source)} has no Forward", at
            if grid.rank_of_forward(source) != grid.ranks[at]:
                yield f"cell {grid.name(source)} is on another rank", at
            if grid.forward[source] > at:
                yield f"cell {grid.name(source)} comes first", at


def _mixed_phases(grid: Grid) -> Breaks:
    """I3, of two phases. The caller makes the loss of all outputs: no other action of a rank comes
    before its last Forward."""
    begun: set[int] = set()
    for at, action, cell in grid.each(*COMPUTING) if grid.plan.two_phases else ():
        if not isinstance(action, Forward):
            begun.add(grid.ranks[at])
        elif grid.ranks[at] in begun:
            yield f"the first phase was over before F{grid.name(cell)}", at
        elif action.keep == "all":
            yield "no graph lives from one phase to the other", at


def _odd_graphs(grid: Grid) -> Breaks:
    """I6. A Backward consumes the graph of a Forward that kept all or of exactly one Recompute."""
    has_graph = bytearray(len(grid.forward))
    for at, action, cell in grid.each(Forward, Recompute, Backward):
        if isinstance(action, Backward):
            if not has_graph[cell]:
                yield f"{grid.name(cell)} kept no graph and no Recompute made one", at
            has_graph[cell] = 0
            continue
        assert isinstance(action, (Forward, Recompute))
        num_layers = grid.plan.stages[action.stage]
        if not 0 <= action.recompute_layers <= num_layers:
            yield f"the stage has {count_words(num_layers, 'layer')}", at
        if isinstance(action, Recompute):
            if at < grid.forward[cell]:
                yield "nothing is kept before the Forward", at
            if has_graph[cell]:
                yield f"the graph of {grid.name(cell)} is there already", at
            if grid.keep[cell] == "all":
                yield "a cell that kept all has no input left", at
        has_graph[cell] = isinstance(action, Recompute) or action.keep == "all"


def _beyond_budget(grid: Grid, memory: Memory) -> Breaks:
    """I9. At every action the rank's bytes stay within its budget."""
    for rank, start in enumerate(grid.starts[:-1]):
        budget = memory.budget_bytes(rank)
        for index, used in enumerate(memory.peak_bytes_of_actions(grid.plan, rank)):
            if used > budget:
                yield f"rank {rank} needs {used} bytes here and has {budget}", start + index


_CELL_RULES: tuple[Rule, ...] = (
    (_ONCE, _not_once),
    (
        "a Backward has factors other than 1 only in a sampled plan, equal ones at all stages",
        _odd_factors,
    ),
    ("forwards ascend, and every cell follows its neighbours", _out_of_order),
    ("a plan of two phases has all Forwards in the first", _mixed_phases),
    ("the K,V of earlier chunks are there when they are read", missing_kv),
    ("the dK,dV of a chunk are complete before its Backward", lost_kv_gradients),
    ("every Backward has one graph, and every Recompute an input to start from", _odd_graphs),
    ("a Backward ends its cell, and no graph is left over", after_the_end),
)

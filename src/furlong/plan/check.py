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

I1 and I2 are in `check_chunks`, I10 and I11 in `check_ranks`, the others here. The orders are those
that make a chunked backward exact (ChunkFlow, Algorithm 2, with its second loop descending, since
dK,dV of a chunk are complete only after all later chunks). Each function relies on those before it
and takes time linear in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol

from furlong.errors import PlanError
from furlong.plan.check_chunks import chunks_are_well_formed, tokens_are_covered
from furlong.plan.check_ranks import (
    messages_pair_up,
    parameters_are_managed,
    passes_are_in_step,
    ranks_never_stall,
)
from furlong.plan.grid import Grid, refuse_chunk
from furlong.plan.values import (
    Backward,
    ChunkPlan,
    Forward,
    Payload,
    RebuildKV,
    Recompute,
    Recv,
)


class Memory(Protocol):
    """What the memory check asks of a cost model."""

    def budget_bytes(self, rank: int) -> int:
        """Bytes that the rank may use."""

    def bytes_after(self, plan: ChunkPlan, rank: int) -> Sequence[int]:
        """For each action of the rank, the peak of bytes in use while it runs."""


def check(plan: ChunkPlan, memory: Memory | None = None) -> None:
    """Raise PlanError if the plan breaks an invariant; its text points at the guilty place."""
    if not plan.stages:
        raise PlanError("broken rule: a plan has stages")
    tokens_are_covered(plan)
    chunks_are_well_formed(plan)
    grid = Grid(plan)
    cells_run_once(grid)
    factors_are_of_samples(grid)
    cells_follow_neighbours(grid)
    earlier_kv_is_there(grid)
    kv_gradients_are_complete(grid)
    graphs_exist(grid)
    backward_ends_a_cell(grid)
    messages_pair_up(grid)
    parameters_are_managed(grid)
    passes_are_in_step(grid)
    ranks_never_stall(grid)
    if memory is not None:
        memory_is_enough(grid, memory)


def cells_run_once(grid: Grid) -> None:
    """I7. One Forward per cell, but for chunks of a sample whose loss nobody reports; Backwards at
    all stages of a chunk from `frozen_stages` on, for all chunks but dummies if for any."""
    rule = "every cell has one Forward and one Backward, on one rank"
    frozen = grid.plan.frozen_stages
    if not 0 <= frozen < grid.num_stages:
        why = f"{frozen} of {grid.num_stages} stages are frozen: the last one has the loss"
        raise PlanError(f"broken rule: {rule}\n{why}")
    firsts = {Forward: grid.forward, Backward: grid.backward}
    for at, (kind, cell) in enumerate(zip(grid.kinds, grid.cells, strict=True)):
        if kind in firsts:
            if firsts[kind][cell] != at:
                raise grid.refuse(rule, f"cell {grid.name(cell)} has one already", at)
            if kind is Backward and cell < frozen * grid.num_chunks:
                raise grid.refuse(rule, f"the first {frozen} stages are frozen", at)
        elif kind is not Recompute and kind is not RebuildKV:
            continue
        if grid.forward[cell] >= 0 and grid.ranks[grid.forward[cell]] != grid.ranks[at]:
            why = f"the Forward of {grid.name(cell)} is on rank {grid.ranks[grid.forward[cell]]}"
            raise grid.refuse(rule, why, at)
    trained = Backward in grid.kinds and not grid.plan.sampled
    for chunk in range(grid.num_chunks):
        cells = range(chunk, len(grid.forward), grid.num_chunks)
        counts = [sum(places[cell] >= 0 for cell in cells) for places in firsts.values()]
        if not grid.plan.report_loss and counts == [0, 0]:
            continue
        if counts[0] != grid.num_stages or counts[1] not in (0, grid.num_stages - frozen):
            why = f"chunk {chunk} has {counts[0]} Forwards and {counts[1]} Backwards"
            over = f"{grid.num_stages} stages" + (f", {frozen} of them frozen" if frozen else "")
            raise refuse_chunk(grid.plan, rule, f"{why} over {over}", chunk)
        if trained and not counts[1] and not grid.plan.chunks[chunk].is_dummy:
            why = f"chunk {chunk} has no Backward, others have, and the plan is not sampled"
            raise refuse_chunk(grid.plan, rule, why, chunk)


def factors_are_of_samples(grid: Grid) -> None:
    """I1, of the losses. Only a plan that samples its chunks scales their gradients, by the same
    finite factors at all stages of a chunk; in any other plan each label counts once."""
    rule = "a Backward has factors other than 1 only in a sampled plan, equal ones at all stages"
    if not grid.plan.sampled and not grid.plan.report_loss:
        raise PlanError("broken rule: only a sampled plan leaves losses out (report_loss)")
    factors: dict[int, tuple[float, float]] = {}
    for at, action in enumerate(grid.actions):
        if not isinstance(action, Backward):
            continue
        own = action.loss_factor, action.relay_factor
        if not grid.plan.sampled and own != (1, 1):
            raise grid.refuse(rule, "the plan is not sampled", at)
        if not all(0 <= factor < inf for factor in own):
            raise grid.refuse(rule, "a factor is at least 0 and finite", at)
        if factors.setdefault(action.chunk, own) != own:
            why = f"chunk {action.chunk} has other factors at another stage"
            raise grid.refuse(rule, why, at)


def cells_follow_neighbours(grid: Grid) -> None:
    """I3. F(c,s) after F(c,s-1) and after F of the chunk before; B(c,s) after F(c,s), B(c,s+1)."""
    rule = "forwards ascend, and every cell follows its neighbours"
    received: dict[tuple[Payload, int, int], int] = {}
    for at, (action, cell) in enumerate(zip(grid.actions, grid.cells, strict=True)):
        if isinstance(action, Recv):
            received.setdefault((action.payload, cell, grid.ranks[at]), at)
    rows: tuple[tuple[list[int], int, Payload], ...] = (
        (grid.forward, -grid.num_chunks, "activation"),
        (grid.backward, grid.num_chunks, "gradient"),
    )
    for places, step, payload in rows:
        for cell, at in enumerate(places):
            source = cell + step
            if at < 0 or not 0 <= source < len(places):
                continue
            rank = grid.ranks[at]
            if grid.ranks[places[source]] == rank:
                if places[source] > at:
                    raise grid.refuse(rule, f"cell {grid.name(source)} comes first", at)
            elif not 0 <= received.get((payload, source, rank), -1) < at:
                why = f"the {payload} of {grid.name(source)} has not been received"
                raise grid.refuse(rule, why, at)
    for cell, at in enumerate(grid.forward):
        if 0 <= grid.backward[cell] < at:
            raise grid.refuse(rule, "a Backward needs its Forward", grid.backward[cell])
        chunk = cell % grid.num_chunks
        for earlier in grid.before[chunk] if at >= 0 else ():
            source = cell - chunk + earlier
            if grid.forward[source] < 0:
                raise grid.refuse(rule, f"cell {grid.name(source)} has no Forward", at)
            if grid.ranks[grid.forward[source]] != grid.ranks[at]:
                raise grid.refuse(rule, f"cell {grid.name(source)} is on another rank", at)
            if grid.forward[source] > at:
                raise grid.refuse(rule, f"cell {grid.name(source)} comes first", at)


def earlier_kv_is_there(grid: Grid) -> None:
    """I4. K,V of a cell that drops them live up to the last Forward of their sequence, then again
    from a RebuildKV on; those of other cells live up to their Backward. A cell drops them that
    keeps its input only, or its attention with a RebuildKV to come."""
    rule = "the K,V of earlier chunks are there when they are read"
    of_rebuilds = {
        cell for kind, cell in zip(grid.kinds, grid.cells, strict=True) if kind is RebuildKV
    }
    drops = [
        keep == "input" or (keep == "attention" and cell in of_rebuilds)
        for cell, keep in enumerate(grid.keep)
    ]
    rebuilt = bytearray(len(drops))
    num_ready: dict[tuple[int, int], int] = {}
    for at, (kind, cell) in enumerate(zip(grid.kinds, grid.cells, strict=True)):
        if kind is not Recompute and kind is not Backward and kind is not RebuildKV:
            continue
        stage, chunk = divmod(cell, grid.num_chunks)
        row = cell - chunk
        for seq_id, position in grid.plan.links[chunk]:
            group = grid.plan.groups[seq_id]
            last = group[max(0, grid.plan.num_computed[seq_id] - 1)]
            if at < grid.forward[row + last]:
                continue
            ready = num_ready.get((seq_id, stage), 0)
            while ready < position and (
                not drops[row + group[ready]] or rebuilt[row + group[ready]]
            ):
                ready += 1
            num_ready[seq_id, stage] = ready
            if ready < position:
                missing = grid.name(row + group[ready])
                why = f"{missing} has dropped its K,V, and no RebuildKV({missing}) came before"
                raise grid.refuse(rule, why, at)
        if kind is RebuildKV:
            if not drops[cell] or not grid.plan.continues[chunk]:
                why = "RebuildKV is for cells that drop their K,V and are read by later chunks"
                raise grid.refuse(rule, why, at)
            if at < grid.forward[cell]:
                raise grid.refuse(rule, "a RebuildKV needs its Forward", at)
            rebuilt[cell] = 1


def kv_gradients_are_complete(grid: Grid) -> None:
    """I5. A Backward comes after that of every later chunk of its sequence that has one. These send
    their dK,dV to K,V that live on until then: a RebuildKV in between would make them anew."""
    rule = "the dK,dV of a chunk are complete before its Backward"
    for group in grid.plan.groups.values():
        for row in range(0, len(grid.backward), grid.num_chunks):
            latest, latest_cell = -1, -1
            for chunk in reversed(group):
                at = grid.backward[row + chunk]
                if 0 <= at < latest:
                    why = f"B{grid.name(latest_cell)} still adds to the dK,dV of chunk {chunk}"
                    raise grid.refuse(rule, why, at)
                if at >= 0:
                    latest, latest_cell = at, row + chunk
    begun: dict[tuple[int, int], int] = {}  # (sequence, stage) -> highest position with a Backward
    for at, (kind, cell) in enumerate(zip(grid.kinds, grid.cells, strict=True)):
        if kind is not Backward and (kind is not RebuildKV or 0 <= grid.backward[cell] < at):
            continue
        stage, chunk = divmod(cell, grid.num_chunks)
        for seq_id, position in grid.plan.links[chunk]:
            if kind is Backward:
                begun.setdefault((seq_id, stage), position)
            elif begun.get((seq_id, stage), position) > position:
                later = grid.name(cell - chunk + grid.plan.groups[seq_id][begun[seq_id, stage]])
                why = f"B{later} has sent dK,dV to {grid.name(cell)}, which this would lose"
                raise grid.refuse(rule, why, at)


def graphs_exist(grid: Grid) -> None:
    """I6. A Backward consumes the graph of a Forward that kept all or of exactly one Recompute."""
    rule = "every Backward has one graph, and every Recompute an input to start from"
    has_graph = bytearray(len(grid.forward))
    for at, (action, cell) in enumerate(zip(grid.actions, grid.cells, strict=True)):
        if isinstance(action, (Forward, Recompute)):
            num_layers = grid.plan.stages[action.stage]
            if not 0 <= action.recompute_layers <= num_layers:
                raise grid.refuse(rule, f"the stage has {num_layers} layers", at)
            if isinstance(action, Forward):
                has_graph[cell] = action.keep == "all"
                continue
            if at < grid.forward[cell]:
                raise grid.refuse(rule, "nothing is kept before the Forward", at)
            if has_graph[cell]:
                raise grid.refuse(rule, f"the graph of {grid.name(cell)} is there already", at)
            if grid.keep[cell] == "all":
                raise grid.refuse(rule, "a cell that kept all has no input left", at)
            has_graph[cell] = 1
        elif isinstance(action, Backward):
            if not has_graph[cell]:
                why = f"{grid.name(cell)} kept no graph and no Recompute made one"
                raise grid.refuse(rule, why, at)
            has_graph[cell] = 0


def backward_ends_a_cell(grid: Grid) -> None:
    """I8. After B(c,s) nothing uses the cell or reads its K,V; every graph meets its Backward."""
    rule = "a Backward ends its cell, and no graph is left over"
    ended: dict[tuple[int, int], int] = {}
    for at, (kind, cell) in enumerate(zip(grid.kinds, grid.cells, strict=True)):
        if kind is not Forward and kind not in (Recompute, RebuildKV, Backward):
            continue
        stage, chunk = divmod(cell, grid.num_chunks)
        done = grid.backward[cell]
        if 0 <= done < at:
            raise grid.refuse(rule, f"B{grid.name(cell)} has run", at)
        if done < 0 and (kind is Recompute or (kind is Forward and grid.keep[cell] == "all")):
            raise grid.refuse(rule, f"no Backward consumes the graph of {grid.name(cell)}", at)
        for seq_id, position in grid.plan.links[chunk]:
            lowest = ended.get((seq_id, stage), position)
            if lowest < position:
                earlier = cell - chunk + grid.plan.groups[seq_id][lowest]
                raise grid.refuse(rule, f"B{grid.name(earlier)} has freed the K,V it reads", at)
            if kind is Backward:
                ended[seq_id, stage] = position


def memory_is_enough(grid: Grid, memory: Memory) -> None:
    """I9. At every action the rank's bytes stay within its budget."""
    rule = "memory stays within the budget"
    for rank, start in enumerate(grid.starts[:-1]):
        budget = memory.budget_bytes(rank)
        for index, used in enumerate(memory.bytes_after(grid.plan, rank)):
            if used > budget:
                why = f"rank {rank} needs {used} bytes here and has {budget}"
                raise grid.refuse(rule, why, start + index)

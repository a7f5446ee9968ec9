"""The invariants of stored K,V: there when they are read, their gradients complete, then gone.

Where a sequence branches, what comes before a piece is its path alone (`furlong.plan.trees`).
"""

from __future__ import annotations

from collections.abc import Iterable

from furlong.plan.grid import Breaks, Grid
from furlong.plan.values import COMPUTING, Backward, Forward, RebuildKV, Recompute


def missing_kv(grid: Grid) -> Breaks:
    """I4. K,V of a cell that drops them live up to the last Forward of their sequence, then again
    from a RebuildKV on; those of other cells live up to their Backward. A cell drops them that
    keeps its input only, or its attention with a RebuildKV to come."""
    again = {cell for _, _, cell in grid.each(RebuildKV)}
    gone = bytearray(
        keep == "input" or (keep == "attention" and cell in again)
        for cell, keep in enumerate(grid.keep)
    )
    drops = bytes(gone)
    num_ready: dict[tuple[int, int], int] = {}
    for at, action, cell in grid.each(Recompute, Backward, RebuildKV):
        stage, chunk = divmod(cell, grid.num_chunks)
        row = cell - chunk
        for seq_id, position in grid.plan.links[chunk]:
            group, tree = grid.plan.groups[seq_id], grid.plan.trees.get(seq_id)
            if at < grid.forward[row + group[max(0, grid.plan.num_computed[seq_id] - 1)]]:
                continue
            first = num_ready.get((seq_id, stage), 0)  # in a line, all before it are there
            before: Iterable[int] = tree.path(position) if tree else range(first, position)
            missing = next((n for n in before if gone[row + group[n]]), None)
            if tree is None:
                num_ready[seq_id, stage] = max(first, position if missing is None else missing)
            if missing is not None:
                name = grid.name(row + group[missing])
                yield f"{name} has dropped its K,V, and no RebuildKV({name}) came before", at
        if isinstance(action, RebuildKV):
            if not drops[cell] or not grid.plan.continues[chunk]:
                yield "RebuildKV is for cells that drop their K,V and are read by later chunks", at
            if at < grid.forward[cell]:
                yield "a RebuildKV needs its Forward", at
            gone[cell] = 0


def lost_kv_gradients(grid: Grid) -> Breaks:
    """I5. A Backward comes after that of every later chunk of its sequence that has one. These send
    their dK,dV to K,V that live on until then: a RebuildKV in between would make them anew."""
    for seq_id, group in grid.plan.groups.items():
        tree = grid.plan.trees.get(seq_id)
        for row in range(0, len(grid.backward), grid.num_chunks):
            for earlier, later in _line(grid, group, row) if tree is None else (
                (row + group[parent], row + group[n])
                for n, parent in enumerate(tree.parents) if parent >= 0
            ):  # fmt: skip
                if 0 <= grid.backward[earlier] < grid.backward[later]:
                    chunk = earlier % grid.num_chunks
                    why = f"B{grid.name(later)} still adds to the dK,dV of chunk {chunk}"
                    yield why, grid.backward[earlier]
    begun: dict[tuple[int, int], list[int]] = {}  # positions with a Backward; in a line the first
    for at, action, cell in grid.each(Backward, RebuildKV):
        stage, chunk = divmod(cell, grid.num_chunks)
        if isinstance(action, RebuildKV) and 0 <= grid.backward[cell] < at:
            continue
        for seq_id, position in grid.plan.links[chunk]:
            readers = begun.setdefault((seq_id, stage), [])
            if isinstance(action, Backward):
                if not readers or seq_id in grid.plan.trees:
                    readers.append(position)
                continue
            reader = next((n for n in readers if _sees(grid, seq_id, n, position)), None)
            if reader is not None:
                name = grid.name(cell - chunk + grid.plan.groups[seq_id][reader])
                yield f"B{name} has sent dK,dV to {grid.name(cell)}, which this would lose", at


def after_the_end(grid: Grid) -> Breaks:
    """I8. After B(c,s) nothing uses the cell or reads its K,V; every graph meets its Backward."""
    ended: dict[tuple[int, int], list[int]] = {}  # positions; in a line the last, the lowest
    for at, action, cell in grid.each(*COMPUTING):
        stage, chunk = divmod(cell, grid.num_chunks)
        done = grid.backward[cell]
        if 0 <= done < at:
            yield f"B{grid.name(cell)} has run", at
        makes_graph = isinstance(action, Recompute)
        makes_graph |= isinstance(action, Forward) and action.keep == "all"
        if done < 0 and makes_graph:
            yield f"no Backward consumes the graph of {grid.name(cell)}", at
        for seq_id, position in grid.plan.links[chunk]:
            over = ended.setdefault((seq_id, stage), [])
            lowest = next((n for n in over if _sees(grid, seq_id, position, n)), None)
            if lowest is not None:
                earlier = cell - chunk + grid.plan.groups[seq_id][lowest]
                yield f"B{grid.name(earlier)} has freed the K,V it reads", at
            if isinstance(action, Backward):
                if seq_id not in grid.plan.trees:
                    over.clear()
                over.append(position)


def _line(grid: Grid, group: tuple[int, ...], row: int) -> Iterable[tuple[int, int]]:
    """Each cell of a sequence without branches, and the one behind it whose Backward is latest."""
    latest = -1
    for chunk in reversed(group):
        at = grid.backward[row + chunk]
        if latest >= 0 <= at:
            yield row + chunk, latest
        if at >= 0:
            latest = row + chunk


def _sees(grid: Grid, seq_id: int, position: int, earlier: int) -> bool:
    tree = grid.plan.trees.get(seq_id)
    return earlier < position if tree is None else tree.sees(position, earlier)

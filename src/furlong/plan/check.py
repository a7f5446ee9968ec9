"""The checker: what every legal plan keeps, one function per invariant, in the order of checking.

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

The orders are those that make a chunked backward exact (ChunkFlow, Algorithm 2, with its second
loop descending, since dK,dV of a chunk are complete only after all later chunks). Where a sequence
branches, what comes before a piece is its path alone (`furlong.plan.trees`).

A rule is a sentence and a function that yields what breaks it: why, and the place of the guilty
action. The first break is refused: each function relies on the rules before it and on its own
earlier lines. All take time linear in the plan.

The actions of all ranks stand in one list, rank after rank; `at` is always a place in that list. A
cell is a number, stage * num_chunks + chunk, so that its neighbours are one addition away.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, repeat
from math import inf
from typing import Any, Protocol

from furlong.errors import PlanError
from furlong.plan.passes import directions
from furlong.plan.plan import (
    COMPUTING,
    MESSAGES,
    ON_PARAMETERS,
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Keep,
    Payload,
    Place,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Reshard,
    Send,
    Slice,
    Unshard,
    place_sizes,
)
from furlong.plan.text import format_action, format_chunk
from furlong.units import count_words

_NUM_AROUND = 4
_ARROW = "    <-- here"
_LEGAL = "_is_legal"
_ONCE = "every cell has one Forward and one Backward, on one rank"


class Grid:
    """The places of each cell's Forward and Backward, for the checks of one plan."""

    def __init__(self, plan: ChunkPlan) -> None:
        self.plan = plan
        self.num_chunks = len(plan.chunks)
        self.num_stages = len(plan.stages)
        self.actions: list[Action] = [action for actions in plan.actions for action in actions]
        self.kinds = [type(action) for action in self.actions]
        self.ranks = [rank for rank, actions in enumerate(plan.actions) for _ in actions]
        self.starts = [0]
        for actions in plan.actions:
            self.starts.append(self.starts[-1] + len(actions))
        self.cells = [self._cell(at, action) for at, action in enumerate(self.actions)]
        """The cell of each action; of an action on parameters, the stage's first."""
        num_cells = self.num_chunks * self.num_stages
        self.forward = self._first(Forward, num_cells)
        """The place of each cell's first Forward, or -1."""
        self.backward = self._first(Backward, num_cells)
        self.keep: list[Keep | None] = [
            action.keep if at >= 0 and isinstance(action := self.actions[at], Forward) else None
            for at in self.forward
        ]
        """Each cell's `keep`, None for a cell without a Forward."""
        groups = plan.groups
        self.before = [
            [
                groups[seq_id][plan.trees[seq_id].parents[at] if seq_id in plan.trees else at - 1]
                for seq_id, at in links
                if at
            ]
            for links in plan.links
        ]
        """For each chunk, the ones that it goes on from."""

    def _cell(self, at: int, action: Action) -> int:
        rule = "every action names a cell of the grid"
        if not 0 <= action.stage < self.num_stages:
            raise self.refuse(rule, f"the plan has {count_words(self.num_stages, 'stage')}", at)
        if isinstance(action, ON_PARAMETERS):
            return action.stage * self.num_chunks
        if not 0 <= action.chunk < self.num_chunks:
            raise self.refuse(rule, f"the plan has {count_words(self.num_chunks, 'chunk')}", at)
        if isinstance(action, MESSAGES):
            peers = range(len(self.plan.actions))
            if action.peer not in peers or action.peer == self.ranks[at]:
                raise self.refuse(rule, f"{action.peer} is no other rank of the plan", at)
        return action.stage * self.num_chunks + action.chunk

    def _first(self, kind: type[Action], num_cells: int) -> list[int]:
        places = [-1] * num_cells
        for at, (other, cell) in enumerate(zip(self.kinds, self.cells, strict=True)):
            if other is kind and places[cell] < 0:
                places[cell] = at
        return places

    def each(self, *kinds: type[Action]) -> Iterator[tuple[int, Action, int]]:
        """The place, the action and the cell of every action of some kinds."""
        for at, (kind, action, cell) in enumerate(
            zip(self.kinds, self.actions, self.cells, strict=True)
        ):
            if kind in kinds:
                yield at, action, cell

    def name(self, cell: int) -> str:
        """`chunk.stage`, as in an action's text."""
        stage, chunk = divmod(cell, self.num_chunks)
        return f"{chunk}.{stage}"

    def waiting_words(self, stuck: Sequence[tuple[int, int]]) -> str:
        """The (rank, place of its action) that wait for each other, in words."""
        texts = [f"rank {rank} at '{format_action(self.actions[at])}'" for rank, at in stuck]
        return "these wait for ever: " + ", ".join(texts)

    def refuse(self, rule: str, why: str, at: int) -> PlanError:
        """The error for a broken rule, showing the actions around the guilty one."""
        rank = self.ranks[at]
        own = self.plan.actions[rank]
        return _refusal(rule, why, f"rank {rank}", own, at - self.starts[rank], format_action)


def _refusal(
    rule: str, why: str, head: str, own: Sequence[Any], at: int, words: Callable[[Any], str]
) -> PlanError:
    """The error for a broken rule, showing what is around the guilty place of `own`."""
    first = max(0, at - _NUM_AROUND)
    shown = own[first : at + _NUM_AROUND + 1]
    lines = [f"{number:6d}  {words(one)}" for number, one in enumerate(shown, first)]
    if lines:
        lines[at - first] += _ARROW
    return PlanError("\n".join([f"broken rule: {rule}", why, head, *lines]))


def _chunk_refusal(plan: ChunkPlan, rule: str, why: str, chunk: int) -> PlanError:
    def words(one: Chunk) -> str:
        return f"{format_chunk(one, plan.sp_size):.80}"

    return _refusal(rule, why, "chunks", plan.chunks, chunk, words)


class Memory(Protocol):
    """The bytes that the memory check asks of a cost model."""

    def budget_bytes(self, rank: int) -> int:
        """Bytes that the rank may use."""

    def peak_bytes_of_actions(self, plan: ChunkPlan, rank: int) -> Sequence[int]:
        """For each action of the rank, the peak of bytes in use while it runs."""


Breaks = Iterator[tuple[str, int]]
"""The ways in which a plan breaks a rule: why, and the place of the guilty action or chunk."""


def check(plan: ChunkPlan, memory: Memory | None = None) -> None:
    """Raise PlanError if the plan breaks an invariant; its text points at the guilty place.

    A plan does not change: what was found legal is noted beside its cached properties.
    """
    if memory is None and _LEGAL in vars(plan):
        return
    if min(plan.stages, default=0) < 1:
        shown = ", ".join(map(str, plan.stages)) or "none"
        raise PlanError(f"broken rule: a plan has stages of at least one layer\nlayers: {shown}")
    for rule, of_chunks in _CHUNK_RULES:
        for why, chunk in of_chunks(plan):
            raise _chunk_refusal(plan, rule, why, chunk)
    grid = Grid(plan)
    for rule, breaks in _RULES:
        for why, at in breaks(grid):
            raise grid.refuse(rule, why, at)
    for why, at in _beyond_budget(grid, memory) if memory is not None else ():
        raise grid.refuse("memory stays within the budget", why, at)
    vars(plan)[_LEGAL] = True


def _uncovered(plan: ChunkPlan) -> Iterator[tuple[str, int]]:
    """I1. The slices of each sequence tile it, and every sequence is there; a chunk without slices
    has no other use than to meet the passes of other ranks, or the Reduce if its rank has no other
    chunk."""
    several = len(plan.actions) > 1
    computed = ({a.chunk for a in own if isinstance(a, Forward)} for own in plan.actions)
    alone = {min(own) for own in computed if len(own) == 1}
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in plan.seq_lens]
    for index, chunk in enumerate(plan.chunks):
        if chunk.is_dummy and not (several and (plan.regathers or index in alone)):
            yield f"chunk {index} is empty, its rank needs none to go with others", index
        for piece in chunk.slices:
            if not 0 <= piece.seq_id < len(plan.seq_lens):
                of_all = count_words(len(plan.seq_lens), "sequence")
                yield f"none of {of_all} is {piece.seq_id}", index
            if piece.stop <= piece.start:
                yield f"a slice of sequence {piece.seq_id} is empty", index
            pieces[piece.seq_id].append((piece.start, piece.stop, index))
    for seq_id, (seq_len, found) in enumerate(zip(plan.seq_lens, pieces, strict=True)):
        covered, index = 0, 0
        for start, stop, index in sorted(found):
            if start != covered:
                yield (
                    f"sequence {seq_id} is covered up to token {covered}, then from {start}",
                    index,
                )
            covered = stop
        if covered != seq_len or not found:
            own = count_words(seq_len, "token")
            yield f"sequence {seq_id} has {own}, its slices cover {covered}", index


def _misplaced(plan: ChunkPlan) -> Iterator[tuple[str, int]]:
    """I2. Places are nested, few pieces have a prefix, a sequence is once in a chunk and keeps its
    place."""
    places: dict[int, Place] = {}
    for index, chunk in enumerate(plan.chunks):
        if why := _oddity(chunk.slices, plan.sp_size):
            yield why, index
        for piece in chunk.slices:
            if places.setdefault(piece.seq_id, piece.place) != piece.place:
                yield f"sequence {piece.seq_id} has another place in an earlier chunk", index


def _oddity(slices: tuple[Slice, ...], sp_size: int) -> str:
    if sp_size < 1:
        return f"a pool has at least one process, not {sp_size}"
    places = [piece.place for piece in slices]
    sizes = place_sizes(sp_size)
    for place in dict.fromkeys(places):
        if place.size not in sizes or place.first not in range(0, sp_size, place.size):
            required = f"a size of {', '.join(map(str, sizes))} and begins at a multiple of it"
            return f"{place} is none of a pool of {sp_size}, where a place has {required}"
    if len(slices) > 1:
        before = {(piece.seq_id, piece.goes_on_from) for piece in slices}
        if len({seq_id for seq_id, _ in before}) < len(before):
            return "a sequence has two slices in the chunk, and they are no branches of one piece"
    order = [(-place.size, place.first) for place in places]
    if order != sorted(order):
        return "slices on larger places come first, then those of lower processes"
    for one, two in pairwise(slices):
        if one.place == two.place and two.start > 0 and one.seq_id != two.seq_id:
            return "only the first slice on a place, and branches beside it, may have a prefix"
    return ""


def _misgrown(plan: ChunkPlan) -> Iterator[tuple[str, int]]:
    """I2, of sequences that branch: pieces lie depth-first, and nothing goes on from those that
    share a chunk. All are on one process, and none is left out."""
    pieces: dict[int, list[tuple[Slice, int]]] = {}
    for index, chunk in enumerate(plan.chunks):
        for piece in chunk.slices:
            pieces.setdefault(piece.seq_id, []).append((piece, index))
    for seq_id, own in pieces.items():
        branches = [index for piece, index in own if piece.parent is not None]
        if not branches:
            continue
        if plan.sampled or plan.sp_size > 1 or len(plan.actions) > 1:
            ranks = f"has {count_words(len(plan.actions), 'rank')} of {plan.sp_size} processes"
            why = "is sampled" if plan.sampled else ranks
            yield f"sequence {seq_id} branches, and the plan {why}", branches[0]
        chunks = [index for _, index in own]
        path = [0]
        followed = {piece.goes_on_from for piece, _ in own}
        for piece, index in sorted(own, key=lambda pair: pair[0].start):
            if piece.goes_on_from not in path or piece.parent == piece.start:
                yield f"no piece of the path ends at token {piece.parent}, or it is the last", index
            path = [*path[: path.index(piece.goes_on_from) + 1], piece.stop]
            if piece.stop in followed and chunks.count(index) > 1:
                yield f"a piece goes on from token {piece.stop}, in a chunk of branches", index


_CHUNK_RULES: tuple[tuple[str, Callable[[ChunkPlan], Breaks]], ...] = (
    ("every token is in exactly one slice", _uncovered),
    (
        "a chunk holds at most one piece with a prefix per place, and a sequence keeps its place",
        _misplaced,
    ),
    ("a branch goes on from the end of an earlier piece on its path", _misgrown),
)


def _not_once(grid: Grid) -> Breaks:
    """I7. One Forward per cell, but for chunks of a sample whose loss nobody reports; Backwards at
    all stages of a chunk from `frozen_stages` on, for all chunks but dummies if for any."""
    plan, frozen = grid.plan, grid.plan.frozen_stages
    if not 0 <= frozen < grid.num_stages:
        given = f"{frozen} of {count_words(grid.num_stages, 'stage')}"
        raise PlanError(f"broken rule: {_ONCE}\n{given} are frozen: the last one has the loss")
    firsts = {Forward: grid.forward, Backward: grid.backward}
    for at, action, cell in grid.each(*COMPUTING):
        if firsts.get(type(action), {cell: at})[cell] != at:
            yield f"cell {grid.name(cell)} has one already", at
        if isinstance(action, Backward) and action.stage < frozen:
            yield f"the first {frozen} stages are frozen", at
        if grid.forward[cell] >= 0 and grid.ranks[grid.forward[cell]] != grid.ranks[at]:
            yield (
                f"the Forward of {grid.name(cell)} is on rank {grid.ranks[grid.forward[cell]]}",
                at,
            )
    trained = Backward in grid.kinds and not plan.sampled
    for chunk in range(grid.num_chunks):
        cells = range(chunk, len(grid.forward), grid.num_chunks)
        forwards, backwards = (sum(firsts[kind][c] >= 0 for c in cells) for kind in firsts)
        if not plan.report_loss and forwards == backwards == 0:
            continue
        if forwards != grid.num_stages or backwards not in (0, grid.num_stages - frozen):
            found = f"{count_words(forwards, 'Forward')} and {count_words(backwards, 'Backward')}"
            over = count_words(grid.num_stages, "stage")
            over += f", {frozen} of them frozen" if frozen else ""
            raise _chunk_refusal(plan, _ONCE, f"chunk {chunk} has {found} over {over}", chunk)
        if trained and not backwards and not plan.chunks[chunk].is_dummy:
            why = f"chunk {chunk} has no Backward, others have, and the plan is not sampled"
            raise _chunk_refusal(plan, _ONCE, why, chunk)


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
            if grid.ranks[grid.forward[source]] != grid.ranks[at]:
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


def _missing_kv(grid: Grid) -> Breaks:
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


def _lost_kv_gradients(grid: Grid) -> Breaks:
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


def _after_the_end(grid: Grid) -> Breaks:
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


_Key = tuple[object, object]
_Entries = list[tuple[int, object]]
"""Places in a rank's list, and what another rank has to have there too."""


def _unpaired_messages(grid: Grid) -> Breaks:
    """I10. Each message carries a result of its sender to the rank that needs it, and both ranks
    list the messages between them in the same order."""
    sent: dict[tuple[int, int], _Entries] = defaultdict(list)
    received: dict[tuple[int, int], _Entries] = defaultdict(list)
    seen: set[tuple[str, int]] = set()
    for at, action, cell in grid.each(*MESSAGES):
        if isinstance(action, Send):
            yield from _not_made(grid, at, action)
            if (action.payload, cell) in seen:
                yield "it has been sent already", at
            seen.add((action.payload, cell))
            sent[grid.ranks[at], action.peer].append((at, (action.payload, cell)))
        elif isinstance(action, Recv):
            received[action.peer, grid.ranks[at]].append((at, (action.payload, cell)))
    for sender, receiver in sorted(sent.keys() | received.keys()):
        ours, theirs = sent[sender, receiver], received[sender, receiver]
        yield from _differences(grid, sender, ours, theirs)
        if len(ours) > len(theirs):
            yield f"rank {receiver} does not receive it", ours[len(theirs)][0]
        if len(ours) < len(theirs):
            yield f"rank {sender} does not send it", theirs[len(ours)][0]


def _not_made(grid: Grid, at: int, action: Send) -> Breaks:
    forward = action.payload == "activation"
    made = (grid.forward if forward else grid.backward)[grid.cells[at]]
    if made < 0 or grid.ranks[made] != grid.ranks[at] or made > at:
        yield f"rank {grid.ranks[at]} has not computed it yet", at
    reader = grid.cells[at] + (grid.num_chunks if forward else -grid.num_chunks)
    if not 0 <= reader < len(grid.forward):
        yield "there is no stage to send it to", at
    if grid.ranks[grid.forward[reader]] != action.peer:
        yield f"cell {grid.name(reader)} is on rank {grid.ranks[grid.forward[reader]]}", at


def _odd_reduces(grid: Grid) -> Breaks:
    last: dict[tuple[int, int], int] = {}
    reduces: dict[tuple[int, int], int] = {}
    for at, action, _ in grid.each(Backward, Reduce):
        key = action.stage, grid.ranks[at]
        if isinstance(action, Backward):
            last[key] = at
            if key in reduces:
                yield "a Backward comes after it", reduces[key]
        else:
            if key in reduces:
                yield f"stage {action.stage} is reduced already", at
            if key not in last:
                yield f"no Backward of stage {action.stage} came before", at
            reduces[key] = at
    if not reduces:
        return
    for key in sorted(last.keys() - reduces.keys()):
        yield f"no Reduce of stage {key[0]} follows", last[key]
    reducing = {rank for _, rank in reduces}
    trained = [ranks for stage, ranks in _members(grid).items() if stage >= grid.plan.frozen_stages]
    has_frozen_alone = set().union(*_members(grid).values()).difference(*trained)
    for rank in range(len(grid.plan.actions)):
        if rank not in reducing and rank not in has_frozen_alone:
            why = f"rank {rank} has none; without work it takes a token without a label"
            yield why, min(reduces.values())


def _unequal_collectives(grid: Grid) -> Breaks:
    """I10. The ranks of a stage issue the same collectives in the same order."""
    lists: dict[int, dict[int, _Entries]] = defaultdict(lambda: defaultdict(list))
    for at, action, _ in grid.each(*ON_PARAMETERS):
        lists[action.stage][grid.ranks[at]].append((at, type(action)))
    yield from _unequal(grid, lists, lambda _: "the other ranks of the stage issue fewer")


def _used_while_sharded(grid: Grid) -> Breaks:
    """I10. A stage that is unsharded somewhere computes only while it is."""
    unsharded = {
        (action.stage, grid.ranks[at]): False for at, action, _ in grid.each(Unshard, Reshard)
    }
    for at, action, _ in grid.each(Unshard, Reshard, *COMPUTING):
        key = action.stage, grid.ranks[at]
        if key not in unsharded:
            continue
        if isinstance(action, (Unshard, Reshard)):
            if isinstance(action, Unshard) == unsharded[key]:
                already = "" if unsharded[key] else "not "
                yield f"stage {action.stage} is {already}unsharded here", at
            unsharded[key] = isinstance(action, Unshard)
        elif not unsharded[key]:
            yield f"stage {action.stage} is not unsharded here", at


def _out_of_step(grid: Grid) -> Breaks:
    """I10. Where each pass gathers the weights of its stage, the ranks of a stage go through it in
    the same order of forwards and backwards. In FSDP2 a pass too many hangs, and one the other way
    round computes with the weights of other layers, silently."""
    if not grid.plan.regathers:
        return
    walks: dict[int, dict[int, _Entries]] = defaultdict(lambda: defaultdict(list))
    for rank, start in enumerate(grid.starts[:-1]):
        for at, direction in enumerate(directions(grid.plan, rank), start):
            if grid.kinds[at] in (Unshard, Reshard):
                yield "no stage of this plan is unsharded for longer", at
            if direction is not None:
                walks[grid.actions[at].stage][rank].append((at, direction))
    yield from _unequal(
        grid, walks,
        lambda rank: f"rank {rank} has no pass to meet it; a dummy chunk would fill its list up",
    )  # fmt: skip


def _unequal(
    grid: Grid, lists: dict[int, dict[int, _Entries]], why: Callable[[int], str]
) -> Breaks:
    """The places where the list of a stage's first rank and another one's differ. `why`: words for
    what the rank with the shorter one lacks."""
    members = _members(grid)
    for stage, by_rank in lists.items():
        first, *others = sorted(members[stage])
        for rank in others:
            ours, theirs = by_rank[first], by_rank[rank]
            yield from _differences(grid, first, ours, theirs)
            if len(ours) != len(theirs):
                shorter, longer = (first, theirs) if len(ours) < len(theirs) else (rank, ours)
                yield why(shorter), longer[min(len(ours), len(theirs))][0]


def _differences(grid: Grid, rank: int, ours: _Entries, theirs: _Entries) -> Breaks:
    """The places where a list differs from that of `rank`, as far as both go."""
    for (one, value), (other, different) in zip(ours, theirs, strict=False):
        if value != different:
            yield f"here rank {rank} has '{format_action(grid.actions[one])}'", other


def _stalls(grid: Grid) -> Breaks:
    """I11. Run all ranks at once: a send never waits, a receive waits for its message, a collective
    for all ranks of its stage, and so does a pass that gathers weights. Relies on equal orders at
    both ends."""
    num_ranks = len(grid.plan.actions)
    posted: dict[_Key, int] = defaultdict(int)
    sleeping: dict[_Key, list[int]] = defaultdict(list)
    awake = deque(range(num_ranks) if num_ranks > 1 else ())
    members = _members(grid)

    def post(key: _Key) -> None:
        posted[key] += 1
        awake.extend(sleeping.pop(key, ()))

    def walk(rank: int) -> Iterator[tuple[int, _Key, int]]:
        """The rank's waits: where, for which signal, for how many of it since the start."""
        passed: dict[_Key, int] = defaultdict(int)
        places = range(grid.starts[rank], grid.starts[rank + 1])
        ways = directions(grid.plan, rank) if grid.plan.regathers else repeat(None)
        for at, way in zip(places, ways, strict=False):
            action = grid.actions[at]
            if isinstance(action, Send):
                post((rank, action.peer))
            elif isinstance(action, Recv):
                passed[action.peer, rank] += 1
                yield at, (action.peer, rank), passed[action.peer, rank]
            elif way or isinstance(action, (Unshard, Reduce)):
                key = "pass" if way else type(action), action.stage
                passed[key] += 1
                post(key)
                yield at, key, passed[key] * len(members[action.stage])

    walks = [walk(rank) for rank in range(num_ranks)]
    waits: dict[int, tuple[int, _Key, int]] = {}
    while awake:
        rank = awake.popleft()
        while wait := waits.pop(rank, None) or next(walks[rank], None):
            _, key, needed = wait
            if posted[key] < needed:
                waits[rank] = wait
                sleeping[key].append(rank)
                break
    if waits:
        stuck = sorted((rank, at) for rank, (at, _, _) in waits.items())
        yield grid.waiting_words(stuck), stuck[0][1]


def _members(grid: Grid) -> dict[int, set[int]]:
    """For each stage, the ranks that hold it; a message names the stage of another rank too."""
    members: dict[int, set[int]] = defaultdict(set)
    for action, rank in zip(grid.actions, grid.ranks, strict=True):
        if not isinstance(action, MESSAGES):
            members[action.stage].add(rank)
    return members


def _beyond_budget(grid: Grid, memory: Memory) -> Breaks:
    """I9. At every action the rank's bytes stay within its budget."""
    for rank, start in enumerate(grid.starts[:-1]):
        budget = memory.budget_bytes(rank)
        for index, used in enumerate(memory.peak_bytes_of_actions(grid.plan, rank)):
            if used > budget:
                yield f"rank {rank} needs {used} bytes here and has {budget}", start + index


_RULES: tuple[tuple[str, Callable[[Grid], Breaks]], ...] = (
    (_ONCE, _not_once),
    (
        "a Backward has factors other than 1 only in a sampled plan, equal ones at all stages",
        _odd_factors,
    ),
    ("forwards ascend, and every cell follows its neighbours", _out_of_order),
    ("a plan of two phases has all Forwards in the first", _mixed_phases),
    ("the K,V of earlier chunks are there when they are read", _missing_kv),
    ("the dK,dV of a chunk are complete before its Backward", _lost_kv_gradients),
    ("every Backward has one graph, and every Recompute an input to start from", _odd_graphs),
    ("a Backward ends its cell, and no graph is left over", _after_the_end),
    ("every message that is sent is received, in the same order", _unpaired_messages),
    ("a Reduce follows the last Backward of its stage on its rank, once", _odd_reduces),
    ("the ranks of a stage issue its collectives in the same order", _unequal_collectives),
    ("parameters are unsharded while they are used", _used_while_sharded),
    ("ranks that gather weights with every pass run the same passes of a stage", _out_of_step),
    ("no rank waits for ever", _stalls),
)


def missing_to_run(
    plan: ChunkPlan, num_tokens: int | None = None, *, num_processes: int = 1
) -> str:
    """The needs of a plan that `num_processes` do not meet, as words; empty where it runs.

    A pool that shards no sequence is data parallelism. `num_tokens`: those of the batch; a plan of
    more pads its sequences, which nothing carries out. Nor does a pipeline gather its weights with
    every pass.
    """
    needed = len(plan.actions) * plan.sp_size
    parts = []
    if num_tokens is not None and sum(plan.seq_lens) != num_tokens:
        parts.append("padding")
    num_replicas = sum(
        any(isinstance(action, Forward) and action.stage == 0 for action in own)
        for own in plan.actions
    )
    if plan.regathers and len(plan.actions) > num_replicas:
        parts.append("a pipeline that gathers its weights with every pass (ZeRO-3)")
    if needed != num_processes:
        parts.append(f"{needed} processes that run it by furlong.Engine.run")
    return ", ".join(parts)

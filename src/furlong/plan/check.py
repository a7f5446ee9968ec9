"""The plan checker. A legal plan satisfies eleven rules, I1 to I11. Each has a sentence and a
function in this file, in this order.

The rules make a chunked backward exact. They require the order of ChunkFlow's Algorithm 2, but with
its second loop descending: dK,dV of a chunk are complete only after the backwards of all later
chunks. If a sequence branches, the "earlier chunks" of a piece are those on its path from the root.

Each function yields (reason, index of the action or chunk) for each violation of its rule. Only the
first violation is raised. So a function may assume that all earlier checks, also those in its
earlier lines, have passed. All functions take time linear in the plan.

The functions see the actions of all ranks as one list, rank after rank; `at` is always an index
into it. A cell is the work of one chunk at one stage. Its number is stage * num_chunks + chunk, so
that a neighbouring cell is one addition away.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import Protocol

from furlong.errors import PlanError
from furlong.plan.passes import Direction, layer_directions
from furlong.plan.plan import (
    COMPUTING,
    MESSAGES,
    ON_PARAMETERS,
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
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
)
from furlong.plan.text import format_action, format_chunk
from furlong.units import count_words

_NUM_AROUND = 4
_LEGAL = "_is_legal"
_ONCE = "every cell has one Forward and one Backward, on one rank"

Breaks = Iterator[tuple[str, int]]
"""Violations of a rule: (why, index of the action or chunk)."""


class Memory(Protocol):
    """The part of a cost model that the memory check needs."""

    @property
    def device_budget_bytes(self) -> int:
        """Device memory that each process may use."""

    def peak_bytes_of_actions(self, plan: ChunkPlan, rank: int) -> Sequence[int]:
        """Return the peak bytes in use on a device of the rank during each of its actions."""


def check(plan: ChunkPlan, memory: Memory | None = None) -> None:
    """Raise PlanError if the plan breaks a rule; the error text shows the action or chunk.

    Success is cached on the plan, which is immutable. `memory`: also check peak memory (I11).
    """
    if memory is None and _LEGAL in vars(plan):
        return
    for rule in _odd_fields(plan):
        raise PlanError(f"broken rule: {rule}")
    # fmt: off
    for rule, of_chunks in {
        "every token is in exactly one slice": _uncovered,  # I1
        "a chunk holds at most one piece with a prefix per place, and a sequence keeps its place":
            _misplaced,  # I2
        "a branch goes on from the end of an earlier piece on its path": _misgrown,
    }.items():
        for why, chunk in of_chunks(plan):
            raise _refusal(plan, rule, why, None, chunk)
    grid = Grid(plan)
    for rule, breaks in {
        _ONCE: _not_once,  # I3
        "a Backward has factors other than 1 only in a sampled plan, equal ones at all stages":
            _odd_factors,
        "forwards ascend, and every cell follows its neighbours": _out_of_order,  # I4
        "a plan of two phases has all Forwards in the first": _mixed_phases,
        "the K,V of earlier chunks are there when they are read": _missing_kv,  # I5
        "the dK,dV of a chunk are complete before its Backward": _lost_kv_gradients,  # I6
        "every Backward has one graph, and every Recompute an input to start from":
            _odd_graphs,  # I7
        "a Backward ends its cell, and no graph is left over": _after_the_end,  # I8
        "every message that is sent is received, in the same order": _unpaired_messages,  # I9
        "a Reduce follows the last Backward of its stage on its rank, once": _odd_reduces,
        "ranks that share stages issue their collectives, and passes that gather weights, in one "
        "order over all of these": _unequal_collectives,
        "parameters are unsharded while they are used": _used_while_sharded,
        "no rank waits for ever": _stalls,  # I10
    }.items():
        for why, at in breaks(grid):
            raise grid.refuse(rule, why, at)
    # fmt: on
    for why, at in _beyond_budget(grid, memory) if memory is not None else ():
        raise grid.refuse("memory stays within the budget", why, at)  # I11
    vars(plan)[_LEGAL] = True


class Grid:
    """Lookup tables over the actions of one plan, for the checks."""

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
        """The cell of each action; for an action on parameters, the first cell of its stage."""
        self.forward, self.backward = self._first(Forward), self._first(Backward)
        """Index of each cell's first Forward and first Backward, or -1."""
        self.parents: dict[int, Sequence[int]] = {
            seq_id: tree.parents if (tree := plan.trees.get(seq_id)) else range(-1, len(group) - 1)
            for seq_id, group in plan.groups.items()
        }
        """For each cut sequence, the piece that each piece continues, -1 for the first."""
        self.members: dict[int, set[int]] = defaultdict(set)
        """For each stage, the ranks that hold it. Messages may name another rank's stage."""
        for kind, action, rank in zip(self.kinds, self.actions, self.ranks, strict=True):
            if kind not in MESSAGES:
                self.members[action.stage].add(rank)

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

    def _first(self, wanted: type[Action]) -> list[int]:
        places = [-1] * (self.num_chunks * self.num_stages)
        for at, (kind, cell) in enumerate(zip(self.kinds, self.cells, strict=True)):
            if kind is wanted and places[cell] < 0:
                places[cell] = at
        return places

    def each(self, *kinds: type[Action]) -> Iterator[tuple[int, Action, int]]:
        """Yield (index, action, cell number) of each action whose type is among `kinds`."""
        for at, kind in enumerate(self.kinds):
            if kind in kinds:
                yield at, self.actions[at], self.cells[at]

    def columns(self) -> Iterator[tuple[Sequence[int], list[int]]]:
        """Yield (parents, cells) for each stage of each cut sequence. Both have one entry per piece
        of the sequence: `parents` the index of the piece that it continues (-1 for none), `cells`
        the number of its cell at this stage."""
        for seq_id, group in self.plan.groups.items():
            for row in range(0, len(self.forward), self.num_chunks):
                yield self.parents[seq_id], [row + chunk for chunk in group]

    def ways(self) -> list[Direction | None]:
        """Return, for each action, the direction in which its pass runs through the layers, if all
        ranks of the stage gather weights for the pass, else None."""
        if not self.plan.regathers or self.plan.replicated:
            return [None] * len(self.actions)
        ranks = range(len(self.plan.actions))
        return [way for rank in ranks for way in layer_directions(self.plan, rank)]

    def name(self, cell: int) -> str:
        """Return the name of a cell in an action's text: `chunk.stage`."""
        stage, chunk = divmod(cell, self.num_chunks)
        return f"{chunk}.{stage}"

    def refuse(self, rule: str, why: str, at: int) -> PlanError:
        """Return the error for a broken rule, with the reason and the actions around index `at`."""
        rank = self.ranks[at]
        return _refusal(self.plan, rule, why, rank, at - self.starts[rank])


def _refusal(plan: ChunkPlan, rule: str, why: str, rank: int | None, at: int) -> PlanError:
    """Return the error for a broken rule, with the reason `why` and the actions of `rank` around
    index `at` of its list; for rank None `at` is a chunk, and the chunks around it are shown."""
    own = plan.chunks if rank is None else plan.actions[rank]
    lines = ["chunks" if rank is None else f"rank {rank}"]
    first = max(0, at - _NUM_AROUND)
    for number, one in enumerate(own[first : at + _NUM_AROUND + 1], first):
        text = format_chunk(one, plan.sp_size) if isinstance(one, Chunk) else format_action(one)
        lines.append(f"{number:6d}  {text:.80}" + ("    <-- here" if number == at else ""))
    return PlanError("\n".join([f"broken rule: {rule}", why, *lines]))


def _odd_fields(plan: ChunkPlan) -> Iterator[str]:
    """Yield a text per violation in the plan's fields, apart from chunks and actions."""
    num_stages, frozen = len(plan.stages), plan.frozen_stages
    if min(plan.stages, default=0) < 1:
        shown = ", ".join(map(str, plan.stages)) or "none"
        yield f"a plan has stages of at least one layer\nlayers: {shown}"
    if plan.sp_size < 1:
        yield f"a pool has at least one process\nsp_size: {plan.sp_size}"
    if not 0 <= frozen < num_stages:
        given = f"{frozen} of {count_words(num_stages, 'stage')}"
        yield f"{_ONCE}\n{given} are frozen: the last one has the loss"
    if not plan.sampled and not plan.report_loss:
        yield "only a sampled plan leaves losses out (report_loss)"


def _uncovered(plan: ChunkPlan) -> Breaks:
    """Yield violations of I1: the slices of each sequence cover each token once, and no sequence is
    missing. A dummy chunk, which has no slices, is legal in two cases only: passes gather weights,
    so that its rank must run as many as other ranks; or it is the rank's only chunk, so that the
    rank can join the Reduce."""
    computed = ({a.chunk for a in own if isinstance(a, Forward)} for own in plan.actions)
    alone = {min(own) for own in computed if len(own) == 1 < len(plan.actions)}
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in plan.seq_lens]
    for index, chunk in enumerate(plan.chunks):
        meets = index in alone or (plan.regathers and not plan.replicated and len(plan.actions) > 1)
        if chunk.is_dummy and not meets:
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
                up_to = f"sequence {seq_id} is covered up to token {covered}"
                yield f"{up_to}, then from {start}", index
            covered = stop
        if covered != seq_len or not found:
            own = count_words(seq_len, "token")
            yield f"sequence {seq_id} has {own}, its slices cover {covered}", index


def _misplaced(plan: ChunkPlan) -> Breaks:
    """Yield violations of I2: in all its chunks a sequence stays on one `Place` (sequence-parallel
    group of the pool). In one chunk, at most one slice of each place continues earlier tokens.
    Several branches of the same piece count as one slice."""
    place_of: dict[int, Place] = {}
    for index, chunk in enumerate(plan.chunks):
        places = [piece.place for piece in chunk.slices]
        for place in dict.fromkeys(places):
            divides = place.size > 0 and plan.sp_size % place.size == 0
            if not divides or place.first not in range(0, plan.sp_size, place.size):
                has = "a size that divides it and begins at a multiple of it"
                yield f"{place} is none of a pool of {plan.sp_size}, where a place has {has}", index
        before = {(piece.seq_id, piece.goes_on_from) for piece in chunk.slices}
        if len({seq_id for seq_id, _ in before}) < len(before):
            why = "a sequence has two slices in the chunk, and they are no branches of one piece"
            yield why, index
        order = [(-place.size, place.first) for place in places]
        if order != sorted(order):
            yield "slices on larger places come first, then those of lower processes", index
        for one, two in pairwise(chunk.slices):
            if one.place == two.place and two.start > 0 and one.seq_id != two.seq_id:
                why = "only the first slice on a place, and branches beside it, may have a prefix"
                yield why, index
        for piece in chunk.slices:
            if place_of.setdefault(piece.seq_id, piece.place) != piece.place:
                yield f"sequence {piece.seq_id} has another place in an earlier chunk", index


def _misgrown(plan: ChunkPlan) -> Breaks:
    """Yield violations of I2 for sequences that branch. Pieces are laid out depth-first: all pieces
    that continue a piece follow before the next branch. A piece that shares its chunk with other
    branches is not continued by any piece. Sequences of sampled plans may not branch."""
    pieces: dict[int, list[tuple[Slice, int]]] = defaultdict(list)
    for index, chunk in enumerate(plan.chunks):
        for piece in chunk.slices:
            pieces[piece.seq_id].append((piece, index))
    for seq_id, own in pieces.items():
        branches = [index for piece, index in own if piece.parent is not None]
        if not branches:
            continue
        if plan.sampled:
            yield f"sequence {seq_id} branches, and the plan is sampled", branches[0]
        num_pieces = Counter(index for _, index in own)
        followed = {piece.goes_on_from for piece, _ in own}
        path = [0]
        for piece, index in sorted(own, key=lambda pair: pair[0].start):
            if piece.goes_on_from not in path or piece.parent == piece.start:
                yield f"no piece of the path ends at token {piece.parent}, or it is the last", index
            path = [*path[: path.index(piece.goes_on_from) + 1], piece.stop]
            if piece.stop in followed and num_pieces[index] > 1:
                yield f"a piece goes on from token {piece.stop}, in a chunk of branches", index


def _not_once(grid: Grid) -> Breaks:
    """Yield violations of I3: each cell has one Forward, except chunks that a sampled plan leaves
    out. A chunk has one Backward at each stage from `frozen_stages` on, or none at all. Without
    sampling, all chunks but dummies have Backwards, or none has."""
    plan, frozen, num_stages = grid.plan, grid.plan.frozen_stages, grid.num_stages
    firsts = {Forward: grid.forward, Backward: grid.backward}
    for at, action, cell in grid.each(*COMPUTING):
        if firsts.get(type(action), {cell: at})[cell] != at:
            yield f"cell {grid.name(cell)} has one already", at
        if isinstance(action, Backward) and action.stage < frozen:
            yield f"the first {frozen} stages are frozen", at
        forward = grid.forward[cell]
        if forward >= 0 and grid.ranks[forward] != grid.ranks[at]:
            yield f"the Forward of {grid.name(cell)} is on rank {grid.ranks[forward]}", at
    trained = Backward in grid.kinds and not plan.sampled
    for index, chunk in enumerate(plan.chunks):
        forwards, backwards = (
            sum(at >= 0 for at in places[index :: grid.num_chunks]) for places in firsts.values()
        )
        if not plan.report_loss and forwards == backwards == 0:
            continue
        why = ""
        if forwards != num_stages or backwards not in (0, num_stages - frozen):
            found = f"{count_words(forwards, 'Forward')} and {count_words(backwards, 'Backward')}"
            over = count_words(num_stages, "stage") + (f", {frozen} of them frozen" * (frozen > 0))
            why = f"chunk {index} has {found} over {over}"
        elif trained and not backwards and not chunk.is_dummy:
            why = f"chunk {index} has no Backward, others have, and the plan is not sampled"
        if why:
            raise _refusal(plan, _ONCE, why, None, index)


def _odd_factors(grid: Grid) -> Breaks:
    """Yield violations of I3 for gradient factors. Only a sampled plan scales gradients, by finite
    factors that are equal at all stages of a chunk; in any other plan each label counts once."""
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
    """Yield violations of I4, for F (Forward) and B (Backward) of chunk c at stage s: F(c,s) comes
    after F(c,s-1) and F of the chunk that c continues; B(c,s) comes after F(c,s) and B(c,s+1)."""
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
    for forward, backward in zip(grid.forward, grid.backward, strict=True):
        if 0 <= backward < forward:
            yield "a Backward needs its Forward", backward
    for parents, cells in grid.columns():
        for cell, parent in zip(cells, parents, strict=True):
            at, source = grid.forward[cell], cells[parent]
            if at < 0 or parent < 0:
                continue
            if grid.forward[source] < 0:
                yield f"cell {grid.name(source)} has no Forward", at
            if grid.ranks[grid.forward[source]] != grid.ranks[at]:
                yield f"cell {grid.name(source)} is on another rank", at
            if grid.forward[source] > at:
                yield f"cell {grid.name(source)} comes first", at


def _mixed_phases(grid: Grid) -> Breaks:
    """Yield violations of I4 in plans of two phases. The caller computes the loss from all outputs,
    so all Forwards of a rank come before its other computations, and none keeps its graph."""
    begun: set[int] = set()
    for at, action, cell in grid.each(*COMPUTING) if grid.plan.two_phases else ():
        if not isinstance(action, Forward):
            begun.add(grid.ranks[at])
        elif grid.ranks[at] in begun:
            yield f"the first phase was over before F{grid.name(cell)}", at
        elif action.keep == "all":
            yield "no graph lives from one phase to the other", at


def _missing_kv(grid: Grid) -> Breaks:
    """Yield violations of I5: K,V exist when they are read.

    K,V of most cells exist from their Forward to their Backward. Two kinds of cells drop them after
    the last Forward of the sequence: those with keep="input", and those with keep="attention" that
    have a RebuildKV. Their K,V exist again after the RebuildKV.
    """
    again = {cell for _, _, cell in grid.each(RebuildKV)}
    drops = {
        cell
        for _, action, cell in grid.each(Forward)
        if isinstance(action, Forward)
        and (action.keep == "input" or (action.keep == "attention" and cell in again))
    }
    gone = set(drops)
    ready: set[tuple[int, int, int]] = set()
    """(sequence, stage, piece) whose K,V exist, together with those of all pieces on its path."""
    for at, action, cell in grid.each(Recompute, Backward, RebuildKV):
        stage, chunk = divmod(cell, grid.num_chunks)
        for seq_id, piece in grid.plan.links[chunk]:
            parents, group = grid.parents[seq_id], grid.plan.groups[seq_id]
            cells = cell - chunk
            if at < grid.forward[cells + group[grid.plan.num_computed[seq_id] - 1]]:
                continue
            path, piece = [], parents[piece]
            while piece >= 0 and (seq_id, stage, piece) not in ready:
                path.append(piece)
                piece = parents[piece]
            for piece in reversed(path):
                if cells + group[piece] in gone:
                    name = grid.name(cells + group[piece])
                    yield f"{name} has dropped its K,V, and no RebuildKV({name}) came before", at
                ready.add((seq_id, stage, piece))
        if isinstance(action, RebuildKV):
            if cell not in drops or not grid.plan.continues[chunk]:
                yield "RebuildKV is for cells that drop their K,V and are read by later chunks", at
            if at < grid.forward[cell]:
                yield "a RebuildKV needs its Forward", at
            gone.discard(cell)


def _lost_kv_gradients(grid: Grid) -> Breaks:
    """Yield violations of I6: a Backward comes after the Backwards of all later chunks of its
    sequence, which send it dK,dV. No RebuildKV comes in between, as it would lose dK,dV."""
    never = len(grid.actions)
    first_sent = [never] * len(grid.backward)
    """Index of the first Backward that sends dK,dV to each cell."""
    for parents, cells in grid.columns():
        # first and last Backward among the pieces that see each piece
        first, last = [never] * len(cells), [-1] * len(cells)
        for piece in reversed(range(len(cells))):
            cell, parent, at = cells[piece], parents[piece], grid.backward[cells[piece]]
            if 0 <= at < last[piece]:
                later, chunk = grid.name(grid.cells[last[piece]]), cell % grid.num_chunks
                yield f"B{later} still adds to the dK,dV of chunk {chunk}", at
            first_sent[cell] = min(first_sent[cell], first[piece])
            if parent >= 0:
                first[parent] = min(first[parent], first[piece], at if at >= 0 else never)
                last[parent] = max(last[parent], last[piece], at)
    for at, _, cell in grid.each(RebuildKV):
        if first_sent[cell] < at and not 0 <= grid.backward[cell] < at:
            name = grid.name(grid.cells[first_sent[cell]])
            yield f"B{name} has sent dK,dV to {grid.name(cell)}, which this would lose", at


def _odd_graphs(grid: Grid) -> Breaks:
    """Yield violations of I7: each Backward consumes one autograd graph, which a Forward with
    keep="all" or a Recompute has made."""
    graphs: set[int] = set()
    for at, action, cell in grid.each(Forward, Recompute, Backward):
        if isinstance(action, Backward):
            if cell not in graphs:
                yield f"{grid.name(cell)} kept no graph and no Recompute made one", at
            graphs.remove(cell)
            continue
        assert isinstance(action, (Forward, Recompute))
        num_layers = grid.plan.stages[action.stage]
        if not 0 <= action.recompute_layers <= num_layers:
            yield f"the stage has {count_words(num_layers, 'layer')}", at
        if isinstance(action, Recompute):
            if at < grid.forward[cell]:
                yield "nothing is kept before the Forward", at
            if cell in graphs:
                yield f"the graph of {grid.name(cell)} is there already", at
            graphs.add(cell)
        elif action.keep == "all":
            graphs.add(cell)


def _after_the_end(grid: Grid) -> Breaks:
    """Yield violations of I8: after the Backward of a cell nothing computes in the cell or reads
    its K,V, and each graph has a Backward that consumes it."""
    never = len(grid.actions)
    ends = [at if at >= 0 else never for at in grid.backward]
    freed = [never] * len(ends)
    """Index of the first Backward among the cells whose K,V each cell reads."""
    for parents, cells in grid.columns():
        first: list[int] = []
        for cell, parent in zip(cells, parents, strict=True):
            first.append(min(first[parent], ends[cells[parent]]) if parent >= 0 else never)
            freed[cell] = min(freed[cell], first[-1])
    for at, action, cell in grid.each(*COMPUTING):
        if ends[cell] < at:
            yield f"B{grid.name(cell)} has run", at
        makes_graph = isinstance(action, Recompute)
        makes_graph |= isinstance(action, Forward) and action.keep == "all"
        if ends[cell] == never and makes_graph:
            yield f"no Backward consumes the graph of {grid.name(cell)}", at
        if freed[cell] < at:
            yield f"B{grid.name(grid.cells[freed[cell]])} has freed the K,V it reads", at


_Entries = list[tuple[int, object]]
"""(index of an action, the value that must match in another rank's list)."""


def _unpaired_messages(grid: Grid) -> Breaks:
    """Yield violations of I9 for messages: a rank sends only results that it has computed, to the
    rank that needs them, and both ranks list the messages between them in the same order."""
    sent: dict[tuple[int, int], _Entries] = defaultdict(list)
    received: dict[tuple[int, int], _Entries] = defaultdict(list)
    seen: set[tuple[str, int]] = set()
    for at, action, cell in grid.each(*MESSAGES):
        assert isinstance(action, MESSAGES)
        message, rank = (action.payload, cell), grid.ranks[at]
        if isinstance(action, Recv):
            received[action.peer, rank].append((at, message))
            continue
        is_forward = action.payload == "activation"
        made = (grid.forward if is_forward else grid.backward)[cell]
        if made < 0 or grid.ranks[made] != rank or made > at:
            yield f"rank {rank} has not computed it yet", at
        reader = cell + (grid.num_chunks if is_forward else -grid.num_chunks)
        if not 0 <= reader < len(grid.forward):
            yield "there is no stage to send it to", at
        if grid.ranks[grid.forward[reader]] != action.peer:
            yield f"cell {grid.name(reader)} is on rank {grid.ranks[grid.forward[reader]]}", at
        if message in seen:
            yield "it has been sent already", at
        seen.add(message)
        sent[rank, action.peer].append((at, message))
    for sender, receiver in sorted(sent.keys() | received.keys()):
        lacks = {sender: f"rank {sender} does not send it"}
        lacks[receiver] = f"rank {receiver} does not receive it"
        lists = sent[sender, receiver], received[sender, receiver]
        yield from _unequal(grid, (sender, receiver), lists, lacks.__getitem__)


def _odd_reduces(grid: Grid) -> Breaks:
    """Yield violations of I9: gradients of a stage are reduced once, after the last Backward of the
    stage on the rank, and either on all ranks or on none."""
    last = {(action.stage, grid.ranks[at]): at for at, action, _ in grid.each(Backward)}
    reduces: dict[tuple[int, int], int] = {}
    for at, action, _ in grid.each(Reduce):
        key = action.stage, grid.ranks[at]
        if key in reduces:
            yield f"stage {action.stage} is reduced already", at
        if key not in last:
            yield f"no Backward of stage {action.stage} came before", at
        if at < last[key]:
            yield "a Backward comes after it", at
        reduces[key] = at
    if not reduces:
        return
    for key in sorted(last.keys() - reduces.keys()):
        yield f"no Reduce of stage {key[0]} follows", last[key]
    for rank in range(len(grid.plan.actions)):
        stages = [stage for stage, ranks in grid.members.items() if rank in ranks]
        is_frozen = bool(stages) and max(stages) < grid.plan.frozen_stages
        if not is_frozen and not any((stage, rank) in reduces for stage in stages):
            why = f"rank {rank} has none; without work it takes a token without a label"
            yield why, min(reduces.values())


def _unequal_collectives(grid: Grid) -> Breaks:
    """Yield violations of I9: ranks issue the collectives of all stages that they share in the same
    order. If each pass gathers its weights, passes are collectives, too: in FSDP2 a surplus pass
    hangs, and swapped passes silently compute with other layers' weights of equal sizes."""
    lists: dict[int, _Entries] = defaultdict(list)
    for at, (action, rank, way) in enumerate(
        zip(grid.actions, grid.ranks, grid.ways(), strict=True)
    ):
        if grid.plan.regathers and isinstance(action, Unshard):
            yield "no stage of this plan is unsharded for longer", at
        if way or isinstance(action, (Unshard, Reduce)):
            lists[rank].append((at, (way or type(action), action.stage)))
    shared: dict[tuple[int, int], set[int]] = defaultdict(set)
    """(first rank of a stage, another of its ranks) -> the stages that both hold."""
    for stage, members in grid.members.items():
        first, *others = sorted(members)
        for rank in others:
            shared[first, rank].add(stage)
    for pair, stages in sorted(shared.items()):
        both = [[e for e in lists[rank] if grid.actions[e[0]].stage in stages] for rank in pair]
        yield from _unequal(grid, pair, both, _lacks)


def _lacks(rank: int) -> str:
    return f"rank {rank} issues fewer; a dummy chunk would fill up passes that gather weights"


def _used_while_sharded(grid: Grid) -> Breaks:
    """Yield violations of I9 for stages that a rank unshards: Unshard comes before all computation
    in the stage, and Reshard after the Reduce, since gradients have full size until then."""
    sharded = {(action.stage, grid.ranks[at]) for at, action, _ in grid.each(Unshard, Reshard)}
    for at, action, _ in grid.each(*ON_PARAMETERS, *COMPUTING) if sharded else ():
        key = action.stage, grid.ranks[at]
        if isinstance(action, Unshard):
            if key not in sharded:
                yield f"stage {action.stage} is unsharded here", at
            sharded.discard(key)
        elif key in sharded:
            yield f"stage {action.stage} is not unsharded here", at
        elif isinstance(action, Reshard):
            sharded.add(key)


def _unequal(
    grid: Grid, ranks: tuple[int, int], lists: Sequence[_Entries], lacks: Callable[[int], str]
) -> Breaks:
    """Yield a violation for each position at which the two ranks' `lists` differ. `lacks` returns
    the reason to give for the rank with the shorter list."""
    ours, theirs = lists
    for (one, value), (other, different) in zip(ours, theirs, strict=False):
        if value != different:
            yield f"here rank {ranks[0]} has '{format_action(grid.actions[one])}'", other
    if len(ours) != len(theirs):
        shorter, longer = (ranks[0], theirs) if len(ours) < len(theirs) else (ranks[1], ours)
        yield lacks(shorter), longer[min(len(ours), len(theirs))][0]


def _stalls(grid: Grid) -> Breaks:
    """Yield violations of I10: no rank waits for ever.

    All ranks are run in turns, each until it must wait, until none advances. A Send never waits. A
    Recv waits for its message. A collective waits for all ranks of its stage; so does a pass, if
    passes gather weights. The check assumes I9: both ends have messages and collectives in the same
    order.
    """
    posted: Counter[object] = Counter()
    """Messages sent per channel, and ranks that have entered each collective."""
    ways = grid.ways()

    def walk(rank: int) -> Iterator[int]:
        """Run the actions of a rank; yield the index of an action for as long as it must wait."""
        passed: Counter[object] = Counter()
        for at in range(grid.starts[rank], grid.starts[rank + 1]):
            action = grid.actions[at]
            if isinstance(action, Send):
                posted[rank, action.peer] += 1
                continue
            key: tuple[object, int]
            if isinstance(action, Recv):
                key, num_posts = (action.peer, rank), 1
            elif ways[at] or isinstance(action, (Unshard, Reduce)):
                key = "pass" if ways[at] else type(action), action.stage
                num_posts = len(grid.members[action.stage])
                posted[key] += 1
            else:
                continue
            passed[key] += num_posts
            while posted[key] < passed[key]:
                yield at

    walks = [walk(rank) for rank in range(len(grid.plan.actions))]
    waits: list[int | None] = []
    before: list[int | None] | None = None
    while waits != before:
        before, waits = waits, [next(one, None) for one in walks]
    stuck = [(rank, at) for rank, at in enumerate(waits) if at is not None]
    if stuck:
        texts = (f"rank {rank} at '{format_action(grid.actions[at])}'" for rank, at in stuck)
        yield "these wait for ever: " + ", ".join(texts), stuck[0][1]


def _beyond_budget(grid: Grid, memory: Memory) -> Breaks:
    """Yield violations of I11: the bytes in use at each action stay within the rank's budget."""
    budget = memory.device_budget_bytes
    for rank, start in enumerate(grid.starts[:-1]):
        for at, used in enumerate(memory.peak_bytes_of_actions(grid.plan, rank), start):
            if used > budget:
                yield f"rank {rank} needs {used} bytes here and has {budget}", at

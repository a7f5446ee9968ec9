"""The invariants between ranks: messages, collectives, and that nobody waits for ever."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import repeat

from furlong.plan.grid import Breaks, Grid, Rule
from furlong.plan.passes import directions
from furlong.plan.text import format_action
from furlong.plan.values import (
    COMPUTING,
    MESSAGES,
    ON_PARAMETERS,
    Backward,
    Recv,
    Reduce,
    Reshard,
    Send,
    Unshard,
)

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
    if grid.rank_of_forward(reader) != action.peer:
        yield f"cell {grid.name(reader)} is on rank {grid.rank_of_forward(reader)}", at


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
    for first, ours, _, theirs in _pairs(grid, lists):
        yield from _differences(grid, first, ours, theirs)
        if len(ours) != len(theirs):
            extra, _ = max(ours, theirs, key=len)[min(len(ours), len(theirs))]
            yield "the other ranks of the stage issue fewer", extra


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
    for first, ours, rank, theirs in _pairs(grid, walks):
        yield from _differences(grid, first, ours, theirs)
        if len(ours) != len(theirs):
            shorter, longer = (first, theirs) if len(ours) < len(theirs) else (rank, ours)
            why = f"rank {shorter} has no pass to meet it; a dummy chunk would fill its list up"
            yield why, longer[min(len(ours), len(theirs))][0]


def _pairs(
    grid: Grid, lists: dict[int, dict[int, _Entries]]
) -> Iterator[tuple[int, _Entries, int, _Entries]]:
    """The first rank of each stage with its list, and each other one with its own."""
    members = _members(grid)
    for stage, by_rank in lists.items():
        first, *others = sorted(members[stage])
        for rank in others:
            yield first, by_rank[first], rank, by_rank[rank]


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


RANK_RULES: tuple[Rule, ...] = (
    ("every message that is sent is received, in the same order", _unpaired_messages),
    ("a Reduce follows the last Backward of its stage on its rank, once", _odd_reduces),
    ("the ranks of a stage issue its collectives in the same order", _unequal_collectives),
    ("parameters are unsharded while they are used", _used_while_sharded),
    ("ranks that gather weights with every pass run the same passes of a stage", _out_of_step),
    ("no rank waits for ever", _stalls),
)

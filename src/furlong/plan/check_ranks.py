"""The invariants between ranks: messages, collectives, and that nobody waits for ever."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import repeat

from furlong.plan.grid import Grid
from furlong.plan.passes import directions
from furlong.plan.text import format_action
from furlong.plan.values import (
    Backward,
    Forward,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Reshard,
    Send,
    Unshard,
)

_Key = tuple[object, object]
_COMPUTES = (Forward, Recompute, Backward, RebuildKV)


def messages_pair_up(grid: Grid) -> None:
    """I10, messages. Each carries what its sender has made to the rank that needs it, and both ends
    of a pair of ranks list the same messages in the same order."""
    rule = "every message that is sent is received, in the same order"
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    received: dict[tuple[int, int], list[int]] = defaultdict(list)
    seen: set[tuple[str, int]] = set()
    for at, action in enumerate(grid.actions):
        if isinstance(action, Send):
            _sends_what_it_made(grid, rule, at, action)
            message = action.payload, grid.cells[at]
            if message in seen:
                raise grid.refuse(rule, "it has been sent already", at)
            seen.add(message)
            sent[grid.ranks[at], action.peer].append(at)
        elif isinstance(action, Recv):
            received[action.peer, grid.ranks[at]].append(at)
    for sender, receiver in sorted(sent.keys() | received.keys()):
        pair = sender, receiver
        for out, into in zip(sent[pair], received[pair], strict=False):
            first, second = grid.actions[out], grid.actions[into]
            assert isinstance(first, Send) and isinstance(second, Recv)
            if (first.payload, grid.cells[out]) != (second.payload, grid.cells[into]):
                why = f"here rank {sender} has '{format_action(first)}'"
                raise grid.refuse(rule, why, into)
        extra = len(sent[pair]) - len(received[pair])
        if extra > 0:
            why = f"rank {receiver} does not receive it"
            raise grid.refuse(rule, why, sent[pair][len(received[pair])])
        if extra < 0:
            raise grid.refuse(rule, f"rank {sender} does not send it", received[pair][extra])


def _sends_what_it_made(grid: Grid, rule: str, at: int, action: Send) -> None:
    cell = grid.cells[at]
    forward = action.payload == "activation"
    made = (grid.forward if forward else grid.backward)[cell]
    if made < 0 or grid.ranks[made] != grid.ranks[at] or made > at:
        raise grid.refuse(rule, f"rank {grid.ranks[at]} has not computed it yet", at)
    reader = cell + (grid.num_chunks if forward else -grid.num_chunks)
    if not 0 <= reader < len(grid.forward):
        raise grid.refuse(rule, "there is no stage to send it to", at)
    if grid.ranks[grid.forward[reader]] != action.peer:
        why = f"cell {grid.name(reader)} is on rank {grid.ranks[grid.forward[reader]]}"
        raise grid.refuse(rule, why, at)


def parameters_are_managed(grid: Grid) -> None:
    """I10, collectives. The ranks of a stage issue the same ones in the same order; a stage that is
    unsharded somewhere computes only while it is; a Reduce follows the last Backward."""
    _reduces_are_last(grid)
    rule = "the ranks of a stage issue its collectives in the same order"
    lists: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    members = _members(grid)
    for at, action in enumerate(grid.actions):
        if isinstance(action, (Unshard, Reshard, Reduce)):
            lists[action.stage][grid.ranks[at]].append(at)
    for stage, by_rank in lists.items():
        ranks = sorted(members[stage])
        for rank in ranks[1:]:
            ours, theirs = by_rank[ranks[0]], by_rank[rank]
            for one, other in zip(ours, theirs, strict=False):
                if grid.kinds[one] is not grid.kinds[other]:
                    why = f"here rank {ranks[0]} has '{format_action(grid.actions[one])}'"
                    raise grid.refuse(rule, why, other)
            if len(ours) != len(theirs):
                extra = max(ours, theirs, key=len)[min(len(ours), len(theirs))]
                raise grid.refuse(rule, "the other ranks of the stage issue fewer", extra)
    _computes_while_unsharded(grid, lists)


def passes_are_in_step(grid: Grid) -> None:
    """I10, where each pass gathers the weights of its stage. The ranks of a stage go through it in
    the same order of forwards and backwards. In FSDP2 a pass too many hangs, and one the other way
    round computes with the weights of other layers, silently."""
    if not grid.plan.regathers:
        return
    rule = "ranks that gather weights with every pass run the same passes of a stage"
    walks: dict[int, dict[int, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
    for rank, start in enumerate(grid.starts[:-1]):
        for at, direction in enumerate(directions(grid.plan, rank), start):
            if grid.kinds[at] in (Unshard, Reshard):
                raise grid.refuse(rule, "no stage of this plan is unsharded for longer", at)
            if direction is not None:
                walks[grid.actions[at].stage][rank].append((at, direction))
    members = _members(grid)
    for stage, by_rank in walks.items():
        first, *others = sorted(members[stage])
        for rank in others:
            _refuse_first_difference(grid, rule, by_rank, first, rank)


def _refuse_first_difference(
    grid: Grid, rule: str, walks: dict[int, list[tuple[int, str]]], first: int, rank: int
) -> None:
    ours, theirs = walks[first], walks[rank]
    for (one, direction), (other, opposite) in zip(ours, theirs, strict=False):
        if direction != opposite:
            why = f"here rank {first} has '{format_action(grid.actions[one])}'"
            raise grid.refuse(rule, why, other)
    if len(ours) != len(theirs):
        shorter, longer = (first, rank) if len(ours) < len(theirs) else (rank, first)
        why = f"rank {shorter} has no pass to meet it; a dummy chunk would fill its list up"
        raise grid.refuse(rule, why, walks[longer][len(walks[shorter])][0])


def _computes_while_unsharded(grid: Grid, lists: dict[int, dict[int, list[int]]]) -> None:
    rule = "parameters are unsharded while they are used"
    state = {
        (stage, rank): False
        for stage, by_rank in lists.items()
        for rank, places in by_rank.items()
        if any(grid.kinds[at] is not Reduce for at in places)
    }
    if not state:
        return
    for at, action in enumerate(grid.actions):
        key = action.stage, grid.ranks[at]
        if key not in state:
            continue
        if isinstance(action, Unshard) == state[key] and isinstance(action, (Unshard, Reshard)):
            already = "" if state[key] else "not "
            raise grid.refuse(rule, f"stage {action.stage} is {already}unsharded here", at)
        if isinstance(action, _COMPUTES) and not state[key]:
            raise grid.refuse(rule, f"stage {action.stage} is not unsharded here", at)
        if isinstance(action, (Unshard, Reshard)):
            state[key] = isinstance(action, Unshard)


def _reduces_are_last(grid: Grid) -> None:
    rule = "a Reduce follows the last Backward of its stage on its rank, once"
    last: dict[tuple[int, int], int] = {}
    reduces: dict[tuple[int, int], int] = {}
    for at, action in enumerate(grid.actions):
        key = action.stage, grid.ranks[at]
        if isinstance(action, Backward):
            last[key] = at
            if key in reduces:
                raise grid.refuse(rule, "a Backward comes after it", reduces[key])
        elif isinstance(action, Reduce):
            if key in reduces:
                raise grid.refuse(rule, f"stage {action.stage} is reduced already", at)
            if key not in last:
                raise grid.refuse(rule, f"no Backward of stage {action.stage} came before", at)
            reduces[key] = at
    if not reduces:
        return
    for key in sorted(last.keys() - reduces.keys()):
        raise grid.refuse(rule, f"no Reduce of stage {key[0]} follows", last[key])
    reducing = {rank for _, rank in reduces}
    trained = [ranks for stage, ranks in _members(grid).items() if stage >= grid.plan.frozen_stages]
    has_frozen_alone = set().union(*_members(grid).values()).difference(*trained)
    for rank in range(len(grid.plan.actions)):
        if rank not in reducing and rank not in has_frozen_alone:
            why = f"rank {rank} has none; without work it takes a token without a label"
            raise grid.refuse(rule, why, min(reduces.values()))


def ranks_never_stall(grid: Grid) -> None:
    """I11. Run all ranks at once: a send never waits, a receive waits for its message, a collective
    for all ranks of its stage, and so does a pass that gathers weights. Relies on equal orders at
    both ends."""
    num_ranks = len(grid.plan.actions)
    if num_ranks == 1:
        return
    posted: dict[_Key, int] = defaultdict(int)
    sleeping: dict[_Key, list[int]] = defaultdict(list)
    awake = deque(range(num_ranks))
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
        texts = [f"rank {rank} at '{format_action(grid.actions[at])}'" for rank, at in stuck]
        why = "these wait for ever: " + ", ".join(texts)
        raise grid.refuse("no rank waits for ever", why, stuck[0][1])


def _members(grid: Grid) -> dict[int, set[int]]:
    """For each stage, the ranks that hold it; a message names the stage of another rank too."""
    members: dict[int, set[int]] = defaultdict(set)
    for action, rank in zip(grid.actions, grid.ranks, strict=True):
        if not isinstance(action, (Send, Recv)):
            members[action.stage].add(rank)
    return members

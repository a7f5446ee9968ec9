"""The clock: the times at which all actions of a plan would run, as a Timeline.

Every rank goes through its list in order. Cells take the compute lane, one after the other. What a
cell copies to or from its target runs beside it, and the rank goes on when both are done. A message
takes the link from its sender to its receiver, a channel of its own that keeps their order: a Send
never waits, a Recv waits for its message (isend and a queue per direction). A collective of the
ranks of a stage starts when the last of them has come to it:

    collective      starts when                     its ranks go on
    Unshard         all have come, links are free   when what is beside the layers is there
    Reduce          all have come                   at once, but on a CPU when it is over
    pass in step    all have come                   when the slowest of them is through
    gathering pass  all have come                   when they are through themselves
    reducing pass   all have come                   when they are through themselves

An Unshard gathers what is in front of the layers, for which its ranks wait, then one layer after
the other in equal times, and the head, beside what they compute. The first pass through the stage
runs each layer when that is there: it is recorded as if it waited for all of them in front of its
first layer. So does the first pass with a loss for the head.

A Reduce begins layer by layer beside the stage's last Backward, as far as the links are free then;
its action stands for what is left of it.

A pass is in step where the plan gathers weights with every pass: then the n-th passes of all ranks
of a stage, whatever their chunks, are one collective; a rank's record ends with its own work, so
that the rest shows as waiting. Else the first pass of a stage gathers its weights, unless an
Unshard does, and its last Backward adds gradients up: whoever comes to them first waits, and so
does the gradient that it has for the stage before.

Where two ranks wait only for each other, the order in which they are looked at does not matter: all
times follow from the plan. Left out: the links of different pairs of ranks share no bandwidth.

Behind the clock: the figures of a timeline, simulated or measured (seconds of each rank, the bubble
ratio).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any, Literal, Protocol

from furlong.errors import PlanError
from furlong.plan.passes import NOTHING, computed_late, directions, passes
from furlong.plan.plan import (
    COMPUTING,
    Action,
    Backward,
    ChunkPlan,
    Forward,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Send,
    Unshard,
)
from furlong.timeline import Lane, Record, Timeline

Collective = tuple[type[Action] | Literal["pass", "gathering", "reducing"], int]
"""The kind of a collective, and its stage."""


def _joins(plan: ChunkPlan, rank: int, shared: Collection[int]) -> list[Collective | None]:
    actions = plan.actions[rank]
    joins: list[Collective | None] = [None] * len(actions)
    gathered = {action.stage for action in actions if isinstance(action, Unshard)}
    reducing: dict[int, int] = {}
    in_step = plan.regathers and not plan.replicated
    ways = directions(plan, rank) if in_step or shared else repeat(None)
    for index, (action, way) in enumerate(zip(actions, ways, strict=False)):
        if isinstance(action, (Unshard, Reduce)):
            joins[index] = type(action), action.stage
        elif way and in_step:
            joins[index] = "pass", action.stage
        elif way and action.stage in shared:
            if action.stage not in gathered:
                gathered.add(action.stage)
                joins[index] = "gathering", action.stage
            elif isinstance(action, Backward):
                reducing[action.stage] = index
    for stage, index in reducing.items():
        joins[index] = "reducing", stage
    return joins


_Pair = tuple[int, int]
_Joined = tuple[Collective, int]
"""A collective, and which of its occurrences, for every rank numbers them from 0."""
_LINKED = (Send, Recv, Unshard, Reduce)


class ActionCosts(Protocol):
    """The seconds that the clock asks of a cost model."""

    def compute_s(self, action: Action, rank: int) -> float:
        """Seconds of any action but Send and Recv. An Unshard takes the link for so long, a Reduce
        goes on for so long behind its stage's last Backward; the slowest of their ranks counts."""

    def transfer_s(self, action: Send, rank: int) -> float:
        """Seconds that the message takes from `rank` to its peer."""

    def link_s(self, action: Reduce, rank: int) -> float:
        """Seconds for which a Reduce takes the link, those beside the last Backward among them."""

    def blocking_s(self, action: Unshard | Reduce, rank: int) -> float:
        """Seconds of a collective, from its start, in which its ranks compute nothing."""

    def head_s(self, action: Unshard, rank: int) -> float:
        """Seconds of an Unshard, at its end, that are of the head."""


class CopyCosts(Protocol):
    """The seconds of copies that the clock asks of a cost model."""

    def copy_s(self, action: Action, rank: int) -> float:
        """Seconds of copies of offloaded tensors that run beside the action."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds since the start of the step at which every action starts and stops, per rank."""

    start_s: list[list[float]]
    stop_s: list[list[float]]
    copy_stop_s: dict[tuple[int, int], float]
    """When the copies of (rank, place in its list) stop, where there are any."""

    @property
    def duration_s(self) -> float:
        """The makespan."""
        last = max((max(times, default=0.0) for times in self.stop_s), default=0.0)
        return max(last, max(self.copy_stop_s.values(), default=0.0))

    def busiest_s(self, plan: ChunkPlan) -> float:
        """Seconds in which the rank that does so longest computes, or copies beside that."""
        return max(
            sum(
                max(stops[i], self.copy_stop_s.get((rank, i), 0.0)) - starts[i]
                for i, action in enumerate(plan.actions[rank])
                if isinstance(action, COMPUTING)
            )
            for rank, (starts, stops) in enumerate(zip(self.start_s, self.stop_s, strict=True))
        )


def simulate(
    plan: ChunkPlan,
    costs: ActionCosts,
    *,
    copies: CopyCosts | None = None,
    device_bytes: Sequence[Sequence[int]] | None = None,
    offloaded_bytes: Sequence[Sequence[int]] | None = None,
) -> Timeline:
    """The plan's timeline on a cost model; the plan has passed `plan.check`.

    A Recv is recorded from where its rank waits for a message that is on its way: waiting for one
    that has not been sent yet is no communication, and stays empty. `device_bytes`,
    `offloaded_bytes`: [rank][action], the peak while the action runs; None: all are 0. Raises
    PlanError where ranks wait for each other.
    """
    times = time_actions(plan, costs, copies=copies)
    records: list[Record] = []
    for rank, actions in enumerate(plan.actions):
        device, offloaded = (
            own[rank] if own else [0] * len(actions) for own in (device_bytes, offloaded_bytes)
        )
        starts, stops = times.start_s[rank], times.stop_s[rank]
        for index, action in enumerate(actions):
            lane: Lane = "link" if isinstance(action, _LINKED) else "compute"
            start, in_use = starts[index], (device[index], offloaded[index])
            records.append(Record(rank, lane, action, start, stops[index], *in_use))
            if copied := times.copy_stop_s.get((rank, index)):
                records.append(Record(rank, "copy", action, start, copied, *in_use))
    # sorting is stable: a rank's records that end together stay in the order of its list
    records.sort(key=lambda record: record.stop_s)
    return Timeline(tuple(records))


def time_actions(plan: ChunkPlan, costs: ActionCosts, *, copies: CopyCosts | None = None) -> Times:
    """The times of `simulate` without records: for those who want the makespan of many plans."""
    return Clock(plan, costs, copies).run()


class Clock:
    """One run of the clock. Ranks are generators that yield the one event that they wait for: a
    message of a channel, or an occurrence of a collective."""

    def __init__(
        self, plan: ChunkPlan, costs: ActionCosts, copies: CopyCosts | None = None
    ) -> None:
        self._plan, self._costs, self._copies = plan, costs, copies
        ranks = range(len(plan.actions))
        shared = {stage for stage, holders in enumerate(plan.holders) if len(holders) > 1}
        self._start_s = [[-1.0] * len(actions) for actions in plan.actions]
        self._stop_s = [[-1.0] * len(actions) for actions in plan.actions]
        self._copy_stop_s: dict[tuple[int, int], float] = {}
        self._spans: dict[_Pair, list[tuple[float, float]]] = defaultdict(list)
        """Per channel, when each message starts and stops, as far as that is known."""
        self._received: Counter[_Pair] = Counter()
        """Per channel, the messages that the receiver has taken."""
        self._joins = [_joins(plan, rank, shared) for rank in ranks]
        """Per rank and action, the collective that it is part of."""
        self._num_ranks = Counter(key for joins in self._joins for key in set(joins) if key)
        self._joined: Counter[tuple[Collective, int]] = Counter()
        """Per collective and rank, the occurrences that it has come to."""
        self._come: dict[_Joined, list[tuple[int, int, float]]] = defaultdict(list)
        """The (rank, place in its list, time) that have come to an occurrence."""
        self._settled_s: dict[_Joined, float] = {}
        """When an occurrence stops, once all have come."""
        self._link_free_s = [0.0 for _ in ranks]

    def run(self) -> Times:
        walks = [self._walk(rank) for rank in range(len(self._plan.actions))]
        waits: list[object] = []
        before: list[object] | None = None
        while waits != before:  # each rank as far as it gets, until none gets on
            before, waits = waits, [next(walk, None) for walk in walks]
        if stuck := [rank for rank, stops in enumerate(self._stop_s) if -1.0 in stops]:
            raise PlanError(f"the ranks {stuck} wait for each other: the plan was not checked")
        return Times(self._start_s, self._stop_s, self._copy_stop_s)

    def _walk(self, rank: int) -> Iterator[object]:
        """Go through a rank's list; yield what it waits for, where that has no time yet."""
        actions, starts, stops = self._plan.actions[rank], self._start_s[rank], self._stop_s[rank]
        now = 0.0  # when the rank is free for its next action
        index = 0
        unsharding: dict[int, tuple[int, _Joined]] = {}  # by stages that no pass has used yet
        heads: dict[int, tuple[int, _Joined]] = {}  # by stages whose head none has used
        while index < len(actions):
            action = actions[index]
            if isinstance(action, (Send, Recv)):
                count, now = yield from self._exchange(rank, index, now)
                index += count
                continue
            if isinstance(action, (Unshard, Reduce)):
                # runs on the link, beside the cells that follow
                joined = self._join(rank, index, now)
                if isinstance(action, Unshard):
                    unsharding[action.stage] = heads[action.stage] = index, joined
                if blocking_s := self._costs.blocking_s(action, rank):
                    yield from self._end(joined)
                    now = max(now, starts[index] + blocking_s)
                index += 1
                continue
            what = passes(self._plan, rank)[index]
            if action.stage in unsharding and what is not NOTHING:
                at, joined = unsharding.pop(action.stage)
                yield from self._end(joined)
                now = max(now, self._entered_s(rank, at, action))
            if what.loss and action.stage in heads:
                at, joined = heads.pop(action.stage)
                yield from self._end(joined)
                before_s = 0.0  # a backward begins with the head, a forward ends with it
                if isinstance(action, Forward):
                    before_s = self._costs.compute_s(action, rank)
                now = max(now, self._stop_s[rank][at] - before_s)
            if self._joins[rank][index] is None:
                starts[index] = now
                stops[index] = free = now + self._costs.compute_s(action, rank)
            else:
                # the last rank to come writes this one's start and stop
                free = yield from self._end(self._join(rank, index, now))
                if not self._plan.regathers or self._plan.replicated:
                    free = stops[index]
            if self._copies and (copy_s := self._copies.copy_s(action, rank)):
                self._copy_stop_s[rank, index] = starts[index] + copy_s
                free = max(free, starts[index] + copy_s)
            now = free
            index += 1

    def _exchange(
        self, rank: int, index: int, now: float
    ) -> Generator[object, None, tuple[int, float]]:
        """The message at `index`: how many actions that was, and when the rank is free again."""
        action = self._plan.actions[rank][index]
        if isinstance(action, Send):
            channel = rank, action.peer
            spans = self._spans[channel]
            start = max(now, spans[-1][1]) if spans else now
            stop = start + self._costs.transfer_s(action, rank)
            spans.append((start, stop))
        else:
            assert isinstance(action, Recv)
            channel = action.peer, rank
            spans, message = self._spans[channel], self._received[channel]
            self._received[channel] += 1
            while len(spans) <= message:
                yield channel, message
            start, stop = spans[message]
            stop = max(stop, now)
            start = min(max(start, now), stop)
            now = stop
        self._start_s[rank][index], self._stop_s[rank][index] = start, stop
        return 1, now

    def _join(self, rank: int, index: int, now: float) -> _Joined:
        """Come to a collective; the last of its ranks settles its times, and wakes the others."""
        key = self._joins[rank][index]
        assert key is not None
        joined = key, self._joined[key, rank]
        self._joined[key, rank] += 1
        come = self._come[joined]
        come.append((rank, index, now))
        if len(come) == self._num_ranks[key]:
            self._give_times(joined, self._come.pop(joined))
        return joined

    def _give_times(self, joined: _Joined, come: list[tuple[int, int, float]]) -> None:
        on_link = isinstance(joined[0][0], type)
        start = max(max(at, self._link_free_s[rank]) if on_link else at for rank, _, at in come)
        own_s = [self._costs.compute_s(self._plan.actions[rank][i], rank) for rank, i, _ in come]
        stop = start + max(own_s)
        if joined[0][0] is Reduce:
            # beside the last Backward it had the link when that was free
            came = max(at for _, _, at in come)
            stop = came + max(own_s)
            for rank, i, _ in come:
                reduce = self._plan.actions[rank][i]
                assert isinstance(reduce, Reduce)
                stop = max(stop, self._link_free_s[rank] + self._costs.link_s(reduce, rank))
        for (rank, i, _), seconds in zip(come, own_s, strict=True):
            # a link is in use to the end; a rank that is through with its pass only waits
            self._start_s[rank][i] = start
            self._stop_s[rank][i] = stop if on_link else start + seconds
            if on_link:
                self._link_free_s[rank] = stop
        self._settled_s[joined] = stop

    def _entered_s(self, rank: int, at: int, action: Action) -> float:
        """When the first pass through a stage begins, whose layers number `at` of the list gathers,
        if it is not to wait for any of them once it runs."""
        unshard, num_layers = self._plan.actions[rank][at], self._plan.stages[action.stage]
        assert isinstance(unshard, Unshard)
        stop_s = self._stop_s[rank][at] - self._costs.head_s(unshard, rank)
        layers_s = stop_s - self._start_s[rank][at] - self._costs.blocking_s(unshard, rank)
        before_last = 1 - 1 / num_layers
        return stop_s - before_last * min(layers_s, self._costs.compute_s(action, rank))

    def _end(self, joined: _Joined) -> Generator[object, None, float]:
        """Wait until a collective has its times; when it stops."""
        while joined not in self._settled_s:
            yield joined
        return self._settled_s[joined]


@dataclass(frozen=True, slots=True)
class RankSeconds:
    """The seconds of one rank; they add up to the step's. Where several fields claim a moment, it
    belongs to the first of them."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    """Backwards, with the recomputation inside them of layers that were checkpointed one by one."""
    recompute_s: float = 0.0
    """The second forward of cells, and what makes their K,V again."""
    copies_s: float = 0.0
    """Idle time while offloaded K,V are copied."""
    messages_s: float = 0.0
    """Idle time while a message for this rank is on its way."""
    collectives_s: float = 0.0
    """Idle time while parameters are gathered or gradients are reduced."""
    waiting_s: float = 0.0
    """Idle time for all other reasons: the bubble proper."""


_FIELDS: dict[type[Action], str] = {
    Backward: "backward_s",
    RebuildKV: "recompute_s",
    Recv: "messages_s",
    Unshard: "collectives_s",
    Reduce: "collectives_s",
}


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of one step over all its ranks."""

    duration_s: float
    ranks: tuple[RankSeconds, ...]
    peak_device_bytes: tuple[int, ...]
    """Bytes on the device of each rank at its peak."""
    peak_offloaded_bytes: tuple[int, ...]
    """Bytes that each rank has offloaded, at their peak."""

    @property
    def bubble_ratio(self) -> float:
        """Share of all ranks' time that is neither a first forward nor a backward, 0..1.

        Recomputation is no useful work (ChunkFlow, Eq. 1; its Figure 6 fits no other reading).
        """
        return self._share_without("forward_s", "backward_s")

    @property
    def idle_ratio(self) -> float:
        """Share of all ranks' time in which nothing is computed, 0..1."""
        return self._share_without("forward_s", "backward_s", "recompute_s")

    def _share_without(self, *busy: str) -> float:
        total_s = self.duration_s * len(self.ranks)
        busy_s = sum(getattr(rank, name) for rank in self.ranks for name in busy)
        return max(0.0, 1 - busy_s / total_s) if total_s else 0.0  # sums of parts may round up

    def shares(self) -> dict[str, float]:
        """Share of all ranks' time by the fields of RankSeconds without their unit; sums to 1."""
        total_s = self.duration_s * len(self.ranks)
        names = RankSeconds.__dataclass_fields__
        sums = {name: sum(getattr(rank, name) for rank in self.ranks) for name in names}
        return {
            name.removesuffix("_s"): (value / total_s if total_s else 0.0)
            for name, value in sums.items()
        }

    def to_json(self) -> dict[str, Any]:
        """All figures as plain values."""
        ratios = {"bubble_ratio": self.bubble_ratio, "idle_ratio": self.idle_ratio}
        return asdict(self) | ratios | {"shares": self.shares()}


def measure(timeline: Timeline, plan: ChunkPlan | None = None) -> StepFigures:
    """The figures of a timeline; its ranks are those that left a record and all below them.

    `plan`: the plan that ran. Where one of its Forwards computes nothing, the Recompute is the
    cell's first forward, and counts as such; None: every Recompute counts as a second one.
    """
    num_ranks = max((record.rank for record in timeline.records), default=-1) + 1
    by_rank: list[list[Record]] = [[] for _ in range(num_ranks)]
    for record in timeline.records:
        by_rank[record.rank].append(record)
    late = computed_late(plan) if plan is not None else frozenset()
    return StepFigures(
        duration_s=timeline.duration_s,
        ranks=tuple(_measure_rank(records, timeline.duration_s, late) for records in by_rank),
        peak_device_bytes=tuple(max((r.device_bytes for r in rs), default=0) for rs in by_rank),
        peak_offloaded_bytes=tuple(
            max((r.offloaded_bytes for r in rs), default=0) for rs in by_rank
        ),
    )


def _measure_rank(
    records: Sequence[Record], duration_s: float, late: frozenset[tuple[int, int]]
) -> RankSeconds:
    """Every moment belongs to the first field of RankSeconds for which a record stands then."""
    changes: list[tuple[float, int, str]] = []
    for record in records:
        if name := _field(record, late):
            changes += [(record.start_s, 1, name), (record.stop_s, -1, name)]
    seconds = dict.fromkeys(RankSeconds.__dataclass_fields__, 0.0)
    running = dict.fromkeys(seconds, 0) | {"waiting_s": 1}
    now = 0.0
    for time, change, name in [*sorted(changes), (duration_s, 0, "waiting_s")]:
        seconds[next(field for field in running if running[field])] += time - now
        running[name] += change
        now = time
    return RankSeconds(**seconds)


def _field(record: Record, late: frozenset[tuple[int, int]]) -> str | None:
    """The field of RankSeconds that a record's time belongs to."""
    action = record.action
    if record.lane == "copy":
        return "copies_s"
    if isinstance(action, (Forward, Recompute)):
        is_first = isinstance(action, Forward) != ((action.chunk, action.stage) in late)
        return "forward_s" if is_first else "recompute_s"
    return _FIELDS.get(type(action))

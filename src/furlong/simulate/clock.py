"""The clock: simulated start and stop times of all actions of a plan, as a Timeline.

Each rank runs its list of actions in order, one computation at a time. Copies of offloaded tensors
run concurrently with the computation that uses them, and the rank continues when both are done. A
message uses the link from its sender to its receiver, which delivers in order: a Send never waits,
a Recv waits for its message (isend and a queue per direction).

A pass (forward or backward of one chunk at one stage) can be a collective of the ranks of its
stage, in one of three ways:

- Lockstep pass: if the plan gathers weights with each pass, the n-th passes of all ranks, whatever
  their chunks, are one collective.
- Gathering pass: in other plans, the first pass of a stage gathers the weights, unless an Unshard
  does.
- Reducing pass: in other plans, the last Backward of a stage reduces gradients.

A rank that arrives early waits, and so does the gradient that it sends to the stage before. The
record of a pass ends with the rank's computation, so the rest of the collective shows as waiting. A
collective starts when the last of its ranks has entered it:

    collective      starts when                      its ranks continue
    Unshard         all entered, links are free      when weights outside the layers are gathered
    Reduce          all entered                      at once; on a CPU when it has ended
    lockstep pass   all entered                      when the slowest of them has finished
    gathering pass  all entered                      when their own work has finished
    reducing pass   all entered                      when their own work has finished

An Unshard first gathers the weights before the layers (the embedding), and its ranks wait for them.
Then it gathers the layers, each in the same time, and the head, while the ranks compute. The first
pass through the stage may reach a layer before its weights. The clock adds up these waits, and
records them before the first layer. In the same way the first pass with a loss waits for the head.

A Reduce runs layer by layer during the stage's last Backward, as far as the links are free. The
Reduce action stands for the part that remains after the Backward.

The times do not depend on the order in which the simulation visits the ranks. Simplification: links
of different pairs of ranks share no bandwidth.

The second half of the file computes figures of a simulated or measured timeline (seconds of each
rank, bubble ratio).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any, Literal, Protocol

from furlong.errors import PlanError
from furlong.plan.passes import NOTHING, computed_late, layer_directions, passes
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

StageCollective = tuple[type[Action] | Literal["pass", "gathering", "reducing"], int]
"""(kind of a collective, its stage)."""


def _joins(plan: ChunkPlan, rank: int, shared: Collection[int]) -> list[StageCollective | None]:
    actions = plan.actions[rank]
    joins: list[StageCollective | None] = [None] * len(actions)
    gathered = {action.stage for action in actions if isinstance(action, Unshard)}
    reducing: dict[int, int] = {}
    # replicas that hold all weights gather within their pools, and need not run in lockstep
    in_step = plan.regathers and not plan.replicated
    ways = layer_directions(plan, rank) if in_step or shared else repeat(None)
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
                # each later Backward replaces the one before: only the last reduces
                reducing[action.stage] = index
    for stage, index in reducing.items():
        joins[index] = "reducing", stage
    return joins


_Pair = tuple[int, int]
_Joined = tuple[StageCollective, int]
"""(collective, number of its occurrence, which each rank counts from 0)."""
_LINKED = (Send, Recv, Unshard, Reduce)


class ActionCosts(Protocol):
    """Seconds of actions, as a cost model computes them."""

    def compute_s(self, action: Action, rank: int) -> float:
        """Return the seconds that an action takes on `rank`. For an Unshard these are its seconds
        on the link, for a Reduce only those after the stage's last Backward. It is not called for
        Send and Recv. For a collective, the clock takes the seconds of the slowest rank."""

    def transfer_s(self, action: Send, rank: int) -> float:
        """Return the seconds that a message takes from `rank` to its peer."""

    def link_s(self, action: Reduce, rank: int) -> float:
        """Return the seconds of a Reduce on the link, including those during the last Backward."""

    def blocking_s(self, action: Unshard | Reduce, rank: int) -> float:
        """Return for how many seconds, from the start of a collective, its ranks must wait before
        they can compute again; 0 if they continue at once."""

    def head_s(self, action: Unshard, rank: int) -> float:
        """Return the seconds at the end of an Unshard in which it gathers the head."""


class CopyCosts(Protocol):
    """The part of a cost model that the clock needs for copies of offloaded tensors."""

    def copy_s(self, action: Action, rank: int) -> float:
        """Return the seconds of copies of offloaded tensors that run during the action."""


@dataclass(frozen=True, slots=True)
class Times:
    """Start and stop of each action, in seconds since the start of the step: [rank][index]."""

    start_s: list[list[float]]
    stop_s: list[list[float]]
    copy_stop_s: dict[tuple[int, int], float]
    """(rank, index of the action) -> stop of its copies, if it has any."""

    @property
    def duration_s(self) -> float:
        """The makespan: seconds until the last action and the last copy have ended."""
        last = max((max(times, default=0.0) for times in self.stop_s), default=0.0)
        return max(last, max(self.copy_stop_s.values(), default=0.0))

    def busiest_s(self, plan: ChunkPlan) -> float:
        """Return the seconds for which the busiest rank is busy: the sum over its computing
        actions, each until both the computation and its copies have ended."""
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
    """Return the timeline of a plan that has passed `plan.check`.

    The record of a Recv starts when its rank waits and the Send has started; waiting before the
    Send starts shows as idle time.

    Args:
        plan: The plan.
        costs: Seconds of its actions.
        copies: Seconds of its copies of offloaded tensors; None: no copies.
        device_bytes: [rank][action], peak bytes during the action; None: all are 0.
        offloaded_bytes: The same for offloaded tensors.

    Raises:
        PlanError: Ranks wait for each other.
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
    # the sort is stable: a rank's records with one stop keep the order of its list
    records.sort(key=lambda record: record.stop_s)
    return Timeline(tuple(records))


def time_actions(plan: ChunkPlan, costs: ActionCosts, *, copies: CopyCosts | None = None) -> Times:
    """Return the start and stop times of a plan's actions, as in `simulate`, but without records.
    This is faster if only the makespans of many plans are needed."""
    return Clock(plan, costs, copies).run()


class Clock:
    """One simulation of a plan. Each rank is a generator that yields while it waits for a message,
    or for the other ranks of a collective."""

    def __init__(
        self, plan: ChunkPlan, costs: ActionCosts, copies: CopyCosts | None = None
    ) -> None:
        self._plan, self._costs, self._copies = plan, costs, copies
        ranks = range(len(plan.actions))
        shared = {stage for stage, holders in enumerate(plan.holders) if len(holders) > 1}
        # -1: not simulated yet, by which `run` knows the ranks that are stuck
        self._start_s = [[-1.0] * len(actions) for actions in plan.actions]
        self._stop_s = [[-1.0] * len(actions) for actions in plan.actions]
        self._copy_stop_s: dict[tuple[int, int], float] = {}
        self._spans: dict[_Pair, list[tuple[float, float]]] = defaultdict(list)
        """(sender, receiver) -> (start, stop) of each message sent so far."""
        self._received: Counter[_Pair] = Counter()
        """(sender, receiver) -> number of messages received so far."""
        self._joins = [_joins(plan, rank, shared) for rank in ranks]
        """[rank][action] -> the collective that the action is part of."""
        self._num_ranks = Counter(key for joins in self._joins for key in set(joins) if key)
        self._joined: Counter[tuple[StageCollective, int]] = Counter()
        """(collective, rank) -> number of occurrences that the rank has entered."""
        self._come: dict[_Joined, list[tuple[int, int, float]]] = defaultdict(list)
        """(rank, index of the action, time) of each rank that has entered an occurrence."""
        self._settled_s: dict[_Joined, float] = {}
        """Stop of each occurrence that all its ranks have entered."""
        self._link_free_s = [0.0 for _ in ranks]

    def run(self) -> Times:
        walks = [self._walk(rank) for rank in range(len(self._plan.actions))]
        waits: list[object] = []
        before: list[object] | None = None
        while waits != before:  # run each rank until it waits; end when no rank advances
            before, waits = waits, [next(walk, None) for walk in walks]
        if stuck := [rank for rank, stops in enumerate(self._stop_s) if -1.0 in stops]:
            raise PlanError(f"the ranks {stuck} wait for each other: the plan was not checked")
        return Times(self._start_s, self._stop_s, self._copy_stop_s)

    def _walk(self, rank: int) -> Iterator[object]:
        """Simulate one rank; yield the message or collective that it is waiting for."""
        actions, starts, stops = self._plan.actions[rank], self._start_s[rank], self._stop_s[rank]
        now = 0.0  # when the rank is free for its next action
        index = 0
        # stage -> its Unshard, until the first pass, or the first with a loss, has waited for it
        unsharding: dict[int, tuple[int, _Joined]] = {}
        heads: dict[int, tuple[int, _Joined]] = {}
        while index < len(actions):
            action = actions[index]
            if isinstance(action, (Send, Recv)):
                count, now = yield from self._exchange(rank, index, now)
                index += count
                continue
            if isinstance(action, (Unshard, Reduce)):
                # runs on the link, concurrently with the next actions
                joined = self._join(rank, index, now)
                if isinstance(action, Unshard):
                    unsharding[action.stage] = heads[action.stage] = index, joined
                if blocking_s := self._costs.blocking_s(action, rank):
                    yield from self._end(joined)
                    now = max(now, starts[index] + blocking_s)
                index += 1
                continue
            what = passes(self._plan, rank)[index]
            # a pass that computes nothing needs no weights, and leaves the waiting to the next pass
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
                # the last rank to enter writes this rank's start and stop
                free = yield from self._end(self._join(rank, index, now))
                # `_end` is the slowest rank's stop, for which a rank waits in lockstep only
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
        """Simulate the Send or Recv at `index`, which the rank reaches at time `now`. Return (1,
        time at which the rank is free again): one action is done."""
        action = self._plan.actions[rank][index]
        if isinstance(action, Send):
            channel = rank, action.peer
            spans = self._spans[channel]
            # links deliver in order: a message starts after the one before it, its rank goes on
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
            # a message that arrived before its Recv takes no time
            stop = max(stop, now)
            start = min(max(start, now), stop)
            now = stop
        self._start_s[rank][index], self._stop_s[rank][index] = start, stop
        return 1, now

    def _join(self, rank: int, index: int, now: float) -> _Joined:
        """Enter the collective of the action at `index`, at time `now`, and return it. The last
        rank to enter computes the times of all ranks, which wakes the others."""
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
        # collectives on links have a type as their kind, collective passes a name
        on_link = isinstance(joined[0][0], type)
        start = max(max(at, self._link_free_s[rank]) if on_link else at for rank, _, at in come)
        own_s = [self._costs.compute_s(self._plan.actions[rank][i], rank) for rank, i, _ in come]
        stop = start + max(own_s)
        if joined[0][0] is Reduce:
            # it began during the last Backward if the link was free then
            came = max(at for _, _, at in come)
            stop = came + max(own_s)
            for rank, i, _ in come:
                reduce = self._plan.actions[rank][i]
                assert isinstance(reduce, Reduce)
                stop = max(stop, self._link_free_s[rank] + self._costs.link_s(reduce, rank))
        for (rank, i, _), seconds in zip(come, own_s, strict=True):
            # a link is busy to the end; a rank that has finished its pass only waits
            self._start_s[rank][i] = start
            self._stop_s[rank][i] = stop if on_link else start + seconds
            if on_link:
                self._link_free_s[rank] = stop
        self._settled_s[joined] = stop

    def _entered_s(self, rank: int, at: int, action: Action) -> float:
        """Return the earliest time at which `action`, the first pass through a stage, can start so
        that no layer has to wait for its weights. The Unshard at index `at` gathers these
        weights."""
        unshard, num_layers = self._plan.actions[rank][at], self._plan.stages[action.stage]
        assert isinstance(unshard, Unshard)
        stop_s = self._stop_s[rank][at] - self._costs.head_s(unshard, rank)
        layers_s = stop_s - self._start_s[rank][at] - self._costs.blocking_s(unshard, rank)
        # slow gathering ends when the last layer begins; if it is fast, only the first layer waits
        before_last = 1 - 1 / num_layers
        return stop_s - before_last * min(layers_s, self._costs.compute_s(action, rank))

    def _end(self, joined: _Joined) -> Generator[object, None, float]:
        """Wait until the times of a collective are known; return the time at which it ends."""
        while joined not in self._settled_s:
            yield joined
        return self._settled_s[joined]


@dataclass(frozen=True, slots=True)
class RankSeconds:
    """The seconds that one rank spends in each activity, which add up to the seconds of the step.
    If activities are concurrent, their time counts only for the one whose field comes first."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    """Backwards, including recomputation of checkpointed layers inside them."""
    recompute_s: float = 0.0
    """Second forwards of cells (Recompute), and RebuildKV."""
    copies_s: float = 0.0
    """Idle time while offloaded K,V are copied."""
    messages_s: float = 0.0
    """Idle time while a message to this rank is in transit."""
    collectives_s: float = 0.0
    """Idle time while parameters are gathered or gradients are reduced."""
    waiting_s: float = 0.0
    """All other idle time: the bubble in the narrow sense."""


_FIELDS: dict[type[Action], str] = {
    Backward: "backward_s",
    RebuildKV: "recompute_s",
    Recv: "messages_s",
    Unshard: "collectives_s",
    Reduce: "collectives_s",
}


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Figures of one simulated or measured step over all its ranks."""

    duration_s: float
    ranks: tuple[RankSeconds, ...]
    peak_device_bytes: tuple[int, ...]
    """Peak device bytes of each rank."""
    peak_offloaded_bytes: tuple[int, ...]
    """Peak offloaded bytes of each rank."""

    @property
    def bubble_ratio(self) -> float:
        """Share of all ranks' time that is neither a first forward nor a backward, 0..1.

        Recomputation counts as bubble, as in ChunkFlow's Eq. 1. (No other definition fits its
        Figure 6.)
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
        """Return the share of each activity in all ranks' time, keyed by the fields of RankSeconds
        without `_s`; the shares add up to 1."""
        total_s = self.duration_s * len(self.ranks)
        names = RankSeconds.__dataclass_fields__
        sums = {name: sum(getattr(rank, name) for rank in self.ranks) for name in names}
        return {
            name.removesuffix("_s"): (value / total_s if total_s else 0.0)
            for name, value in sums.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        ratios = {"bubble_ratio": self.bubble_ratio, "idle_ratio": self.idle_ratio}
        return asdict(self) | ratios | {"shares": self.shares()}


def measure(timeline: Timeline, plan: ChunkPlan | None = None) -> SimulatedStep:
    """Return the figures of a timeline, for ranks 0 to the highest one with a record.

    `plan`: the plan that ran. Where a Forward in it computes nothing, the Recompute of the same
    cell counts as the first forward. With plan None every Recompute counts as recomputation.
    """
    num_ranks = max((record.rank for record in timeline.records), default=-1) + 1
    by_rank: list[list[Record]] = [[] for _ in range(num_ranks)]
    for record in timeline.records:
        by_rank[record.rank].append(record)
    late = computed_late(plan) if plan is not None else frozenset()
    return SimulatedStep(
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
    """Return a rank's seconds by activity. Where records overlap, time counts for the field that
    comes first in RankSeconds. `late`: cells whose Forward computes nothing."""
    changes: list[tuple[float, int, str]] = []
    for record in records:
        if name := _field(record, late):
            changes += [(record.start_s, 1, name), (record.stop_s, -1, name)]
    seconds = dict.fromkeys(RankSeconds.__dataclass_fields__, 0.0)
    # waiting always runs, as the last field: it counts the time that no other field takes
    running = dict.fromkeys(seconds, 0) | {"waiting_s": 1}
    now = 0.0
    for time, change, name in [*sorted(changes), (duration_s, 0, "waiting_s")]:
        seconds[next(field for field in running if running[field])] += time - now
        running[name] += change
        now = time
    return RankSeconds(**seconds)


def _field(record: Record, late: frozenset[tuple[int, int]]) -> str | None:
    """Return the field of RankSeconds that a record counts for; None if it counts for none."""
    action = record.action
    if record.lane == "copy":
        return "copies_s"
    if isinstance(action, (Forward, Recompute)):
        # a late cell's Recompute takes the role of its Forward, which computes nothing
        is_first = isinstance(action, Forward) != ((action.chunk, action.stage) in late)
        return "forward_s" if is_first else "recompute_s"
    return _FIELDS.get(type(action))

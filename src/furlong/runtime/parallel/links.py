"""Links between the stages of a pipeline: one process group per pair of neighbours and direction.

A message carries no tag (NCCL has none): each direction is first in, first out, and both ends know
its messages from the plan. One receive is posted ahead, and a send begins right after its compute.
On a GPU a posted receive is a kernel that spins, and starts NCCL's clock: it is posted behind all
but the last pass before the action that needs it.
With one queue for both directions, or one per process, sends that face each other wait for ever.

A send buffer is held, untouched, until its message has gone: gloo copies nothing, so the receiver
would get what is written into it later, and a send that is forgotten never arrives.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from furlong.errors import PlanError
from furlong.plan.messages import Message, all_rows, messages
from furlong.plan.plan import Action, Chunk, ChunkPlan, Computing, Recv, Send
from furlong.plan.text import format_action
from furlong.runtime.parallel.waiter import Waiter
from furlong.runtime.parallel.wires import GroupWire, Wire, Work, guarded

_ONE_WAY_SENDS = 2
"""Most sends under way on a link whose other direction is idle. Nothing else keeps a stage that
waits for no gradient from running through the whole batch, and from holding all its outputs."""
_POLL_S = 1e-4
_MAX_CTAS = 2
"""Multiprocessors of a GPU that a waiting message may occupy, on each of its links."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """The form of every message of a step: (num_rows, width) of one dtype, on one device."""

    width: int
    dtype: torch.dtype
    device: torch.device
    num_rows: Callable[[Chunk], int] = all_rows
    """Rows of a chunk that this process holds."""

    def empty(self, message: Message) -> Tensor:
        return torch.empty((message.num_rows, self.width), dtype=self.dtype, device=self.device)

    def require(self, message: Message, x: Tensor, link: str) -> None:
        """Raise PlanError for a tensor of another form: backends read its bytes as they expect."""
        expected = (message.num_rows, self.width), self.dtype, self.device.type
        if (tuple(x.shape), x.dtype, x.device.type) != expected:
            raise PlanError(
                f"{link} was given {tuple(x.shape)} of {x.dtype} on {x.device.type} for {message}, "
                f"where both ends expect {expected[0]} of {expected[1]} on {expected[2]}"
            )


class Outgoing:
    """The sending end of a link."""

    def __init__(self, wire: Wire, name: str, waiter: Waiter | None = None) -> None:
        """`waiter`: where a send is only known to have gone once it was waited for (gloo); None:
        `is_completed` tells (NCCL)."""
        self._wire, self._name, self._waiter = wire, name, waiter
        self._todo: deque[Message] = deque()
        self._held: deque[tuple[str, Future[None] | Work, Tensor | None]] = deque()
        self._most: int | None = None

    @property
    def num_held(self) -> int:
        """Send buffers held now."""
        return sum(not _has_gone(work) for _, work, _ in self._held)

    def begin(self, expected: Iterable[Message], parcel: Parcel, *, one_way: bool) -> None:
        """Expect the messages of a step; `one_way`: the step has none in the other direction."""
        assert not self._todo, f"{self._name} has not sent {self._todo[0]} of the step before"
        self._todo.extend(expected)
        self._parcel, self._most = parcel, _ONE_WAY_SENDS if one_way else None

    def send(self, action: Send, x: Tensor) -> None:
        """Begin to send; x (num_rows, D) must not change before its message has gone."""
        message, text = _next_of(self._todo, action, self._name), format_action(action)
        x = x.contiguous()
        self._parcel.require(message, x, self._name)
        self.drain(None if self._most is None else self._most - 1)
        work = guarded(self._name, text, lambda: self._wire.isend(x))
        self._todo.popleft()
        if self._waiter is None:
            self._held.append((text, work, x))
        else:
            self._held.append((text, self._waiter.hold(work, x), None))

    def skip(self, action: Send) -> None:
        """Send zeros in the place of a message, if it has not gone."""
        if self._todo and self._todo[0].is_of(action):
            self.send(action, self._parcel.empty(self._todo[0]).zero_())

    def drain(self, most: int | None = 0) -> None:
        """Wait until at most so many sends are under way (None: forget those that have gone)."""
        while self._held:
            text, work, _ = self._held[0]
            if not _has_gone(work) and (most is None or self.num_held <= most):
                return
            guarded(self._name, text, partial(_finish, work))
            self._held.popleft()


class Incoming:
    """The receiving end of a link."""

    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self._name = wire, name
        self._todo: deque[Message] = deque()
        self._posted: tuple[Work, Tensor] | None = None
        self._posts_ahead = True

    def begin(
        self, expected: Iterable[Message], parcel: Parcel, *, posts_ahead: bool = True
    ) -> None:
        """Expect the messages of a step; `post` then posts the receive of the first.
        `posts_ahead`: whether each receive posts the next one."""
        assert not self._todo, f"{self._name} has not received {self._todo[0]} of the step before"
        self._todo.extend(expected)
        self._parcel, self._posts_ahead = parcel, posts_ahead

    def recv(self, action: Recv) -> Tensor:
        """The next message (num_rows, D)."""
        _next_of(self._todo, action, self._name)
        self.post()  # where the one before found no memory for it
        assert self._posted is not None
        work, x = self._posted
        guarded(self._name, format_action(action), work.wait)
        self._todo.popleft()
        self._posted = None
        if self._posts_ahead:
            self.post()
        return x

    def skip(self, action: Recv) -> None:
        """Take a message that nobody reads, if it has not come."""
        if self._todo and self._todo[0].is_of(action):
            self.recv(action)

    def post(self) -> None:
        """Post the receive of the next message, unless that is done or there is none."""
        if self._todo and self._posted is None:
            x = self._parcel.empty(self._todo[0])
            what = f"the receive of {self._todo[0]}"
            self._posted = guarded(self._name, what, lambda: self._wire.irecv(x)), x


class Links:
    """One process's links: by the step from its rank to a neighbour's, both directions."""

    def __init__(
        self, ways: Mapping[int, tuple[Outgoing, Incoming]], *, posts_ahead: bool = True
    ) -> None:
        """`ways`: of the keys -1 (the stage before) and 1 (the stage behind) those that there are.
        `posts_ahead`: whether one receive of each way is always posted; else at the last pass
        before it is needed."""
        self._ways, self._posts_ahead = ways, posts_ahead
        self._rank = 0
        self._posts: Mapping[int, list[int]] = {}
        """By action, the peers whose receives are posted before it."""
        self.most_held = 0
        """Most send buffers held at a time, since the start or since it was set."""

    def begin(self, plan: ChunkPlan, rank: int, parcel: Parcel) -> None:
        """Expect the messages of a step in which this process obeys the list of `rank`.

        Raises PlanError for messages to or from a rank that is no neighbour.
        """
        _refuse_strangers(plan, rank, {rank + step for step in self._ways})
        self._rank = rank
        self._posts = {} if self._posts_ahead else late_posts(plan.actions[rank])
        for step, (out, into) in self._ways.items():
            theirs = messages(plan, rank + step, rank, parcel.num_rows)
            ours = messages(plan, rank, rank + step, parcel.num_rows)
            out.begin(ours, parcel, one_way=not theirs)
            into.begin(theirs, parcel, posts_ahead=self._posts_ahead)
        for _, into in self._ways.values() if self._posts_ahead else ():
            into.post()

    def before(self, index: int) -> None:
        """Action number `index` of the step is about to begin."""
        for peer in self._posts.get(index, ()):
            self._ways[peer - self._rank][1].post()

    def send(self, action: Send, x: Tensor) -> None:
        """Begin to send x (num_rows, D), which must not change before `finish`."""
        self._ways[action.peer - self._rank][0].send(action, x)
        self.most_held = max(self.most_held, sum(out.num_held for out, _ in self._ways.values()))

    def recv(self, action: Recv) -> Tensor:
        """The hidden states, or their gradient, (num_rows, D) that an action names."""
        return self._ways[action.peer - self._rank][1].recv(action)

    def skip(self, action: Send | Recv) -> None:
        """Let the message of an action pass without what it carries, if it has not passed."""
        out, into = self._ways[action.peer - self._rank]
        if isinstance(action, Send):
            out.skip(action)
        else:
            into.skip(action)

    def finish(self) -> None:
        """Wait until every message of the step has gone."""
        for out, _ in self._ways.values():
            out.drain()


def late_posts(actions: Sequence[Action]) -> dict[int, list[int]]:
    """By action, the peers whose receives are posted before it: at the last pass before the action
    that needs it. Others are posted when they are needed."""
    found: dict[int, list[int]] = {}
    last: int | None = None
    for index, action in enumerate(actions):
        if isinstance(action, Recv) and last is not None:
            found.setdefault(last, []).append(action.peer)
        elif isinstance(action, Computing):
            last = index
    return found


def open_links(
    pipelines: Sequence[Sequence[int]], device: torch.device, timeout: timedelta | None = None
) -> Links:
    """The links of this process, each used once.

    `pipelines`: the processes of each pipeline by stage, as numbers in the world; each process is
    in one. `timeout`: by default that of the world. Collective over the world: every process makes
    all groups, in one order, and sends one element through each of its own. NCCL connects two
    processes at the first message and blocks them until then: receives posted ahead would wait for
    each other in a circle.
    """
    me = dist.get_rank()
    options: dict[str, Any] = {}
    timeout = timeout or world_timeout(device)
    if device.type == "cuda":
        narrow = dist.ProcessGroupNCCL.Options()
        narrow.config.max_ctas = _MAX_CTAS
        if timeout is not None:
            narrow._timeout = timeout
        options = {"backend": "nccl", "pg_options": narrow}
    ways: dict[int, dict[str, tuple[GroupWire, str]]] = {}
    for here, there in directions(len(pipelines[0])):
        for own in pipelines:
            sender, receiver = own[here], own[there]
            name = f"the link from process {sender} to {receiver} (stages {here}, {there})"
            group = dist.new_group([sender, receiver], timeout, group_desc=name, **options)
            if me not in (sender, receiver):
                continue
            step = there - here if me == sender else here - there
            end = "out" if me == sender else "in"
            wire = GroupWire(receiver if me == sender else sender, group)
            ways.setdefault(step, {})[end] = wire, name
            warm_up(wire, name, device, sends=me == sender)
    polls = device.type != "cpu"
    waiters = {step: None if polls else Waiter(f"furlong-link-{step}") for step in ways}
    both = {
        step: (Outgoing(*ends["out"], waiters[step]), Incoming(*ends["in"]))
        for step, ends in ways.items()
    }
    return Links(both, posts_ahead=not polls)


def world_timeout(device: torch.device) -> timedelta | None:
    """The timeout of the run's process group, where it is known; `new_group` would take the
    backend's own."""
    world = dist.group.WORLD
    options = getattr(world and world._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def directions(num_stages: int) -> Iterator[tuple[int, int]]:
    """The stages at both ends of every link of a pipeline, sender first, in the order in which
    links are made."""
    for stage in range(num_stages - 1):
        yield stage, stage + 1
        yield stage + 1, stage


def warm_up(wire: Wire, name: str, device: torch.device, *, sends: bool) -> None:
    """Send or receive the first message of a link, of one element."""
    x = torch.zeros(1, device=device)
    guarded(name, "its first message", (wire.isend(x) if sends else wire.irecv(x)).wait)


def _refuse_strangers(plan: ChunkPlan, rank: int, neighbours: set[int]) -> None:
    for action in plan.actions[rank]:
        if isinstance(action, (Send, Recv)) and action.peer not in neighbours:
            shown = " and ".join(map(str, sorted(neighbours))) or "nobody"
            raise PlanError(f"rank {rank} has '{format_action(action)}': its links lead to {shown}")


def _next_of(todo: deque[Message], action: Send | Recv, name: str) -> Message:
    if not todo or not todo[0].is_of(action):
        expected = todo[0] if todo else "no message any more"
        raise PlanError(f"{name} expects {expected} at '{format_action(action)}'")
    return todo[0]


def _has_gone(work: Future[None] | Work) -> bool:
    return work.done() if isinstance(work, Future) else work.is_completed()


def _finish(work: Future[None] | Work) -> None:
    """Wait for a send on the host; `wait` of NCCL would only keep a stream waiting."""
    if isinstance(work, Future):
        work.result()
        return
    while not work.is_completed():
        time.sleep(_POLL_S)

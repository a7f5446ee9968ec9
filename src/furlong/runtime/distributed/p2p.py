"""Links between the stages of a pipeline: one process group per pair of neighbours and direction.

A message carries no tag (NCCL has none): each direction is first in, first out, and both ends know
its messages from the plan. A send begins right after its compute. A receive is posted when it is
needed, that of an activation at the last pass before, if its message does not depend on that pass:
on a GPU it is a kernel that spins, and starts NCCL's clock. A pass may have to wait for the device,
as where CUDA loads a kernel at its first call, and then waits for all that was posted before it.
With one queue for both directions, or one per process, sends that face each other wait for ever.

A send buffer is held, untouched, until its message has gone: gloo copies nothing, so the receiver
would get what is written into it later, and a send that is forgotten never arrives. A send of gloo
is only known to be over once it was waited for: a thread waits for them, one after the other. Its
end waits for none: a process that fails must not stay until its neighbours have taken what it has
sent, for they wait for what it will never send.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from furlong.errors import PlanError
from furlong.kv.pools import Event, ThreadLane
from furlong.plan.plan import Action, Chunk, ChunkPlan, Computing, Payload, Recv, Send
from furlong.plan.text import format_action
from furlong.runtime.distributed.mesh import time_limit

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class End:
    """This process's end of the link of one direction."""

    begin: Callable[[Tensor], Work]
    """Begins to send a tensor, or to receive into it: in the order in which the other end does."""
    name: str
    limit: Callable[[], timedelta | None] = lambda: None
    """The time that a message may take by now, of a backend whose `wait` does not know it: gloo's
    takes what its group began with. That of NCCL given any would keep the host."""

    def wait(self, work: Work) -> None:
        """Wait until a message has passed, or on a GPU let the current stream wait."""
        limit = self.limit()
        _ = work.wait() if limit is None else work.wait(limit)

    def guarded(self, text: str, act: Callable[[], _T]) -> _T:
        """Call `act`. Raises ConnectionError, which names link and action, for what a backend
        raises."""
        try:
            return act()
        except RuntimeError as error:
            raise ConnectionError(f"{self.name} broke at '{text}': {error}") from error

    def warm_up(self, device: torch.device) -> None:
        """Send or receive the first message, of one element."""
        first = self.begin(torch.zeros(1, device=device))
        self.guarded("its first message", lambda: self.wait(first))


_ONE_WAY_SENDS = 2
"""Most sends under way on a link whose other direction is idle. Nothing else keeps a stage that
waits for no gradient from running through the whole batch, and from holding all its outputs."""
_POLL_S = 1e-4
_MAX_CTAS = 2
"""Multiprocessors of a GPU that a waiting message may occupy, on each of its links."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """The form of every message of a step: hidden states, or their gradient, (num_rows, width) of
    one chunk, in one dtype and on one device."""

    width: int
    dtype: torch.dtype
    device: torch.device
    num_rows: Callable[[Chunk], int] = lambda chunk: max(1, chunk.num_tokens)
    """Rows of a chunk that this process holds; by default all, of a dummy chunk one."""


class Neighbour:
    """The links to one neighbour: what is sent and what is received, each first in, first out.

    Both ends take the messages from their own lists: a checked plan has them in the same order.
    """

    def __init__(self, out: End, into: End, waiter: ThreadLane | None = None) -> None:
        """`waiter`: of a backend whose `is_completed` does not tell (gloo)."""
        self._out, self._into, self._waiter = out, into, waiter
        self._to_send: deque[Action] = deque()
        self._to_recv: deque[Action] = deque()
        self._under_way: deque[tuple[str, Event | Work, Tensor | None]] = deque()
        self._posted: tuple[Work, Tensor] | None = None

    @property
    def num_held(self) -> int:
        """Send buffers held now."""
        return sum(not _has_gone(work) for _, work, _ in self._under_way)

    def begin(self, messages: Iterable[Action], chunks: Sequence[Chunk], parcel: Parcel) -> None:
        """Expect a step's messages; `post` then posts the receive of the first."""
        left = [*self._to_send, *self._to_recv]
        assert not left, f"'{format_action(left[0])}' of the step before is left"
        for action in messages:
            (self._to_send if isinstance(action, Send) else self._to_recv).append(action)
        self._chunks, self._parcel = chunks, parcel
        self._is_one_way = not self._to_recv

    def send(self, action: Send, x: Tensor) -> None:
        """Begin to send; x (num_rows, D) must not change before its message has gone."""
        text, x = format_action(action), x.contiguous()
        assert self._to_send and self._to_send[0] == action, f"'{text}' is not the next message"
        assert (x.shape, x.dtype) == self._form(action), f"'{text}' is of another form"
        self.drain(_ONE_WAY_SENDS - 1 if self._is_one_way else None)
        work = self._out.guarded(text, lambda: self._out.begin(x))
        self._to_send.popleft()
        if self._waiter is None:
            self._under_way.append((text, work, x))
        else:
            event = self._waiter.submit(partial(_wait_holding, x, work, self._out), ())
            self._under_way.append((text, event, None))

    def recv(self, action: Recv) -> Tensor:
        """The next message (num_rows, D)."""
        text = format_action(action)
        assert self._to_recv and self._to_recv[0] == action, f"'{text}' is not the next message"
        self.post()  # unless a pass before it has
        assert self._posted is not None
        work, x = self._posted
        self._into.guarded(text, lambda: self._into.wait(work))
        self._to_recv.popleft()
        self._posted = None
        return x

    def post(self) -> None:
        """Post the receive of the next message, unless that is done or there is none."""
        if self._to_recv and self._posted is None:
            action = self._to_recv[0]
            x, text = self._empty(action), f"post {format_action(action)}"
            self._posted = self._into.guarded(text, lambda: self._into.begin(x)), x

    def skip(self, action: Send | Recv) -> None:
        """Let a message pass without what it carries, if it has not passed: send zeros, or take
        what nobody reads."""
        todo = self._to_send if isinstance(action, Send) else self._to_recv
        if next(iter(todo), None) != action:
            return
        if isinstance(action, Send):
            self.send(action, self._empty(action).zero_())
        else:
            self.recv(action)

    def drain(self, most: int | None = 0) -> None:
        """Wait until at most so many sends are under way (None: forget those that have gone)."""
        while self._under_way:
            text, work, _ = self._under_way[0]
            if not _has_gone(work) and (most is None or self.num_held <= most):
                return
            self._out.guarded(text, partial(_finish, work))
            self._under_way.popleft()

    def close(self) -> None:
        """End the thread that waits for sends."""
        if self._waiter is not None:
            self._waiter.close()

    def _form(self, action: Action) -> tuple[tuple[int, int], torch.dtype]:
        assert isinstance(action, (Send, Recv))
        num_rows = self._parcel.num_rows(self._chunks[action.chunk])
        return (num_rows, self._parcel.width), self._parcel.dtype

    def _empty(self, action: Action) -> Tensor:
        shape, dtype = self._form(action)
        return torch.empty(shape, dtype=dtype, device=self._parcel.device)


class Links:
    """One process's links: by the step from its rank to a neighbour's, -1 or 1."""

    def __init__(
        self, neighbours: Mapping[int, Neighbour], groups: Iterable[dist.ProcessGroup] = ()
    ) -> None:
        """`groups`: those that `close` ends."""
        self.neighbours, self.groups = neighbours, [*groups]
        self._rank = 0
        self._posts: Mapping[int, list[int]] = {}
        """By action, the peers whose receives are posted before it."""

    def begin(self, plan: ChunkPlan, rank: int, parcel: Parcel) -> None:
        """Expect the messages of a step in which this process obeys the list of `rank`.

        Raises PlanError for messages to or from a rank that is no neighbour.
        """
        own = plan.actions[rank]
        messages: dict[int, list[Action]] = {step: [] for step in self.neighbours}
        for action in own:
            if isinstance(action, (Send, Recv)):
                if action.peer - rank not in messages:
                    to = " and ".join(str(rank + step) for step in sorted(messages)) or "nobody"
                    text = format_action(action)
                    raise PlanError(f"rank {rank} has '{text}': its links lead to {to}")
                messages[action.peer - rank].append(action)
        self._rank, self._posts = rank, late_posts(plan, rank)
        for step, neighbour in self.neighbours.items():
            neighbour.begin(messages[step], plan.chunks, parcel)

    def before(self, index: int) -> None:
        """Action number `index` of the step is about to begin."""
        for peer in self._posts.get(index, ()):
            self.neighbours[peer - self._rank].post()

    def of(self, action: Send | Recv) -> Neighbour:
        """Who sends, or receives, the message of an action."""
        return self.neighbours[action.peer - self._rank]

    def finish(self) -> None:
        """Wait until every message of the step has gone."""
        for neighbour in self.neighbours.values():
            neighbour.drain()

    def close(self) -> None:
        """End the threads and the groups; nothing is under way."""
        for neighbour in self.neighbours.values():
            neighbour.close()
        while self.groups:
            dist.destroy_process_group(self.groups.pop())


def late_posts(plan: ChunkPlan, rank: int) -> dict[int, list[int]]:
    """By action of a rank, the peers whose receives are posted before it: of activations, at the
    last pass before the action that needs them, unless the message depends on that pass. Others
    are posted when they are needed.

    Passes that wait for what is posted before them wait in no circle: activations go up the
    pipeline, and one that waited for itself would lead back by gradients, which no pass waits for
    early. With both kinds posted early two neighbours wait for each other's next message.
    """
    found: dict[int, list[int]] = {}
    needs = _last_needed(plan, rank)
    last = -1
    for index, action in enumerate(plan.actions[rank]):
        if isinstance(action, Recv):
            if action.payload == "activation" and needs[index] < last:
                found.setdefault(last, []).append(action.peer)
        elif isinstance(action, Computing):
            last = index
    return found


def _last_needed(plan: ChunkPlan, rank: int) -> dict[int, int]:
    """For each Recv of a rank, the last of the rank's actions that come before the matching Send
    in every run: a Send that leads there by way of other ranks, each of which keeps to the order
    of its list; -1 if there is none. Collectives add nothing to this: those between the first and
    the last pass come before a stage's last Backward, which needs all that its ranks have sent."""
    needs: dict[int, int] = {}
    sent: dict[tuple[Payload, int, int], int] = {}
    """For each message that has been sent, the last action of `rank` that comes before it."""
    known, places = defaultdict[int, int](lambda: -1), defaultdict[int, int](int)
    """By rank, the last action of `rank` that comes before where it is, and where it is."""
    stack = [rank]  # each waits for the one behind it
    while stack:
        own = stack[-1]
        for index in range(places[own], len(plan.actions[own])):
            action = plan.actions[own][index]
            if not isinstance(action, (Send, Recv)):
                continue
            message = action.payload, action.chunk, action.stage
            if isinstance(action, Send):
                sent[message] = index if own == rank else known[own]
            elif message in sent:
                known[own] = max(known[own], sent[message])
                if own == rank:
                    needs[index] = sent[message]
            else:
                places[own] = index
                stack.append(action.peer)
                break
        else:
            places[own] = len(plan.actions[own])
            stack.pop()
    return needs


def open_links(
    pipelines: Sequence[Sequence[int]], device: torch.device, timeout: timedelta | None = None
) -> Links:
    """The links of this process, each used once.

    `pipelines`: the processes of each pipeline by stage, as numbers in the world; each process is
    in one. `timeout`: by default that of the world. Collective over the world: every process makes
    all groups, in one order, and sends one element through each of its own: NCCL connects two
    processes at the first message, for which both wait, and takes memory, for which a device may
    wait for what is posted on it.

    Of 256 processes with 8 stages each makes 448 groups, in 10 ms, and holds its own: at most 4.
    No barrier is behind a group unless TORCH_DIST_INIT_BARRIER asks for it.
    """
    me = dist.get_rank()
    world = dist.group.WORLD
    if timeout is None and world is not None:
        timeout = time_limit(world)
    outs, intos, groups = {}, {}, []
    for here, there in directions(len(pipelines[0])):
        for own in pipelines:
            sender, receiver = own[here], own[there]
            name = f"the link from process {sender} to {receiver} (stages {here}, {there})"
            options = {} if device.type == "cpu" else _narrow(timeout)
            group = dist.new_group([sender, receiver], timeout, group_desc=name, **options)
            if me not in (sender, receiver):
                continue
            groups.append(group)
            limit = partial(time_limit, group) if device.type == "cpu" else lambda: None
            if me == sender:
                begin: Any = partial(dist.isend, dst=receiver, group=group)
                end = outs[there - here] = End(begin, name, limit)
            else:
                begin = partial(dist.irecv, src=sender, group=group)
                end = intos[here - there] = End(begin, name, limit)
            end.warm_up(device)
    polls = device.type != "cpu"
    neighbours = {
        step: Neighbour(out, intos[step], None if polls else ThreadLane("link", joins=False))
        for step, out in outs.items()
    }
    return Links(neighbours, groups)


def _narrow(timeout: timedelta | None) -> dict[str, Any]:
    """Options of one group: `new_group` writes the group's name and ranks into them."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _MAX_CTAS
    if timeout is not None:
        options._timeout = timeout
    return {"backend": "nccl", "pg_options": options}


def directions(num_stages: int) -> Iterator[tuple[int, int]]:
    """The stages at both ends of every link of a pipeline, sender first, in the order in which
    links are made."""
    for stage in range(num_stages - 1):
        yield stage, stage + 1
        yield stage + 1, stage


def _wait_holding(x: Tensor, work: Work, out: End) -> None:
    """Wait for the send of a buffer, which is held meanwhile."""
    out.wait(work)


def _has_gone(work: Event | Work) -> bool:
    return work.done() if isinstance(work, Event) else work.is_completed()


def _finish(work: Event | Work) -> None:
    """Wait for a send on the host; `wait` of NCCL would only keep a stream waiting."""
    if isinstance(work, Event):
        work.block()
        return
    while not work.is_completed():
        time.sleep(_POLL_S)

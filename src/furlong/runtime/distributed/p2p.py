"""Links between the stages of a pipeline: one process group per pair of neighbours and direction.

Messages carry no tag (NCCL has none): each direction is first in, first out, and both ends know the
order from the plan. With one queue for both directions, or one per process, two sends that face
each other would deadlock.

A send starts right after the pass that computes its tensor. The receive of a gradient is posted
when the gradient is needed. The receive of an activation is posted one pass earlier, unless the
activation depends on that pass. No receive is posted still earlier: on a GPU a posted receive is a
spinning kernel, and NCCL's timeout starts with it. A pass that waits for the device, as when CUDA
loads a kernel at its first call, also waits for all receives posted before.

A send buffer is kept unchanged until its message has been sent: gloo does not copy, so the receiver
would get later writes, and a dropped send never arrives. Gloo reports a send as finished only to
`wait`, so a thread waits for sends one after the other. Closing does not wait for that thread: a
process that fails must not wait for its neighbours, which wait for messages it will never send.
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
    """This process's end of a link, in one direction."""

    begin: Callable[[Tensor], Work]
    """Starts an isend or irecv of a tensor, in the order of the other end."""
    name: str
    limit: Callable[[], timedelta | None] = lambda: None
    """The group's current timeout, for gloo: its `wait` would use the one from the group's start.
    None for NCCL, whose `wait` with a timeout would block the host."""

    def wait(self, work: Work) -> None:
        """Wait for a message; on a GPU only the current stream waits."""
        limit = self.limit()
        _ = work.wait() if limit is None else work.wait(limit)

    def guarded(self, text: str, act: Callable[[], _T]) -> _T:
        """Return `act()`; raise a backend's error as ConnectionError with the link and `text`."""
        try:
            return act()
        except RuntimeError as error:
            raise ConnectionError(f"{self.name} broke at '{text}': {error}") from error

    def warm_up(self, device: torch.device) -> None:
        """Send or receive the first message, of one element."""
        first = self.begin(torch.zeros(1, device=device))
        self.guarded("its first message", lambda: self.wait(first))


_ONE_WAY_SENDS = 2
"""Most unfinished sends on a link without messages in the other direction. A stage that waits for
no gradient would otherwise run ahead through the whole batch, and hold all its outputs."""
_POLL_S = 1e-4
_MAX_CTAS = 2
"""Most multiprocessors of a GPU that a waiting message occupies on each link."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Shape, dtype and device of a step's messages: hidden states or their gradient (num_rows,
    width) of one chunk."""

    width: int
    dtype: torch.dtype
    device: torch.device
    num_rows: Callable[[Chunk], int] = lambda chunk: max(1, chunk.num_tokens)
    """Rows of a chunk on this process; by default its tokens, at least 1 (a dummy chunk)."""


class Neighbour:
    """The links to and from one neighbour, each first in, first out.

    Each end takes the order of messages from its own actions; a checked plan has equal orders.
    """

    def __init__(self, out: End, into: End, waiter: ThreadLane | None = None) -> None:
        """`waiter`: thread that waits for gloo's sends; gloo reports their end to `wait` only."""
        self._out, self._into, self._waiter = out, into, waiter
        self._to_send: deque[Action] = deque()
        self._to_recv: deque[Action] = deque()
        self._under_way: deque[tuple[str, Event | Work, Tensor | None]] = deque()
        self._posted: tuple[Work, Tensor] | None = None

    @property
    def num_held(self) -> int:
        """Number of send buffers held now."""
        return sum(not _has_gone(work) for _, work, _ in self._under_way)

    def begin(self, messages: Iterable[Action], chunks: Sequence[Chunk], parcel: Parcel) -> None:
        """Prepare for a step. `messages` are the step's Sends and Recvs with this neighbour, in
        order; `chunks` are those of its plan; `parcel` describes the tensors."""
        left = [*self._to_send, *self._to_recv]
        assert not left, f"'{format_action(left[0])}' of the step before is left"
        for action in messages:
            (self._to_send if isinstance(action, Send) else self._to_recv).append(action)
        self._chunks, self._parcel = chunks, parcel
        self._is_one_way = not self._to_recv

    def send(self, action: Send, x: Tensor) -> None:
        """Start to send x (num_rows, D), which must not change until it has been sent."""
        text, x = format_action(action), x.contiguous()
        assert self._to_send and self._to_send[0] == action, f"'{text}' is not the next message"
        assert (x.shape, x.dtype) == self._form(action), f"'{text}' is of another form"
        # here, as nothing else frees the buffers of finished sends during a step
        self.drain(_ONE_WAY_SENDS - 1 if self._is_one_way else None)
        work = self._out.guarded(text, lambda: self._out.begin(x))
        self._to_send.popleft()
        if self._waiter is None:
            # with x, which NCCL still reads
            self._under_way.append((text, work, x))
        else:
            event = self._waiter.submit(partial(_wait_holding, x, work, self._out), ())
            self._under_way.append((text, event, None))

    def recv(self, action: Recv) -> Tensor:
        """Receive the next message (num_rows, D)."""
        text = format_action(action)
        assert self._to_recv and self._to_recv[0] == action, f"'{text}' is not the next message"
        self.post()  # if `Links.before` has not
        assert self._posted is not None
        work, x = self._posted
        self._into.guarded(text, lambda: self._into.wait(work))
        self._to_recv.popleft()
        self._posted = None
        return x

    def post(self) -> None:
        """Post the receive of the next message, if there is one and it is not posted."""
        # one at a time: a posted receive holds a buffer and, on a GPU, multiprocessors
        if self._to_recv and self._posted is None:
            action = self._to_recv[0]
            x, text = self._empty(action), f"post {format_action(action)}"
            self._posted = self._into.guarded(text, lambda: self._into.begin(x)), x

    def drain(self, most: int | None = 0) -> None:
        """Wait until at most `most` sends are unfinished; None: drop finished ones, do not wait."""
        while self._under_way:  # the oldest first: sends of a link finish in order
            text, work, _ = self._under_way[0]
            if not _has_gone(work) and (most is None or self.num_held <= most):
                return
            self._out.guarded(text, partial(_finish, work))
            self._under_way.popleft()

    def close(self) -> None:
        """Stop the thread that waits for sends."""
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
    """The links of one process, keyed by the neighbour's rank minus its rank: -1 or 1."""

    def __init__(
        self, neighbours: Mapping[int, Neighbour], groups: Iterable[dist.ProcessGroup] = ()
    ) -> None:
        """`groups`: process groups that `close` destroys."""
        self.neighbours, self.groups = neighbours, [*groups]
        self._rank = 0
        self._posts: Mapping[int, list[int]] = {}
        """Action number -> ranks whose receives are posted before that action."""

    def begin(self, plan: ChunkPlan, rank: int, parcel: Parcel) -> None:
        """Set the messages of a step in which this process runs the actions of `rank`.

        Raises PlanError for messages to or from a rank that is not a neighbour.
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
        """Post the receives that are due before action number `index`."""
        for peer in self._posts.get(index, ()):
            self.neighbours[peer - self._rank].post()

    def of(self, action: Send | Recv) -> Neighbour:
        """Return the neighbour that an action sends to or receives from."""
        return self.neighbours[action.peer - self._rank]

    def finish(self) -> None:
        """Wait until every message of the step has been sent."""
        for neighbour in self.neighbours.values():
            neighbour.drain()

    def close(self) -> None:
        """Stop threads and destroy groups; all messages must have finished."""
        for neighbour in self.neighbours.values():
            neighbour.close()
        while self.groups:  # popped before: a group whose end fails is not ended twice
            dist.destroy_process_group(self.groups.pop())


def late_posts(plan: ChunkPlan, rank: int) -> dict[int, list[int]]:
    """Return {number of an action: ranks from which a receive is posted before this action}.
    Receives of gradients are not in the result: they are posted when needed.

    The receive of an activation is posted early, before the last pass that comes before the Recv.
    If the message depends on that pass, it is posted when needed instead, and is not in the result.

    Early receives cannot deadlock. A pass may have to wait for receives that were posted before it.
    But activations only go up the pipeline, so waits cannot form a circle. If receives of gradients
    were posted early, too, two neighbours could each wait for the other's next message.
    """
    found: dict[int, list[int]] = {}
    needs = _last_needed(plan, rank)
    last = -1
    for index, action in enumerate(plan.actions[rank]):
        if isinstance(action, Recv):
            # else the pass `last` must run before the message can be sent
            if action.payload == "activation" and needs[index] < last:
                found.setdefault(last, []).append(action.peer)
        elif isinstance(action, Computing):
            last = index
    return found


def _last_needed(plan: ChunkPlan, rank: int) -> dict[int, int]:
    """Return {number of a Recv of `rank`: number of the last Send of `rank` that its message
    depends on}; -1 if the message depends on no Send of `rank`. Numbers are indices in the rank's
    list of actions. A message depends on all messages that its sender received before, and so on
    through the other ranks.

    Collectives may be ignored here. Those between the first and the last pass come before a stage's
    last Backward, which waits for every message to its ranks anyway."""
    needs: dict[int, int] = {}
    sent: dict[tuple[Payload, int, int], int] = {}
    """Message that has been sent -> last action of `rank` that it depends on."""
    known, places = defaultdict[int, int](lambda: -1), defaultdict[int, int](int)
    """Rank -> last action of `rank` that its progress depends on; rank -> next action to visit."""
    stack = [rank]  # each waits for a message of the next
    # lists are walked as they would run: each stops at a Recv until its Send has been passed
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
    """Create the process groups of all links, and return the links of this process. Collective over
    the world.

    Args:
        pipelines: World ranks of each pipeline's processes, in order of stages. Each process is in
            one pipeline.
        timeout: Timeout of the new groups, by default the world's.

    Every process creates all groups, in the same order, and keeps at most 4: those that it belongs
    to. With 256 processes and 8 stages there are 448 groups, which take 10 ms. Creating a group has
    no barrier unless TORCH_DIST_INIT_BARRIER is set.

    One element is sent through each link here. NCCL connects two processes at their first message,
    and allocates memory then. Later this could wait for receives that are posted on the device.
    """
    me = dist.get_rank()
    world = dist.group.WORLD
    # by default `new_group` takes the backend's timeout, not the world's
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
            # all processes do this in the order of the groups, so none waits in a circle
            end.warm_up(device)
    polls = device.type != "cpu"
    neighbours = {
        step: Neighbour(out, intos[step], None if polls else ThreadLane("link", joins=False))
        for step, out in outs.items()
    }
    return Links(neighbours, groups)


def _narrow(timeout: timedelta | None) -> dict[str, Any]:
    """Return NCCL options for one group: `new_group` writes its own name and ranks into them."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _MAX_CTAS
    if timeout is not None:
        options._timeout = timeout
    return {"backend": "nccl", "pg_options": options}


def directions(num_stages: int) -> Iterator[tuple[int, int]]:
    """Yield (sending stage, receiving stage) of every link, in the order of their creation."""
    for stage in range(num_stages - 1):
        yield stage, stage + 1
        yield stage + 1, stage


def _wait_holding(x: Tensor, work: Work, out: End) -> None:
    """Wait for a send; the argument `x` keeps its buffer alive meanwhile."""
    out.wait(work)


def _has_gone(work: Event | Work) -> bool:
    return work.done() if isinstance(work, Event) else work.is_completed()


def _finish(work: Event | Work) -> None:
    """Block the host until a send has finished; NCCL's `wait` would only block a stream."""
    if isinstance(work, Event):
        work.block()
        return
    while not work.is_completed():
        time.sleep(_POLL_S)

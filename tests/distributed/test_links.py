"""Links over gloo: order, forms, what is held and for how long, and a neighbour that is gone."""

from __future__ import annotations

import os
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.launched import Launched
from helpers.load import slowed
from helpers.ranks import run_all, run_ranks

from furlong.errors import PlanError
from furlong.kv.pools import ThreadLane
from furlong.plan.plan import Chunk, ChunkPlan, Forward, Recv, Send, Slice
from furlong.planners.orders import plan_1f1b
from furlong.runtime.distributed.mesh import allow_time, time_limit
from furlong.runtime.distributed.p2p import End, Links, Neighbour, Parcel, open_links

CPU = torch.device("cpu")
PARCEL = Parcel(3, torch.float64, CPU)


def opened(num_stages: int, timeout_s: float = 30) -> Links:
    return open_links([range(num_stages)], CPU, timedelta(seconds=timeout_s))


def plan_of(num_chunks: int, num_stages: int = 2, **settings: Any) -> ChunkPlan:
    """One sequence; chunk i has i % 3 + 1 tokens."""
    chunks, start = [], 0
    for index in range(num_chunks):
        chunks.append(Chunk((Slice(0, start, start + index % 3 + 1),)))
        start += index % 3 + 1
    return plan_1f1b([start], [chunks], stages=(1,) * num_stages, **settings)


def value(action: Send | Recv, plan: ChunkPlan) -> torch.Tensor:
    code = action.chunk * 10 + action.stage + (0.5 if action.payload == "gradient" else 0)
    return torch.full((plan.chunks[action.chunk].num_tokens, 3), code, dtype=torch.float64)


def num_held(links: Links) -> int:
    return sum(neighbour.num_held for neighbour in links.neighbours.values())


def obey(links: Links, plan: ChunkPlan, rank: int) -> int:
    """The most send buffers that were held at a time."""
    links.begin(plan, rank, PARCEL)
    most = 0
    for action in plan.actions[rank]:
        if isinstance(action, Send):
            links.of(action).send(action, value(action, plan))
            most = max(most, num_held(links))
        elif isinstance(action, Recv):
            assert torch.equal(links.of(action).recv(action), value(action, plan))
    links.finish()
    return most


def test_the_thread_of_a_forgotten_waiter_ends() -> None:
    """That of a model with a pipeline, which nobody closes. Nobody waits for its sends either."""
    waiter, sent = ThreadLane("link-test", joins=False), threading.Event()
    [thread] = [t for t in threading.enumerate() if t.name.endswith("link-test")]
    waiter.submit(lambda: sent.wait(10), ())
    del waiter
    assert thread.is_alive()
    sent.set()
    thread.join(10)
    assert not thread.is_alive()


def many_steps(rank: int, num_ranks: int) -> tuple[int, int]:
    links = opened(num_ranks)
    most = max(obey(links, plan_of(count, num_ranks), rank) for count in (1, 12, 5))
    return most, num_held(links)


def test_messages_of_mixed_sizes_arrive_in_order_step_after_step():
    outcomes = run_ranks(many_steps, 3, num_ranks=3)
    assert all(held == 0 for _, held in outcomes), "a finished step holds nothing"
    assert all(0 < most <= 12 for most, _ in outcomes)


def slow_receiver(rank: int) -> tuple[int, list[float]]:
    """The receiver takes its time; the sender's clock at each send."""
    links, plan = opened(2), plan_of(8, backward=False)
    links.begin(plan, rank, PARCEL)
    dist.barrier()
    clock, most, started_s = [], 0, time.monotonic()
    for action in plan.actions[rank]:
        if isinstance(action, Recv):
            time.sleep(0.05)
            links.of(action).recv(action)
        elif isinstance(action, Send):
            links.of(action).send(action, value(action, plan))
            clock.append(time.monotonic() - started_s)
            most = max(most, num_held(links))
    links.finish()
    return most, clock


def test_pace_strangers_and_timeouts_of_links():
    """Outputs of a stage that waits for nobody would all be held: nothing but the receiver's pace
    keeps it back. A message to no neighbour is refused. Links have the timeout of the run, until
    a step is given more time; gloo's messages learn of it as they are waited for."""
    found = run_all(slow_receiver, strangers, timeouts, num_ranks=2)
    ((most, clock), _), said, ((world, *others), _) = found
    assert most <= 2
    assert clock[-1] - clock[0] > 0.15
    assert "its links lead to 1" in said[0] and "its links lead to 0" in said[1]
    assert world != timedelta(minutes=30), "gloo's own"
    assert others == [world] * 2 + [timedelta(hours=3)] * 5


def nowhere(x: torch.Tensor) -> Any:
    raise AssertionError("it must not leave")


def test_what_the_other_end_does_not_expect_does_not_leave():
    """gloo would reinterpret its bytes, or fill a part of the buffer, without a word."""
    plan = plan_of(2)
    first, later = [a for a in plan.actions[0] if isinstance(a, Send)][:2]
    good = value(first, plan)
    for action, x in (
        (later, value(later, plan)), (first, good.float()), (first, good[:, :2]),
        (first, torch.cat([good, good])),
    ):  # fmt: skip
        end = Neighbour(End(nowhere, "the link"), End(nowhere, ""))
        own = [a for a in plan.actions[0] if isinstance(a, (Send, Recv))]
        end.begin(own, plan.chunks, PARCEL)
        with pytest.raises(AssertionError, match=r"not the next message|another form"):
            end.send(action, x)


def gone(rank: int, how: str) -> tuple[str, float]:
    plan, links = plan_of(4), opened(2, timeout_s=2 if how == "silent" else 30)
    links.begin(plan, rank, PARCEL)
    started_s = time.monotonic()
    if rank == 1:
        if how == "closed":
            links.close()
        return "", 0.0
    try:
        for action in plan.actions[0]:
            if isinstance(action, Send):
                links.of(action).send(action, value(action, plan))
            elif isinstance(action, Recv):
                links.of(action).recv(action)
    except ConnectionError as error:
        return str(error), time.monotonic() - started_s
    return "nothing was noticed", 0.0


def test_a_neighbour_that_is_gone_is_named_with_the_action():
    for how, ((said, took_s), _) in zip(
        ("silent", "closed"), run_all((gone, "silent"), (gone, "closed"), num_ranks=2), strict=True
    ):
        broke = r"the link from process \d to \d \(stages \d, \d\) broke at '"
        assert re.match(broke, said), said
        assert "gradient" in said or "activation" in said
        assert took_s < slowed(10)
        assert ("Timed out" in said) == (how == "silent")


def fails(folder: Path) -> None:
    """The second process, beside one that stays and takes nothing."""
    rank = int(os.environ["RANK"])
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    links, plan = opened(2, timeout_s=300), plan_of(4)
    if rank == 0:
        time.sleep(600)
    links.begin(plan, rank, PARCEL)
    first = next(a for a in plan.actions[1] if isinstance(a, Send))
    links.of(first).send(first, value(first, plan))
    raise ValueError("no such layer")


def test_a_process_that_fails_leaves_at_once(tmp_path):
    """Although its neighbour has not taken what it has sent."""
    launched = Launched(tmp_path, fails, tmp_path)
    launched.processes[1].join(slowed(60))
    stays, left = launched.ended(0)
    assert left.code == 1 and "no such layer" in left.said
    assert stays.code is None


def test_a_receive_has_a_buffer_of_its_own_and_is_posted_once() -> None:
    plan, posted = plan_of(5), list[torch.Tensor]()

    def irecv(x: torch.Tensor) -> Any:
        posted.append(x)
        return SimpleNamespace(wait=lambda: None)

    end = Neighbour(End(nowhere, ""), End(irecv, "the link"))
    received = [a for a in plan.actions[1] if isinstance(a, Recv)]
    end.begin(received, plan.chunks, PARCEL)
    for number, action in enumerate(received, 1):
        for _ in range(number % 3):
            end.post()
        assert end.recv(action) is posted[-1] and len(posted) == number
    assert [len(x) for x in posted] == [chunk.num_tokens for chunk in plan.chunks]
    with pytest.raises(AssertionError, match="not the next message"):
        end.recv(received[0])


def strangers(rank: int) -> str:
    links = opened(2)
    plan = ChunkPlan(
        (1,), (Chunk((Slice(0, 0, 1),)),), (1, 1),
        ((Forward(0, 0, "all"), Send("activation", 0, 0, 2)),) * 3,
    )  # fmt: skip
    try:
        links.begin(plan, rank, PARCEL)
    except PlanError as error:
        return str(error)
    return ""


def timeouts(rank: int) -> list[timedelta | None]:
    links, waited = open_links([range(2)], CPU), list[timedelta | None]()
    groups = [dist.group.WORLD, *links.groups]
    found = [time_limit(group) for group in groups]
    for hours in (3, 2):
        allow_time(timedelta(hours=hours))
    [neighbour] = links.neighbours.values()
    for end in (neighbour._out, neighbour._into):
        end.wait(SimpleNamespace(wait=waited.append))
    return [*found, *map(time_limit, groups), *waited]

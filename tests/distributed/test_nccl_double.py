"""Every pipeline planner's plans on an NCCL double: where they hang, and that ours do not."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.nccl_double import (
    Deadlock,
    DoubleWire,
    NCCLDouble,
    Placement,
    per_direction,
    per_pair,
    per_process,
)
from helpers.pipeline_plans import random_1f1b, random_infinipipe, random_row, random_seq1f1b

from furlong.plan.plan import ChunkPlan, Computing, Recv, Send
from furlong.runtime.distributed import p2p
from furlong.runtime.distributed.p2p import (
    End,
    Links,
    Neighbour,
    Parcel,
    directions,
    late_posts,
)

PARCEL = Parcel(1, torch.float32, torch.device("cpu"))


def end_of(double: NCCLDouble, sender: int, receiver: int, own: int) -> End:
    wire = DoubleWire(double, sender, receiver)
    return End(wire.isend if own == sender else wire.irecv, f"{sender} to {receiver}")


def links_of(double: NCCLDouble, rank: int) -> Links:
    neighbours = {
        other - rank: Neighbour(
            end_of(double, rank, other, rank), end_of(double, other, rank, rank)
        )
        for other in (rank - 1, rank + 1)
        if 0 <= other < double.num_processes
    }
    return Links(neighbours)


def payload_of(action: Send | Recv) -> float:
    return float(action.chunk * 10 + action.stage + (0.5 if action.payload == "gradient" else 0))


def warm_up_links(double: NCCLDouble, rank: int) -> None:
    for sender, receiver in directions(double.num_processes):
        if rank in (sender, receiver):
            end_of(double, sender, receiver, rank).warm_up(PARCEL.device)


def obey(
    plan: ChunkPlan, double: NCCLDouble, rank: int, outcomes: dict[int, str], warm: bool
) -> None:
    """The messages of a rank in their order, through the links of a run."""
    links = links_of(double, rank)
    try:
        if warm:
            warm_up_links(double, rank)
        links.begin(plan, rank, PARCEL)
        for index, action in enumerate(plan.actions[rank]):
            links.before(index)
            rows = plan.chunks[getattr(action, "chunk", 0)].num_tokens
            if isinstance(action, Send):
                links.of(action).send(action, torch.full((rows, 1), payload_of(action)))
            elif isinstance(action, Recv):
                x = links.of(action).recv(action)
                assert torch.equal(x, torch.full((rows, 1), payload_of(action)))
        double.leave()
        outcomes[rank] = "done"
    except Deadlock:
        outcomes[rank] = "deadlock"


def run_on_double(
    plan: ChunkPlan, placement: Placement, *, connects: bool = False, warm: bool = False
) -> set[str]:
    """How the ranks of a plan end; `warm`: after the first messages of a run's start."""
    double = NCCLDouble(len(plan.actions), placement, connects)
    outcomes: dict[int, str] = {}
    threads = [
        threading.Thread(target=obey, args=(plan, double, rank, outcomes, warm), daemon=True)
        for rank in range(len(plan.actions))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "neither done nor deadlocked"
    assert len(outcomes) == len(threads), "a rank failed"
    if outcomes[0] == "done":
        assert not any(double.queues.values()), "a message is left"
    return set(outcomes.values())


PLANNERS = {
    # planner: (plan of a seed, instances)
    "1f1b": (random_1f1b, 60),
    "seq1f1b": (random_seq1f1b, 60),
    "in a row": (random_row, 60),
    "infinipipe": (random_infinipipe, 4),
    "evaluation": (partial(random_1f1b, backward=False), 60),
}


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_queue_per_direction_never_hangs(planner):
    make, num_instances = PLANNERS[planner]
    for seed in range(num_instances):
        assert run_on_double(make(seed), per_direction) == {"done"}, seed


def hangs(plan: ChunkPlan, posts: Sequence[Mapping[int, Sequence[int]]]) -> bool:
    """Whether ranks wait for ever whose every pass waits for what has been posted before it, as
    where CUDA loads a kernel: a posted receive is a kernel that spins until its message comes."""
    sent, posted, received = Counter[object](), Counter[object](), Counter[object]()

    def walk(rank: int) -> Iterator[int]:
        for index, action in enumerate(plan.actions[rank]):
            for peer in posts[rank].get(index, ()):
                posted[peer, rank] = received[peer, rank] + 1  # the next, unless it is posted
            if isinstance(action, Send):
                sent[rank, action.peer] += 1
            elif isinstance(action, Recv):
                link = action.peer, rank
                received[link] += 1
                posted[link] = max(posted[link], received[link])
            elif isinstance(action, Computing):
                links = [(peer, rank) for peer in (rank - 1, rank + 1)]
                while any(posted[link] > sent[link] for link in links):
                    yield index

    walks = [walk(rank) for rank in range(len(plan.actions))]
    waits: list[int | None] = []
    before: list[int | None] | None = None
    while waits != before:
        before, waits = waits, [next(one, None) for one in walks]
    return any(at is not None for at in waits)


@pytest.mark.parametrize("planner", PLANNERS)
def test_no_receive_is_posted_before_a_pass_that_its_message_depends_on(planner):
    """Nor before passes that then wait for each other. What is posted later would be too early."""
    make, num_instances = PLANNERS[planner]
    num_early = 0
    for seed in range(min(20, num_instances)):
        plan = make(seed)
        posts = [late_posts(plan, rank) for rank in range(len(plan.actions))]
        assert not hangs(plan, posts), seed
        for rank, own in enumerate(plan.actions):
            passes = [i for i, a in enumerate(own) if isinstance(a, Computing)]
            needed = [
                (max(i for i in passes if i < index), action.peer)
                for index, action in enumerate(own)
                if isinstance(action, Recv) and action.payload == "activation" and index > passes[0]
            ]
            num_early += sum(peer in posts[rank].get(last, ()) for last, peer in needed)
            for last, peer in needed:
                if peer not in posts[rank].get(last, ()):
                    more = dict(enumerate(posts))
                    more[rank] = {**posts[rank], last: [*posts[rank].get(last, ()), peer]}
                    assert hangs(plan, [*more.values()]), (seed, rank, last)
    assert num_early


def test_each_link_has_options_of_its_own(monkeypatch):
    """`new_group` writes a group's name and ranks into them, which a watchdog tells."""
    made: list[object] = []

    def new_group(ranks: object, timeout: object, **given: object) -> None:
        made.append(given["pg_options"])

    double = SimpleNamespace(
        get_rank=lambda: 8, new_group=new_group, group=SimpleNamespace(WORLD=None),
        ProcessGroupNCCL=SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace())),
    )  # fmt: skip
    monkeypatch.setattr(p2p, "dist", double)
    p2p.open_links([range(4)], torch.device("cuda"))
    assert len(made) == len(set(map(id, made))) == 6
    assert all(own.config.max_ctas == 2 for own in made)


@pytest.mark.parametrize("placement", [per_pair, per_process], ids=lambda f: f.__name__)
def test_a_queue_for_both_directions_hangs(placement):
    """NCCL has that one for sends and receives that are not batched."""
    ends = Counter(min(run_on_double(random_1f1b(seed), placement)) for seed in range(60))
    assert ends["deadlock"] >= 0.7 * 60, ends


@pytest.mark.parametrize("warm", [True, False])
def test_nothing_hangs_where_a_first_message_connects(warm):
    """NCCL connects two processes at their first message, and blocks both until then."""
    for plan in map(random_1f1b, range(20)):
        assert run_on_double(plan, per_direction, connects=True, warm=warm) == {"done"}

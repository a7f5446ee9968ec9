"""Every pipeline planner's plans on an NCCL double: where they hang, and that ours do not."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial

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


def test_a_receive_is_posted_at_the_last_pass_before_it_is_needed():
    """On a GPU a posted one spins, and NCCL's clock runs: not during the whole forward."""
    for seed in range(20):
        for own in random_1f1b(seed).actions:
            posts = late_posts(own)
            for index, peers in posts.items():
                behind = own[index + 1 : index + 1 + len(peers) + 4]
                assert isinstance(own[index], Computing) and any(
                    isinstance(a, Recv) and a.peer in peers for a in behind
                )
            passes = [i for i, a in enumerate(own) if isinstance(a, Computing)]
            needed = [i for i, a in enumerate(own) if isinstance(a, Recv) and i > passes[0]]
            assert sum(map(len, posts.values())) == len(needed)
            for index in needed:
                assert own[index].peer in posts[max(i for i in passes if i < index)]


@pytest.mark.parametrize("placement", [per_pair, per_process], ids=lambda f: f.__name__)
@pytest.mark.parametrize("planner", ["1f1b", "seq1f1b", "in a row"])
def test_a_queue_for_both_directions_hangs(planner, placement):
    """NCCL has that one for sends and receives that are not batched; few plans get by with it."""
    make, num_instances = PLANNERS[planner]
    ends = Counter(min(run_on_double(make(seed), placement)) for seed in range(num_instances))
    assert ends["deadlock"] >= 0.9 * num_instances, ends


def test_links_are_connected_at_the_start_or_hang():
    """NCCL connects two processes at their first message: a receive that is posted early waits."""
    plans = [random_1f1b(seed) for seed in range(20)]
    assert {"deadlock"} in [run_on_double(plan, per_direction, connects=True) for plan in plans]
    for plan in plans:
        assert run_on_double(plan, per_direction, connects=True, warm=True) == {"done"}

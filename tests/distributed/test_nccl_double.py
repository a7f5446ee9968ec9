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

from furlong.plan.values import ChunkPlan, Recv, Send
from furlong.runtime.parallel.links import Incoming, Links, Outgoing, Parcel, directions, warm_up

PARCEL = Parcel(1, torch.float32, torch.device("cpu"))
NUM_INSTANCES = 200


def links_of(double: NCCLDouble, rank: int) -> Links:
    ways = {
        step: (
            Outgoing(DoubleWire(double, rank, rank + step), f"{rank} to {rank + step}"),
            Incoming(DoubleWire(double, rank + step, rank), f"{rank + step} to {rank}"),
        )
        for step in (-1, 1)
        if 0 <= rank + step < double.num_processes
    }
    return Links(ways)


def payload_of(action: Send | Recv) -> float:
    return float(action.chunk * 10 + action.stage + (0.5 if action.payload == "gradient" else 0))


def warm_up_links(double: NCCLDouble, rank: int) -> None:
    for sender, receiver in directions(double.num_processes):
        if rank in (sender, receiver):
            wire = DoubleWire(double, sender, receiver)
            warm_up(wire, "", PARCEL.device, sends=rank == sender)


def obey(
    plan: ChunkPlan, double: NCCLDouble, rank: int, outcomes: dict[int, str], warm: bool
) -> None:
    """The messages of a rank in their order, through the links of a run."""
    links = links_of(double, rank)
    try:
        if warm:
            warm_up_links(double, rank)
        links.begin(plan, rank, PARCEL)
        for action in plan.actions[rank]:
            rows = plan.chunks[getattr(action, "chunk", 0)].num_tokens
            if isinstance(action, Send):
                links.send(action, torch.full((rows, 1), payload_of(action)))
            elif isinstance(action, Recv):
                x = links.recv(action)
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
    "1f1b": (random_1f1b, 200),
    "seq1f1b": (random_seq1f1b, 200),
    "in a row": (random_row, 200),
    "infinipipe": (random_infinipipe, 10),
    "evaluation": (partial(random_1f1b, backward=False), 200),
}


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_queue_per_direction_never_hangs(planner):
    make, num_instances = PLANNERS[planner]
    for seed in range(num_instances):
        assert run_on_double(make(seed), per_direction) == {"done"}, seed


@pytest.mark.parametrize("placement", [per_pair, per_process], ids=lambda f: f.__name__)
@pytest.mark.parametrize("planner", ["1f1b", "seq1f1b", "in a row"])
def test_a_queue_for_both_directions_hangs(planner, placement):
    """NCCL has that one for sends and receives that are not batched."""
    make, num_instances = PLANNERS[planner]
    ends = Counter(min(run_on_double(make(seed), placement)) for seed in range(num_instances))
    assert ends == {"deadlock": num_instances}


def test_links_are_connected_at_the_start_or_hang():
    """NCCL connects two processes at their first message: a receive that is posted ahead waits."""
    for seed in range(50):
        plan = random_1f1b(seed)
        assert run_on_double(plan, per_direction, connects=True) == {"deadlock"}
        assert run_on_double(plan, per_direction, connects=True, warm=True) == {"done"}

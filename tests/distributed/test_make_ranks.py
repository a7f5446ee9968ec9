"""Who is who among several processes, and layouts that are refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_all, run_ranks

from furlong.errors import ConfigError
from furlong.plan.plan import Layout, first_device
from furlong.planners.layouts import require_replicate
from furlong.runtime.distributed.mesh import (
    Ranks,
    make_ranks,
    ranks_of_group,
    require_sizes,
    require_stages,
)


def of_one(rank: int, num_processes: int, own: int, sizes: tuple[int, int, int]) -> dict:
    """What process `own` of a large world would see: no message is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=own, world_size=num_processes)
    ranks = make_ranks(*sizes, "cpu")
    return {
        "axes": ranks.mesh.mesh_dim_names,
        "shape": tuple(ranks.mesh.mesh.shape),
        "at": (ranks.stage, ranks.replica, ranks.process, ranks.plan_rank),
        "places": {n: dist.get_process_group_ranks(g) for n, g in ranks.place_groups.items()},
        "shards": dist.get_process_group_ranks(ranks.stage_group),
        "peers": ranks.mesh.mesh.reshape(ranks.pp, ranks.dp, -1)[..., ranks.process].T.flatten(),
        "all": ranks.num_processes,
    }


def test_numbers_places_and_groups_of_large_worlds():
    """A process of eight in a pool on two stages; a pool of 24, with places of its divisors."""
    layout = Layout(dp=2, sp=2, pp=3)
    calls = (16, 13, (1, 8, 2)), (48, 24 + 13, (2, 24, 1)), (12, 7, (2, 2, 3))
    (seen,), (pool,), (stages,) = run_all(*((of_one, *call) for call in calls), num_ranks=1)
    assert seen["axes"] == ("pp", "dp", "sp0", "sp1", "sp2") and seen["all"] == 16
    assert seen["shape"] == (2, 1, 2, 2, 2)
    assert seen["at"] == (1, 0, 5, 1)
    assert seen["places"] == {2: [12, 13], 4: [12, 13, 14, 15], 8: list(range(8, 16))}
    assert seen["shards"] == list(range(8, 16))
    assert seen["peers"].tolist() == [5, 13]
    assert pool["shape"] == (1, 2, 3, 2, 2, 2)
    assert pool["at"] == (0, 1, 13, 1)
    assert pool["places"] == {
        2: [36, 37], 4: [36, 37, 38, 39], 8: list(range(32, 40)), 24: list(range(24, 48)),
        3: [36, 37, 38], 6: list(range(36, 42)), 12: list(range(36, 48)),
    }  # fmt: skip
    assert pool["shards"] == list(range(48)) and pool["peers"].tolist() == [13, 37]
    # lists of replica 1 come after all of replica 0, whose stages follow each other; the numbers of
    # processes are those that the cost model takes for devices
    assert stages["at"] == (1, 1, 1, 4)
    assert stages["peers"].tolist() == [1, 5, 9, 3, 7, 11]
    assert stages["peers"].tolist() == [first_device(rank, layout) + 1 for rank in range(6)]
    assert stages["places"] == {2: [6, 7]} and stages["shards"] == [4, 5, 6, 7]


def sums(rank: int) -> tuple[float, float, float]:
    """A sum over a place, over those who share weights, and over a group of the caller's."""
    ranks = make_ranks(2, 2, 1, "cpu")
    own = ranks_of_group(dist.new_group([0, 1, 2, 3]), "cpu")
    assert (own.dp, own.replica, own.num_processes) == (4, rank, 4)
    found = []
    for group in (ranks.place_groups[2], ranks.stage_group, own.group):
        x = torch.tensor(float(2**rank))
        dist.all_reduce(x, group=group)
        found.append(x.item())
    return tuple(found)


def test_the_groups_work():
    assert run_ranks(sums, num_ranks=4) == [(3, 15, 15), (3, 15, 15), (12, 15, 15), (12, 15, 15)]


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [((2, 3, 1), "dp 2 x sp 3 x pp 1 = 6 on 8 processes"), ((0, 8, 1), "1 or more")],
)
def test_sizes_that_do_not_multiply_show_the_arithmetic(sizes, shown):
    require_sizes(2, 2, 2, 8)
    with pytest.raises(ConfigError, match=shown):
        require_sizes(*sizes, 8)


def test_more_stages_than_layers():
    require_stages(2, 2)
    with pytest.raises(ConfigError, match="pp 3 for a model of 2 layers"):
        require_stages(3, 2)


@pytest.mark.parametrize(
    "config, device", [("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda"), ("cpu:gloo", "cpu")]
)
def test_facts_are_told_on_the_host_where_the_group_has_a_side_for_it(config, device, monkeypatch):
    """Through a GPU they would wait for all that it has to do."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    ranks = Ranks(SimpleNamespace(device_type="cuda"), None, 1, 1, 1, 0, 0, 0, {}, None, None)  # type: ignore[arg-type]
    assert ranks.facts_device(None) == device  # type: ignore[arg-type]


@pytest.mark.parametrize("replicate", [0, 4, 12])
def test_groups_that_hold_all_weights_divide_the_replicas(replicate):
    require_replicate(6, 3)
    with pytest.raises(ConfigError) as refused:
        require_replicate(6, replicate)
    require_replicate(6, int(refused.value.change.rpartition(" ")[2]))

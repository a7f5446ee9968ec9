"""What a plan lacks to be run by this release."""

from dataclasses import replace

import pytest

from furlong.plan.runnable import missing_to_run
from furlong.planners.chunks.groups import group_chunks
from furlong.planners.chunks.placement import shard
from furlong.planners.options import ChunkOptions
from furlong.planners.orders.one_device import plan_on_device
from furlong.planners.orders.pipeline import plan_1f1b
from furlong.planners.orders.replicas import join_replicas

LENS = (40, 9)
OPTIONS = ChunkOptions(size=16)


def pipeline(lens=LENS, *, pp=1, sp=1):
    groups = shard(group_chunks(lens, OPTIONS), sp)
    return plan_1f1b(lens, groups, stages=(4 // pp,) * pp, num_retained=1, sp_size=sp)


def replicas(**sizes):
    return join_replicas([pipeline((n,), **sizes) for n in LENS], [[0], [1]], LENS)


@pytest.mark.parametrize(
    ("plan", "num_processes"),
    [
        (pipeline(), 1),
        (
            plan_on_device(LENS, replace(OPTIONS, order="layer-first", tier="host"), num_layers=4),
            1,
        ),
        (pipeline(pp=2), 2),
        (pipeline(sp=4), 4),
        (replicas(), 2),
        (
            replicas(pp=2, sp=2),
            8,
        ),
    ],
)
def test_a_plan_runs_on_its_own_number_of_processes(plan, num_processes):
    assert missing_to_run(plan, sum(LENS), num_processes=num_processes) == ""
    words = f"{num_processes} processes: start it with torchrun --nproc-per-node {num_processes}"
    assert missing_to_run(plan) == ("" if num_processes == 1 else words)
    assert missing_to_run(plan, num_processes=16) == words


def test_a_plan_of_padded_sequences_is_not_the_batchs():
    assert missing_to_run(pipeline((40, 40)), sum(LENS)) == "padding"

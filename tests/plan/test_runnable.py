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
    ("plan", "words"),
    [
        (pipeline(), ""),
        (
            plan_on_device(LENS, replace(OPTIONS, order="layer-first", tier="host"), num_layers=4),
            "",
        ),
        (pipeline(pp=2), "a pipeline of 2 stages"),
        (pipeline(sp=4), "sequence parallelism over 4 devices"),
        (replicas(), "data parallelism over 2 replicas"),
        (
            replicas(pp=2, sp=2),
            "data parallelism over 2 replicas, sequence parallelism over 2 devices,"
            " a pipeline of 2 stages",
        ),
    ],
)
def test_each_axis_of_several_devices_is_missing(plan, words):
    assert missing_to_run(plan) == words
    assert missing_to_run(plan, sum(LENS)) == words


def test_a_plan_of_padded_sequences_is_not_the_batchs():
    assert missing_to_run(pipeline((40, 40)), sum(LENS)) == "padding"

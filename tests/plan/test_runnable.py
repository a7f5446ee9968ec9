"""What a plan lacks to be run by this release."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from furlong.errors import PlanError
from furlong.plan.check import missing_to_run
from furlong.planners.chunks import group_chunks, shard
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas, plan_1f1b, plan_on_device
from furlong.runtime.parallel.comms import require_layout

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
    words = f"{num_processes} processes that run it by furlong.Engine.run"
    assert missing_to_run(plan) == ("" if num_processes == 1 else words)
    assert missing_to_run(plan, num_processes=16) == words


@pytest.mark.parametrize(
    ("plan", "pp"),
    [(pipeline(sp=2), 1), (replicas(), 1), (pipeline(pp=2, sp=2), 2), (replicas(pp=2), 2)],
)
def test_no_pipeline_gathers_weights_with_every_pass(plan, pp):
    plan = replace(plan, regathers=True)
    missing = missing_to_run(plan, num_processes=len(plan.actions) * plan.sp_size)
    assert missing == ("a pipeline that gathers its weights with every pass (ZeRO-3)"
                       if pp > 1 else "")  # fmt: skip
    with pytest.raises(PlanError, match="keeps its weights") if pp > 1 else nullcontext():
        require_layout(plan, SimpleNamespace(dp=len(plan.actions) // pp, sp=plan.sp_size, pp=pp))


def test_a_plan_of_padded_sequences_is_not_the_batchs():
    assert missing_to_run(pipeline((40, 40)), sum(LENS)) == "padding"

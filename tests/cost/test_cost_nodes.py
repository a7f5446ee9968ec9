"""Which devices share a node: the same in the cost model as in a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from furlong.cost.machine import Link, hardware
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.plan.plan import ChunkPlan, Layout, Send, first_device
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas, plan_replica

SHAPE = model_shape("Qwen2.5-0.5B")
STAGES = (12, 12)


def plan_of(num_replicas: int) -> ChunkPlan:
    options = ChunkOptions(size=1024)
    one = plan_replica((1024,), options, num_layers=SHAPE.num_layers, stages=STAGES)
    if num_replicas == 1:
        return one
    ids = [[replica] for replica in range(num_replicas)]
    return join_replicas([one] * num_replicas, ids, [1024] * num_replicas)


def seconds(plan: ChunkPlan, replicas: int) -> tuple[float, float]:
    """Those of a message, where a link between nodes alone takes time, and of a reduction."""
    spec = hardware("A100-80")
    links = replace(
        spec.links, devices_per_node=2, within_node=Link(0.0, 1e30), between_nodes=Link(1.0, 1e30),
        collectives=None,
    )  # fmt: skip
    training = replace(Training(), zero_stage=1, replicas=replicas)
    costs = CostModel(SHAPE, replace(spec, links=links), training).costs(plan)
    return costs.transfer_s(Send("activation", 0, 0, 1), 0), costs.reduce_s(0)


@pytest.mark.parametrize(("listed", "others"), [(2, 1), (1, 2)])
def test_replicas_of_a_stage_are_neighbours(listed: int, others: int) -> None:
    """Two pipelines on two nodes of two devices: messages cross, gradients stay."""
    message_s, reduce_s = seconds(plan_of(listed), others)
    assert message_s == pytest.approx(1.0) and reduce_s == pytest.approx(0.0)


def test_one_pipeline_stays_on_its_node() -> None:
    assert seconds(plan_of(1), 1)[0] == pytest.approx(0.0)


def test_devices_are_numbered_with_the_pool_innermost_and_the_stages_outermost() -> None:
    layout = Layout(dp=3, sp=4, pp=2)
    firsts = [first_device(rank, layout) for rank in range(6)]
    assert firsts == [0, 12, 4, 16, 8, 20]
    assert first_device(5, Layout(dp=6)) == first_device(5, Layout(pp=6)) == 5

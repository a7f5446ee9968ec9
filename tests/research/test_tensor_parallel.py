"""Tensor parallelism of baselines: a group of GPUs as one device, which gathers and scatters."""

from dataclasses import replace

import pytest
from papers.fused import OtherMemory, fused
from papers.tensor_parallel import TensorParallel

from furlong.cost.machine import Machine
from furlong.cost.memory import stage_bytes
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.plan.plan import Chunk, ChunkPlan, Forward, Slice

pytestmark = pytest.mark.nightly

SHAPE, A100 = model_shape("Llama-3-8B"), Machine.named("A100-80")
EXACT = replace(
    A100, linear=replace(A100.linear, half_tokens=0.0), tile_tokens=0, layer_launch_s=0.0,
    attention_forward=replace(A100.attention_forward, half_tokens=0.0),
)  # fmt: skip
LONG = 32_768


def forward_s(model):
    plan = ChunkPlan((LONG,), (Chunk((Slice(0, 0, LONG),)),), (32,), ((Forward(0, 0, "all"),),))
    return model.costs(plan).compute_s(Forward(0, 0, "all"), 0)


def test_it_divides_work_and_pays_gathers():
    quarter = forward_s(TensorParallel.of(SHAPE, EXACT, Training(), 4))
    # by hand: 3/4 of 32,768 x 4,096 bf16 values, 201,326,592 bytes, are 671.089 us at 300 GB/s;
    # with 20 us of latency, 4 times in 32 layers
    assert quarter == pytest.approx(forward_s(CostModel(SHAPE, EXACT)) / 4 + 0.088459346)


def test_two_nodes_share_their_adapters():
    """A ring crosses a node's edge once: each of its four devices carries a quarter."""
    links = A100.links
    far = replace(
        links, devices_per_node=4, between_nodes=replace(links.between_nodes, bytes_per_s=5e9)
    )
    near_s, far_s = (
        forward_s(TensorParallel.of(SHAPE, replace(EXACT, links=own), Training(), 8))
        for own in (links, far)
    )
    moved = 4 * 32 * LONG * 4096 * 2 * 7 / 8
    more = moved * (1 / (4 * 5e9) - 1 / 300e9) + 128 * (far.between_nodes.latency_s - 2e-5)
    assert far_s - near_s == pytest.approx(more)


def test_a_gpu_holds_its_share():
    model, stages = TensorParallel.of(SHAPE, A100, Training(zero_stage=1), 2), (16, 16)
    memory, whole = model.memory(), stage_bytes(SHAPE, stages, 1, Training())
    assert isinstance(memory, OtherMemory)
    assert memory.cell(stages, 1).graph() == pytest.approx(whole.graph() / 2)
    assert memory.cell(stages, 1).kv_layer == whole.kv_layer / 2
    held = frozenset((1,))
    own, alone = (
        training.weights(SHAPE, stages, held, 4) for training in (memory.training, model.training)
    )
    assert own.state.total == pytest.approx(alone.state.total / 2, abs=2)
    assert sum(own.gradients(1, 2)) == pytest.approx(sum(alone.gradients(1, 2)) / 2)


def test_fused_modules_save_what_megatron_counts():
    shape = model_shape("GPT-13B")  # width 4 D, full heads: 32 D bytes and the log-sum-exp
    assert fused(shape).layer_bytes(shape, 0, 2) == 32 * 5120 + 4 * 40
    ours = stage_bytes(shape, (shape.num_layers,), 0, Training())
    assert fused(shape).layer_bytes(shape, 0, 2) < ours.graph_layers[0]

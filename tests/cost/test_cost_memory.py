"""Bytes of states and of every action: closed forms, the real store's peak, and the check."""

from dataclasses import replace
from functools import cache

import pytest
from helpers.shapes import shape_of_values
from papers.chunkflow_plan import plan_chunkflow

from furlong.cost.machine import Machine, this_cpu
from furlong.cost.memory import PARTS, PlanMemory, stage_bytes, tile_tokens
from furlong.cost.model import CostModel, update_s
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.plan.check import check
from furlong.plan.plan import (
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Place,
    Reduce,
    Slice,
    Unshard,
)
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device, plan_replica
from furlong.planners.question import STATE

LLAMA8, QWEN = model_shape("Llama-3-8B"), model_shape("Qwen2.5-0.5B")
WHOLE = frozenset((0,))
TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 90,
}  # fmt: skip


@cache
def tiny_shape():
    return shape_of_values(TINY)


def test_states_of_bf16_training_take_18_bytes_per_parameter():
    state = Training().weights(LLAMA8, (32,), WHOLE, 1).state
    n = LLAMA8.num_parameters
    assert (state.weights, state.gradients, state.optimizer) == (6 * n, 4 * n, 8 * n)
    assert Training.in_dtype("float32").weights(LLAMA8, (32,), WHOLE, 1).state.total == 16 * n
    assert Training(optimizer_bytes=0).weights(LLAMA8, (32,), WHOLE, 1).state.total == 10 * n
    assert Training.in_dtype("float64").gradient_bytes == 8


def test_zero_stages_shard_one_thing_after_another():
    n = LLAMA8.num_parameters
    states = [Training(zero_stage=z).weights(LLAMA8, (32,), WHOLE, 8).state for z in (0, 1, 2, 3)]
    assert [s.optimizer for s in states] == [8 * n, n, n, n]
    assert [s.gradients for s in states] == pytest.approx([4 * n, 4 * n, n / 2, n / 2], abs=1)
    weights = [6 * n, 2.5 * n, 2.5 * n, 0.75 * n]
    assert [s.weights for s in states] == pytest.approx(weights, abs=1)
    assert Training(zero_stage=2).weights(LLAMA8, (32,), WHOLE, 8).gathered_bytes == 0
    gathered = Training(zero_stage=3).weights(LLAMA8, (32,), WHOLE, 8).gathered_bytes
    assert gathered == 2 * max(LLAMA8.embedding_parameters, 2 * LLAMA8.layers[0].parameters)


def test_gradients_are_whole_until_they_are_reduced():
    """A plan reduces once, behind the last Backward; only ZeRO-3 reduces with every one."""
    chunks = tuple(Chunk((Slice(i, 0, 16),)) for i in range(3))
    ranks = ((0, 1), (2,))  # replicas of one stage
    plan = ChunkPlan(
        (16,) * 3, chunks, (4,),
        tuple(
            (*(a for c in own for a in (Forward(c, 0, "all"), Backward(c, 0))), Reduce(0))
            for own in ranks
        ),
    )  # fmt: skip
    n = tiny_shape().num_parameters

    def held(plan, **training):
        curves = [curve(plan, rank, training=Training(**training)) for rank in (0, 1)]
        return [found.device[:, PARTS.index("gradients")].max() for found in curves]

    assert [held(plan, zero_stage=zero) for zero in (0, 1, 2)] == [[4 * n] * 2] * 3
    assert held(plan, zero_stage=3) == [2 * n] * 2
    adapters = 4 * 4 * Lora(rank=4).layer_parameters(tiny_shape(), 0)
    assert held(plan, zero_stage=2, lora=Lora(rank=4)) == [adapters] * 2
    # without a Backward there are none
    evaluated = replace(plan, actions=tuple((Forward(c, 0, "input"),) for c in (0, 2)))
    assert held(evaluated, zero_stage=2) == [0] * 2


def test_gradients_come_with_the_first_backward_of_their_stage():
    shape, column = tiny_shape(), PARTS.index("gradients")
    options = ChunkOptions(size=32, order="layer-first", stage_layers=2)
    plan = plan_on_device([64], options, num_layers=4)
    found = dict(zip(plan.actions[0], curve(plan).device[:, column].tolist(), strict=True))
    layers, ends = (4 * n for n in (2 * shape.layers[0].parameters, shape.embedding_parameters))
    last = layers + ends + 4 * shape.final_parameters
    assert all(not n for action, n in found.items() if isinstance(action, Forward))
    assert found[Reduce(1)] == last and found[Reduce(0)] == 4 * shape.num_parameters
    # a first Backward: the whole graph with the head's gradient, or all gradients and no graph
    whole = plan_on_device([256], ChunkOptions(size=256), num_layers=4)
    first, after = (row[column] for row in curve(whole).device.tolist()[1:])
    assert (first, after) == (last - layers, 4 * shape.num_parameters)
    few = plan_on_device([4], ChunkOptions(size=4), num_layers=4)
    assert curve(few).device[1, column] == 4 * shape.num_parameters


def test_a_pools_only_backward_leaves_shards_of_its_layers():
    """Each layer's gradient is reduced when it is made; head and embedding wait for the last."""
    training = replace(Training.in_dtype("float32"), zero_stage=1, gathers=True)
    made = [training.weights(tiny_shape(), (4,), WHOLE, 2).gradients(0, n) for n in (1, 2)]
    assert made[0][0] == made[1][0] and made[0][-1] == made[1][-1]
    assert [2 * n for n in made[0][1:-1]] == made[1][1:-1]
    assert sum(made[1]) == 4 * tiny_shape().num_parameters


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("group", [2, 8])
def test_shards_lie_beside_what_is_whole(dtype, group):
    """Fully sharded weights: float32 shards, whole weights in the compute dtype, whole gradients in
    float32, which become shards one after the other, two moments for each shard."""
    training = replace(Training.in_dtype(dtype), zero_stage=1, gathers=True)
    count = training.weights(QWEN, (24,), WHOLE).all
    state = training.weights(QWEN, (24,), WHOLE, group).state
    element = 2 if dtype == "bfloat16" else 4
    assert state.weights == pytest.approx(count * (element + 4 / group))
    assert state.gradients == pytest.approx(count * 4)
    assert state.optimizer == pytest.approx(count * 8 / group)
    buffers = training.weights(QWEN, (24,), WHOLE, group).collective_bytes()
    assert buffers == QWEN.layers[0].parameters * 4
    alone = training.weights(QWEN, (24,), WHOLE, 1).state
    assert alone == replace(training, gathers=False).weights(QWEN, (24,), WHOLE, 1).state
    assert not training.weights(QWEN, (24,), WHOLE, 1).collective_bytes()


def test_a_frozen_base_has_shards_too():
    training = replace(Training(), lora=Lora(8), zero_stage=1, gathers=True)
    base = training.weights(QWEN, (24,), WHOLE).all
    adapters = training.weights(QWEN, (24,), WHOLE).trained
    state = training.weights(QWEN, (24,), WHOLE, 4).state
    assert state.weights == pytest.approx(2 * (base + adapters) + 2 * base / 4 + adapters)


def test_lora_trains_its_adapters_only():
    training = Training(lora=Lora(rank=8))
    adapters = 32 * 8 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    state = training.weights(LLAMA8, (32,), WHOLE, 1).state
    assert training.weights(LLAMA8, (32,), WHOLE).trained == adapters
    assert state.weights == 2 * LLAMA8.num_parameters + 6 * adapters
    assert state.gradients + state.optimizer == 12 * adapters
    with_mlp = Lora(rank=8, modules="all-linear").layer_parameters(LLAMA8, 0)
    assert with_mlp - Lora(rank=8).layer_parameters(LLAMA8, 0) == 8 * 3 * (4096 + 14336)


def test_whole_weights_are_made_of_experts_with_adapters_alone():
    shape = model_shape("Qwen3-30B-A3B-Instruct-2507")

    def overhead(lora):
        return CostModel(shape, Machine.named("H100"), Training(lora=lora)).memory().overhead_bytes

    experts = Lora(8, "all-linear", ("experts.gate_up_proj", "experts.down_proj"))
    assert overhead(Lora(8, "all-linear")) == overhead(None)
    weights = shape.layers[0].expert_parameters * (shape.num_layers + 2)
    assert overhead(experts) - overhead(None) == 2 * weights


def test_a_rank_with_both_ends_holds_a_tied_head_once():
    tied = shape_of_values(TINY | {"tie_word_embeddings": True})

    def count(*held):
        return Training().weights(tied, (2, 1, 1), frozenset(held)).all

    assert count(0, 1, 2) == tied.num_parameters
    assert count(0) + count(1, 2) == tied.num_parameters + tied.embedding_parameters


def curve(plan, rank=0, **fields):
    training = fields.pop("training", Training.in_dtype("float32"))
    shape = fields.pop("shape", tiny_shape())
    return PlanMemory(shape, training, 10**15, **fields).curve(plan, rank)


def test_a_plan_is_walked_once_by_equal_memories():
    model = CostModel(tiny_shape(), Machine.named("H100"))
    plan = plan_on_device([64], ChunkOptions(size=32, keep="kv"), num_layers=4)
    walked = model.memory().curve(plan, 0)
    assert model.memory().curve(plan, 0) is walked
    with pytest.raises(ValueError, match="read-only"):
        walked.device[:] = 0
    assert model.memory(2**30).curve(plan, 0) is not walked
    assert model.memory().curve(replace(plan), 0) is not walked


def test_a_checkpointed_layer_keeps_its_input():
    cell = stage_bytes(LLAMA8, (16, 16), 1, Training())
    assert cell.graph(16) == 16 * 2 * 4096 + cell.ends
    assert cell.graph(3) - cell.graph(4) == pytest.approx(cell.graph_layers[0] - 2 * 4096)
    assert stage_bytes(LLAMA8, (16, 16), 0, Training()).ends == 2 * 4096, "its output"


def test_an_unsharded_stage_is_whole_from_then_on():
    piece = Chunk((Slice(0, 0, 16),))
    training = Training(zero_stage=3)
    cells = (Unshard(0), Forward(0, 0, "all"), Backward(0, 0), Reduce(0))
    plan = ChunkPlan((16,), (piece,), (4,), (cells,), sp_size=1)
    weights = curve(plan, training=training).device[:, PARTS.index("weights")]
    whole = 2 * tiny_shape().num_parameters
    sharded = training.weights(tiny_shape(), (4,), WHOLE, 1).state.weights
    assert weights.tolist() == [sharded + whole] * 4


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("height", [1, 3])
def test_a_state_whose_weights_are_freed_is_what_the_walk_holds_of_it(tied, height, offloads):
    """Without an entrance of another size: at the ends, where a stage has the embedding or the
    head beside its layers, or in between."""
    shape = shape_of_values(TINY | {"tie_word_embeddings": tied, "num_hidden_layers": 7})
    options = ChunkOptions(size=8, order="layer-first", stage_layers=height, reshard=True)
    training = Training(zero_stage=1, gathers=True, replicas=2)
    training = training.offloading() if offloads else training
    plan = plan_replica([40, 13], options, num_layers=7, sp_size=2)
    curve = CostModel(shape, Machine.named("A100-80"), training).memory().curve(plan, 0)
    parts = [PARTS.index(part) for part in STATE]
    own = training.weights(shape, plan.stages, frozenset(plan.held[0]), 4)
    walked = curve.device[:, parts].sum(axis=1)
    assert own.resharded_bytes == pytest.approx(max(walked), abs=8)
    weights = curve.device[:, PARTS.index("weights")]
    assert own.share_bytes + own.whole_at_a_time(reshards=True) == max(weights)
    assert own.share_bytes + own.whole_at_a_time(reshards=False) == own.state.weights
    assert not offloads or (own.share_bytes == own.state.optimizer == 0)
    assert set(curve.cpu) == {own.host_bytes * offloads}


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_one_device_has_its_weights_in_cpu_memory_and_two_layers_of_them(lora):
    """16 bytes of a trained parameter and 2 of a frozen one; a CPU has them as its own."""
    options = ChunkOptions(size=4096, order="layer-first", reshard=True)
    plan = plan_replica([16_384], options, num_layers=32)
    training = Training(lora=lora).offloading()
    own = training.weights(LLAMA8, plan.stages, frozenset(plan.held[0]))
    frozen = 0 if lora is None else own.all
    assert own.host_bytes == 16 * own.trained + 2 * frozen
    card = CostModel(LLAMA8, Machine.named("A100-80"), training)
    curve = card.memory().curve(plan, 0)
    assert set(curve.cpu) == {own.host_bytes}
    whole = own.whole_at_a_time(reshards=True)
    assert curve.device[:, PARTS.index("weights")].max() == whole < 0.12 * 2 * own.in_use
    here = CostModel(LLAMA8, card.hardware, replace(training, host_is_device=True))
    on_cpu = here.memory().curve(plan, 0)
    assert set(on_cpu.cpu) == {0}
    lies = 12 * own.trained + 2 * frozen
    assert on_cpu.peak["weights"] + on_cpu.peak["optimizer"] >= lies


def test_weights_come_over_the_bus_once_for_each_unshard():
    """In front of the stage's pass, and gradients go back beside the next one."""
    options = ChunkOptions(size=4096, order="layer-first", reshard=True)
    plan = plan_replica([16_384], options, num_layers=32)
    card = CostModel(LLAMA8, Machine.named("A100-80"), Training().offloading())
    costs, bus = card.costs(plan), card.hardware.links.host.bytes_per_s
    own = card.training.weights(LLAMA8, plan.stages, frozenset(plan.held[0]))
    layer = LLAMA8.layers[5].parameters
    assert costs.blocking_s(Unshard(5), 0) == pytest.approx(4 * layer / bus, rel=0.01)
    loaded = sum(costs.blocking_s(a, 0) for a in plan.actions[0] if isinstance(a, Unshard))
    assert loaded == pytest.approx(2 * 4 * own.all / bus, rel=0.1)
    assert costs.link_s(Reduce(5), 0) == pytest.approx(4 * layer / bus, rel=0.01)
    rate = card.hardware.host_parameters_per_s
    assert update_s(card, plan) == pytest.approx(own.trained / rate)


def test_processes_of_a_group_hold_their_own_slices():
    """Places decide: the process with the long local slice needs most."""
    chunk = Chunk(
        (Slice(0, 0, 100, Place(0, 2)), Slice(1, 0, 60, Place(0, 1)), Slice(2, 0, 10, Place(1, 1)))
    )
    plan = ChunkPlan(
        (100, 60, 10), (chunk,), (4,), ((Forward(0, 0, "all"), Backward(0, 0)),), sp_size=2
    )
    check(plan)
    alone = Chunk((Slice(0, 0, 110),))
    single = ChunkPlan((110,), (alone,), (4,), plan.actions)
    shared = Training.in_dtype("float32")
    assert curve(plan, training=shared).peak["activations"] == pytest.approx(
        curve(single, training=shared).peak["activations"]
    )


def test_a_pool_on_cpus_counts_what_is_added_up_and_what_the_heap_does_not_give_back():
    shape = shape_of_values(TINY | {"vocab_size": 2000})
    training = replace(Training.in_dtype("float32"), zero_stage=1, gathers=True)
    chunks = tuple(Chunk((Slice(i, 0, 16, Place(0, 2)),)) for i in (0, 1))
    actions = tuple(a for c in (0, 1) for a in (Forward(c, 0, "all"), Backward(c, 0)))
    plan = ChunkPlan((16, 16), chunks, (4,), ((*actions, Reduce(0)),), sp_size=2)
    on_cpu = PlanMemory(shape, training, 10**15, heap_blocks=1.0, device_type="cpu")

    def buffers(memory):
        return memory.curve(plan, 0).device[-1, PARTS.index("buffers")]

    held = shape, (4,), WHOLE, 2
    added_up = shape.embedding_parameters * 4  # the head, then the embedding: the largest there is
    expected = on_cpu.heap_bytes(plan, 0) + added_up  # gloo's copies have gone back
    plain = buffers(replace(on_cpu, heap_blocks=0.0)) - training.weights(*held).collective_bytes()
    assert buffers(on_cpu) - plain == expected
    assert training.weights(*held).collective_bytes() < added_up  # layers are shards by then


def test_a_cpus_kernels_for_bfloat16_are_counted():
    shape = shape_of_values(TINY | {"model_type": "llama"})
    for dtype, device, counted in (
        ("bfloat16", this_cpu(), True),
        ("float32", this_cpu(), False),
        ("bfloat16", Machine.named("H100"), False),
    ):
        memory = CostModel(shape, device, Training.in_dtype(dtype)).memory()
        assert (memory.overhead_bytes > 0) == counted
        assert (memory.heap_blocks > 0) == (memory.device_type == "cpu")


def test_layers_do_not_run_while_the_loss_does():
    """Of a backward's two moments that with more bytes counts; each is more in one of these."""
    parts = {}
    for vocab in (90, 90_000):
        shape = shape_of_values(TINY | {"vocab_size": vocab})
        memory = PlanMemory(shape, Training.in_dtype("float32"), 0, device_type="cpu")
        plan = plan_chunkflow((256,), ChunkOptions(size=256), stages=(4,))
        cell, peak = memory.cell((4,), 0), memory.curve(plan, 0).peak
        parts[vocab] = peak["logits"], peak["buffers"]
        loss = memory.loss_bytes(cell, 256, backward=True)
        expected = (loss, 256 * cell.message), (0, 256 * (cell.working + cell.message))
        assert parts[vocab] == max(expected, key=sum)
    assert parts[90][0] == 0 < parts[90_000][0]


@pytest.mark.parametrize(
    "vocab_size, on_cpu, on_cuda",
    [(64, 256, 2**21), (4096, 256, 2**15), (32_000, 131, 4194), (151_936, 128, 883)],
)
def test_rows_of_a_tile(vocab_size, on_cpu, on_cuda):
    assert tile_tokens(vocab_size, "cpu") == on_cpu
    assert tile_tokens(vocab_size, "cuda") == on_cuda


def test_a_tile_makes_a_gradient_of_the_whole_head():
    """V x D numbers beside the gradient of the logits, which is all that is left of them by then;
    none of a frozen head."""
    for training, backward, expected in (
        (Training(), True, 4 * 90 * 4 + 90 * 32 * 2),
        (Training(lora=Lora(rank=4)), True, 4 * 90 * (3 * 4 + 2 * 2)),
        (Training(), False, 4 * 90 * (3 * 4 + 2 * 2)),
    ):
        memory = PlanMemory(tiny_shape(), training, 0)
        assert memory.loss_bytes(memory.cell((4,), 0), 4, backward=backward) == expected

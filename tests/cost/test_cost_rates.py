"""Terms that a calibration measures, each against its formula by hand; free until measured."""

from dataclasses import replace
from functools import cache
from math import inf

import pytest
from helpers.shapes import shape_of_values

from furlong.cost.machine import Efficiency, Machine
from furlong.cost.memory import stage_bytes
from furlong.cost.model import CostModel, update_s
from furlong.cost.seconds import attended_keys, chunk_table
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.plan.plan import Backward, Chunk, ChunkPlan, Forward, Place, Recompute, Slice
from furlong.planners.chunks import group_chunks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_1f1b, plan_on_device

FREE = Efficiency(inf, 0.0)
NOTHING = replace(
    Machine.named("A100-80"), linear=FREE, attention_forward=FREE, attention_backward=FREE,
    layer_launch_s=0.0, hides_launches=False, activation_bytes_per_s=inf,
)  # fmt: skip
CHUNKS = (
    Chunk((Slice(0, 0, 40),)),
    Chunk((Slice(0, 40, 70), Slice(1, 0, 10), Slice(2, 0, 20))),
)
PLAN = ChunkPlan(
    (70, 10, 20), CHUNKS, (3,),
    ((
        Forward(0, 0, "kv"), Forward(1, 0, "all"), Backward(1, 0), Recompute(0, 0), Backward(0, 0),
    ),),
)  # fmt: skip
TO_KV, GRAPH, BACK, AGAIN, LAST = range(5)


@cache
def tiny_shape():
    return shape_of_values({
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 160, "vocab_size": 500,
    })  # fmt: skip


def seconds(**rates):
    model = CostModel(tiny_shape(), replace(NOTHING, **rates), Training.in_dtype("float32"))
    costs = model.costs(PLAN)
    return [costs.compute_s(action, 0) for action in PLAN.actions[0]]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({}, [0, 0, 0, 0, 0]),
        ({"pass_launch_s": 2.0}, [2, 2, 2, 2, 2]),
        ({"layer_launch_s": 1.0}, [3, 3, 6, 3, 6]),  # twice in a backward
        # the first forward stops before the attention of its last layer
        ({"slice_launch_s": 1.0}, [2, 9, 18, 3, 6]),
    ],
)
def test_what_was_measured_of_launches_is_charged(rates, expected):
    assert seconds(**rates) == expected


def test_launches_add_to_work_or_hide_it():
    rates = {"linear": Efficiency(1.0, 0.0), "peak_flops_per_s": 1e6, "layer_launch_s": 10.0}
    work, launches = seconds(**rates | {"layer_launch_s": 0.0}), seconds(layer_launch_s=10.0)
    assert seconds(**rates) == pytest.approx([a + b for a, b in zip(work, launches, strict=True)])
    hidden = seconds(**rates, hides_launches=True)
    assert hidden[TO_KV] == max(work[TO_KV], launches[TO_KV])
    assert hidden[AGAIN] == max(work[AGAIN], launches[AGAIN])


def test_kernels_pass_what_graphs_save_and_logits():
    found = seconds(activation_bytes_per_s=1.0)
    cell = stage_bytes(tiny_shape(), (3,), 0, Training.in_dtype("float32"))
    layer, logits = cell.graph_layers[0], cell.logit * tiny_shape().vocab_size
    assert found[GRAPH] == pytest.approx(60 * 3 * layer)
    assert found[AGAIN] == pytest.approx(40 * 3 * layer)
    assert found[BACK] == pytest.approx(60 * (6 * layer + logits))
    assert found[LAST] == pytest.approx(40 * (6 * layer + logits))
    assert 40 * 2 * layer < found[TO_KV] < 40 * 3 * layer


def test_weights_in_4_bits_are_made_whole_for_each_pass():
    """Codes are read, floats written and read again, once in a pass, however many its tokens."""

    def on(packed_bytes):
        training = replace(Training.in_dtype("float32"), lora=Lora(4), packed_bytes=packed_bytes)
        machine = replace(NOTHING, unpacking_bytes_per_s=1.0)
        costs = CostModel(tiny_shape(), machine, training).costs(PLAN)
        return [costs.compute_s(action, 0) for action in PLAN.actions[0]]

    layer = tiny_shape().layers[0]
    whole = 3 * layer.linear_parameters * (0.5 + 2 * 4)
    behind_kv = (layer.linear_parameters - layer.before_kv) * (0.5 + 2 * 4)
    assert on(0.5) == pytest.approx([whole - behind_kv, whole, whole, whole, whole])
    assert on(None) == [0] * 5


def test_tiles_that_the_diagonal_cuts_are_computed_whole():
    plain, tiled = (chunk_table(CHUNKS, tiny_shape(), 1, tile) for tile in (0, 16))
    own = [
        attended_keys(0, 40),
        attended_keys(40, 70) + attended_keys(0, 10) + attended_keys(0, 20),
    ]
    assert plain.local_keys[None][0].tolist() == own
    in_vain = [40 * 16 / 2, 30 * 16 / 2 + 10 * 10 / 2 + 20 * 16 / 2]
    assert (tiled.local_keys[None] - plain.local_keys[None])[0].tolist() == in_vain
    assert tiled.prefix_keys[None].tolist() == plain.prefix_keys[None].tolist() == [[0, 30 * 40]]
    assert plain.num_slices.tolist() == [[1, 3]]


def test_the_optimizers_step():
    spec = replace(NOTHING, optimizer_parameters_per_s=2e6)
    plan = plan_on_device([8], ChunkOptions(size=4), num_layers=3)

    def on(plan=plan, **training):
        return update_s(CostModel(tiny_shape(), spec, Training(**training)), plan) * 2e6

    assert on() == pytest.approx(tiny_shape().num_parameters)
    # a data sheet's device passes 30 bytes of each parameter through its memory
    assert Machine.named("A100-80").optimizer_parameters_per_s == pytest.approx(2.039e12 / 30)
    pool = replace(plan, sp_size=4)
    assert on(pool) == on(replicas=4) == on()
    quarter = on(pool, zero_stage=1)
    assert quarter == on(replicas=4, zero_stage=2) == on() / 4
    assert quarter == on(replace(plan, sp_size=2), zero_stage=3, replicas=2)
    adapters = Lora(rank=1)
    own = sum(adapters.layer_parameters(tiny_shape(), layer) for layer in range(3))
    assert on(lora=adapters) == pytest.approx(own)
    assert on(plan_on_device([8], ChunkOptions(size=4), num_layers=3, backward=False)) == 0
    # of a pipeline the largest stage decides
    held = [Training().weights(tiny_shape(), (1, 2), frozenset((s,))).all for s in (0, 1)]
    assert held[0] != held[1]
    groups = group_chunks([8], ChunkOptions(size=4))
    assert on(plan_1f1b([8], groups, stages=(1, 2))) == pytest.approx(max(held))


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_experts_are_read_where_some_token_visits_them(num_tokens):
    """k of E per token: n tokens visit E (1 - (1 - k/E)^n) on average."""
    config = {
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 500,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "num_experts": 16,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 160,
        "mlp_only_layers": [1],
    }  # fmt: skip
    shape = shape_of_values(config)
    spec = replace(NOTHING, peak_flops_per_s=1.0, linear=Efficiency(1.0, 7.0))
    plan = ChunkPlan(
        (num_tokens,), (Chunk((Slice(0, 0, num_tokens),)),), (2, 1),
        ((Forward(0, 0, "all"), Forward(0, 1, "all"), Backward(0, 1), Backward(0, 0)),),
    )  # fmt: skip

    def times(**changes):
        model = CostModel(replace(shape, **changes), spec, Training.in_dtype("float32"))
        return [model.costs(plan).compute_s(action, 0) for action in plan.actions[0]]

    dense = tuple(replace(layer, num_experts=layer.num_active) for layer in shape.layers)
    expert = 2 * 3 * 64 * 32
    visited = 16 * (1 - (1 - 2 / 16) ** num_tokens) - 2
    once = 7 * expert * visited
    first, last, back_last, back_first = (
        own - other for own, other in zip(times(), times(layers=dense), strict=True)
    )
    assert [first, last, back_last, back_first] == pytest.approx([once, once, 2 * once, 2 * once])


def test_seconds_without_a_plan_are_those_of_a_plan():
    """Of every cell of a pipeline on groups of two, layers recomputed, weights gathered."""
    stages, again = (2, 1), (1, 0)
    model = CostModel(tiny_shape(), Machine.named("A100-80"), Training(zero_stage=3))
    pieces = (Slice(0, 0, 500, Place(0, 2)), Slice(0, 500, 700, Place(0, 2)))
    chunks = tuple(Chunk((piece,)) for piece in pieces)
    cells = [
        tuple(a for c in (0, 1) for a in (Forward(c, s, "all", again[s]), Backward(c, s)))
        for s in (0, 1)
    ]
    plan = ChunkPlan((700,), chunks, stages, tuple(cells), sp_size=2)
    costs = model.costs(plan)
    found = model.cell_seconds(chunks, stages, sp_size=2, recompute_layers=again)
    for rank, own in enumerate(cells):
        expected = [costs.compute_s(action, rank) for action in own]
        assert found[rank].ravel().tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("card", "lora", "bytes_passed", "linear_flops_per_s", "bandwidth"),
    [
        ("H100", None, 34.1e9, 620e12, 2.6e12),
        ("H100", Lora(16), 38.9e9, 620e12, 2.6e12),
        ("H200", Lora(16), 38.9e9, 690e12, 3.6e12),
    ],
)
def test_each_kind_of_kernel_of_a_layer_takes_what_was_counted_of_it(
    card, lora, bytes_passed, linear_flops_per_s, bandwidth
):
    """Qwen3-8B in one chunk, which is not recomputed: products, cuDNN's attention, and bytes of
    unfused element-wise kernels, counted by operator for 8,192 tokens with a recompute: a fourth
    of their passes, for a backward is two."""
    shape, tokens, machine = model_shape("Qwen3-8B"), 32_768, Machine.named(card)
    plan = plan_on_device([tokens], ChunkOptions(size=tokens, num_retained=0), num_layers=36)
    free = dict.fromkeys(("linear", "attention_forward", "attention_backward"), FREE)
    free |= {"activation_bytes_per_s": inf, "layer_launch_s": 0.0}

    def layers_s(*kinds):
        spent = {name: getattr(machine, name) for name in kinds}
        model = CostModel(
            replace(shape, vocab_size=0), replace(machine, **free | spent), Training(lora=lora)
        )
        return sum(model.costs(plan).compute_s(action, 0) for action in plan.actions[0])

    elements = 3 / 4 * 36 * tokens / 8192 * bytes_passed / bandwidth
    assert layers_s("activation_bytes_per_s") == pytest.approx(elements, rel=0.05)
    matrices = sum(layer.matrices for layer in shape.layers)
    products = (4 if lora else 6) * matrices * tokens / linear_flops_per_s
    assert layers_s("linear") == pytest.approx(products, rel=0.05)
    keys = 36 * 4 * 4096 * attended_keys(0, tokens) / 1e12
    attention = keys * (1 / 580 + 2.5 / 480)
    assert layers_s("attention_forward", "attention_backward") == pytest.approx(attention, rel=0.05)

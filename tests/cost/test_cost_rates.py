"""Terms that a calibration measures, each against its formula by hand; free until measured."""

from dataclasses import replace
from functools import cache
from itertools import product
from math import inf

import pytest
from helpers.shapes import shape_of_values

from furlong.cost.machine import Efficiency, Machine
from furlong.cost.memory import stage_bytes
from furlong.cost.model import CostModel, update_s
from furlong.cost.seconds import PassPart, attended_keys, chunk_table, step_flops
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.plan.plan import (
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Layout,
    Place,
    Recompute,
    Slice,
)
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
    packed = attended_keys(0, 30) + attended_keys(0, 10) + attended_keys(0, 20)
    own = {"full": [0, 30 * 40], "square": [attended_keys(0, 40), 0], "packed": [0, packed]}
    in_vain = {"full": [0, 0], "square": [40 * 16 / 2, 0]}
    in_vain["packed"] = [0, 30 * 16 / 2 + 10 * 10 / 2 + 20 * 16 / 2]
    for call, keys in own.items():
        before = plain.local_keys[None, call]
        assert before[0].tolist() == keys
        assert (tiled.local_keys[None, call] - before)[0].tolist() == in_vain[call]
    assert tiled.prefix_keys(None).tolist() == plain.prefix_keys(None).tolist() == [[0, 30 * 40]]
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


K = 1024
KERNELS = "FlashAttention 2", "cuDNN", "FlashAttention 4"
ATTENTION = dict(zip(KERNELS, ((370e12, 290e12), (580e12, 480e12), (640e12, 540e12)), strict=True))
"""FLOP/s of a forward and of a backward on Hopper over blocks without a mask; squares 15 % less."""
CARDS = {"H100": (620e12, 2.6e12), "H200": (690e12, 3.6e12)}
"""FLOP/s of products, and bytes per second of the memory."""
PASSED = {None: 12.7e9, Lora(16): 12.0e9}
"""Bytes outside of products and attention that 8,192 tokens of a layer of Qwen3-8B pass in a
forward, a recompute and a backward, which is two passes: counted by operator (docs/kernels.md)."""
WRITTEN = {None: 34.1e9, Lora(16): 38.9e9}
"""Those by which the steps below were added up: of modules as written, with offload and merges."""
STEPS_S = {
    ("H100", 32 * K): (8.1, 6.7, 6.4),
    ("H100", 128 * K): (77.7, 55.3, 51.4),
    ("H100", 1024 * K): (3950, 2525, 2283),
    ("H200", 32 * K): (7.3, 5.9, 5.6),
    ("H200", 128 * K): (73.8, 51.5, 47.5),
    ("H200", 1024 * K): (3887, 2462, 2220),
}
"""By kernel: seconds of a step of one sequence with adapters, from the rates above, with the head
(its products, and some 70 bytes for each logit) and merges of blocks of 8,192 keys (28 bytes for
each number of a row's output: 1, 3 and 5 %; of 32,768 keys, as blocks are now, a fourth)."""
MFU = {32 * K: 0.33, 128 * K: 0.37, 1024 * K: 0.41}
"""All weights trained, H100, cuDNN."""


def in_chunks(card, kernel, lora, tokens, **changed):
    """The cost of a step in chunks of 8,192, the last of which is not recomputed, nor is attention;
    and its seconds, beside those of the optimizer."""
    shape, machine = model_shape("Qwen3-8B"), Machine.named(card).attended_by(kernel)
    model = CostModel(shape, replace(machine, **changed), Training(lora=lora))
    plan = plan_on_device([tokens], ChunkOptions(size=8192, keep="attention"), num_layers=36)
    costs = model.costs(plan)
    return model, sum(costs.compute_s(action, 0) for action in plan.actions[0])


@pytest.mark.parametrize("lora", [None, Lora(16)], ids=["all", "lora"])
@pytest.mark.parametrize("tokens", [32 * K, 128 * K, 1024 * K], ids=str)
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kind_of_kernel_takes_what_its_rate_says(card, kernel, lora, tokens):
    """Within 5 %, calls of few tokens apart: products, attention and all else of the layers."""
    free = dict.fromkeys(("linear", "attention_forward", "attention_backward"), FREE)
    free |= {"activation_bytes_per_s": inf, "layer_launch_s": 0.0}
    machine, (gemm, bandwidth) = Machine.named(card).attended_by(kernel), CARDS[card]

    def layers_s(*kinds):
        spent = {name: getattr(machine, name) for name in kinds}
        for name, own in spent.items():
            if isinstance(own, Efficiency):
                spent[name] = replace(own, half_tokens=0.0)
        model, whole_s = in_chunks(card, kernel, lora, tokens, **free | spent)
        head = model.stage_seconds((36,), 0, layout=Layout(), ranks=(0,))
        table = chunk_table([Chunk((Slice(0, 0, tokens),))], model.shape, 1)
        return whole_s - head.pass_seconds((PassPart("head and back"),), table).sum()

    shape, chunks = model_shape("Qwen3-8B"), tokens / 8192
    weights = sum(layer.matrices for layer in shape.layers)
    products = ((4 if lora else 6) * chunks + 2 * (chunks - 1)) * 8192 * weights / gemm
    assert layers_s("linear") == pytest.approx(products, rel=0.05)
    elements = 36 * (chunks - 1 / 4) * PASSED[lora] / bandwidth
    assert layers_s("activation_bytes_per_s") == pytest.approx(elements, rel=0.05)
    squares, forward, backward = chunks * attended_keys(0, 8192), *ATTENTION[kernel]
    keys = attended_keys(0, tokens) + (1 / 0.85 - 1) * squares
    attention = 36 * 4 * 4096 * keys * (1 / forward + 2.5 / backward)
    found = layers_s("attention_forward", "attention_backward")
    assert found == pytest.approx(attention, rel=0.05)


@pytest.mark.parametrize(("card", "tokens"), STEPS_S)
def test_steps_on_hopper_take_what_their_kernels_sum_up_to(card, tokens):
    def written(lora):
        bytes_per_s = Machine.named(card).activation_bytes_per_s * PASSED[lora] / WRITTEN[lora]
        return {"activation_bytes_per_s": bytes_per_s}

    for kernel, step_s in zip(KERNELS, STEPS_S[card, tokens], strict=True):
        found = in_chunks(card, kernel, Lora(16), tokens, **written(Lora(16)))
        assert found[1] == pytest.approx(step_s, rel=0.05)
    if card == "H100":
        model, step_s = in_chunks(card, "cuDNN", None, tokens, **written(None))
        flops = step_flops(model.shape, [tokens], has_frozen_base=False)
        assert flops / 989e12 / step_s == pytest.approx(MFU[tokens], rel=0.05)
    assert Machine.named(card).attended_by("cuDNN") == Machine.named(card)


@pytest.mark.parametrize(("change", "slower"), [({"window": 256}, True), ({}, False)])
def test_what_cudnn_does_not_take_has_the_rate_of_packed_slices(change, slower):
    """Windows and wide heads, wherever their keys lie."""
    shape = model_shape("Qwen3-8B")
    layers = tuple(replace(layer, **change) for layer in shape.layers)
    shapes = [replace(shape, layers=layers), replace(shape, layers=layers, head_dim=256)]
    free = {"linear": FREE, "activation_bytes_per_s": inf, "layer_launch_s": 0.0}
    table = chunk_table([Chunk((Slice(0, 2**16, 2**17),))], shapes[0], 1)
    seconds = []
    for own, kernel in product(shapes, KERNELS[:2]):
        model = CostModel(own, replace(Machine.named("H100").attended_by(kernel), **free))
        stage = model.stage_seconds((36,), 0, layout=Layout(), ranks=(0,))
        seconds.append(stage.pass_seconds((PassPart("forward"),), table).sum())
    flash_s, cudnn_s, wide_flash_s, wide_cudnn_s = seconds
    assert wide_cudnn_s == pytest.approx(wide_flash_s, rel=0.01)
    assert cudnn_s == pytest.approx(flash_s if slower else flash_s * 370 / 580, rel=0.02)

"""Places larger than the heads: what every process computes, exchanges and keeps, counted by hand
from the rows and heads that each of them has."""

from dataclasses import replace
from math import inf

import pytest
from helpers.shapes import shape_of_values

from furlong.cost.machine import Efficiency, Link, Machine
from furlong.cost.memory import PlanMemory
from furlong.cost.model import CostModel
from furlong.cost.seconds import chunk_table
from furlong.cost.training import Training
from furlong.plan.check import check
from furlong.plan.plan import (
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Place,
    Recompute,
    Slice,
)

FREE = Efficiency(inf, 0.0)
NUM_LAYERS, HEAD_DIM = 3, 16
CASES = [
    (4, 4, 8, 4),
    (4, 2, 8, 4),
    (4, 1, 4, 4),
    (6, 2, 8, 2),
    (7, 7, 4, 1),
    (8, 4, 8, 8),
    (12, 3, 4, 1),
]
"""Query heads, K,V heads, size of the place, size of an inner group."""


def shape_of(num_heads, num_kv_heads):
    return shape_of_values({
        "model_type": "llama", "hidden_size": 16 * num_heads, "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads,
        "head_dim": HEAD_DIM, "intermediate_size": 160, "vocab_size": 8,
    })  # fmt: skip


def one_slice(num_tokens, size, pool=8):
    chunks = (Chunk((Slice(0, 0, num_tokens, Place(0, size)),)),)
    return ChunkPlan(
        (num_tokens,), chunks, (NUM_LAYERS,), ((Forward(0, 0, "all"), Backward(0, 0)),),
        sp_size=pool,
    )  # fmt: skip


def on_links(**links):
    """A device on which nothing but links takes time."""
    a100 = Machine.named("A100-80")
    return replace(
        a100, linear=FREE, attention_forward=FREE, attention_backward=FREE, layer_launch_s=0.0,
        activation_bytes_per_s=inf, links=replace(a100.links, **links),
    )  # fmt: skip


def rows_of_block(num_tokens, block, num_blocks):
    """An early and a late part of 2 * num_blocks."""
    part = num_tokens // (2 * num_blocks)
    late = 2 * num_blocks - 1 - block
    return [*range(block * part, (block + 1) * part), *range(late * part, (late + 1) * part)]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "size", "inner"), CASES)
@pytest.mark.few(3)
def test_what_an_exchange_moves_and_what_is_attended(num_heads, num_kv_heads, size, inner):
    """Every process, one by one: the elements that it receives, and its keys times heads."""
    num_tokens, element_bytes = 32 * size, 2
    num_blocks, heads = size // inner, num_heads // inner
    received, attended = [], []
    for process in range(size):
        block, number = divmod(process, inner)
        rows = rows_of_block(num_tokens, block, num_blocks)
        own = len(rows) // inner
        needed = {
            head * num_kv_heads // num_heads for head in range(number * heads, (number + 1) * heads)
        }
        q = (len(rows) - own) * heads * HEAD_DIM
        kv = 2 * (num_tokens - own) * len(needed) * HEAD_DIM
        received.append(2 * q + kv)  # what the output brings back is what q brought
        attended.append(sum(row + 1 for row in rows) * heads)
    assert len(set(received)) == len(set(attended)) == 1

    shape, slow = shape_of(num_heads, num_kv_heads), Link(0.0, 1.0)
    spec = on_links(within_node=slow, between_nodes=slow)
    plan = one_slice(num_tokens, size)
    costs = CostModel(shape, spec, Training()).costs(plan)
    forward_s, backward_s = (costs.compute_s(action, 0) for action in plan.actions[0])
    assert forward_s == pytest.approx(NUM_LAYERS * element_bytes * received[0])
    assert backward_s == pytest.approx(forward_s)
    table = chunk_table(plan.chunks, shape, 8)
    assert table.shared_keys[None, "square"][0, 0] * num_heads == attended[0]
    assert table.num_slices[0, 0] == (1 if num_blocks == 1 else 2)


def test_a_gathered_exchange_waits_once_for_its_latency():
    shape = shape_of(2, 2)
    endless = Link(1e-3, inf)
    spec = on_links(within_node=endless, between_nodes=endless)
    plans = [one_slice(64, size) for size in (2, 4, 8)]
    steps = [CostModel(shape, spec).costs(p).compute_s(p.actions[0][0], 0) for p in plans]
    assert steps == pytest.approx([NUM_LAYERS * 4e-3] * 3)


def test_far_keys_and_near_queries_go_over_their_own_links():
    shape = shape_of(4, 4)
    spec = on_links(devices_per_node=4, within_node=Link(0.0, 1.0), between_nodes=Link(0.0, 0.1))
    plan = one_slice(64, 8)
    # of 64 tokens in two groups of four: q of 24 rows from near, K,V of 56 from all; one head each;
    # four of the seven others are in the other node
    near, everywhere = 2 * 24 * HEAD_DIM * 2, 2 * 56 * HEAD_DIM * 2
    found = CostModel(shape, spec).costs(plan).compute_s(plan.actions[0][0], 0)
    assert found == pytest.approx(NUM_LAYERS * (near + everywhere * (4 / 7) / 0.1))


@pytest.mark.parametrize("layers", [0, 2, 3])
def test_a_graph_keeps_the_gathered_keys_of_the_layers_that_it_keeps(layers):
    """Two heads on a place of eight: every process has one head of all tokens, four times its part;
    on two places of the inner size, with as many tokens each, only its own part."""
    shape, num_tokens = shape_of(2, 2), 800
    memory = PlanMemory(shape, Training(), 10**15)
    actions = ((Forward(0, 0, "all", layers), Backward(0, 0)),)
    gathered = replace(one_slice(num_tokens, 8), actions=actions)
    lens = (num_tokens // 4,) * 4
    places = [Place(first, 2) for first in range(0, 8, 2)]
    slices = (Slice(i, 0, n, places[i]) for i, n in enumerate(lens))
    plain = replace(gathered, seq_lens=lens, chunks=(Chunk(tuple(slices)),))
    for plan in (gathered, plain):
        check(plan, memory)
    token_bytes = 2 * shape.kv_size * 2  # K and V in 16 bits
    beyond = (num_tokens / 2 - num_tokens / 8) * token_bytes
    many, few = (memory.curve(plan, 0).device.sum(axis=1) for plan in (gathered, plain))
    # one layer's are received, or its gradients sent, while a pass runs; a checkpointed layer's
    # are there again in the backward
    kept = NUM_LAYERS - layers
    assert many - few == pytest.approx([beyond * (kept + 1), beyond * (kept + 1 + (layers > 0))])


def test_a_store_keeps_the_keys_of_every_token_of_the_process_heads():
    shape = shape_of(2, 2)
    place = Place(0, 8)
    chunks = Chunk((Slice(0, 0, 600, place),)), Chunk((Slice(0, 600, 1000, place),))
    actions = (
        Forward(0, 0, "kv"), Forward(1, 0, "all"), Backward(1, 0), Recompute(0, 0), Backward(0, 0),
    )  # fmt: skip
    plan = ChunkPlan((1000,), chunks, (NUM_LAYERS,), (actions,), sp_size=8)
    memory = PlanMemory(shape, Training(), 10**15)
    check(plan, memory)
    # the last piece stores none
    stored = memory.curve(plan, 0).peak["kv"]
    assert stored == NUM_LAYERS * 600 * (2 * HEAD_DIM * 2)
    table = chunk_table(chunks, shape, 8)
    assert table.prefix_tokens[None][0].tolist() == [0, 600 / 2]
    assert table.prefix_keys(None)[0].tolist() == [0, 600 * 400 / 8]


def test_processes_that_get_other_tokens_are_told_apart():
    """Equal tokens on all processes, but K,V gathered on half of them alone."""
    shape = shape_of(1, 1)
    slices = [
        Slice(0, 0, 400, Place(0, 4)),
        *(Slice(i - 3, 0, 100, Place(i, 1)) for i in range(4, 8)),
    ]
    lens = (400, 100, 100, 100, 100)
    plan = replace(one_slice(400, 8), seq_lens=lens, chunks=(Chunk(tuple(slices)),))
    local = [Slice(i, 0, 100, Place(i, 1)) for i in range(8)]
    alike = replace(plan, seq_lens=(100,) * 8, chunks=(Chunk(tuple(local)),))
    memory = PlanMemory(shape, Training(), 10**15)
    more, less = (sum(memory.curve(p, 0).peak.values()) for p in (plan, alike))
    travels = 100 * 2 * (2 * HEAD_DIM + 2 * HEAD_DIM)  # q, k, v, and a copy of what is sent
    assert more - less == pytest.approx((NUM_LAYERS + 1) * 300 * 2 * HEAD_DIM * 2 + travels)

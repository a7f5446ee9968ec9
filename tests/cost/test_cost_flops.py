"""FLOPs: counted pairs, the closed form of a step, and what torch counts in the real executor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from papers.chunkflow_plan import plan_chunkflow

from furlong.cost.machine import Efficiency, HardwareSpec, hardware
from furlong.cost.model import CostModel
from furlong.cost.seconds import (
    ATTENTION_BACKWARD,
    attended_keys,
    sequence_flops,
    stage_flops,
)
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.models.describe import describe
from furlong.planners.options import ChunkOptions

TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 90,
}  # fmt: skip


@given(start=st.integers(0, 60), length=st.integers(0, 60), window=st.none() | st.integers(1, 70))
def test_attended_keys_are_the_pairs_of_the_mask(start, length, window):
    stop = start + length
    pairs = sum(
        1 for q in range(start, stop) for k in range(q + 1) if window is None or q - k < window
    )
    assert attended_keys(start, stop, window) == pairs


def test_a_step_is_six_parameters_and_causal_attention():
    shape = model_shape("Llama-2-7B")
    seq_len = 4096
    step = sequence_flops(shape, seq_len).times(3, 1 + ATTENTION_BACKWARD)
    matrices = sum(shape.layers[i].matrices for i in range(32)) + shape.embedding_parameters
    assert step.linear == 6 * matrices * seq_len
    assert step.attention == 32 * 3.5 * 4 * 4096 * seq_len * (seq_len + 1) / 2


def test_chunks_of_a_sequence_sum_to_the_sequence():
    shape = describe(TINY | {"model_type": "mistral", "sliding_window": 7})
    stage = stage_flops(shape, (3,), 0)
    parts = [(0, 5), (5, 6), (6, 30), (30, 41)]
    total = sum(stage.forward(b - a, {7: attended_keys(a, b, 7)}).total for a, b in parts)
    assert total + stage.head_per_token * 41 == sequence_flops(shape, 41).total


def test_stages_sum_to_the_model():
    shape = model_shape("Qwen2.5-7B")
    keys = {None: 1000.0}
    whole = stage_flops(shape, (28,), 0).forward(100, keys)
    parts = [stage_flops(shape, (10, 11, 7), s) for s in range(3)]
    assert sum(part.forward(100, keys).total for part in parts) == whole.total
    assert [part.head_per_token > 0 for part in parts] == [False, False, True]
    left_out = 2 * (shape.layers[27].matrices - shape.layers[27].before_kv)
    assert parts[-1].tail_per_token == left_out


def test_layers_with_and_without_window_are_told_apart():
    shape = describe(
        TINY | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 4, "num_hidden_layers": 5}
    )
    stage = stage_flops(shape, (5,), 0)
    assert sorted(map(str, stage.windows)) == ["4", "4", "4", "None", "None"]
    assert stage.forward(0, {4: 1.0, None: 100.0}).attention == 4 * 32 * (3 + 200)


def perfect(attention_counts=False):
    """A device whose seconds are FLOPs."""
    spec = hardware("A100-80")
    free = Efficiency(1.0 if attention_counts else 1e30, 0.0)
    return HardwareSpec(
        "perfect", 1.0, spec.memory_bytes, 0, Efficiency(1.0, 0.0), free, free, 0.0, spec.links
    )


@pytest.mark.parametrize("keep", ["all", "attention", "kv", "input"])
@pytest.mark.parametrize("lora", [False, True])
def test_linear_flops_are_those_that_the_executor_runs(keep, lora):
    """Every first-pass saving included; torch counts the matrix products."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    from furlong.api import Engine

    config = AutoConfig.for_model(**TINY)
    model = AutoModelForCausalLM.from_config(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = get_peft_model(model, LoraConfig(r=4, target_modules=modules))
    lens = (41, 9, 6, 3)
    options = ChunkOptions(size=16, num_retained=1, keep=keep)
    engine = Engine(model)
    tokens = [torch.randint(0, 90, (n,)) for n in lens]
    sequences = [{"input_ids": t, "labels": t} for t in tokens]
    with FlopCounterMode(display=False) as counter:
        engine.forward_backward(sequences, options)  # checked anew: the counter hooks all modules
        before = counter.get_total_flops()
        engine.forward_backward(sequences, options)

    shape = describe(TINY)
    plan = plan_chunkflow(lens, options, stages=(3,))
    training = Training(lora=Lora(4) if lora else None)
    costs = CostModel(shape, perfect(), training).costs(plan)
    counted = sum(costs.compute_s(action, 0) for action in plan.actions[0])
    # the last token of a sequence has no label, so the head does not see it
    counted -= len(lens) * (2 if lora else 3) * 2 * shape.embedding_parameters
    # under LoRA torch skips the gradient of the bottom layer's input: of q, k, v and their adapters
    skipped = (2 * shape.layers[0].before_kv + 3 * 2 * 4 * 32) * sum(lens) if lora else 0
    # left out of the count: the rotary table of every pass, a product of one column and one row.
    found = counter.get_total_flops() - before
    assert found == pytest.approx(counted - skipped, rel=4e-3)


def test_attention_flops_of_every_action():
    shape = describe(TINY)
    cost = CostModel(shape, perfect(attention_counts=True))
    plan = plan_chunkflow((10,), ChunkOptions(size=4, num_retained=1, keep="kv"), stages=(3,))
    costs = cost.costs(plan)
    stage = stage_flops(shape, (3,), 0)
    for action in plan.actions[0][:-1]:
        piece = plan.chunks[action.chunk].slices[0]
        n = piece.num_tokens
        keys = {None: float(attended_keys(piece.start, piece.stop))}
        forward = stage.forward(n, keys)
        # a first pass stops at the last layer's K,V
        tail = stage.tail_per_token * n + stage.attention_per_key[0] * keys[None]
        expected = {
            "Forward": forward.total - (0 if piece.stop == 10 else tail),
            "Recompute": forward.total,
            "Backward": forward.times(2, ATTENTION_BACKWARD).total + 3 * stage.head_per_token * n,
        }[type(action).__name__]
        assert costs.compute_s(action, 0) == pytest.approx(expected), action

"""FLOPs: counted pairs, the closed form of a step, and what torch counts in the real executor."""

from dataclasses import replace

import pytest
from helpers.shapes import shape_of_values, with_windows
from hypothesis import given
from hypothesis import strategies as st
from papers.chunkflow_plan import plan_chunkflow

from furlong.cost.machine import Efficiency, Machine
from furlong.cost.model import CostModel
from furlong.cost.seconds import ATTENTION_BACKWARD, attended_keys, sequence_flops
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.plan.plan import Chunk, Recv, Reduce, Send, Slice
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
    linear, attention = sequence_flops(shape, seq_len)
    matrices = sum(shape.layers[i].matrices for i in range(32)) + shape.embedding_parameters
    assert 3 * linear == 6 * matrices * seq_len
    attention *= 1 + ATTENTION_BACKWARD
    assert attention == 32 * 3.5 * 4 * 4096 * seq_len * (seq_len + 1) / 2


def perfect(attention_counts=False):
    """A device whose seconds are FLOPs."""
    spec = Machine.named("A100-80")
    free = Efficiency(1.0 if attention_counts else 1e30, 0.0)
    return Machine(
        "perfect", 1.0, spec.memory_bytes, 0, Efficiency(1.0, 0.0), free, free, 0.0, spec.links
    )


@pytest.mark.parametrize(
    ("keep", "lora"), [("all", False), ("attention", True), ("kv", False), ("input", True)]
)
@pytest.mark.few(2)
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

    shape = shape_of_values(TINY)
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


@pytest.mark.parametrize(("stages", "window"), [((3,), None), ((1, 2), None), ((3,), 5)])
def test_flops_of_every_action(stages, window):
    """By hand: matrices 2 per parameter, attention 4 N H for each pair; twice and 2.5 times in a
    backward; of whole models and of pipelines."""
    shape = with_windows(shape_of_values(TINY), (window,) * 3)
    plan = plan_chunkflow((10,), ChunkOptions(size=4, num_retained=1, keep="kv"), stages=stages)
    costs = CostModel(shape, perfect(attention_counts=True)).costs(plan)
    layer = shape.layers[0]
    for rank, actions in enumerate(plan.actions):
        height, is_last = stages[rank], rank == len(stages) - 1
        for action in actions:
            if isinstance(action, Send | Recv | Reduce):
                continue
            piece = plan.chunks[action.chunk].slices[0]
            n = piece.num_tokens
            seen = [min(t + 1, window or t + 1) for t in range(piece.start, piece.stop)]
            attention = 4 * 32 * sum(seen)
            head = 3 * 2 * shape.embedding_parameters * n * is_last
            # a first pass of the last stage stops at the last layer's K,V
            stops = 2 * n * (layer.matrices - layer.before_kv) + attention
            forward = height * (2 * layer.matrices * n + attention)
            expected = {
                "Forward": forward - stops * (is_last and piece.stop < 10),
                "Recompute": forward,
                "Backward": height * (4 * layer.matrices * n + 2.5 * attention) + head,
            }[type(action).__name__]
            assert costs.compute_s(action, rank) == pytest.approx(expected), action


def test_replicas_are_dealt_sequences_by_what_their_chunks_take():
    """Where kernels are at their best whatever the size of a chunk."""
    shape, lens = model_shape("Qwen2.5-0.5B"), [300, 40_000]
    machine = replace(
        perfect(attention_counts=True), linear=Efficiency(0.5, 0.0),
        attention_forward=Efficiency(0.4, 0.0), attention_backward=Efficiency(0.3, 0.0),
    )  # fmt: skip
    for lora in (None, Lora(1)):
        model = CostModel(shape, machine, Training(lora=lora))
        own = [
            model.cell_seconds([Chunk((Slice(0, 0, n),))], (shape.num_layers,)).sum() for n in lens
        ]
        assert model.sequence_seconds(lens) == pytest.approx(
            own, rel=1e-12 if lora is None else 0.01
        )

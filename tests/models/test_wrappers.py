"""Adapters and wrappers around a model: equal to the model's own forward, or refused by name."""

from __future__ import annotations

import functools
from typing import Any

import peft
import pytest
import torch
from helpers.batches import batch
from helpers.tiny_families import build
from torch import nn

import furlong
from furlong.errors import UnsupportedModelError
from furlong.testing import reference_loss, take_grads, worst_relative_error

OPTIONS = furlong.ChunkOptions(size=8)
LAYER_FIRST = furlong.ChunkOptions(size=8, keep="input", order="layer-first", recompute_layers=1)
TARGETS = ["q_proj", "v_proj"]
LORA = functools.partial(peft.LoraConfig, r=4, target_modules=TARGETS, task_type="CAUSAL_LM")

EXACT: dict[str, Any] = {
    "LoRA on the head and the embeddings": LORA(target_modules=["embed_tokens", "lm_head"]),
    "LoRA and trained modules": LORA(modules_to_save=["lm_head"]),
    "LoRA of bare parameters": LORA(
        target_modules=[], target_parameters=["mlp.experts.gate_up_proj"]
    ),
    "DoRA": LORA(use_dora=True),
    "IA3": peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "VeRA": peft.VeraConfig(r=4, target_modules=TARGETS),
    "OFT": peft.OFTConfig(r=0, oft_block_size=4, target_modules=TARGETS),
    "LN tuning": peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "trainable tokens": peft.TrainableTokensConfig(
        token_indices=list(range(3, 40)), target_modules=["embed_tokens"]
    ),
    "adaption prompt": peft.AdaptionPromptConfig(
        adapter_len=3, adapter_layers=2, task_type="CAUSAL_LM"
    ),
}


def adapted(config: Any, family: str = "llama") -> Any:
    """A model whose adapters do something: no neutral start that would hide a gradient."""
    model = peft.get_peft_model(build(family), config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(0.1 * noise)
    return model


def assert_exact(model: Any, bound: float = 1e-12, **arguments: Any) -> None:
    sequences = batch([29, 4])
    loss = reference_loss(model, sequences)
    truth = take_grads(model)
    assert truth
    for options in (OPTIONS, LAYER_FIRST):
        result = furlong.forward_backward(model, sequences, options, **arguments)
        assert result.loss == pytest.approx(loss, rel=bound)
        assert worst_relative_error(take_grads(model), truth) <= bound


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.few(4)
def test_verified_adapters_are_exact(name: str) -> None:
    family = "qwen3_moe" if "bare parameters" in name else "llama"
    assert_exact(adapted(EXACT[name], family), 2e-6 if family == "qwen3_moe" else 1e-12)


@pytest.mark.parametrize("where", ["around", "model", "decoder"])
def test_a_compiled_model_runs_as_it_is_written(where: str) -> None:
    """In torch.compile's own wrapper, and compiled in place."""
    model = build("llama")
    sequences = batch([29, 4])
    reference_loss(model, sequences)
    truth = take_grads(model)
    module, given = model, model
    if where == "around":
        given = torch.compile(model)
    else:
        module = {"model": model, "decoder": model.model}[where]
        module.compile()
    call = module._compiled_call_impl
    for options in (OPTIONS, LAYER_FIRST):
        furlong.forward_backward(given, sequences, options)
        assert worst_relative_error(take_grads(model), truth) <= 1e-12
    assert module._compiled_call_impl is call


def compiled_layers(model: Any, backend: Any) -> Any:
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return model


@pytest.mark.slow
def test_layers_compiled_in_place_run_so_in_chunks() -> None:
    model, graphs = build("llama"), []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    sequences = batch([29, 4])
    reference_loss(model, sequences)
    truth = take_grads(model)
    engine = furlong.Engine(model)
    compiled_layers(model, counting)
    for options in (LAYER_FIRST, OPTIONS):
        engine.forward_backward(sequences, options)
        assert worst_relative_error(take_grads(model), truth) <= 1e-12
    num_graphs = len(graphs)
    assert num_graphs > 3, "checked again, with a graph before and behind attention"
    engine.forward_backward(batch([31, 19]), OPTIONS)
    assert len(graphs) == num_graphs, "other lengths have a graph"


def test_layers_that_compute_something_else_compiled_are_refused() -> None:
    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *x: [y * 1.01 if torch.is_tensor(y) else y for y in graph.forward(*x)]

    model = build("llama")
    engine = furlong.Engine(model)
    torch._dynamo.reset()
    model.model.layers[1].mlp.compile(backend=wrong)
    with pytest.raises(
        UnsupportedModelError, match=r"chunks than whole(.|\n)*leave out layer.comp"
    ):
        engine.forward_backward(batch([29, 4]), OPTIONS)


def test_compiled_layers_with_dropout_are_refused() -> None:
    model: Any = peft.get_peft_model(build("llama"), LORA(lora_dropout=0.1))
    model.model.model.layers[0].mlp.compile()
    with pytest.raises(UnsupportedModelError, match=r"compiled in place, and dropout"):
        furlong.Engine(model)


def test_a_compiler_that_fails_is_told() -> None:
    def failing(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    with pytest.raises(UnsupportedModelError, match=r"no compiler here(.|\n)*leave out layer.comp"):
        furlong.Engine(compiled_layers(build("llama"), failing))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_wrappers_of_several_processes_say_what_to_pass(kind: str, tmp_path: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = build("llama", torch.float32)
        if kind == "ddp":
            wrapped: nn.Module = nn.parallel.DistributedDataParallel(model)
        else:
            wrapped = torch.distributed.fsdp.fully_shard(model)
        with pytest.raises(UnsupportedModelError, match=r"one process|whole on one device"):
            furlong.Engine(wrapped)
    finally:
        torch.distributed.destroy_process_group()

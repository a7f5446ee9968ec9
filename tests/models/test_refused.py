"""Models that could not be trained exactly: refused by name, before anything is computed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate import cpu_offload
from helpers.attention_families import LATENT
from helpers.batches import batch
from helpers.tiny_families import VOCAB_SIZE, build, build_other
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoConfig, AutoModelForCausalLM

import furlong
from furlong.errors import UnsupportedModelError
from furlong.models.build import build_model

OPTIONS = furlong.ChunkOptions(size=8)
TARGETS = ["q_proj", "v_proj"]
LORA = functools.partial(peft.LoraConfig, r=4, target_modules=TARGETS, task_type="CAUSAL_LM")
VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
INDEXED = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, **LATENT, "index_topk": 16,
    "index_head_dim": 16, "index_n_heads": 2,
}  # fmt: skip


def with_adapters(config: Any) -> Any:
    return peft.get_peft_model(build("llama"), config)


def changed(change: Callable[[Any], Any]) -> Any:
    """A model after a change, which may return another one."""
    model: Any = build("llama", torch.float32)
    return change(model) or model


def with_own_adapter(model: Any) -> None:
    model.add_adapter(LORA(alora_invocation_tokens=[5, 6]))


def with_layer(wrap: Callable[[Any], Any], model: Any) -> None:
    model.model.layers[1] = wrap(model.model.layers[1])


def with_other_types(model: Any) -> None:
    model.config.layer_types = ["chunked_attention", "full_attention"]


def on_two_devices(model: Any) -> None:
    model.model.layers[2].to("meta")


def quantised(model: Any) -> None:
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def packed(model: Any) -> None:
    weight = torch.zeros(4, 4, dtype=torch.uint8)
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(weight, requires_grad=False)


def with_hook(model: Any) -> None:
    model.model.norm.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def encoder_decoder() -> Any:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=VOCAB_SIZE, **sizes)
    return transformers.T5ForConditionalGeneration(config)


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "falcon": (lambda: build_other("falcon", alibi=True), "Falcon"),
    "bloom": (lambda: build_other("bloom", n_head=4, hidden_size=32), "Bloom"),
    "xglm, whatever its dropout": (
        lambda: build_other("xglm", attention_dropout=0.1), "AttentionInterface",
    ),
    "attention dropout": (lambda: build_other("gpt2", attn_pdrop=0.1), "attention dropout 0.1"),
    "attention in both directions": (
        lambda: build_other("gemma3_text", head_dim=8, use_bidirectional_attention=True),
        "both directions",
    ),
    "a router loss": (
        lambda: build_other("doge", is_moe=True, output_router_logits=True),
        "router loss",
    ),
    "attention blocks of no size": (lambda: changed(with_other_types), "chunked_attention"),
    "states of an own cache": (lambda: build_other("xlstm", num_heads=4), "xLSTM"),
    "a learned indexer": (
        lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v32", **INDEXED)),
        "DeepseekV32ForCausalLM, which picks the keys",
    ),
    "an encoder": (encoder_decoder, "T5ForConditionalGeneration"),
    "prompt tuning": (
        lambda: with_adapters(peft.PromptTuningConfig(**VIRTUAL)), r"learning \(PROMPT_TUNING\)",
    ),
    "prefix tuning": (
        lambda: with_adapters(peft.PrefixTuningConfig(**VIRTUAL)), r"learning \(PREFIX_TUNING\)",
    ),
    "p-tuning": (
        lambda: with_adapters(peft.PromptEncoderConfig(**VIRTUAL, encoder_hidden_size=8)),
        r"learning \(P_TUNING\)",
    ),
    "aLoRA": (lambda: with_adapters(LORA(alora_invocation_tokens=[5, 6])), "aLoRA"),
    "adapters that transformers put in": (lambda: changed(with_own_adapter), "aLoRA"),
    "AdaLoRA": (
        lambda: with_adapters(
            peft.AdaLoraConfig(
                target_modules=TARGETS, total_step=10, init_r=4, target_r=2, tinit=1, tfinal=2
            )
        ),
        "AdaLoRA",
    ),
    "unverified adapters": (
        lambda: with_adapters(peft.LoHaConfig(r=4, target_modules=TARGETS)),
        "adapters of type LOHA, which were never compared",
    ),
    "a compiled layer": (
        lambda: changed(functools.partial(with_layer, torch.compile)),
        r"compiled layer .* at model.layers.1",
    ),
    "a checkpoint wrapper": (
        lambda: changed(functools.partial(with_layer, checkpoint_wrapper)), "checkpoint_wrapper",
    ),
    "DataParallel": (lambda: changed(nn.DataParallel), r"pass model\.module"),
    "offloaded": (
        lambda: changed(lambda m: cpu_offload(m, execution_device=torch.device("cpu"))),
        "offloaded",
    ),
    "two devices": (lambda: changed(on_two_devices), "spread over cpu, meta"),
    "quantised": (lambda: changed(quantised), "is quantised"),
    "packed": (lambda: changed(packed), r"up_proj\.weight holds packed numbers"),
    "a hook on a weight": (lambda: changed(with_hook), r"hook on model\.norm\.weight"),
    "a name": (lambda: "gpt2", "str is no model"),
    "a layer": (lambda: nn.Linear(2, 2), "Linear is no transformers model"),
    "no head": (lambda: changed(lambda m: m.model), "LlamaModel .*(?s:.*)AutoModelForCausalLM"),
    "no values": (lambda: changed(lambda m: m.to("meta")), "meta(?s:.*)AutoModelForCausalLM"),
    "a masked model, whose dropout is no matter": (
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=1)),
        "causal",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_refused_by_name(name: str) -> None:
    make, told = MODELS[name]
    model = make()
    with pytest.raises(UnsupportedModelError, match=told):
        furlong.Engine(model).forward_backward(batch([21, 4]), OPTIONS)
    if isinstance(model, nn.Module):
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_hook_on_a_weight_is_no_fault_of_an_evaluation() -> None:
    assert furlong.forward_backward(changed(with_hook), batch([21]), OPTIONS, backward=False).loss


FOLDERS: dict[str, tuple[dict[str, Any], str]] = {
    "axk2": (INDEXED, "learned indexer"),
    "minimax_m3_vl_text": ({}, "learned indexer"),
    "qwen4_exp_text": (
        {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256,
         "indexer_budget": 16, "indexer_compress_ratio": 4},
        "learned indexer",
    ),
    "rwkv": ({}, "outside of transformers' cache"),
}  # fmt: skip
"""Three by their keys, one by its type; all types of the table of families are in test_describe."""


@pytest.mark.parametrize("model_type", FOLDERS)
def test_a_folder_is_refused_before_weights_are_read(model_type: str, tmp_path: Path) -> None:
    """It has none: whoever looked for weights would say so."""
    settings, why = FOLDERS[model_type]
    config = AutoConfig.for_model(model_type, **settings)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(UnsupportedModelError, match=why) as refusal:
        build_model(str(tmp_path))
    assert f"model type {model_type}" in str(refusal.value)

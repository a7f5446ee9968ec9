"""Tiny randomly initialized models of every tested family, and the error bound of each.

A new family needs a row in `furlong.families` and a line here: in `OTHERS`, or in `FAMILIES` to run
the whole matrix on it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

EXACT = 1e-12
ROUNDED = 2e-6
"""The bound if transformers itself rounds to float32 inside a float64 model."""

VOCAB_SIZE = 96
WINDOW = 6

_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
_HEADS = {"head_dim": 8}
_WINDOW = {"sliding_window": WINDOW}
_PATTERN = _WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
_PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}

# model type: (its own settings beside _SMALL, None for those that it must not have; bound)
FAMILIES: dict[str, tuple[dict[str, Any], float]] = {
    "llama": ({}, EXACT),
    "qwen2": ({}, EXACT),
    "qwen3": (_HEADS, EXACT),
    "mistral": (_WINDOW, EXACT),
    "phi3": (_PLAIN, EXACT),
    "olmo2": ({}, EXACT),
    "granite": ({"logits_scaling": 4.0, "residual_multiplier": 0.5}, EXACT),
    "gpt_neox": ({"hidden_dropout": 0.0, "num_key_value_heads": None}, EXACT),
    "stablelm": ({"hidden_dropout": 0.0}, EXACT),
    "gemma2": (
        {**_HEADS, **_WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
         "query_pre_attn_scalar": 8},
        ROUNDED,
    ),
    "gemma3_text": ({**_HEADS, **_PATTERN, "query_pre_attn_scalar": 8}, ROUNDED),
    "gpt_oss": ({**_HEADS, **_PATTERN, **_EXPERTS, "num_local_experts": 4}, ROUNDED),
    "mixtral": ({**_EXPERTS, "num_local_experts": 4}, ROUNDED),
    "qwen3_moe": (
        {**_HEADS, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 24}, ROUNDED,
    ),
}  # fmt: skip
"""The families of the matrix."""

OTHERS: dict[str, tuple[dict[str, Any], float]] = {
    "cohere": ({"logit_scale": 0.25, "use_qk_norm": True}, ROUNDED),
    "exaone4": (_WINDOW, EXACT),
    "gemma": (_HEADS, ROUNDED),
    "glm4": (_HEADS, EXACT),
    "gpt2": (
        {**_PLAIN, "n_positions": 64, "attn_pdrop": 0.0, "scale_attn_by_inverse_layer_idx": True},
        EXACT,
    ),
    "granitemoe": (
        {**_EXPERTS, "num_local_experts": 4, "embedding_multiplier": 12.0,
         "residual_multiplier": 0.22, "logits_scaling": 8.0, "attention_multiplier": 0.4},
        EXACT,
    ),
    "olmo3": (_WINDOW, EXACT),
    "phi": (_PLAIN, EXACT),
    "qwen2_moe": (
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 2,
         "shared_expert_intermediate_size": 40},
        ROUNDED,
    ),
    "smollm3": ({"no_rope_layer_interval": 2}, EXACT),
    "starcoder2": ({**_WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0}, EXACT),
}  # fmt: skip


def own_settings(family: str) -> dict[str, Any]:
    """Return a family's settings besides `_SMALL`; none if it is in neither table."""
    return (FAMILIES | OTHERS).get(family, ({}, EXACT))[0]


def bound(family: str) -> float:
    """Return the largest relative error of a gradient that is allowed."""
    return (FAMILIES | OTHERS)[family][1]


def config_of(family: str, **changes: object) -> Any:
    """Return a tiny config of a family; a change to None leaves a setting to transformers."""
    settings = {**_SMALL, **own_settings(family), **changes}
    return AutoConfig.for_model(family, **{k: v for k, v in settings.items() if v is not None})


def build(
    family: str, dtype: torch.dtype = torch.float64, *, seed: int = 0, **changes: object
) -> PreTrainedModel:
    """Return a model in train mode; its weights are five times as large as usual, so that attention
    matters."""
    config = config_of(family, **changes)
    softcap = getattr(config, "attn_logit_softcapping", None)  # SDPA does not support it
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if softcap else None
    )
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).train()


def build_other(model_type: str, **changes: object) -> PreTrainedModel:
    """Return a float64 model of any type in train mode, with two layers and default weights."""
    config = AutoConfig.for_model(model_type, **{**_SMALL, "num_hidden_layers": 2, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.double().train()

"""Tiny random-initialised models of every family in the matrix, and the bound each must meet."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForCausalLM

EXACT = 1e-12
ROUNDED = 2e-6
"""Where transformers itself rounds to float32 inside a float64 model."""

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
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}

# family: (config class, its own settings, bound, attention of the reference)
FAMILIES: dict[str, tuple[str, dict, float, str]] = {
    "llama": ("LlamaConfig", {}, EXACT, "sdpa"),
    "qwen2": ("Qwen2Config", {}, EXACT, "sdpa"),
    "qwen3": ("Qwen3Config", {"head_dim": 8}, EXACT, "sdpa"),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}, EXACT, "sdpa"),
    "phi3": ("Phi3Config", {"resid_pdrop": 0.0, "embd_pdrop": 0.0}, EXACT, "sdpa"),
    "olmo2": ("Olmo2Config", {}, EXACT, "sdpa"),
    "granite": (
        "GraniteConfig", {"logits_scaling": 4.0, "residual_multiplier": 0.5}, EXACT, "sdpa",
    ),
    "gpt_neox": (
        "GPTNeoXConfig", {"hidden_dropout": 0.0, "num_key_value_heads": None}, EXACT, "sdpa",
    ),
    "stablelm": ("StableLmConfig", {"hidden_dropout": 0.0}, EXACT, "sdpa"),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
        ROUNDED, "eager",
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _ALTERNATING,
         "query_pre_attn_scalar": 8},
        ROUNDED, "sdpa",
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _ALTERNATING,
         "num_local_experts": 4, **_EXPERTS},
        ROUNDED, "eager",
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, **_EXPERTS}, ROUNDED, "sdpa"),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, **_EXPERTS},
        ROUNDED, "sdpa",
    ),
}  # fmt: skip


def build(
    family: str, dtype: torch.dtype = torch.float64, *, seed: int = 0, **changes: object
) -> transformers.PreTrainedModel:
    """A model in train mode whose attention matters: weights five times the usual spread."""
    config_class, own, _, attention = FAMILIES[family]
    settings = {k: v for k, v in ({**_SMALL, **own, **changes}).items() if v is not None}
    config = getattr(transformers, config_class)(**settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).train()


def build_other(config_class: str, **changes: object) -> transformers.PreTrainedModel:
    """A float64 model of any config class, in train mode, of two layers."""
    config = getattr(transformers, config_class)(**{**_SMALL, "num_hidden_layers": 2, **changes})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).double().train()


def bound(family: str) -> float:
    return FAMILIES[family][2]

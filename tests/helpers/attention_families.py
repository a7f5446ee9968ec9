"""Tiny float64 twins of families with special attention: latent, chunked, or different from layer
to layer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from helpers.float64_twin import twin_class

VOCAB_SIZE = 320
WINDOW = 20

_SMALL = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "num_key_value_heads": 4,
}  # fmt: skip
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}
_ALTERNATING = ["sliding_attention", "full_attention"]

# name: (model type, its own settings beside _SMALL)
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {**LATENT, **_ROUTED}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, **_ROUTED}),
    "axk1": ("axk1", {**LATENT, **_ROUTED}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {**LATENT, **_ROUTED, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    ),
    "minicpm3": ("minicpm3", LATENT),
    "youtu": ("youtu", LATENT),
    "llama4": (
        "llama4_text",
        {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_layers": [1, 3],
         "intermediate_size_mlp": 96, "attention_chunk_size": WINDOW, "floor_scale": 16,
         "no_rope_layer_interval": 2},
    ),
    "gemma4": (
        "gemma4_text",
        {**_PER_LAYER, "head_dim": 16, "global_head_dim": 16, "sliding_window": WINDOW,
         "layer_types": _ALTERNATING * 2},
    ),
    "gemma4 with shared keys": (
        "gemma4_text",
        {**_PER_LAYER, "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW,
         "layer_types": _ALTERNATING * 3, "num_hidden_layers": 6, "num_kv_shared_layers": 2},
    ),
}  # fmt: skip


def twin_of(name: str, **changes: object) -> PreTrainedModel:
    """Return a twin in train mode, with weights large enough for attention to matter."""
    model_type, own = TWINS[name]
    return build_twin(model_type, **{**_SMALL, **own, **changes})


def build_twin(model_type: str, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Return a causal LM in train mode with random float64 weights, none at its initial value."""
    config = AutoConfig.for_model(model_type, **settings)
    twin = twin_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    config._attn_implementation = "sdpa" if twin._supports_sdpa else "eager"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = twin._from_config(config, dtype=torch.float64)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(0.1 * torch.randn_like(parameter))
                    else:
                        parameter.mul_(3)
    finally:
        torch.set_default_dtype(before)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.train()

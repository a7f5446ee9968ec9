"""Tiny models of families with recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from helpers.float64_twin import twin_class

VOCAB_SIZE = 320
_BASE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_STATE_SPACE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 32}
_LATENT = {
    "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
_ROUTED = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}  # fmt: skip
_LINEAR, _FULL, _CONV = "linear_attention", "full_attention", "conv"

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**_BASE, **_DELTA, "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR]},
    "qwen3_5_moe_text": {**_BASE, **_DELTA, **_SHARED, "layer_types": [_LINEAR] * 3 + [_FULL]},
    "qwen3_next": {**_BASE, **_DELTA, **_SHARED, "layer_types": [_LINEAR] * 3 + [_FULL]},
    "olmo_hybrid": {**_BASE, **_DELTA, "layer_types": [_LINEAR, _FULL] * 2},
    "kimi_linear": {
        **_BASE, **_LATENT, **_ROUTED, "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR],
        "linear_head_dim": 16, "linear_num_heads": 4,
    },
    "bailing_hybrid": {
        **_BASE, **_LATENT, **_ROUTED, "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR],
        "first_k_dense_replace": 1,
    },
    "lfm2": {**_BASE, "layer_types": [_CONV, _FULL] * 2},
    "lfm2_moe": {**_BASE, **_EXPERTS, "layer_types": [_CONV, _FULL] * 2, "num_dense_layers": 1},
    "lfm3": {**_BASE, "num_hidden_layers": 5, "sliding_window": 20},
    "bamba": {**_BASE, **_MAMBA, "attn_layer_indices": [1, 3], "attn_rotary_emb": 16},
    "granitemoehybrid": {
        **_BASE, **_MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32, "layer_types": [_LINEAR, _FULL] * 2,
    },
    "nemotron_h": {
        **_BASE, "num_hidden_layers": None,
        "layers_block_type": [_LINEAR, "moe", _FULL, "mlp", _LINEAR], "mamba_num_heads": 8,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 16,
        "n_routed_experts": 4, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "falcon_h1": {
        **_BASE, **_MAMBA, "mamba_d_ssm": 128, "lm_head_multiplier": 0.7,
        "embedding_multiplier": 1.5, "key_multiplier": 0.5, "ssm_in_multiplier": 0.8,
        "ssm_out_multiplier": 1.2,
    },
    "mamba2": {
        **_STATE_SPACE, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 8,
        "chunk_size": 16,
    },
    "mamba": {**_STATE_SPACE, "state_size": 8},
    "falcon_mamba": {**_STATE_SPACE, "state_size": 8},
    "jamba": {
        **_BASE, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8,
        "attn_layer_period": 2, "attn_layer_offset": 1,
    },
    "zamba": {
        **_BASE, "head_dim": None, "num_key_value_heads": 4, "n_mamba_heads": 2,
        "mamba_d_state": 8, "layers_block_type": ["mamba", "hybrid"] * 2,
    },
    "zamba2": {
        **_BASE, "head_dim": None, "n_mamba_heads": 8, "mamba_d_state": 8, "mamba_ngroups": 2,
        "chunk_size": 16, "layers_block_type": ["mamba", "hybrid"] * 2, "num_key_value_heads": 4,
        "num_mem_blocks": 1, "use_shared_attention_adapter": True, "adapter_rank": 8,
        "use_mem_rope": True,
    },
    "minimax": {
        **_BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 16,
        "layer_types": [_LINEAR, _FULL] * 2,
    },
    "recurrent_gemma": {
        **_BASE, "lru_width": 64, "attention_window_size": 20, "num_key_value_heads": 1,
    },
}  # fmt: skip
"""Settings of a tiny config by model type; None leaves a setting to transformers."""


def build(
    model_type: str, *, wide: bool = True, twin: bool = False, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """Return a float64 model in train mode; `wide`: its weights are also drawn in float64; `twin`:
    it computes in float64 only (`helpers.float64_twin`)."""
    settings = {k: v for k, v in {**HYBRIDS[model_type], **changes}.items() if v is not None}
    config = AutoConfig.for_model(model_type, **settings)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model_class = twin_class(model_class) if twin else model_class
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if wide else torch.float32)
    try:
        model: Any = model_class._from_config(config, dtype=torch.get_default_dtype())
    finally:
        torch.set_default_dtype(before)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().train()

"""A small model of any family of transformers: its config class's own defaults, with small numbers.

Rules go by the names that families give their numbers; `_QUIRKS` holds what no rule can know. Kept:
the pattern of layer types, biases, norms, softcaps, sinks, ratios of heads, tied embeddings. The
window is shorter than the sequences, experts are few enough for all of them to be used, dropout and
router losses are off.
"""

from __future__ import annotations

import re
from typing import Any

from furlong.models.shrink import VOCAB_SIZE

FIRST_PLAIN_TOKEN = 16
"""Ids below it are left to special tokens."""
WINDOW = 6
_MAX_PREFIX = 8
_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NUM_LAYERS = re.compile(
    r"(num_(hidden_|encoder_|decoder_)?layers|n_layers?|(de|en)coder_layers|depth|num_blocks"
    r"|conf_num_hidden_layers|num_global_layers|num_layers_per_stack|(de|en)coder_num_layers)$"
)
# name of a number: its small value; the first that matches counts; a callable takes the old value
_RULES: tuple[tuple[str, Any], ...] = (
    (r".*vocab.*", VOCAB_SIZE),
    (r"qk_nope_head_dim|qk_rope_head_dim|v_head_dim|(swa_)?v_head_dim",
     lambda v: max(2, 2 * round(v / 32))),
    (r"mamba_(n_heads|num_heads)", 8),
    (r"(.*_)?(num_attention_heads|n_heads?|num_heads|attention_heads|num_v?k?q?_heads)", 4),
    (r"(.*_)?(num_key_value_heads|num_kv_heads|num_query_groups)", lambda v: min(v, 2)),
    (r"linear_num_(key|value)_heads", 4),
    (r"query_pre_attn_scalar", 8),  # scores are divided by its root
    (r"(.*_)?(head_dim|d_head|head_size|kv_channels|dim_head|d_kv|headdim|mamba_d_head)", 8),
    (r"(.*_)?(intermediate_size(_\w+)?|ffn_dim|dim_ff|d_?ff|d_inner|feed_forward_size|n_inner"
     r"|mlp_dim|ffn_hidden_size)", 64),
    (r"(.*_)?(hidden_size(_\w+)?|d_model|n_embd|embedding_(size|dim)|emb(ed)?_dim|lru_width"
     r"|word_embed_proj_dim|(out|in)put_dim|adapter_(in_dim|out_dim|input_size))", 32),
    (r"(.*_)?(q_lora_rank|rank|lowrank)", lambda v: 8),
    (r"kv_lora_rank", 8),
    (r"(moe_)?num_(local_)?experts|n_routed_experts|moe_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts", 2),
    (r"n_group|num_expert_group", 2),
    (r"topk_group|n_shared_experts|(moe_)?num_shared_experts|first_k_dense_replace"
     r"|num_dense_layers", 1),
    (r"(.*_)?(sliding_window(_size)?|window_size|local_attention|attention_chunk_size"
     r"|window_len|mem_len)", WINDOW),
    (r"floor_scale|(mamba_)?chunk_size", 8),
    (r"index_topk|index_topk_blocks|keep_window_size", 4),
    (r"index_block_size|block_size", 4),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(target|source)_positions"
     r"|context_length|model_max_length|rel_extent", 256),
    (r"(.*_)?(state_size|d_state)", 8),
    (r"image_size", 16),
    (r"(.*_)?patch_size", 4),
    (r"rotary_dim", 4),
)  # fmt: skip
_COMPILED = tuple((re.compile(f"({name})$"), small) for name, small in _RULES)

_SHARED_KV = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2, "per_layer_config": None,
}  # fmt: skip
_SHARED_BLOCKS = {
    "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 64, "attention_head_dim": 16,
}  # fmt: skip
_INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
    "indexer_compress_ratio": 4, "ngram_vocab_size_base": 50,
}  # fmt: skip
# model type: what no rule can know, a text config's under its own model type
_QUIRKS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0, "kv_n_heads": 2},
        "ffn_config": {
            "hidden_size": 32, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2,
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note_text": {"per_layer_config": None, "head_dim": 12},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        **_SHARED_KV, "intermediate_size": [64] * 6, "activation_sparsity_pattern": [0.95, 0.0] * 3,
    },
    "gemma4_text": _SHARED_KV,
    "gemma4_unified_text": _SHARED_KV,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": _SHARED_BLOCKS,
    "zamba2": {**_SHARED_BLOCKS, "hybrid_layer_ids": [1, 3], "mamba_headdim": 8},
}  # fmt: skip


def small_config(config_class: type) -> Any:
    """A config of that class with small numbers."""
    config = config_class()
    return config_class.from_dict(shrink(config))


def shrink(config: Any) -> dict[str, Any]:
    """The values of a config with small numbers."""
    return _shrink(config, config.to_dict())


def _shrink(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    for key in ("transformers_version", "dtype", "architectures", "id2label", "label2id"):
        values.pop(key, None)
    nested = {
        name: _shrink(getattr(config, name), values[name])
        for name in getattr(config, "sub_configs", {})
        if isinstance(values.get(name), dict) and getattr(config, name, None) is not None
    }
    values = {k: v for k, v in values.items() if k not in nested}
    _shrink_layers(values)
    small = {k: _small_value(k, v) for k, v in values.items()}
    _agree(values, small)
    return small | nested | _QUIRKS.get(config.model_type, {})


def _agree(values: dict[str, Any], small: dict[str, Any]) -> None:
    """Numbers that follow from others, changed in place."""
    if "head_dim" in small and small["head_dim"] is None:
        small["head_dim"] = 8
    if values.get("v_head_dim") and values.get("head_dim") and "qk_nope_head_dim" not in values:
        small["v_head_dim"] = 2 * round(4 * values["v_head_dim"] / values["head_dim"])
    if small.get("num_key_value_heads", 0) is None:
        small["num_key_value_heads"] = 2
    if "kv_lora_rank" in small:  # latent attention: one key and value head per query head
        if "num_key_value_heads" in small:
            small["num_key_value_heads"] = small["num_attention_heads"]
        rope = small.get("qk_rope_head_dim")
        if values.get("head_dim") == values.get("qk_rope_head_dim"):
            small["head_dim"] = rope
        if "qk_head_dim" in small:
            small["qk_head_dim"] = small["qk_nope_head_dim"] + rope


def _shrink_layers(values: dict[str, Any]) -> None:
    """As many layers as show every kind of layer, and every list that has an entry per layer cut
    to them."""
    for name in [n for n in values if _NUM_LAYERS.match(n)]:
        before = values[name]
        if not isinstance(before, int) or before < 3:
            continue
        per_layer = {k: v for k, v in values.items() if isinstance(v, list) and len(v) == before}
        kinds = list(zip(*(v for v in per_layer.values() if isinstance(v[0], str)), strict=True))
        seen = sorted(kinds.index(kind) for kind in set(kinds))
        shown = (seen[-1] if seen else 0) + 1
        chosen = list(range(max(3, shown))) if shown <= _MAX_PREFIX else seen
        chosen = chosen[:before]
        for key, value in per_layer.items():
            values[key] = [value[i] for i in chosen]
        if isinstance(values.get("per_layer_config"), dict):
            values["per_layer_config"] = {
                k: v for k, v in values["per_layer_config"].items() if int(k) < len(chosen)
            }
        values[name] = len(chosen)


def _small_value(key: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        if key == "is_decoder":
            return True
        return False if key == "output_router_logits" else value
    if re.match(r".*(dropout|pdrop|drop|jitter).*", key) and isinstance(value, float):
        return 0.0
    if key.endswith(("_token_id", "_token_index")):
        return _SPECIAL_TOKENS.get(key, 3 if isinstance(value, int) else [3])
    if isinstance(value, dict) and key == "per_layer_config":
        return {k: {n: _small_value(n, v) for n, v in own.items()} for k, own in value.items()}
    if isinstance(value, list) and value and all(type(v) is int for v in value):
        return [_small_value(key, v) for v in value]
    if not isinstance(value, int) or value < 2:
        return value
    for pattern, small in _COMPILED:
        if pattern.match(key):
            return small(value) if callable(small) else min(value, small)
    return value

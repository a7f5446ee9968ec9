"""Tiny checkpoints of models that hold a text decoder beside a vision tower, as a hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText

VOCAB_SIZE, NUM_TEXT_IDS = 96, 80
"""Ids from `NUM_TEXT_IDS` on stand for images and the like, which no text has."""
_TEXT = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256,
}  # fmt: skip
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "patch_size": 4}
_DEPTH = {"num_hidden_layers": 1, "image_size": 16, "num_channels": 3}
_QWEN_TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "depth": 1, "in_channels": 3,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
_QWEN_IDS = {
    "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}  # fmt: skip
_WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}


def _mrope(*sections: int, **others: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
    return {"rope_parameters": rope | {"mrope_section": [*sections]} | others}


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (_TEXT | _mrope(2, 1, 1), _QWEN_TOWER, _QWEN_IDS | {"tie_word_embeddings": True}),
    "qwen3_5": (
        _TEXT | {
            "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 2, "linear_conv_kernel_dim": 4,
        } | _mrope(2, 1, 1, partial_rotary_factor=0.5),
        _QWEN_TOWER | {"deepstack_visual_indexes": []},
        _QWEN_IDS | {"tie_word_embeddings": False},
    ),
    "gemma3": (
        _TEXT | _WINDOW | {"query_pre_attn_scalar": 8},
        _TOWER | _DEPTH | {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"mm_tokens_per_image": 4, "boi_token_index": 92, "eoi_token_index": 93,
         "image_token_index": 90, "tie_word_embeddings": True},
    ),
    "gemma4": (
        _TEXT | _WINDOW | {
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE,
            "global_head_dim": 16, "num_kv_shared_layers": 0, "final_logit_softcapping": 5.0,
            "use_bidirectional_attention": "vision",
        },
        _TOWER | {"num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 8,
                  "global_head_dim": 8, "position_embedding_size": 64, "pooling_kernel_size": 2},
        {"audio_config": None, "image_token_id": 90, "video_token_id": 91, "audio_token_id": 94,
         "boi_token_id": 92, "eoi_token_id": 93, "boa_token_id": 95, "tie_word_embeddings": True},
    ),
    "mistral3": (
        _TEXT | {"model_type": "mistral", "sliding_window": None},
        _TOWER | _DEPTH | {"model_type": "pixtral", "head_dim": 8},
        {"image_token_index": 90, "spatial_merge_size": 2, "tie_word_embeddings": False},
    ),
    "llama4": (
        _TEXT | {
            "num_hidden_layers": 4, "intermediate_size_mlp": 48, "num_local_experts": 4,
            "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 8,
            "output_router_logits": False,
        },
        _TOWER | _DEPTH | {
            "intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        {"image_token_index": 90, "boi_token_index": 92, "eoi_token_index": 93,
         "tie_word_embeddings": False},
    ),
}  # fmt: skip
"""By model type: keys of its text config, its vision config, and beside both."""


def write_checkpoint(folder: Path, kind: str, *, max_shard_size: str = "5GB", **text: Any) -> Path:
    """Write a float32 checkpoint of the whole class, with weights that matter, files of a processor
    and a tensor that transformers has no module for; return its folder."""
    own, tower, beside = KINDS[kind]
    config = AutoConfig.for_model(kind, text_config=own | text, vision_config=tower, **beside)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(5)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    _add_unknown(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": 16, "of": kind}))
    return folder


def _add_unknown(folder: Path) -> None:
    """Add a file with a tensor that transformers has no module for, in another dtype."""
    unknown = {"mtp.fc.weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3)}
    save_file(unknown, folder / "model-extra.safetensors", metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        names = tensors(folder).keys()
        (folder / "model.safetensors").rename(folder / "model-text.safetensors")
        files = dict.fromkeys(names, "model-text.safetensors")
        index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    listed = json.loads(index.read_text())
    listed["weight_map"]["mtp.fc.weight"] = "model-extra.safetensors"
    index.write_text(json.dumps(listed))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files of a checkpoint."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def open_whole(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Return the whole model of a checkpoint in train mode."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.train()

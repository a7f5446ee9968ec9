"""The models that a calibration runs: the user's widths in few layers, and a narrow one."""

from __future__ import annotations

import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from furlong.cost.shape import ModelShape
from furlong.families import SPECIAL_TOKENS
from furlong.models.folders.build import build_model, read_config
from furlong.models.folders.folder import check_folder
from furlong.models.small.layers import cut_layers

VOCABULARY = 4096
"""Largest vocabulary of a measured model: a head is a matrix as any other, and takes long."""
_NARROW_HEADS = 4
_MAX_POSITIONS = 2**17


def default_config() -> Any:
    """The widths of Qwen2.5-0.5B."""
    from transformers import Qwen2Config

    return Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=_MAX_POSITIONS,
    )  # fmt: skip


def config_of(name: str) -> Any:
    """The config of a config.json, of the folder that holds it, or of a model of the hub.

    Raises ConfigError for what cannot be read.
    """
    path = Path(name).expanduser()
    folder = path.parent if path.name == "config.json" else path
    return read_config(check_folder(str(folder)))


def own_config(config: Any, num_layers: int) -> Any:
    """The config with few layers and a small vocabulary, without dropout."""
    values = copy.deepcopy(config.to_dict())
    cut_layers(config, values, range(min(config.num_hidden_layers, num_layers)))
    for key, value in values.items():
        if ("dropout" in key or "pdrop" in key) and isinstance(value, float):
            values[key] = 0.0
    values["vocab_size"] = min(values["vocab_size"], VOCABULARY)
    for token_id, key in enumerate(SPECIAL_TOKENS):
        if values.get(key) is not None:
            values[key] = token_id
    for key in ("quantization_config", "architectures"):
        values.pop(key, None)
    return type(config).from_dict(values)


def narrow_config(shape: ModelShape, num_layers: int) -> Any:
    """A narrow model with heads of the same size."""
    from transformers import Qwen2Config

    hidden = _NARROW_HEADS * shape.head_dim
    return Qwen2Config(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=num_layers,
        num_attention_heads=_NARROW_HEADS, num_key_value_heads=_NARROW_HEADS // 2,
        vocab_size=VOCABULARY // 4, tie_word_embeddings=True,
        max_position_embeddings=_MAX_POSITIONS,
    )  # fmt: skip


def build(config: Any, dtype: torch.dtype, device: torch.device) -> tuple[Any, ModelShape]:
    """A model with random weights, and its shape. Raises UserError for what cannot be trained."""
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model = build_model(folder, init="random", dtype=dtype)
        shape = ModelShape.from_file(folder)
    return model.to(device), shape

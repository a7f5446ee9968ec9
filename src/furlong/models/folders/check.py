"""Check of a model by its files alone, before weights are loaded or data are read."""

from __future__ import annotations

from typing import Any, Literal

import psutil
import torch

from furlong.errors import ConfigError
from furlong.models.causal_lm import CausalLM
from furlong.models.folders.build import model_of_config, read_config
from furlong.models.folders.files import check_generation
from furlong.models.folders.folder import check_folder
from furlong.models.folders.weights import check_weights
from furlong.units import format_bytes, format_count

_LEAST_BYTES = 2
"""Bytes of a weight in the smallest dtype in which a model is loaded."""


def check_model(
    name: str,
    *,
    init: Literal["pretrained", "random"] = "random",
    rope: dict[str, Any] | None = None,
    max_seq_len: int,
) -> None:
    """Raise UserError for a hub id or folder whose model cannot be trained at this length.

    The model is built without memory for its weights; of their files only names and headers are
    looked at, and only if `init` says that they are read. What the forward does is only known to
    the self-check of the engine.
    """
    source = check_folder(name)
    config = read_config(source, rope=rope, max_seq_len=max_seq_len)
    if init == "pretrained":
        check_weights(source)
        check_generation(source)
    model = model_of_config(config, source, dtype=torch.float32)
    CausalLM(model.train(), max_seq_len=max_seq_len)
    _check_memory(model, source)


def _check_memory(model: torch.nn.Module, source: str) -> None:
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    machine_bytes = psutil.virtual_memory().total + psutil.swap_memory().total
    if num_weights * _LEAST_BYTES > machine_bytes:
        raise ConfigError(
            given=f"{format_count(num_weights)} parameters, of which even bfloat16 takes"
            f" {format_bytes(num_weights * _LEAST_BYTES)}",
            required=f"at most {format_bytes(machine_bytes)}, the memory of this machine, in which"
            " a model is loaded before it goes to a device",
            source=f"{source}, config.json",
            change="use a smaller model or a larger machine; or mend the sizes in config.json",
        )

"""4-bit weights (bitsandbytes): the frozen base model under the adapters that QLoRA trains.

Linear layers hold codes and one scale for each 64 weights. They dequantize both to the compute
dtype for each product, and gradients pass as through ordinary weights.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from furlong.errors import ConfigError

_HUB_CODE = "kernels"
"""Package through which bitsandbytes, imported on some CPUs, downloads compiled code of a hub."""


def library(key: str) -> Any:
    """Import and return bitsandbytes, or raise ConfigError that names `key`, which needs it.

    The import downloads nothing: the package `kernels` is hidden meanwhile.
    """
    if "bitsandbytes" not in sys.modules and find_spec("bitsandbytes") is None:
        raise ConfigError(
            given=f"{key} without the package bitsandbytes",
            required="the package bitsandbytes",
            source=key,
            change=f"pip install 'furlong[bitsandbytes]', or remove {key}",
        )
    import_safely()
    return sys.modules["bitsandbytes"]


def import_safely() -> None:
    """Import bitsandbytes, if installed, before peft does and without downloads (see `library`)."""
    if "bitsandbytes" in sys.modules or find_spec("bitsandbytes") is None:
        return
    known, disabled = sys.modules.get(_HUB_CODE), logging.root.manager.disable
    sys.modules[_HUB_CODE] = None  # type: ignore[assignment]
    logging.disable(logging.WARNING)  # hides its warning that `kernels` is missing
    try:
        import_module("bitsandbytes")
    finally:
        logging.disable(disabled)
        del sys.modules[_HUB_CODE]
        if known is not None:
            sys.modules[_HUB_CODE] = known


def quantization(quantize: str | Mapping[Any, Any], compute_dtype: torch.dtype) -> Any:
    """Return transformers' config for `model.quantize`. Raises ConfigError without bitsandbytes."""
    from transformers import BitsAndBytesConfig

    library("model.quantize")
    settings = {"type": quantize} if isinstance(quantize, str) else dict(quantize)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=settings["type"],
        bnb_4bit_use_double_quant=settings.get("double", True),
        bnb_4bit_compute_dtype=compute_dtype,
    )


def check_packed(config: Any, source: str, quantize: object, *, has_adapters: bool) -> None:
    """Raise ConfigError for a model with 4-bit weights if `quantize` asks to quantize them again,
    if the model has no adapters to train, or if it is a checkpoint with vision."""
    if getattr(config, "quantization_config", None) is None:
        return
    given = f"{source}, whose weights are in 4 bits (quantization_config)"
    if quantize is not None:
        raise ConfigError(
            given=f"{given}, with model.quantize",
            required="model.quantize for a model in floats",
            source="model.quantize",
            change="remove model.quantize",
        )
    if config.get_text_config() is not config:
        raise ConfigError(
            given=f"{given}, beside a vision tower",
            required="a checkpoint with vision in floats, whose exports can carry its tower along",
            source="model.name",
            change="name the checkpoint in bfloat16, with model.quantize: nf4",
        )
    if not has_adapters:
        raise ConfigError(
            given=f"{given}, without model.lora",
            required="model.lora: weights in 4 bits are frozen, adapters over them train",
            source="model.name",
            change="add model.lora, or use the model's checkpoint in bfloat16",
        )


def require_linear(model: nn.Module, source: str) -> None:
    """Raise ConfigError for Conv1D layers, which store weights as (in, out): weights that are
    dequantized and merged with adapters would have the wrong layout."""
    if any(type(module).__name__ == "Conv1D" for module in model.modules()):
        raise ConfigError(
            given=f"model.quantize for {source}, whose layers are transformers' Conv1D",
            required="linear layers, which have their weights as (out, in)",
            source="model.quantize",
            change="remove model.quantize, or use a model of another family than GPT-2",
        )


def packed_linears(model: nn.Module) -> dict[str, Any]:
    """Return the 4-bit linear layers by name, without importing bitsandbytes."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module.__dict__["_parameters"].get("weight")).__name__ == "Params4bit"
        and isinstance(module, nn.Linear)
    }


def is_repacked(linear: Any) -> bool:
    """Whether inference on a CPU has put the codes of a 4-bit linear layer into another order."""
    return bool(getattr(linear.weight.quant_state, "packing_format_for_cpu", False))


def scales_of(weight: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors that a 4-bit weight has besides its codes; () for any other weight."""
    state = getattr(weight, "quant_state", None)
    return () if state is None else tuple(state.as_dict(packed=True).values())


def unpacked(linear: Any) -> torch.Tensor:
    """Return the dequantized weight (out, in) of a 4-bit linear layer."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(linear.weight.data, linear.weight.quant_state)  # type: ignore[no-any-return]


def settle(model: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
    """Prepare 4-bit linear layers for training in `compute_dtype` (None: the layers' own).

    On some CPUs a forward in eval mode without gradients would repack their weights permanently,
    after which no gradient passes. Codes stored as floats are viewed as bytes: casts of the model
    leave bytes alone.
    """
    for linear in packed_linears(model).values():
        linear.support_avx512bf16_for_cpu = False
        if compute_dtype is not None:
            linear.compute_dtype, linear.compute_type_is_set = compute_dtype, True
        weight = linear.weight
        if weight.dtype != torch.uint8:
            weight.data = weight.data.view(torch.uint8).reshape(-1, 1)
            weight.quant_storage = linear.quant_storage = torch.uint8

"""Random weights, drawn by name: a module has the same ones in whatever part of a model it is."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import nn

from furlong.errors import UnsupportedModelError


def draw_weights(model: Any, seed: int, device: torch.device) -> None:
    """Give a model on meta weights and buffers, as transformers draws them for each module.

    Each module has a generator state of its own, made of `seed` and its name. Changes the CPU's
    global generator. Raises UnsupportedModelError for a family that leaves a weight as it is.
    """
    model.to_empty(device=device)
    floats = [
        (name, tensor)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_floating_point()
    ]
    with torch.no_grad():
        for _, tensor in floats:
            tensor.fill_(torch.nan)
        _draw(model, "", model, seed)
        model.tie_weights(recompute_mapping=False)  # a stage may lack the head
    for name, tensor in floats:
        if bool(tensor.isnan().any()):
            raise UnsupportedModelError(
                given=f"{type(model).__name__}, whose family gives {name} no random start",
                required="a family that fills every weight of a model that is built without memory",
                source="model.init: random",
                change="start from weights (model.init: pretrained)",
            )


def draw_adapters(model: nn.Module, seed: int) -> None:
    """Draw the weights of LoRA adapters of peft anew, by name, where there are any."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            _seed(name, seed)
            for adapter in module.active_adapters:
                module.reset_lora_parameters(adapter, True)


def _draw(module: nn.Module, name: str, owner: Any, seed: int) -> None:
    """Children come first, and a model inside a model fills its own modules, as in transformers."""
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        owner = module
    for child_name, child in module.named_children():
        _draw(child, f"{name}.{child_name}", owner, seed)
    _seed(name, seed)
    owner._init_weights(module)


def _seed(name: str, seed: int) -> None:
    torch.default_generator.manual_seed(crc32(f"{seed}/{name}".encode()))

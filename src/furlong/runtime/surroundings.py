"""Surroundings of a call: torch's modes, other processes, hooks, random numbers."""

from __future__ import annotations

import torch
from torch import nn

from furlong.errors import ConfigError
from furlong.models.causal_lm import CausalLM
from furlong.models.support import other_dropouts


def refuse_mode(model: nn.Module, compute_dtype: torch.dtype | None) -> None:
    """Raise ConfigError for an inference_mode, or an autocast to another dtype, around a call."""
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            given="torch.inference_mode around furlong",
            required="tensors that autograd may record, also in buffers that later calls use",
            source="the caller's code",
            change="use torch.no_grad, which is all that backward=False needs",
        )
    kind = device_type(model)
    if torch.is_autocast_enabled(kind):
        wanted = torch.get_autocast_dtype(kind)
        computing = {compute_dtype or p.dtype for p in model.parameters() if p.is_floating_point()}
        if computing != {wanted}:
            found = ", ".join(sorted(_dtype_name(dtype) for dtype in computing))
            raise ConfigError(
                given=f"torch.autocast to {_dtype_name(wanted)} around a model of {found}",
                required="one dtype of the compute, which the engine sets itself",
                source="the caller's torch.autocast",
                change=f"pass compute_dtype=torch.{_dtype_name(wanted)} and leave autocast out",
            )


def device_type(model: nn.Module) -> str:
    """The type of the model's device, "cpu" where that knows no autocast."""
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return kind if torch.amp.is_autocast_available(kind) else "cpu"


def left_out(model: nn.Module) -> list[str]:
    """Notes on what a caller may expect and nobody does."""
    notes = []
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size > 1:
            notes.append(
                f"{size} processes: gradients are this process's own and nobody adds them up"
            )
    if model._forward_hooks or model._forward_pre_hooks:
        notes.append(
            f"hooks on {type(model).__name__} itself do not run: chunks go through its decoder "
            "and its head; hooks on its modules do run, once per chunk and forward"
        )
    return notes


def drawn(model: CausalLM) -> str:
    """The note that a forward in train mode drew random numbers."""
    dropouts = other_dropouts(model.model)
    if dropouts:
        name, probability = next(iter(dropouts.items()))
        what = f"{len(dropouts)} dropout modules are active ({name}: {probability})"
    else:
        what = f"{model.name} draws random numbers in train mode (dropout, jitter or sampling)"
    return f"{what}; what they draw depends on how the batch is cut into chunks"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Surroundings of a call: torch's modes, other processes, hooks, random numbers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch._C._functorch import maybe_current_level
from torch.nn.utils import parametrize

from furlong.errors import ConfigError
from furlong.models.attention import called_within
from furlong.models.causal_lm import CausalLM
from furlong.models.entrance import is_sharded
from furlong.models.support import other_dropouts
from furlong.models.wrappers import around

_NOT_RUN = (
    "{} not run: chunks go through the decoder and the head; hooks on their modules do run, once "
    "per chunk and forward"
)


def refuse_mode(model: nn.Module) -> None:
    """Raise ConfigError for a mode of torch around a call in which it would not be exact."""
    if maybe_current_level() is not None:
        raise ConfigError(
            given="a transform of torch.func (grad, vmap, ...) around furlong",
            required="tensors with values, whose gradients are added to .grad",
            source="the caller's code",
            change="call furlong outside of the transform",
        )
    if parametrize._cache_enabled:
        raise ConfigError(
            given="torch.nn.utils.parametrize.cached() around furlong",
            required="weights with a graph of their own in each chunk",
            source="the caller's code",
            change="call furlong outside of it",
        )
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            given="torch.inference_mode around furlong",
            required="tensors that autograd may record, also in buffers that later calls use",
            source="the caller's code",
            change="use torch.no_grad, which is all that backward=False needs",
        )


def refuse_call(module: nn.Module, _: object) -> None:
    """A hook of a model during a call of ours, which never calls it whole."""
    raise called_within(module)


def refuse_autocast(model: nn.Module, compute_dtype: torch.dtype | None) -> None:
    """Raise ConfigError for an autocast around a call to another dtype than that of the compute."""
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


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast of a caller, to be entered again: around passes, and around the head."""

    kind: str
    dtype: torch.dtype
    enabled: bool

    @staticmethod
    def captured(model: nn.Module) -> Autocast:
        kind = device_type(model)
        return Autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def __call__(self) -> AbstractContextManager[object]:
        # casts that were made without a graph would have none in a pass with one
        return torch.autocast(self.kind, self.dtype, self.enabled, cache_enabled=False)


def device_type(model: nn.Module) -> str:
    """The type of the model's device, "cpu" where that knows no autocast."""
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return kind if torch.amp.is_autocast_available(kind) else "cpu"


def left_out(model: nn.Module, bare: nn.Module, *, is_shared: bool = False) -> list[str]:
    """Notes on what a caller may expect and nobody does, of a model and the bare one in it.
    `is_shared`: several processes call it together."""
    notes = []
    distributed = torch.distributed
    if not is_shared and distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size > 1:
            notes.append(
                f"{size} processes: gradients are this process's own and nobody adds them up"
            )
    for module in around(model, bare):
        given = module._forward_pre_hooks.values()
        before = [h for h in given if not getattr(h, "__module__", "").startswith("furlong.")]
        hooks = () if is_sharded(module) else (module._forward_hooks, before)
        if any((*hooks, module._backward_hooks, module._backward_pre_hooks)):
            notes.append(_NOT_RUN.format(f"hooks on {type(module).__name__} itself do"))
        if _has_own_forward(module):
            notes.append(_NOT_RUN.format(f"the forward set on {type(module).__name__} itself does"))
    return notes


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a caller has put a forward in the place of the class's own.

    torch.compile's runs the same code; accelerate's sets autocast or moves weights, which is off or
    refused here; and some of peft's are the forward of the module that they wrap.
    """
    names = module.__dict__
    known = {"_orig_mod", "_original_forward", "_hf_hook"} & (names.keys() | names["_modules"])
    wrapped = isinstance(getattr(names.get("forward"), "__self__", None), nn.Module)
    return "forward" in names and not known and not wrapped


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


def untrainable(model: CausalLM) -> ConfigError:
    """The refusal of a step that nothing is trained in, on no process."""
    return ConfigError(
        given=f"{model.name} without a parameter that requires a gradient",
        required="at least one trainable parameter",
        source="the model that was passed",
        change="model.requires_grad_(True), add adapters, or pass backward=False",
    )

"""Changes of a model by its caller since the last call, and modes of torch around this one.

The first shows in a fingerprint, which changes when a model is resized, adapted, moved, cast,
configured or switched. Torch's modes, other processes and hooks are looked at before each call:
refused, noted, or, as an autocast, entered again for a pass.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from furlong.errors import ConfigError, UnsupportedModelError
from furlong.models.attention import called_within
from furlong.models.decoder import HFDecoder
from furlong.models.support import COMPILED_CALL, around, is_sharded, other_dropouts

_KINDS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
_SWITCHES = ("is_causal", "scale_grad_by_freq")
"""Attributes of modules that a check has judged."""


def fingerprint(model: nn.Module) -> tuple[int, int]:
    """Hashes of everything but the weights' values on which the adapter depends, and of the modes
    on which its check depends besides: which modules train.

    The first is of the config, every module and its type, its active adapters, what was put into it
    or into all modules (hooks, another forward, a compiled call), and the shape, dtype and device
    of every parameter. Comparable within one process.
    """
    config: Any = getattr(model, "config", None)
    text = json.dumps(config.to_dict(), default=str, sort_keys=True) if config is not None else ""
    modules = tuple(
        (
            id(module),
            type(module),
            *map(module.__dict__.get, _SWITCHES),
            _adapters(module),
            _put_in(module),
            id(module.__dict__.get(COMPILED_CALL)),
        )
        for module in model.modules()
    )
    weights = tuple((p.shape, p.dtype, p.device) for p in model.parameters())
    kernel = getattr(config, "_attn_implementation", None)
    modes = hash(tuple(module.training for module in model.modules()))
    everywhere = _hooks(vars(nn.modules.module), "_global_")
    return hash((text, kernel, modules, weights, everywhere)), modes


def adapter_states(model: nn.Module) -> tuple[Any, ...]:
    """The active adapters of every module of peft, whether they are disabled, and what of them is
    merged into the weights."""
    return tuple(
        (*_adapters(module), tuple(module.__dict__.get("merged_adapters") or ()))
        for module in model.modules()
        if "_active_adapter" in module.__dict__ or "merged_adapters" in module.__dict__
    )


def _put_in(module: nn.Module) -> tuple[Any, ...]:
    """Hooks, a forward of its own, and that of the class, which may have been replaced."""
    own = module.__dict__.get("forward")
    return (
        _hooks(vars(module), "_"),
        own if own is None else _code(own, (id(getattr(own, "__self__", own)), *_holds(own))),
        _code(type(module).forward, id(type(module).forward)),
    )


def _hooks(names: dict[str, Any], prefix: str) -> tuple[Any, ...]:
    """The hooks among the names of a module of the model, or of torch's that has those of all. Each
    time that one is put in has a number of its own; an address may come again."""
    return tuple(
        (kind, *(_code(hook, number) for number, hook in hooks.items()))
        for kind in _KINDS
        if (hooks := names.get(prefix + kind))
    )


def _code(function: Any, place: Any) -> tuple[Any, ...]:
    """The code of a function, which is all that a plain one does: the same one, put in anew, is the
    same. Else `place` too."""
    is_plain = isinstance(function, FunctionType) and not (
        function.__closure__ or function.__defaults__ or function.__kwdefaults__
    )
    code = getattr(function, "__code__", type(function))
    return (code,) if is_plain else (code, place)


def _holds(function: Any) -> tuple[Any, ...]:
    """The contents of a closure: numbers and texts, and the addresses of all else."""
    cells = getattr(function, "__closure__", None) or ()
    held = (cell.cell_contents for cell in cells if cell != CellType())  # an empty one has none
    return tuple(x if isinstance(x, int | float | str) else id(x) for x in held)


def _adapters(module: nn.Module) -> tuple[str, bool]:
    """The active adapters of a module of peft, and whether they are disabled."""
    disabled = bool(module.__dict__.get("_disable_adapters", False))
    return str(getattr(module, "_active_adapter", "")), disabled


_NOT_RUN = (
    "{} not run: chunks go through the decoder and the head; hooks on their modules do run, once "
    "per chunk and forward"
)


def refuse_mode() -> None:
    """Raise ConfigError for a mode of torch around a call in which nothing can be recorded."""
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


def refuse_autocast(model: nn.Module, kind: str, compute_dtype: torch.dtype | None) -> None:
    """Raise ConfigError for an autocast around a call to another dtype than that of the compute."""
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
    def captured(kind: str) -> Autocast:
        return Autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def __call__(self) -> AbstractContextManager[object]:
        # casts that were made without a graph would have none in a pass with one
        return torch.autocast(self.kind, self.dtype, self.enabled, cache_enabled=False)


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


def drawn(model: HFDecoder) -> str:
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


def untrainable(model: HFDecoder) -> ConfigError:
    """The refusal of a step that nothing is trained in, on no process."""
    return ConfigError(
        given=f"{model.name} without a parameter that requires a gradient",
        required="at least one trainable parameter",
        source="the model that was passed",
        change="model.requires_grad_(True), add adapters, or pass backward=False",
    )


def refuse_compiled(model: HFDecoder, *, is_shared: bool) -> None:
    """Raise UnsupportedModelError for compiled layers on several processes, or with dropout: a
    graph of its own for passes without gradients need not draw what a recompute draws."""
    dropouts = other_dropouts(model.base)
    if is_shared or dropouts:
        beside = "on several processes" if is_shared else f"and dropout ({next(iter(dropouts))})"
        raise UnsupportedModelError(
            given=f"{model.name} with layers that are compiled in place, {beside}",
            required="layers that draw nothing, whole in one process",
            source="layer.compile(), or model.compile of a run",
            change="leave it out, " + ("or train in one process" if is_shared else "or dropout"),
        )

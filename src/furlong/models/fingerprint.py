"""A number that changes when a model is resized, adapted, moved, cast, configured or switched."""

from __future__ import annotations

import json
from types import CellType, FunctionType
from typing import Any

from torch import nn

from furlong.models.wrappers import COMPILED_CALL

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

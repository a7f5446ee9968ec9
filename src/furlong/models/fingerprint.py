"""A number that changes when a model is resized, adapted, moved, cast, configured or switched."""

from __future__ import annotations

import json
from typing import Any

from torch import nn


def fingerprint(model: nn.Module) -> tuple[int, int]:
    """Hashes of everything but the weights' values on which the adapter depends, and of the modes
    on which its check depends besides: which modules train.

    The first is of the config, every module and its type, its active adapters, what was put into it
    (hooks, a forward of its own), and the shape, dtype and device of every parameter. Comparable
    within one process.
    """
    config: Any = getattr(model, "config", None)
    text = json.dumps(config.to_dict(), default=str, sort_keys=True) if config is not None else ""
    modules = tuple(
        (id(module), type(module), _adapters(module), _put_in(module)) for module in model.modules()
    )
    weights = tuple((p.shape, p.dtype, p.device) for p in model.parameters())
    kernel = getattr(config, "_attn_implementation", None)
    modes = hash(tuple(module.training for module in model.modules()))
    return hash((text, kernel, modules, weights)), modes


def adapter_states(model: nn.Module) -> tuple[Any, ...]:
    """The active adapters of every module of peft, whether they are disabled, and what of them is
    merged into the weights."""
    return tuple(
        (*_adapters(module), tuple(module.__dict__.get("merged_adapters") or ()))
        for module in model.modules()
        if "_active_adapter" in module.__dict__ or "merged_adapters" in module.__dict__
    )


def _put_in(module: nn.Module) -> tuple[Any, ...]:
    """The code of hooks and of a forward of its own: the same hook, put in anew, is the same."""
    functions = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if "forward" in module.__dict__:
        functions.append(module.forward)
    return tuple(getattr(f, "__code__", type(f)) for f in functions)


def _adapters(module: nn.Module) -> tuple[str, bool]:
    """The active adapters of a module of peft, and whether they are disabled."""
    disabled = bool(module.__dict__.get("_disable_adapters", False))
    return str(getattr(module, "_active_adapter", "")), disabled

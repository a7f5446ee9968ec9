"""One walk over a model's modules per call, which collects the modules, parameters, modes and
adapters that the call needs, and a fingerprint that shows whether the model has changed.

A caller may change the model between calls, so each call looks at all of it. With adapters on all
linear layers the model has thousands of modules: one walk takes as long as a chunk of a few tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any
from zlib import crc32

from torch import nn

from furlong.models.support import COMPILED_CALL

Fingerprint = tuple[int, int, int]
"""Hashes of a model's structure, of train or eval modes, and of which parameters are trained.

Structure is the config; of each module its type, active adapters, the code of its forward and
hooks, and whether it is compiled; of each parameter shape, dtype and device. The adapter depends on
it, its check on modes, too. Hashes are comparable within one process."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_SET_ON = {"_active_adapter", "_disable_adapters", "forward", COMPILED_CALL}
"""Attributes of an instance that change what it computes."""


@dataclass(frozen=True, slots=True)
class ModelScan:
    """A model's modules, parameters, train or eval modes, adapters and fingerprint at the start of
    one call."""

    modules: tuple[nn.Module, ...]
    """Modules of the transformers model, itself first."""
    parameters: tuple[nn.Parameter, ...]
    """Each parameter once, also those of wrappers around the transformers model."""
    modes: tuple[bool, ...]
    """Whether each of `modules` is in train mode."""
    adapters: tuple[object, ...]
    """Active adapters of each module of peft, whether they are disabled, and which are merged into
    the weights."""
    fingerprint: Fingerprint


def scan(given: nn.Module, base: nn.Module) -> ModelScan:
    """Walk over a model; `base` is the transformers model in it, or the model itself."""
    seen: set[nn.Module] = set()
    modules = tuple(module for _, module in base.named_modules(seen))
    owners = [*modules, *(module for _, module in given.named_modules(seen))]
    held = (p for module in owners for p in module._parameters.values() if p is not None)
    parameters = tuple(dict.fromkeys(held))
    modes = tuple(module.training for module in modules)
    adapters = tuple(
        (*_adapters(own), tuple(own.get("merged_adapters") or ()))
        for own in map(vars, modules)
        if "_active_adapter" in own or "merged_adapters" in own
    )
    config: Any = getattr(base, "config", None)
    text = json.dumps(config.to_dict(), default=str, sort_keys=True) if config is not None else ""
    kernel = getattr(config, "_attn_implementation", None)
    # a code object is hashed by its instructions: once for each class, not for each module
    kinds: tuple[Any, ...] = tuple(map(type, modules))
    forwards = tuple(_code(kind.forward) for kind in dict.fromkeys(kinds))
    inside = tuple(
        (number, *_put_in(own))
        for number, own in enumerate(map(vars, modules))
        if any(map(own.get, HOOKS)) or not own.keys().isdisjoint(_SET_ON)
    )
    weights = tuple((p.shape, p.dtype, p.device) for p in parameters)
    structure = hash((text, kernel, tuple(map(id, modules)), kinds, forwards, inside, weights))
    trained = hash(tuple(p.requires_grad for p in parameters))
    return ModelScan(modules, parameters, modes, adapters, (structure, hash(modes), trained))


def _put_in(own: Mapping[str, Any]) -> tuple[object, ...]:
    """Return all that other code may have set on a module: active adapters, hooks, a forward of the
    instance, and whether it is compiled. `own` are the module's `vars`.

    A function is represented by its code object. Code objects compare by value, so a hook that is
    defined anew for each step counts as the same. Addresses would not do: they are reused."""
    hooks = tuple((kind, *map(_code, own[kind].values())) for kind in HOOKS if own[kind])
    forward = _code(own["forward"]) if "forward" in own else None
    return *_adapters(own), hooks, forward, own.get(COMPILED_CALL) is not None


def _code(function: Any) -> Any:
    return getattr(function, "__code__", type(function))


def _adapters(own: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the active adapters of a module of peft, and whether they are disabled."""
    return str(own.get("_active_adapter", "")), bool(own.get("_disable_adapters", False))


def mode_of(module: nn.Module) -> str:
    return "training" if module.training else "evaluation"


def module_facts(model: nn.Module) -> dict[str, str]:
    """Return {name of a fact: value in words} with each module's mode, hooks, forward and active
    adapters. Processes can compare these facts; the fingerprint of `scan` is comparable within one
    process only."""
    facts = {}
    for name, module in model.named_modules():
        where = name or "the model"
        hooks = [
            f"{kind[1:-1]} {_code_in_words(hook)}"
            for kind in HOOKS
            for hook in vars(module)[kind].values()
            if not str(getattr(hook, "__module__", "")).startswith(("torch.", "furlong."))
        ]
        facts[f"mode of {where}"] = mode_of(module)
        facts[f"hooks of {where}"] = ", ".join(hooks) or "none"
        facts[f"forward of {where}"] = _code_in_words(module.forward)
        facts[f"adapters of {where}"] = "{} (disabled: {})".format(*_adapters(vars(module)))
    return facts


def _code_in_words(function: Any) -> str:
    """Return name and checksum of a function's code; the type of other callables."""
    code = _code(function)
    if not isinstance(code, CodeType):
        return f"{code.__module__}.{code.__qualname__}"
    # repr of other constants (code, frozensets) differs between processes
    plain = [x for x in code.co_consts if isinstance(x, int | float | str | bytes | None)]
    text = repr((code.co_names, plain)).encode() + code.co_code
    return f"{code.co_qualname} {crc32(text):x}"

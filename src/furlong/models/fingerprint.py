"""A number that changes when a model is resized, adapted, moved, cast or configured anew."""

from __future__ import annotations

import json
from typing import Any

from torch import nn


def fingerprint(model: nn.Module) -> int:
    """Hash of everything but the weights' values on which the adapter and its check depend.

    That is the config, the type of every module, its active adapters, and the shape, dtype and
    device of every parameter. Comparable within one process.
    """
    config: Any = getattr(model, "config", None)
    text = json.dumps(config.to_dict(), default=str, sort_keys=True) if config is not None else ""
    modules = tuple(
        (type(module), str(getattr(module, "_active_adapter", "")), _is_disabled(module))
        for module in model.modules()
    )
    weights = tuple((p.shape, p.dtype, p.device) for p in model.parameters())
    return hash((text, getattr(config, "_attn_implementation", None), modules, weights))


def _is_disabled(module: nn.Module) -> bool:
    return bool(module.__dict__.get("_disable_adapters", False))

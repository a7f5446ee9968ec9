"""furlong: exact training of LLMs on sequences longer than the hardware should allow."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from furlong.version import __version__ as __version__

if TYPE_CHECKING:
    from furlong.api import Engine, forward_backward
    from furlong.chunked_model import chunked, unchunked
    from furlong.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DivergenceError,
        FurlongError,
        PlanError,
        UnsupportedModelError,
        UserError,
    )
    from furlong.kv.pools import Storage
    from furlong.planners.options import ChunkOptions
    from furlong.planners.spaco import Sampling
    from furlong.runtime.step import StepResult
    from furlong.train.metrics import Callback
    from furlong.train.trainer import Trainer

__all__ = [
    "Callback",
    "CheckpointError",
    "ChunkOptions",
    "ConfigError",
    "DataError",
    "DivergenceError",
    "Engine",
    "FurlongError",
    "PlanError",
    "Sampling",
    "StepResult",
    "Storage",
    "Trainer",
    "UnsupportedModelError",
    "UserError",
    "chunked",
    "forward_backward",
    "unchunked",
]


def _says_something(record: logging.LogRecord) -> bool:
    """Return False for what torchao logs whenever transformers imports it: that some of its kernels
    are for other machines, and that torch deprecates a call that torchao makes."""
    return not record.getMessage().startswith(("Failed to load", "<enum "))


for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).addFilter(_says_something)

# Names are resolved on first use (PEP 562): importing furlong loads neither torch nor transformers.
_HOME = {
    **dict.fromkeys(__all__, "furlong.errors"),
    **dict.fromkeys(["Engine", "forward_backward"], "furlong.api"),
    **dict.fromkeys(["chunked", "unchunked"], "furlong.chunked_model"),
    "Callback": "furlong.train.metrics",
    "ChunkOptions": "furlong.planners.options",
    "Sampling": "furlong.planners.spaco",
    "StepResult": "furlong.runtime.step",
    "Storage": "furlong.kv.pools",
    "Trainer": "furlong.train.trainer",
}


def __getattr__(name: str) -> Any:
    if name == "values":
        return importlib.import_module("furlong.values")
    if name not in _HOME:
        raise AttributeError(f"module 'furlong' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

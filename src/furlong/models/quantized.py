"""Weights in 4 bits (bitsandbytes): a frozen base under adapters, as QLoRA trains it.

Linear layers hold codes and a scale for each 64 weights, and multiply with what these stand for in
the dtype of the compute. A gradient passes them as it passes those weights.
"""

from __future__ import annotations

import importlib
import logging
import sys
from importlib.util import find_spec
from typing import Any

from furlong.errors import ConfigError

_HUB_CODE = "kernels"
"""The package by which bitsandbytes gets compiled code of a hub, as it is imported on some CPUs."""


def library(key: str) -> Any:
    """The module bitsandbytes, for the key of a run that needs it. Raises ConfigError without one.

    Nothing is loaded from a hub: for the length of the import there is no package `kernels`.
    """
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            given=f"{key} without the package bitsandbytes",
            required="the package bitsandbytes",
            source=key,
            change=f"pip install 'furlong[bitsandbytes]', or remove {key}",
        )
    import_safely()
    return sys.modules["bitsandbytes"]


def import_safely() -> None:
    """Import bitsandbytes if it is installed, as peft does beside any adapter, without code of a
    hub: see `library`."""
    if "bitsandbytes" in sys.modules or find_spec("bitsandbytes") is None:
        return
    known, disabled = sys.modules.get(_HUB_CODE), logging.root.manager.disable
    sys.modules[_HUB_CODE] = None  # type: ignore[assignment]
    logging.disable(logging.WARNING)  # which tells that there is none
    try:
        importlib.import_module("bitsandbytes")
    finally:
        logging.disable(disabled)
        del sys.modules[_HUB_CODE]
        if known is not None:
            sys.modules[_HUB_CODE] = known

"""The door of a scan: where a mixer's own code hands its tokens to the function that scans them.

A mixer's forward takes a decoding path for one token that continues. That path must not be taken
(`caches.SliceCache`), so the mixer is shown no state and the scan gets it here. The mixer's forward
is called with its own code and its own defaults, but with other functions under the scans' names;
nothing of its module changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from furlong.errors import UnsupportedModelError
from furlong.models.mixers.caches import SliceCache
from furlong.models.mixers.rg_lru import is_rg_lru, rg_lru
from furlong.models.mixers.selective_scan import with_state

_INITIAL = ("initial_state", "initial_states")


@dataclass
class Current:
    """The slice that a mixer computes now."""

    cache: SliceCache | None = None
    num_scans: int = 0
    """Scans of the slice that have run: some mixers scan their heads one by one."""


def own_forward(module: nn.Module, current: Current) -> Callable[..., Any]:
    """A mixer's forward, whose scans take a state that waits at the door."""
    if "forward" in module.__dict__:
        raise UnsupportedModelError(
            given=f"{type(module).__name__} with a forward that was put into this instance",
            required="recurrent layers that run by their class's own forward",
            source="the model that was passed",
            change="pass the model without wrappers (accelerate's hooks, compiled layers)",
        )
    if is_rg_lru(module):
        return partial(_of_cache, module, current)
    plain = inspect.unwrap(type(module).forward)
    doors = {
        name: door
        for name in plain.__code__.co_names
        if (door := _door(name, plain.__globals__.get(name), current)) is not None
    }
    opened = FunctionType(
        plain.__code__, {**plain.__globals__, **doors}, plain.__name__, plain.__defaults__,
        plain.__closure__,
    )  # fmt: skip
    opened.__kwdefaults__ = plain.__kwdefaults__
    return MethodType(opened, module)


def _of_cache(
    module: nn.Module, current: Current, x: Tensor, position_ids: Tensor, **_: Any
) -> tuple[Tensor, None]:
    assert current.cache is not None, "a block outside of a slice"
    return rg_lru(module, x, position_ids, current.cache)


def _door(name: str, function: Any, current: Current) -> Callable[..., Any] | None:
    """The stand-in of a function of the mixer's module; None: the function itself stays."""
    if not callable(function) or isinstance(function, type):
        return None
    if "recurrent" in name or "update" in name:
        return None
    try:
        takes = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if "return_last_state" in takes and not takes.keys() & set(_INITIAL):
        return partial(_scan_from_zero, function, current)
    initial = next((i for i in _INITIAL if i in takes), None)
    return None if initial is None else partial(_scan_from, function, initial, current)


def _scan_from(
    scan: Callable[..., Any], initial: str, current: Current, *args: Any, **kwargs: Any
) -> Any:
    """Call a scan, from the state that waits at the door if there is one."""
    assert current.cache is not None, "a scan outside of a slice"
    if kwargs.get(initial) is None:
        kwargs[initial] = current.cache.at_door
    return scan(*args, **kwargs)


def _scan_from_zero(
    scan: Callable[..., Any], current: Current, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Call a scan that starts from nothing, and add what the state at the door is worth."""
    assert current.cache is not None, "a scan outside of a slice"
    number, before = current.num_scans, current.cache.at_door
    current.num_scans += 1
    y, last = scan(*args, **kwargs)
    if before is None:
        return y, last
    if before.ndim > last.ndim:
        before = before[:, number]
    given = inspect.signature(scan).bind(*args, **kwargs).arguments
    return with_state(y, last, before, given)

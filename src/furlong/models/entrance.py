"""The one method of a model through which every pass enters it.

Wrappers that act when their root module is called (FSDP2's, which gathers sharded weights) then see
every pass as a call of the root: before its layers are swapped for those of a stage, also the first
time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TypeVar

from torch import Tensor, nn

ENTRANCE = "furlong_pass"
_SHARDED = "furlong_sharded"

_T = TypeVar("_T", bound=Tensor)


def add_entrance(base: nn.Module) -> str:
    """Give a model the method, for a wrapper to be told of; returns the method's name.

    For FSDP2: `register_fsdp_forward_method(base, add_entrance(base))`. A model that nothing wraps
    needs none.
    """
    base.__dict__[ENTRANCE] = MethodType(_call, base)
    return ENTRANCE


def has_entrance(base: nn.Module) -> bool:
    """Whether something wraps a model and acts before and behind each of its passes."""
    return ENTRANCE in base.__dict__


def mark_sharded(base: nn.Module) -> None:
    """Note that its weights were divided among processes by us, who know how to enter it."""
    base.__dict__[_SHARDED] = True


def is_sharded(base: nn.Module) -> bool:
    """Whether its weights were divided among processes by us."""
    return _SHARDED in base.__dict__


def enter(base: nn.Module, run: Callable[[], _T]) -> _T:
    """The outcome of `run`, called inside the model's entrance if it has one."""
    entrance = base.__dict__.get(ENTRANCE)
    return run() if entrance is None else entrance(run)


def _call(base: nn.Module, run: Callable[[], _T]) -> _T:
    return run()

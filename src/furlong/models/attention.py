"""The door through which attention enters a model: transformers' own `AttentionInterface`.

The cell that is being computed is bound to the attention modules for the length of a pass, and
again for the recompute of a checkpoint inside a backward: some families drop keyword arguments on
the way down, none drops its own modules.

    T tokens, N query heads, K key-value heads, H head dim
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from furlong.errors import ConfigError, UnsupportedModelError
from furlong.families import ATTENTION_BLOCK, CHUNKED
from furlong.ops.latent_kv import Expansion
from furlong.ops.layer_kv import AttentionRule
from furlong.plan.passes import Pass

ATTENTION_NAME = "furlong"
CELL = "_furlong_cell"
DOOR = "_furlong_door"

# Keywords that say nothing of which tokens meet or how: what a call returns, and what positions
# and packing already say by other means.
_HARMLESS = {
    "cache_position",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}


class KVReady(Exception):  # noqa: N818 - it ends a forward early, it is no error
    """The cell's last K,V are stored: only its backward needs what follows in the forward."""


class CellAttention(Protocol):
    """Computes the attention of one (chunk, stage)."""

    def attend(
        self,
        what: Pass,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AttentionRule,
        sinks: Tensor | None,
        source: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """q (N, T, H), k and v (K, T, H), sinks (N,) or None -> (N, T, H); `what` is the pass.

        `source`: the tensors that k and v are made of, which layers may share.
        """
        ...

    def take_latents(self, what: Pass, layer: int, latents: Tensor, expand: Expansion) -> Tensor:
        """Latents (T, W) of which the keys and values of the layer's next `attend` are made."""
        ...


@dataclass(frozen=True, slots=True)
class BoundCell:
    """The cell whose pass the attention of a module belongs to."""

    cell: CellAttention
    what: Pass
    positions: Tensor
    """Position (T,) of each token in its sequence."""
    thread: int
    """The thread of the pass: a call of the model in another one is no part of it."""

    @classmethod
    def to(cls, module: nn.Module) -> BoundCell | None:
        """The cell of a module in a pass of this thread; None outside of one."""
        found: BoundCell | None = module.__dict__.get(CELL)
        return found if found and found.thread == threading.get_ident() else None


@contextmanager
def bound(
    modules: Sequence[nn.Module], cell: CellAttention, what: Pass, positions: Tensor
) -> Iterator[None]:
    """Within it the attention of `modules` is that of a cell's pass, of tokens at `positions`."""
    before = [module.__dict__.get(CELL) for module in modules]
    for module in modules:
        module.__dict__[CELL] = BoundCell(cell, what, positions, threading.get_ident())
    try:
        yield
    finally:
        for module, other in zip(modules, before, strict=True):
            if other is None:
                module.__dict__.pop(CELL, None)
            else:
                module.__dict__[CELL] = other


@torch.compiler.disable  # type: ignore[untyped-decorator]  # no guard could tell the cell
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query (1, N, T, H), key and value (1, K, T, H).

    Values may be narrower or wider than keys. Raises UnsupportedModelError for whatever it is
    given and does not know.
    """
    pass_of = BoundCell.to(module)
    if pass_of is None:
        raise called_within(module)
    if dropout:
        raise _refusal(
            module,
            f"attention dropout {dropout}",
            "no attention dropout: a chunk cannot draw what the whole sequence would have drawn",
            "set the attention dropout of its config to 0 before building it",
        )
    if attention_mask is not None:
        raise _refusal(module, "a mask of its own", "causal attention, whole or with a window")
    if is_causal is False:
        raise _refusal(module, "is_causal=False", "causal attention")
    unknown = [name for name, x in others.items() if x is not None and name not in _HARMLESS]
    if unknown:
        raise _refusal(
            module, f"the keyword {', '.join(sorted(unknown))}", "keywords that furlong knows"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    shared = module.__dict__.get(DOOR)  # its cache knows which layer a block that several have is
    layer: Any = module.layer_idx if shared is None else shared.layer
    block = attention_block(module, layer)
    q, k, v = as_attended(query, key, value)
    value_width = value.shape[-1]
    narrow = value_width if value_width < v.shape[-1] else None
    rule = AttentionRule(scale, sliding_window or None, softcap or None, block, narrow)
    attended = pass_of.cell.attend(pass_of.what, layer, q, k, v, rule, s_aux, (key, value))
    out = attended[..., :value_width]
    return out.transpose(0, 1)[None], None  # (N, T, H) -> (1, T, N, H)


def called_within(module: nn.Module) -> ConfigError:
    """The refusal of a caller's own call of a model while chunks of it are computed."""
    return ConfigError(
        given=f"{type(module).__name__} called while a step of its model, or of one that shares its"
        " config, runs",
        required="no other call before a step is over: within it attention is furlong's and layers "
        "are those of a stage",
        source="another thread, or a hook, watch or function of values of the step",
        change="call the model before or after, or a copy.deepcopy of it; where no step runs, set "
        "its attention implementation to sdpa",
    )


@contextmanager
def hooked(module: nn.Module, hook: Callable[[nn.Module, object], None]) -> Iterator[None]:
    """Within it a hook runs before each call of a module. It goes by its value, not by a handle: an
    interrupt may come before there is one."""
    try:
        module.register_forward_pre_hook(hook)
        yield
    finally:
        hooks = module._forward_pre_hooks
        for key in [key for key, other in hooks.items() if other == hook]:
            del hooks[key]


def as_attended(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values (1, heads, T, any) as a cell takes them: (heads, T, H) of one width,
    in the dtype of an autocast."""
    width = max(x.shape[-1] for x in tensors)
    return tuple(_widened(_autocast(x[0]), width) for x in tensors)


def attention_block(module: nn.Module, layer: int) -> int | None:
    """Tokens of an attention block, if a layer of an attention module sees its own block only."""
    config: Any = getattr(module, "config", None)
    types = getattr(config, "layer_types", None) or ()
    if CHUNKED not in types or types[layer] != CHUNKED:
        return None
    return int(getattr(config, ATTENTION_BLOCK))


def _autocast(x: Tensor) -> Tensor:
    """x in the dtype of an autocast around the pass, as SDPA takes it."""
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _widened(x: Tensor, width: int) -> Tensor:
    """x (..., H) with zeros behind its last columns: they change no score and no other column."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def _refusal(
    module: nn.Module, what: str, required: str, change: str = "train a model of another family"
) -> UnsupportedModelError:
    return UnsupportedModelError(
        given=f"{type(module).__name__} passes {what} to its attention",
        required=required,
        source="the model's attention",
        change=change,
    )

"""The attention of chunks inside a model, through transformers' `AttentionInterface`.

The cell (one chunk at one stage) is bound to the attention modules for the length of a pass, and
again while a checkpoint recomputes inside a backward. It is stored on the modules since some
families drop keyword arguments on the way to attention.

Two things reach furlong only through transformers' cache: the number of earlier tokens (Llama 4
scales its queries by positions that it counts itself), and latents before they are expanded to keys
and values (DeepSeek and families with its attention). Attention modules that need either one get a
`LayerCache` while a cell computes.

    T tokens, N query heads, K key-value heads, H head dim
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from furlong.errors import ConfigError
from furlong.families import ATTENTION_BLOCK, CHUNKED
from furlong.models.support import COMPILED_CALL, having, rope_types, unsupported
from furlong.ops.attention import AttentionRule
from furlong.ops.latent import Expansion
from furlong.plan.passes import Pass

ATTENTION_NAME = "furlong"
CELL = "_furlong_cell"

# Keywords that do not change attention: they select what a call returns, or repeat positions and
# packing, which furlong knows from its plan.
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
    """Raised to end a pass at the stage's last K,V, where nothing needs the rest of the forward."""


class CellAttention(Protocol):
    """The attention of one cell (a chunk at a stage), called for each of its layers."""

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
        """Map q (N, T, H), k and v (K, T, H) and sinks (N,) or None to out (N, T, H).

        `what`: the pass; `source`: the module's own key and value tensors, by which layers that
        share K,V are recognized.
        """
        ...

    def take_latents(self, what: Pass, layer: int, latents: Tensor, expand: Expansion) -> Tensor:
        """Take the latents (T, W) from which the module makes keys and values for the layer's next
        `attend`, and return the latents for the module to use."""
        ...

    def route(self, what: Pass, router: str, logits: Tensor) -> None:
        """Take the logits (T, E) of a router, which is named."""
        ...


@dataclass(frozen=True, slots=True)
class BoundCell:
    """The cell (a chunk at a stage) bound to an attention module for the current pass."""

    cell: CellAttention
    what: Pass
    positions: Tensor
    """Position (T,) of each token in its sequence."""
    thread: int
    """Id of the pass's thread: calls of the model in other threads do not belong to the pass."""
    cache: Any = None
    """The `models.mixers.EmptyCache` that the decoder passes to its layers, if any."""

    @classmethod
    def to(cls, module: nn.Module) -> BoundCell | None:
        """Return the `BoundCell` that the current pass of this thread has bound to a module, or
        None outside of a pass."""
        found: BoundCell | None = module.__dict__.get(CELL)
        return found if found and found.thread == threading.get_ident() else None

    def layer_of(self, module: nn.Module) -> int:
        """Return the number of the layer for which a module is computing attention. This is the
        layer that has called the cache's `update`, as one module may serve several layers. Without
        such a call it is the module's `layer_idx`."""
        if self.cache is None or self.cache.layer is None:
            return module.layer_idx  # type: ignore[return-value]
        layer, self.cache.layer = self.cache.layer, None
        return int(layer)


ABSENT = object()
"""Value of a missing key."""
Change = tuple[MutableMapping[str, Any], str, Any]
"""(namespace, key, temporary value of the key; `ABSENT` removes it)."""


@contextmanager
def patched(changes: Iterable[Change]) -> Iterator[None]:
    """Context manager: make temporary changes; undo them on exit, also after an error."""
    before: list[Change] = []
    try:
        for names, key, value in changes:
            before.append((names, key, names.get(key, ABSENT)))
            _put(names, key, value)
        yield
    finally:
        for change in reversed(before):
            _put(*change)


def _put(names: MutableMapping[str, Any], key: str, value: Any) -> None:
    if value is ABSENT:
        names.pop(key, None)
    else:
        names[key] = value


@contextmanager
def bound(
    modules: Sequence[nn.Module], cell: CellAttention, what: Pass, positions: Tensor,
    cache: Any = None,
) -> Iterator[None]:  # fmt: skip
    """Context manager: bind a cell to `modules`; the arguments are the fields of `BoundCell`."""
    own = BoundCell(cell, what, positions, threading.get_ident(), cache)
    with patched((vars(module), CELL, own) for module in modules):
        yield


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a guard cannot check the bound cell
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
    """Attention function of transformers' interface: query (1, N, T, H), key and value (1, K, T, H)
    -> (1, T, N, H), None.

    Values may be narrower or wider than keys.

    Raises:
        UnsupportedModelError: a mask, dropout, non-causal attention, or an unknown keyword.
    """
    pass_of = BoundCell.to(module)
    if pass_of is None:
        raise called_within(module)
    unknown = [name for name, x in others.items() if x is not None and name not in _HARMLESS]
    for is_given, what, required in (
        (dropout, f"attention dropout {dropout}", "no attention dropout: set its config's to 0"),
        (attention_mask is not None, "a mask of its own", "causal attention, also with a window"),
        (is_causal is False, "is_causal=False", "causal attention"),
        (unknown, f"the keyword {', '.join(sorted(unknown))}", "keywords that furlong knows"),
    ):
        if is_given:
            what = f"passes {what} to its attention"
            raise unsupported(module, what, required, source="the model's attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer = pass_of.layer_of(module)
    block = attention_block(module, layer)
    q, k, v = as_attended(query, key, value)
    value_width = value.shape[-1]
    narrow = value_width if value_width < v.shape[-1] else None
    rule = AttentionRule(scale, sliding_window or None, softcap or None, block, narrow)
    attended = pass_of.cell.attend(pass_of.what, layer, q, k, v, rule, s_aux, (key, value))
    out = attended[..., :value_width]
    return out.transpose(0, 1)[None], None  # (N, T, H) -> (1, T, N, H)


def called_within(module: nn.Module) -> ConfigError:
    """Return the error for a user's call of a model while a step computes chunks of this model."""
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
    """Context manager: run a hook before each call of a module.

    The hook is removed by identity, since an interrupt may come before its handle is stored.
    """
    try:
        module.register_forward_pre_hook(hook)
        yield
    finally:
        hooks = module._forward_pre_hooks
        for key in [key for key, other in hooks.items() if other == hook]:
            del hooks[key]


def as_attended(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert queries, keys and values (1, heads, T, any) to (heads, T, H): padded to one width,
    and cast to the dtype of the active autocast."""
    width = max(x.shape[-1] for x in tensors)
    return tuple(_widened(_autocast(x[0]), width) for x in tensors)


def attention_block(module: nn.Module, layer: int) -> int | None:
    """Return the number of tokens per attention block if a layer has chunked attention (Llama 4),
    in which a token sees no other block; else None."""
    config: Any = getattr(module, "config", None)
    types = getattr(config, "layer_types", None) or ()
    if CHUNKED not in types or types[layer] != CHUNKED:
        return None
    return int(getattr(config, ATTENTION_BLOCK))


def _autocast(x: Tensor) -> Tensor:
    """Cast x to the dtype of the active autocast, as SDPA does."""
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _widened(x: Tensor, width: int) -> Tensor:
    """Pad x (..., H) with columns of zeros, which change no score and no other output column."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


class LayerCache:
    """Stands for transformers' cache in one call of one attention module."""

    def __init__(self, module: nn.Module, bound: BoundCell) -> None:
        self._module, self._bound = module, bound

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Return a tensor (T,) that the attention module takes for the number of earlier tokens. It
        is each token's position minus its row in the chunk. The module adds the row, which gives
        the position."""
        positions = self._bound.positions
        return positions - torch.arange(len(positions), device=positions.device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Return k and v of this call alone, since the KV store holds earlier ones. If k and v are
        parts of latents (1, 1, T, W), first store the latents."""
        if not _has_latents(self._module):
            return k, v
        widths = k.shape[-1], v.shape[-1]
        latents = torch.cat((k, v), -1)[0, 0]
        expand = _expansion(self._module, widths[0], latents.device.type)
        latents = self._bound.cell.take_latents(self._bound.what, layer_idx, latents, expand)
        return latents[None, None].split(widths, -1)


def _expansion(module: Any, width: int, device_type: str) -> Expansion:
    """Return the function that makes K,V from a module's latents, under the autocast active now.

    `width`: number of columns of a latent before those that RoPE rotates.
    """
    kind = "cpu" if device_type == "meta" else device_type
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def expand(latents: Tensor) -> tuple[Tensor, Tensor]:
        parts = latents[None, None].tensor_split((width,), -1)
        with torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False):
            k, v = as_attended(*module.expand_kv(*parts))
        return k, v

    return expand


def scales_by_position(module: nn.Module) -> bool:
    """Whether an attention module scales queries by positions that it derives from its cache."""
    return bool(getattr(module, "attn_temperature_tuning", False))


def _has_latents(module: nn.Module) -> bool:
    """Whether an attention module makes K,V from latents, which pass through the cache.

    False if the module has active dropout: each expansion would draw other random numbers.
    """
    return hasattr(module, "expand_kv") and not any(
        isinstance(part, nn.Dropout) and part.p > 0 and part.training for part in module.modules()
    )


CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names of the cache argument in the releases of transformers."""


def cache_argument(module: nn.Module) -> str | None:
    """Return the name of the cache argument of a module's forward, or None."""
    takes = inspect.signature(type(module).forward).parameters  # not an instance's own forward
    return next((name for name in CACHE_ARGUMENTS if name in takes), None)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _give_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    bound, name = BoundCell.to(module), cache_argument(module)
    if bound is None or name is None:
        return None
    # the present name: where it is passed, even as None, transformers ignores an older one
    return args, {**kwargs, name: LayerCache(module, bound)}


_PINNED = "pinned"


@contextmanager
def chunked_attention(
    modules: Sequence[nn.Module], attending: Iterable[nn.Module], max_seq_len: int | None,
    compiled: Collection[nn.Module] = (),
) -> Iterator[None]:  # fmt: skip
    """Context manager: run every layer's attention through `attention`. Those modules of
    `attending` that need a `LayerCache` get one. Other arguments: see `forward_as_written`."""
    AttentionInterface.register(ATTENTION_NAME, attention)
    ours = [("_attn_implementation_internal", ATTENTION_NAME)]
    with forward_as_written(modules, max_seq_len, compiled, ours), ExitStack() as stack:
        for module in attending:
            if scales_by_position(module) or _has_latents(module):
                hook = module.register_forward_pre_hook(_give_cache, with_kwargs=True)
                stack.callback(hook.remove)
        yield


@contextmanager
def forward_as_written(
    modules: Sequence[nn.Module], max_seq_len: int | None, compiled: Collection[nn.Module] = (),
    settings: Iterable[tuple[str, Any]] = (),
) -> Iterator[None]:  # fmt: skip
    """Context manager: run a model uncompiled (except `compiled`), without gradient checkpointing,
    with return_dict, and with longrope's factors for `max_seq_len`.

    `modules`: all modules of the model, the model first; `settings`: (key, value) for its configs.
    """
    configs = {id(module.config): module.config for module in having(modules, "config")}.values()
    plain: list[Change] = [
        # the plan decides what is recomputed
        *((vars(m), "gradient_checkpointing", False)
          for m in having(modules, "gradient_checkpointing") if m.gradient_checkpointing is True),
        *((vars(m), COMPILED_CALL, ABSENT) for m in modules
          if COMPILED_CALL in vars(m) and m not in compiled),
        # a config that asks for tuples breaks transformers' own heads
        *((vars(x), "return_dict", True) for x in configs
          if getattr(x, "return_dict", True) is False),
        *((vars(x), *setting) for x, setting in product(configs, settings)),
    ]  # fmt: skip
    with patched(plain), patched(_pinned_longrope(modules, max_seq_len)):
        yield


def _pinned_longrope(modules: Sequence[Any], max_seq_len: int | None) -> Iterator[Change]:
    """Yield changes that fix longrope's factors, in all calls, to those of `max_seq_len` tokens.

    In each call transformers chooses them by the largest position, so that a chunk could have other
    factors than its whole sequence. A model has one RoPE type, or one per layer type.
    """
    if max_seq_len is None or "longrope" not in rope_types(modules[0].config.get_text_config()):
        return
    for rotary in modules:
        rope_type: Any = getattr(rotary, "rope_type", None)
        if isinstance(rope_type, dict):
            for layer_type in [name for name, t in rope_type.items() if t == "longrope"]:
                _choose(rotary, max_seq_len, layer_type=layer_type)
            pinned = {n: _PINNED if t == "longrope" else t for n, t in rope_type.items()}
            yield vars(rotary), "rope_type", pinned
        elif rope_type == "longrope":
            _choose(rotary, max_seq_len)
            yield vars(rotary), "rope_type", _PINNED


def _choose(rotary: Any, max_seq_len: int, **layer_type: str) -> None:
    """Make transformers choose longrope's factors by calling `rotary` for `max_seq_len` tokens."""
    device = next(rotary.buffers()).device
    longest = torch.tensor([[max_seq_len - 1]], device=device)
    rotary(torch.zeros(1, device=device), longest, **layer_type)

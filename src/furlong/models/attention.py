"""How attention of chunks enters a model: by transformers' own `AttentionInterface`.

The cell that is being computed is bound to the attention modules for the length of a pass, and
again for the recompute of a checkpoint inside a backward: some families drop keyword arguments on
the way down, none drops its own modules.

transformers passes through its cache what other ways do not tell: how many tokens came before
(Llama 4 scales its queries by positions that it counts itself), and latents before they are
expanded to keys and values (DeepSeek and all with its attention). So an attention module finds a
cache of ours while a cell computes.

    T tokens, N query heads, K key-value heads, H head dim
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from furlong.errors import ConfigError
from furlong.families import ATTENTION_BLOCK, CHUNKED
from furlong.models.support import COMPILED_CALL, refusal, rope_types
from furlong.ops.attention import AttentionRule
from furlong.ops.latent import Expansion
from furlong.plan.passes import Pass

ATTENTION_NAME = "furlong"
CELL = "_furlong_cell"

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
    cache: Any = None
    """The `models.mixers.EmptyCache` that the decoder passes to its layers, if it does."""

    @classmethod
    def to(cls, module: nn.Module) -> BoundCell | None:
        """The cell of a module in a pass of this thread; None outside of one."""
        found: BoundCell | None = module.__dict__.get(CELL)
        return found if found and found.thread == threading.get_ident() else None

    def layer_of(self, module: nn.Module) -> int:
        """The layer that attends: a block that several share does not know it, the cache does."""
        if self.cache is None or self.cache.layer is None:
            return module.layer_idx  # type: ignore[return-value]
        layer, self.cache.layer = self.cache.layer, None
        return int(layer)


ABSENT = object()
"""The value of a key that is not there."""
Change = tuple[MutableMapping[str, Any], str, Any]
"""A namespace, a key in it, and the key's value for a while."""


@contextmanager
def patched(changes: Iterable[Change]) -> Iterator[None]:
    """Within it keys have other values; on exit, also after an error, all are as they were."""
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
    """Within it the attention of `modules` is that of a cell's pass, of tokens at `positions`;
    `cache`: see `BoundCell`."""
    own = BoundCell(cell, what, positions, threading.get_ident(), cache)
    with patched((vars(module), CELL, own) for module in modules):
        yield


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
    unknown = [name for name, x in others.items() if x is not None and name not in _HARMLESS]
    for is_given, what, required in (
        (dropout, f"attention dropout {dropout}", "no attention dropout: set its config's to 0"),
        (attention_mask is not None, "a mask of its own", "causal attention, also with a window"),
        (is_causal is False, "is_causal=False", "causal attention"),
        (unknown, f"the keyword {', '.join(sorted(unknown))}", "keywords that furlong knows"),
    ):
        if is_given:
            what = f"passes {what} to its attention"
            raise refusal(module, what, required, source="the model's attention")
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


class LayerCache:
    """A cache for one call of one attention module."""

    def __init__(self, module: nn.Module, bound: BoundCell) -> None:
        self._module, self._bound = module, bound

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Tokens before each one (T,) in its sequence, less those before it in the chunk: the
        module adds the latter."""
        positions = self._bound.positions
        return positions - torch.arange(len(positions), device=positions.device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Keys and values of the call alone: the store has those of others. Latents k and v
        (1, 1, T, W) go to the store from here."""
        if not _has_latents(self._module):
            return k, v
        widths = k.shape[-1], v.shape[-1]
        latents = torch.cat((k, v), -1)[0, 0]
        expand = _expansion(self._module, widths[0], latents.device.type)
        latents = self._bound.cell.take_latents(self._bound.what, layer_idx, latents, expand)
        return latents[None, None].split(widths, -1)


def _expansion(module: Any, width: int, device_type: str) -> Expansion:
    """The expansion of a module's latents, under the autocast that is on now; `width`: columns of a
    latent without the part that positions turn."""
    kind = "cpu" if device_type == "meta" else device_type
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def expand(latents: Tensor) -> tuple[Tensor, Tensor]:
        parts = latents[None, None].tensor_split((width,), -1)
        with torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False):
            k, v = as_attended(*module.expand_kv(*parts))
        return k, v

    return expand


def scales_by_position(module: nn.Module) -> bool:
    """Whether an attention module scales its queries by positions that it takes from a cache."""
    return bool(getattr(module, "attn_temperature_tuning", False))


def _has_latents(module: nn.Module) -> bool:
    """Whether an attention module makes keys and values of latents that pass through the cache.

    What draws random numbers on the way (dropout of an adapter) would draw others each time.
    """
    return hasattr(module, "expand_kv") and not any(
        isinstance(part, nn.Dropout) and part.p > 0 and part.training for part in module.modules()
    )


CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names under which the modules of transformers' releases take a cache."""


def cache_argument(module: nn.Module) -> str | None:
    """Return the name under which a module's forward takes a cache, None if it takes none."""
    takes = inspect.signature(type(module).forward).parameters  # not a forward put before it
    return next((name for name in CACHE_ARGUMENTS if name in takes), None)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _give_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    bound, name = BoundCell.to(module), cache_argument(module)
    if bound is None or name is None:
        return None
    # Under its present name: transformers drops an older one beside it, even if that says None.
    return args, {**kwargs, name: LayerCache(module, bound)}


_PINNED = "pinned"


@contextmanager
def chunked_attention(
    base: nn.Module, max_seq_len: int | None, compiled: Collection[nn.Module] = ()
) -> Iterator[None]:
    """Within it the attention of every layer is ours, and attention modules that need a cache are
    given one with each of a cell's passes. `compiled`: modules that stay compiled in place."""
    AttentionInterface.register(ATTENTION_NAME, attention)
    ours = [(vars(x), "_attn_implementation_internal", ATTENTION_NAME) for x in _configs(base)]
    with patched(ours), own_forward(base, max_seq_len, compiled), ExitStack() as stack:
        for module in base.modules():
            if scales_by_position(module) or _has_latents(module):
                hook = module.register_forward_pre_hook(_give_cache, with_kwargs=True)
                stack.callback(hook.remove)
        yield


@contextmanager
def own_forward(
    base: nn.Module, max_seq_len: int | None, compiled: Collection[nn.Module] = ()
) -> Iterator[None]:
    """Within it the model's modules but those of `compiled` run as they are written, once, and
    return named outputs; its RoPE is that of the run."""
    written = set(base.modules()).difference(compiled)
    plain: list[Change] = [
        # the plan decides what is recomputed
        *((vars(m), "gradient_checkpointing", False) for m in base.modules()
          if getattr(m, "gradient_checkpointing", False) is True),
        *((vars(m), COMPILED_CALL, ABSENT) for m in written if COMPILED_CALL in vars(m)),
        # a config that asks for tuples breaks transformers' own heads
        *((vars(x), "return_dict", True) for x in _configs(base)
          if getattr(x, "return_dict", True) is False),
    ]  # fmt: skip
    with patched(plain), patched(_pinned_longrope(base, max_seq_len)):
        yield


def _configs(base: nn.Module) -> list[Any]:
    """The configs that the model's modules hold."""
    return list({id(m.config): m.config for m in base.modules() if hasattr(m, "config")}.values())


def _pinned_longrope(base: nn.Module, max_seq_len: int | None) -> Iterator[Change]:
    """Let longrope choose its factors by the run's longest sequence, once, and keep them.

    transformers chooses them per call, by the call's largest position: a chunk would choose
    otherwise than the sequence that it is a piece of. A model has one type of RoPE, or one per
    layer type.
    """
    if max_seq_len is None or "longrope" not in rope_types(base.config.get_text_config()):  # type: ignore[operator, union-attr]
        return
    for rotary in base.modules():
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
    """Make transformers choose the factors of a run of `max_seq_len` tokens."""
    device = next(rotary.buffers()).device
    longest = torch.tensor([[max_seq_len - 1]], device=device)
    rotary(torch.zeros(1, device=device), longest, **layer_type)

"""The cache that an attention module finds while a cell computes: not transformers' own.

transformers passes through its cache what other ways do not tell: how many tokens came before
(Llama 4 scales its queries by positions that it counts itself), and latents before they are
expanded to keys and values (DeepSeek and all with its attention).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from furlong.models.attention import BoundCell, as_attended


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
        expand = _Expansion(self._module, widths[0])
        latents = self._bound.cell.take_latents(self._bound.what, layer_idx, latents, expand)
        return latents[None, None].split(widths, -1)


class _Expansion:
    """The expansion of a module's latents, under the autocast in which it was made."""

    def __init__(self, module: nn.Module, width: int) -> None:
        """`width`: columns of a latent without the part that positions turn."""
        self._module, self._width = module, width
        device_type = next(module.parameters()).device.type
        self._device_type = "cpu" if device_type == "meta" else device_type
        self._dtype = torch.get_autocast_dtype(self._device_type)
        self._enabled = torch.is_autocast_enabled(self._device_type)

    def __call__(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        parts = latents[None, None].tensor_split((self._width,), -1)
        with torch.autocast(
            self._device_type, self._dtype, enabled=self._enabled, cache_enabled=False
        ):
            k, v = as_attended(*self._module.expand_kv(*parts))  # type: ignore[operator]
        return k, v


@contextmanager
def layer_caches(base: nn.Module) -> Iterator[None]:
    """Within it the attention modules that need a cache are given one with each of a cell's
    passes."""
    handles = [
        module.register_forward_pre_hook(_give_cache, with_kwargs=True)
        for module in base.modules()
        if scales_by_position(module) or _has_latents(module)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _give_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    bound = BoundCell.to(module)
    if bound is None:
        return None
    return args, {**kwargs, "past_key_values": LayerCache(module, bound)}

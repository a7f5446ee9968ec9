"""The recurrent block of RecurrentGemma, which keeps its states on itself and not in a cache.

transformers' own forward forgets the tokens before a slice that its convolution joins, and writes
the state into the module. The same computation here takes both from the cache of a slice.

    T tokens, W width of the block, K tokens that the convolution joins
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from furlong.models.mixers.caches import SliceCache


def rg_lru_blocks(decoder: nn.Module) -> dict[nn.Module, int]:
    """The recurrent blocks of a decoder, with their layers."""
    layers = getattr(decoder, "layers", ())
    blocks = ((getattr(layer, "temporal_block", None), i) for i, layer in enumerate(layers))
    return {block: i for block, i in blocks if block is not None and is_rg_lru(block)}


def is_rg_lru(module: nn.Module) -> bool:
    return type(module).__name__ == "RecurrentGemmaRecurrentBlock"


def rg_lru(block: Any, x: Tensor, position_ids: Tensor, cache: SliceCache) -> tuple[Tensor, None]:
    """x (1, T, D) -> (1, T, D), from the states of a cache; positions tell where a sequence begins,
    and nothing enters there."""
    num_tokens = x.shape[1]
    gate = block.act_fn(block.linear_y(x))
    branch = block.linear_x(x).transpose(1, 2)  # (1, W, T)
    full = cache.update_conv_state(branch, 0, conv_kernel_size=block.conv1d_width)
    branch = block.conv_1d(full)[..., : full.shape[-1]][..., -num_tokens:]
    recurrence = block.rg_lru
    recurrence.recurrent_states = cache.before.get(("recurrent", 0))
    try:
        scanned = recurrence(branch.transpose(1, 2), position_ids)
        cache.update_recurrent_state(recurrence.recurrent_states, 0)
    finally:
        recurrence.recurrent_states = None
    return block.linear_out(scanned * gate), None

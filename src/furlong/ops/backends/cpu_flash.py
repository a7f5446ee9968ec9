"""Attention of one block with PyTorch's flash kernel for CPUs.

The kernel requires as many key-value heads as query heads, and gets an expanded view of keys and
values. The backward of a block without a mask concatenates the rows of a head group instead (the
query heads of one key-value head), which gives one gradient per key. Masks exist for one tile of
rows and the keys that these rows see. Each multi-threaded operation waits for its slowest thread:
few large operations beat many small ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from furlong.ops.backends.base import Backend, Block, each_square, each_square_backward, lse_dtype
from furlong.ops.backends.reference import Reference

_BAND_ROWS = 512
"""Rows of a masked tile: few enough that a window's band wastes little work."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CPUFlash(Backend):
    """Backend of torch's flash kernel for CPUs, which loops over the slices of a packed chunk.

    Batches of equally long slices are no faster: gathering rows costs what fewer calls save (200
    slices of 20 tokens, one thread: 38 ms in a loop, 41 ms in one batch; longer ones lose more).
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        num_rows, num_keys = q.shape[1], k.shape[1]
        if block.softcap is not None:
            return Reference().forward(q, k, v, block)
        if block.squares:
            return each_square(self, q, k, v, block)
        is_full = block.is_full(num_rows, num_keys)
        if is_full or block.is_causal(num_rows, num_keys):
            out, lse = _flash(*_expanded(q, k, v), is_causal=not is_full, scale=block.scale)
            return out.reshape(q.shape), lse.reshape(q.shape[:2])
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=lse_dtype(q.dtype))
        for rows, seen, mask in _band(block, num_rows, num_keys, q):
            tile_out, tile_lse = _flash(
                *_expanded(q[:, rows], k[:, seen], v[:, seen]), attn_mask=mask, scale=block.scale
            )
            out[:, rows] = tile_out.reshape(q[:, rows].shape)
            lse[:, rows] = tile_lse.reshape(q[:, rows].shape[:2])
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows, num_keys = q.shape[1], k.shape[1]
        if block.softcap is not None:
            return Reference().backward(dout, q, k, v, out, lse, block)
        if block.squares:
            return each_square_backward(self, dout, q, k, v, out, lse, block)
        if block.is_full(num_rows, num_keys):
            pieces = _num_pieces(q.shape[0], k.shape[0])
            keys, values = k.expand(pieces, *k.shape), v.expand(pieces, *v.shape)
            fdout, fq, fout, flse = (_fold(x, k, pieces) for x in (dout, q, out, lse))
            dq, dk, dv = _flash_backward(
                fdout, fq, keys, values, fout, flse, 0.0, False, scale=block.scale
            )
            if pieces == 1:
                return _unfold(dq, q.shape), dk[0], dv[0]
            return _unfold(dq, q.shape), dk.sum(0), dv.sum(0)  # (pieces, K, S, H) -> (K, S, H)
        if block.is_causal(num_rows, num_keys):
            return _square_backward(dout, q, k, v, out, lse, True, None, block.scale)
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        for rows, seen, mask in _band(block, num_rows, num_keys, q):
            tile = (dout[:, rows], q[:, rows], k[:, seen], v[:, seen], out[:, rows], lse[:, rows])
            dq[:, rows], dk_tile, dv_tile = _square_backward(*tile, False, mask, block.scale)
            dk[:, seen] += dk_tile
            dv[:, seen] += dv_tile
        return dq, dk, dv


def _num_pieces(num_heads: int, num_kv_heads: int) -> int:
    """Return the number of batch entries into which `_fold` divides the rows of a head group.

    The backward kernel runs one thread per (batch, head): with fewer key-value heads than cores,
    several entries keep the threads busy.
    """
    num_groups = num_heads // num_kv_heads
    wanted = max(1, torch.get_num_threads() // num_kv_heads)
    return max(n for n in range(1, num_groups + 1) if num_groups % n == 0 and n <= wanted)


def _fold(x: Tensor, k: Tensor, pieces: int) -> Tensor:
    """Concatenate the rows of a head group: (N, T, ...) -> (pieces, K, N/(K*pieces) * T, ...)."""
    return x.reshape(k.shape[0], pieces, -1, *x.shape[2:]).transpose(0, 1)


def _unfold(folded: Tensor, shape: torch.Size) -> Tensor:
    """Invert `_fold`: back to (N, T, ...)."""
    return folded.transpose(0, 1).reshape(shape)


def _expanded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q as (K, N/K, T, H), and k and v as views with as many heads, without copies."""
    num_kv_heads, num_groups = k.shape[0], q.shape[0] // k.shape[0]
    heads = (num_kv_heads, num_groups, -1, -1)
    return (
        q.unflatten(0, (num_kv_heads, num_groups)),
        k[:, None].expand(heads),
        v[:, None].expand(heads),
    )


def _square_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    is_causal: bool, mask: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    eq, ek, ev = _expanded(q, k, v)
    heads = eq.shape[:2]
    dq, dk, dv = _flash_backward(
        dout.unflatten(0, heads), eq, ek, ev, out.unflatten(0, heads), lse.unflatten(0, heads),
        0.0, is_causal, attn_mask=mask, scale=scale,
    )  # fmt: skip
    return dq.flatten(0, 1), dk.sum(1), dv.sum(1)  # (K, N/K, S, H) -> (K, S, H)


def _band(
    block: Block, num_rows: int, num_keys: int, like: Tensor
) -> list[tuple[slice, slice, Tensor]]:
    """Return tiles of rows: the rows, the keys that they see, and an additive mask.

    Tiles away from the edges share one mask.
    """
    tiles = []
    masks: dict[tuple[int, int, int], Tensor] = {}
    visible = block.visible_rows(num_rows, num_keys)
    for start in range(0, visible, _BAND_ROWS):
        stop = min(start + _BAND_ROWS, visible)
        first, last = block.visible_keys(start, stop, num_keys)
        part = block.at(start, first)
        shape = part.distance, stop - start, last - first
        if shape not in masks:
            seen = part.mask(stop - start, last - first, like.device)
            mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
            masks[shape] = mask.masked_fill_(~seen, -torch.inf)
        tiles.append((slice(start, stop), slice(first, last), masks[shape]))
    return tiles

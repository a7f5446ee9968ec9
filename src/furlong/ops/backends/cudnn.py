"""Attention on CUDA with cuDNN's fused kernels, the fastest on Hopper.

They take grouped heads and any strides except in the last dimension. Windows and slices of unequal
lengths, which they lack, go to FlashAttention, and so does every shape that torch's dispatcher
would not give them, since a direct call bypasses its conditions. If there are many rows or keys,
those beyond a multiple of `KERNEL_STEP` go to FlashAttention too. This avoids NaN gradients (64 mod
128 keys on Hopper, pytorch 196678), reads out of bounds (pytorch 169849), single keys, and most of
cuDNN's plans: it builds one per shape and thread, in 0.1 to 1 s, and keeps it forever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from furlong.ops.backends.base import Block, lse_dtype, merge_
from furlong.ops.backends.cuda_flash import DATA_CENTER, CUDAFlash
from furlong.plan.segments import KERNEL_STEP

_NEWER_THAN = 91_500
"""Last version of cuDNN (9.15.0) that reads out of bounds."""
_STEP, _MIN_SIZE = KERNEL_STEP, 256
"""Rows and keys of a call are multiples of `_STEP`, and at least `_MIN_SIZE`."""
_MIN_CUT = 1024
"""Fewest rows or keys for which a remainder is worth a second call."""
_MAX_SIZE = 2**15
"""Most rows or keys of a call. Longer blocks are cut and share plans, and known faults of fused
kernels begin with causal squares above 65,535."""


def is_trusted(device: torch.device) -> bool:
    """Whether torch itself prefers cuDNN on a device; on others FlashAttention is at least as
    fast."""
    version = torch.backends.cudnn.version() or 0
    return version > _NEWER_THAN and torch.cuda.get_device_capability(device) in DATA_CENTER


class CallPart(NamedTuple):
    """Rows and keys of one kernel call; `is_fused`: whether the kernel is cuDNN's."""

    rows: slice
    keys: slice
    is_fused: bool


class CUDNN(CUDAFlash):
    """cuDNN for aligned full blocks and causal squares, FlashAttention for all other blocks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        parts = split_calls(q.shape[1], k.shape[1], block)
        if len(parts) == 1:
            return self._part_forward(q, k, v, block, parts[0])
        block = replace(block, window=None)  # blocks that a window limits have one part
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))
        for rows, group in groupby(parts, attrgetter("rows")):
            first, *others = group
            seen_out, seen_lse = self._part_forward(q, k, v, block, first)
            if others:  # merge in the log-sum-exp's dtype, round once
                seen_out = seen_out.to(lse.dtype)
            for part in others:
                merge_(seen_out, seen_lse, *self._part_forward(q, k, v, block, part))
            out[:, rows], lse[:, rows] = seen_out, seen_lse
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        whole = dout, q, k, v, out, lse
        parts = split_calls(q.shape[1], k.shape[1], block)
        if len(parts) == 1:
            return self._part_backward(*whole, block, parts[0])
        block = replace(block, window=None)
        dq = torch.empty_like(q)
        is_wide = len({part.rows.start for part in parts}) > 1  # gradients of keys are summed
        dk, dv = (torch.empty_like(x, dtype=lse.dtype if is_wide else None) for x in (k, v))
        filled = 0  # dk, dv are uninitialised from this key on
        for rows, group in groupby(parts, attrgetter("rows")):
            sums: Tensor | None = None
            for part in group:
                part_dq, *grads = self._part_backward(*whole, block, part)
                sums = part_dq if sums is None else sums.to(lse.dtype).add_(part_dq)
                for total, grad in zip((dk, dv), grads, strict=True):
                    into = total[:, part.keys]
                    _ = into.add_(grad) if part.keys.start < filled else into.copy_(grad)
                filled = max(filled, part.keys.stop)
            assert sums is not None
            dq[:, rows] = sums
        return dq, dk, dv

    def _part_forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, part: CallPart
    ) -> tuple[Tensor, Tensor]:
        q, k, v = q[:, part.rows], k[:, part.keys], v[:, part.keys]
        block = block.at(part.rows.start, part.keys.start)
        if not part.is_fused:
            return super().forward(q, k, v, block)
        is_causal = not block.is_full(q.shape[1], k.shape[1])
        found = _forward(q, k, v, block, is_causal=is_causal)
        self.count("cuDNN", q, k, block)
        return found

    def _part_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        block: Block, part: CallPart,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dout, q, out, lse = (x[:, part.rows] for x in (dout, q, out, lse))
        k, v = k[:, part.keys], v[:, part.keys]
        block = block.at(part.rows.start, part.keys.start)
        if not part.is_fused:
            return super().backward(dout, q, k, v, out, lse, block)
        is_causal = not block.is_full(q.shape[1], k.shape[1])
        found = _backward(dout, q, k, v, out, lse, block, is_causal=is_causal)
        self.count("cuDNN", q, k, block, backward=True)
        return found


def split_calls(num_rows: int, num_keys: int, block: Block) -> list[CallPart]:
    """Return the calls that together compute a block; calls on the same rows are consecutive.

    A full block is cut into rows and keys, a causal square into squares and the full blocks left of
    them. The last rows and the last keys go to FlashAttention. Rows that see all keys come first:
    their gradients initialise dk and dv, to which other rows add.
    """
    everything = CallPart(slice(0, num_rows), slice(0, num_keys), is_fused=False)
    is_full = block.is_full(num_rows, num_keys)
    takes = not (block.softcap is not None or block.squares or num_rows < _MIN_SIZE)
    if not takes or not (is_full or block.is_causal(num_rows, num_keys)):
        return [everything]
    num_aligned = _aligned(num_rows)
    aligned_keys = _aligned(num_keys) if is_full else num_aligned
    # the backward has no deterministic form
    if min(num_aligned, aligned_keys) < _MIN_SIZE or torch.are_deterministic_algorithms_enabled():
        return [everything]
    parts = []
    if num_aligned < num_rows:
        parts.append(CallPart(slice(num_aligned, num_rows), everything.keys, is_fused=False))
    every = list(_cut(aligned_keys))
    for number, rows in enumerate(_cut(num_aligned)):
        seen = every if is_full else every[: number + 1]
        parts += [CallPart(rows, keys, is_fused=True) for keys in seen]
        if is_full and aligned_keys < num_keys:
            parts.append(CallPart(rows, slice(aligned_keys, num_keys), is_fused=False))
    return parts


def _aligned(size: int) -> int:
    """Return the number of leading rows or keys that go to cuDNN. If `size` is a multiple of
    `_STEP`, these are all. Otherwise `size` is rounded down to a multiple of a step that grows with
    it (up to 1/32 of it), so that cuDNN builds few plans. A small `size` gives 0."""
    if size % _STEP == 0:
        return size
    return size - size % max(_STEP, 2 ** (size.bit_length() - 6)) if size >= _MIN_CUT else 0


def _cut(size: int) -> Iterator[slice]:
    """Cut `size` into pieces of at least `_MIN_SIZE` and at most `_MAX_SIZE`."""
    start = 0
    while start < size:
        stop = min(start + _MAX_SIZE, size)
        if 0 < size - stop < _MIN_SIZE:
            stop -= _MIN_SIZE
        yield slice(start, stop)
        start = stop


def _forward(
    q: Tensor, k: Tensor, v: Tensor, block: Block, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(_dense_heads(x)[None] for x in (q, k, _narrow(v, block))), None, True, 0.0, is_causal,
        False, scale=block.scale,
    )  # fmt: skip
    lse = result[1].reshape(q.shape[:2])  # (1, N, T, 1) -> (N, T)
    return _widened(result[0][0], v), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block,
    *, is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    # torch caches one cuDNN plan per strides of q, k and v, with the strides of dout, out and lse
    # built in. Those must never vary: a second layout would be read as if it were the first.
    # Versions after 2.13 infer them from q's strides, and refuse others
    q = _dense_heads(q)
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        _in_order_of(q, _narrow(dout, block))[None],
        *(_dense_heads(x)[None] for x in (q, k, _narrow(v, block))),
        _in_order_of(q, _narrow(out, block))[None], lse.contiguous()[None, ..., None],
        unused, unused, None, None, None, q.shape[1], k.shape[1], 0.0, is_causal, scale=block.scale,
    )  # fmt: skip
    return dq[0], dk[0], _widened(dv[0], v)


def _narrow(x: Tensor, block: Block) -> Tensor:
    """Return x (N, T, H) without the columns of zeros that pad values to the width of keys: cuDNN
    has kernels for such values only if they are not padded."""
    return x if block.value_width is None else x[..., : block.value_width]


def _widened(x: Tensor, like: Tensor) -> Tensor:
    width = like.shape[-1] - x.shape[-1]
    return pad(x, (0, width)) if width else x


def _dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _in_order_of(q: Tensor, x: Tensor) -> Tensor:
    """Return x (N, T, H), dense in memory, with the dimensions in the order of q's."""
    if q.stride(0) > q.stride(1):
        return x.contiguous()
    return x.transpose(0, 1).contiguous().transpose(0, 1)

"""Attention on CUDA by cuDNN's fused kernels, the fastest on Hopper.

They take grouped heads and any strides but the last. What they lack (windows, slices of unequal
lengths) goes to flash attention, and so does every shape that torch's own dispatcher would not give
them: a direct call goes past its conditions. Of a block without a mask that is every key behind the
last multiple of 1,024. It ends rows whose gradients are NaN (64 mod 128 keys on Hopper, pytorch
196678), reads out of bounds (pytorch 169849), single keys, and nearly all plans, of which cuDNN
builds one per shape and thread, in 0.1 to 1 s, and keeps it for ever."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from furlong.ops.backends.base import Block, lse_dtype, merge_
from furlong.ops.backends.cuda_flash import CUDAFlash

_NEWER_THAN = 91_500
"""The last version of cuDNN (9.15.0) that reads out of bounds."""
_CAPABILITIES = {(9, 0), (10, 0), (10, 3)}
"""Hopper and Blackwell of data centers; on others flash attention is as fast, or faster."""
_STEP, _MIN_SIZE = 128, 256
"""Rows and keys of a call are multiples of the one, and at least the other."""
_KEYS_STEP, _MAX_SEGMENT = 1024, 8192
"""A block of more keys than a segment of the store, or of an odd number, ends at a multiple."""
_MAX_SIZE = 2**15
"""Rows or keys of a call without a mask: longer blocks share their plans."""
_MAX_SQUARE = 65_535
"""Rows of a causal square: known faults of fused kernels begin above it."""


def is_trusted(device: torch.device) -> bool:
    """Whether torch itself prefers cuDNN on a device."""
    version = torch.backends.cudnn.version() or 0
    return version > _NEWER_THAN and torch.cuda.get_device_capability(device) in _CAPABILITIES


class CUDNN(CUDAFlash):
    """cuDNN for aligned full blocks and causal squares, flash attention for all others."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        num_rows, num_keys = q.shape[1], k.shape[1]
        aligned = _aligned_keys(num_rows, num_keys, block)
        if not aligned:
            return super().forward(q, k, v, block)
        if not block.is_full(num_rows, num_keys):
            return _forward(q, k, v, block, is_causal=True)
        if aligned == num_keys and max(num_rows, num_keys) <= _MAX_SIZE:
            return _forward(q, k, v, block, is_causal=False)
        out = q.new_zeros(q.shape, dtype=lse_dtype(q.dtype))
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=out.dtype)
        for rows, keys in _parts(num_rows, num_keys, aligned):
            part = q[:, rows], k[:, keys], v[:, keys]
            if keys.start < aligned:
                seen = _forward(*part, block, is_causal=False)
            else:
                seen = super().forward(*part, block.at(rows.start, aligned))
            merge_(out[:, rows], lse[:, rows], *seen)
        return out.to(q.dtype), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        whole = dout, q, k, v, out, lse
        num_rows, num_keys = q.shape[1], k.shape[1]
        aligned = _aligned_keys(num_rows, num_keys, block)
        if not aligned:
            return super().backward(*whole, block)
        if not block.is_full(num_rows, num_keys):
            return _backward(*whole, block, is_causal=True)
        if aligned == num_keys and max(num_rows, num_keys) <= _MAX_SIZE:
            return _backward(*whole, block, is_causal=False)
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        for rows, keys in _parts(num_rows, num_keys, aligned):
            part = (dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, rows])
            if keys.start < aligned:
                grads = _backward(*part, block, is_causal=False)
            else:
                grads = super().backward(*part, block.at(rows.start, aligned))
            dq[:, rows] += grads[0]
            dk[:, keys] += grads[1]
            dv[:, keys] += grads[2]
        return dq.to(q.dtype), dk, dv


def _takes(num_rows: int, num_keys: int) -> bool:
    """Whether cuDNN is given a call of such a size; its backward has no deterministic form."""
    return (
        num_rows % _STEP == num_keys % _STEP == 0
        and min(num_rows, num_keys) >= _MIN_SIZE
        and not torch.are_deterministic_algorithms_enabled()
    )


def _aligned_keys(num_rows: int, num_keys: int, block: Block) -> int:
    """How many first keys of a block are cuDNN's; 0: flash attention takes the whole."""
    if block.softcap is not None or block.squares:
        return 0
    aligned = num_keys
    if block.is_full(num_rows, num_keys):
        if num_keys % _STEP or num_keys > _MAX_SEGMENT:
            aligned -= num_keys % _KEYS_STEP
    elif not block.is_causal(num_rows, num_keys) or num_rows > _MAX_SQUARE:
        return 0
    return aligned if _takes(num_rows, aligned) else 0


def _parts(num_rows: int, num_keys: int, aligned: int) -> Iterator[tuple[slice, slice]]:
    """Rows and keys of the calls for a full block; flash attention has those from `aligned` on."""
    for rows in _cut(num_rows):
        for keys in _cut(aligned):
            yield rows, keys
        if aligned < num_keys:
            yield rows, slice(aligned, num_keys)


def _cut(size: int) -> Iterator[slice]:
    for start in range(0, size, _MAX_SIZE):
        yield slice(start, min(start + _MAX_SIZE, size))


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
    # torch keeps one cuDNN plan per strides of q, k and v, with the strides of dout, out and lse
    # built in, so that these must never vary: a second layout would be read as if it were the
    # first. Versions after 2.13 infer them from q's, and refuse others
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
    """x (N, T, H) without columns of zeros: cuDNN has kernels for narrower values only."""
    return x if block.value_width is None else x[..., : block.value_width]


def _widened(x: Tensor, like: Tensor) -> Tensor:
    width = like.shape[-1] - x.shape[-1]
    return pad(x, (0, width)) if width else x


def _dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _in_order_of(q: Tensor, x: Tensor) -> Tensor:
    """x (N, T, H) without gaps, its memory in the order of q's dimensions."""
    if q.stride(0) > q.stride(1):
        return x.contiguous()
    return x.transpose(0, 1).contiguous().transpose(0, 1)

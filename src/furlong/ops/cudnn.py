"""Attention on CUDA by cuDNN's fused kernels, the fastest on Hopper.

They take grouped heads and any strides but the last. What they lack (windows, slices of unequal
lengths) goes to flash attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from furlong.ops.backend import Backend, Block, lse_dtype, merge_
from furlong.ops.cuda_flash import CUDAFlash

_MAX_ROWS = 65_535
"""Rows or keys of one call: known faults of fused kernels begin above it."""


class CUDNN(Backend):
    """cuDNN for full blocks and causal squares; a block beyond the limit is cut in pieces."""

    def __init__(self) -> None:
        self._flash = CUDAFlash()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        if not _is_plain(q, k, block):
            return self._flash.forward(q, k, v, block)
        if not block.is_full(q.shape[1], k.shape[1]):
            return _forward(q, k, v, block.scale, is_causal=True)
        parts = [self._full_forward(q[:, rows], k, v, block) for rows in _pieces(q.shape[1])]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)

    def _full_forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        pieces = _pieces(k.shape[1])
        if len(pieces) == 1:
            return _forward(q, k, v, block.scale, is_causal=False)
        out = q.new_zeros(q.shape, dtype=lse_dtype(q.dtype))
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=out.dtype)
        for keys in pieces:
            merge_(out, lse, *_forward(q, k[:, keys], v[:, keys], block.scale, is_causal=False))
        return out.to(q.dtype), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        whole = dout, q, k, v, out, lse
        if not _is_plain(q, k, block):
            return self._flash.backward(*whole, block)
        if not block.is_full(q.shape[1], k.shape[1]):
            return _backward(*whole, block.scale, is_causal=True)
        row_pieces, key_pieces = _pieces(q.shape[1]), _pieces(k.shape[1])
        if len(row_pieces) == len(key_pieces) == 1:
            return _backward(*whole, block.scale, is_causal=False)
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        for rows in row_pieces:
            for keys in key_pieces:
                grads = _backward(
                    dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, rows],
                    block.scale, is_causal=False,
                )  # fmt: skip
                dq[:, rows] += grads[0]
                dk[:, keys] += grads[1]
                dv[:, keys] += grads[2]
        return dq.to(q.dtype), dk, dv

    def packed_forward(
        self, q: Tensor, k: Tensor, v: Tensor, slices: Sequence[slice], block: Block
    ) -> tuple[Tensor, Tensor]:
        return self._flash.packed_forward(q, k, v, slices, block)

    def packed_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        slices: Sequence[slice], block: Block,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return self._flash.packed_backward(dout, q, k, v, out, lse, slices, block)


def _is_plain(q: Tensor, k: Tensor, block: Block) -> bool:
    """Whether cuDNN computes this block: a full one, or a causal square within the limit."""
    num_rows, num_keys = q.shape[1], k.shape[1]
    if block.softcap is not None or num_rows == 0:
        return False
    if block.is_full(num_rows, num_keys):
        return True
    return block.is_causal(num_rows, num_keys) and num_rows <= _MAX_ROWS


def _pieces(size: int) -> list[slice]:
    """As few and as even pieces as the limit allows."""
    num_pieces = -(-size // _MAX_ROWS)
    step = -(-size // num_pieces)
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(_dense_heads(x)[None] for x in (q, k, v)), None, True, 0.0, is_causal, False, scale=scale
    )
    return result[0][0], result[1].reshape(q.shape[:2])  # lse: (1, N, T, 1) -> (N, T)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    *, is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    # torch keeps one cuDNN plan per strides of q, k and v, with the strides of dout, out and lse
    # built in, so that these must never vary: a second layout would be read as if it were the first
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        _token_major(dout)[None], *(_dense_heads(x)[None] for x in (q, k, v)),
        _token_major(out)[None], lse.contiguous()[None, ..., None], unused, unused,
        None, None, None, q.shape[1], k.shape[1], 0.0, is_causal, scale=scale,
    )  # fmt: skip
    return dq[0], dk[0], dv[0]


def _dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _token_major(x: Tensor) -> Tensor:
    """x (N, T, H), its memory in the order (T, N, H): a model's own, so that few are copied."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)

"""Attention of one block by PyTorch's CUDA kernels: flash attention and cuDNN's.

Both are called at the level where the log-sum-exp goes in and out, so that blocks can be merged;
the backward takes the merged output and log-sum-exp, the way torch's own context parallelism does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from furlong.ops.backend import Block, lse_dtype
from furlong.ops.reference import Reference

_MAX_ROWS = 65_535
"""Rows or keys of one cuDNN call: known faults of fused kernels begin above it."""


class CUDAFlash:
    """flash attention 2: grouped heads and sliding windows natively."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        call = _flash_call(q.shape[1], k.shape[1], block)
        if call is None:
            return Reference().forward(q, k, v, block)
        rows, first_key, is_causal, left, right = call
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=lse_dtype(q.dtype))
        if rows == 0:
            return out, lse
        result = torch.ops.aten._flash_attention_forward(
            _row_major(q[:, :rows]), _row_major(k[:, first_key:]), _row_major(v[:, first_key:]),
            None, None, rows, k.shape[1] - first_key, 0.0, is_causal, False,
            scale=block.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        out[:, :rows] = result[0][0].transpose(0, 1)
        lse[:, :rows] = result[1][0]
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = _flash_call(q.shape[1], k.shape[1], block)
        if call is None:
            return Reference().backward(dout, q, k, v, out, lse, block)
        rows, first_key, is_causal, left, right = call
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        if rows == 0:
            return dq, dk, dv
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            _row_major(dout[:, :rows]), _row_major(q[:, :rows]),
            _row_major(k[:, first_key:]), _row_major(v[:, first_key:]), _row_major(out[:, :rows]),
            lse[None, :, :rows].contiguous(), None, None, rows, k.shape[1] - first_key,
            0.0, is_causal, unused, unused,
            scale=block.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        dq[:, :rows] = grads[0][0].transpose(0, 1)
        dk[:, first_key:] = grads[1][0].transpose(0, 1)
        dv[:, first_key:] = grads[2][0].transpose(0, 1)
        return dq, dk, dv


class CUDNN:
    """cuDNN's fused attention, the fastest on Hopper; what it lacks goes to flash attention.

    A full block folds a head group's rows under one another; the causal square repeats the chunk's
    own keys.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        if not _is_plain(q, k, block):
            return CUDAFlash().forward(q, k, v, block)
        is_causal = not block.is_full(q.shape[1], k.shape[1])
        if is_causal:
            heads = (q[None], _repeated(k, q), _repeated(v, q))
        else:
            heads = (_folded(q, k), k[None], v[None])
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *heads, None, True, 0.0, is_causal, False, scale=block.scale
        )
        return result[0].reshape(q.shape), result[1].reshape(q.shape[:2])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not _is_plain(q, k, block):
            return CUDAFlash().backward(dout, q, k, v, out, lse, block)
        is_causal = not block.is_full(q.shape[1], k.shape[1])
        if is_causal:
            heads = (dout[None], q[None], _repeated(k, q), _repeated(v, q), out[None])
        else:
            heads = (_folded(dout, k), _folded(q, k), k[None], v[None], _folded(out, k))
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(t.contiguous() for t in heads), lse.reshape(*heads[1].shape[:3], 1).contiguous(),
            unused, unused, None, None, None,
            heads[1].shape[2], k.shape[1], 0.0, is_causal, scale=block.scale,
        )  # fmt: skip
        groups = (k.shape[0], -1)  # (heads, S, H) -> (K, heads/K, S, H) -> (K, S, H)
        return (
            dq.reshape(q.shape),
            dk[0].unflatten(0, groups).sum(1),
            dv[0].unflatten(0, groups).sum(1),
        )


def _flash_call(
    num_rows: int, num_keys: int, block: Block
) -> tuple[int, int, bool, int | None, int | None] | None:
    """(rows, first key, is_causal, window left, window right) of one flash call, None if it has
    none.

    flash aligns row t with key t + S - T; a window reaches `left` keys before and `right` after it.
    """
    if block.softcap is not None:
        return None
    if block.is_full(num_rows, num_keys):
        return num_rows, 0, False, None, None
    if block.distance == 0 and num_rows == num_keys:
        left = None if block.window is None else block.window - 1
        return num_rows, 0, True, left, None if left is None else 0
    if block.window is None or block.distance < num_keys - 1:
        return None
    rows = block.visible_rows(num_rows, num_keys)
    first = max(0, block.distance - block.window + 1)
    aligned = (num_keys - first) - rows
    left = aligned - (block.distance - first) + block.window - 1
    return rows, first, False, left, -1


def _is_plain(q: Tensor, k: Tensor, block: Block) -> bool:
    """Whether cuDNN may take this block in one call."""
    num_rows, num_keys = q.shape[1], k.shape[1]
    is_full = block.is_full(num_rows, num_keys)
    rows_per_call = num_rows * (q.shape[0] // k.shape[0]) if is_full else num_rows
    plain = is_full or block.is_causal(num_rows, num_keys)
    return plain and block.softcap is None and max(rows_per_call, num_keys) <= _MAX_ROWS


def _row_major(x: Tensor) -> Tensor:
    """(N, T, H) -> (1, T, N, H), flash attention's layout."""
    return x.transpose(0, 1)[None].contiguous()


def _folded(x: Tensor, k: Tensor) -> Tensor:
    """x (N, T, H) -> (1, K, N/K * T, H)."""
    return x.reshape(1, k.shape[0], -1, x.shape[-1])


def _repeated(k: Tensor, q: Tensor) -> Tensor:
    """k (K, S, H) -> (1, N, S, H)."""
    return k.repeat_interleave(q.shape[0] // k.shape[0], 0)[None]

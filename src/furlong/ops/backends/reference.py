"""Attention of one block in plain tensor operations, for any dtype, device and mask rule.

The fast backends are tested against it, and it computes what they lack (softcap). Scores exist for
one tile of rows at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from furlong.ops.backends.base import (
    Backend,
    Block,
    each_square,
    each_square_backward,
    lse_dtype,
)

_MAX_SCORE_ELEMENTS = 2**24


class Reference(Backend):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        if block.squares:
            return each_square(self, q, k, v, block)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))  # (N, T)
        for rows, tile in _tiles(q, k, block):
            scores, _ = _scores(q[:, rows], k, tile)  # (N, rows, keys)
            lse[:, rows] = torch.logsumexp(scores, dim=-1)
            probabilities = _probabilities(scores, lse[:, rows])
            out[:, rows] = _grouped(probabilities, v.to(scores.dtype)).to(q.dtype)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        if block.squares:
            return each_square_backward(self, dout, q, k, v, out, lse, block)
        wide = lse.dtype
        dq = torch.zeros_like(q)
        dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        num_kv_heads = k.shape[0]
        for rows, tile in _tiles(q, k, block):
            scores, tanh = _scores(q[:, rows], k, tile)
            probabilities = _probabilities(scores, lse[:, rows])  # (N, rows, keys)
            dout_rows = dout[:, rows].to(wide)
            delta = (dout_rows * out[:, rows].to(wide)).sum(-1, keepdim=True)  # (N, rows, 1)
            dprobabilities = _grouped(dout_rows, v.to(wide).mT)
            dscores = probabilities * (dprobabilities - delta)
            if tanh is not None:
                dscores = dscores * (1 - tanh**2)
            dscores = dscores * block.scale
            dq[:, rows] = _grouped(dscores, k.to(wide)).to(q.dtype)
            dk += _fold(dscores, num_kv_heads).mT @ _fold(q[:, rows].to(wide), num_kv_heads)
            dv += _fold(probabilities, num_kv_heads).mT @ _fold(dout_rows, num_kv_heads)
        return dq, dk, dv


def _tiles(q: Tensor, k: Tensor, block: Block) -> list[tuple[slice, Block]]:
    """Return tiles of query rows, each with its `Block`; every tile has all keys."""
    num_rows = q.shape[1]
    step = max(1, min(num_rows, _MAX_SCORE_ELEMENTS // max(1, q.shape[0] * k.shape[1])))
    starts = range(0, num_rows, step)
    return [(slice(i, min(i + step, num_rows)), block.at(i, 0)) for i in starts]


def _scores(q: Tensor, k: Tensor, block: Block) -> tuple[Tensor, Tensor | None]:
    """Return masked scores (N, T, S) in the log-sum-exp's dtype, and with softcap their tanh."""
    wide = lse_dtype(q.dtype)
    scores = _grouped(q.to(wide), k.to(wide).mT) * block.scale
    tanh = None
    if block.softcap is not None:
        tanh = torch.tanh(scores / block.softcap)
        scores = tanh * block.softcap
    seen = block.mask(q.shape[1], k.shape[1], q.device)
    return scores.masked_fill(~seen, -torch.inf), tanh


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(scores - lse), with zeros in rows that see no key."""
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])


def _fold(x: Tensor, num_kv_heads: int) -> Tensor:
    """Concatenate the rows of a head group: (N, T, X) -> (K, N/K * T, X)."""
    return x.reshape(num_kv_heads, -1, x.shape[-1])


def _grouped(a: Tensor, b: Tensor) -> Tensor:
    """Return a (N, T, X) @ b (K, X, Y) -> (N, T, Y), where each head uses the b of its group."""
    return (_fold(a, b.shape[0]) @ b).reshape(*a.shape[:2], b.shape[-1])

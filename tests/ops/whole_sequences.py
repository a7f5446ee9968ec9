"""Sequences attended chunk by chunk in a store of their own, against dense attention of each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from emulated_cuda import EmulatedCUDA
from helpers.switch import Switch, SwitchExchange, run_pool
from torch import Tensor

from furlong.kv.arena import Arena
from furlong.kv.pools import DevicePool
from furlong.kv.store import KVStore
from furlong.ops.attention import AttentionRule
from furlong.plan.passes import Pass
from furlong.plan.plan import Chunk, ChunkPlan
from furlong.plan.rows import ChunkRows, rows_of
from furlong.runtime.cell import Cell, chunk_pieces

H = 8
Whole = tuple[Tensor, ...]
"""q (N, T, H), k, v (K, T, H), and dout (N, T, H) of a sequence."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1000 * seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def dense(q, k, v, rule, sinks):
    """Causal attention of one whole sequence; q (N, T, H), k and v (K, T, H)."""
    k, v = (t.repeat_interleave(q.shape[0] // k.shape[0], 0) for t in (k, v))
    scores = q @ k.mT * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    at = torch.arange(q.shape[1])
    behind = at[:, None] - at
    seen = (behind >= 0) & (behind < (rule.window or q.shape[1]))
    if rule.block is not None:
        seen &= (at // rule.block)[:, None] == at // rule.block
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[1], 1)], -1)
    return scores.softmax(-1)[..., : q.shape[1]] @ v


def token_major(parts: list[Tensor]) -> Tensor:
    """Parts (N, t, H) -> (N, T, H) as a model's projections lie in memory."""
    return torch.cat(parts, 1).transpose(0, 1).contiguous().transpose(0, 1)


def local(wholes: Sequence[Whole], which: int, rows: ChunkRows, dtype: torch.dtype) -> Tensor:
    """A process's rows of q, k, v or dout, as a model's projections lie in memory."""
    parts = [wholes[s][which].detach()[:, a:b] for s, a, b in rows.tokens]
    parts = parts or [torch.ones_like(wholes[0][which].detach()[:, :1])]
    return token_major(parts).to(dtype)


def walk(
    plan: ChunkPlan, wholes: Sequence[Whole], rule: AttentionRule, sinks: Tensor | None,
    backend: Any, exchange: SwitchExchange, *, is_saved: bool, dtype: torch.dtype,
) -> tuple[list[tuple[ChunkRows, list[Tensor]]], Tensor | None]:  # fmt: skip
    """One process's out, dq, dk, dv of each chunk, and its gradient of the sinks."""
    heads, sp_size = (wholes[0][0].shape[0], wholes[0][1].shape[0]), plan.sp_size
    arena = Arena(torch.device("cpu"), poison=True)
    store, own_sinks = KVStore(arena, plan.piece_lens), None
    if sinks is not None:
        own_sinks = sinks.detach().clone().requires_grad_()
    cells, found = [], []
    for number, chunk in enumerate(plan.chunks):
        rows = rows_of(
            chunk, exchange.process, sp_size=sp_size, q_heads=heads[0], kv_heads=heads[1]
        )
        pool = DevicePool(arena)
        cell = Cell(
            rows, chunk_pieces(plan, number), store, backend, pool, range(1), exchange=exchange
        )
        leaves = [local(wholes, i, rows, dtype).requires_grad_() for i in range(3)]
        what = Pass("graph", writes_kv=True)
        if is_saved:
            with torch.no_grad():
                first = Pass("values", writes_kv=True, remembers=1)
                cell.attend(first, 0, *leaves, rule, own_sinks)
            what = Pass("graph", remembered=1)
        cells.append((cell, rows, leaves, cell.attend(what, 0, *leaves, rule, own_sinks)))
    for number, (cell, rows, leaves, out) in reversed(list(enumerate(cells))):
        out.backward(local(wholes, 3, rows, dtype))
        given = [out.detach().clone(), *(leaf.grad for leaf in leaves)]
        cell.forget()
        for seq_id, index in plan.links[number]:
            store.free(seq_id, 0, index)
        found.append((rows, given))
    assert not store.num_buffers and not arena.taken_bytes
    return found, None if own_sinks is None else own_sinks.grad


def check(
    chunks: Sequence[Chunk], lens: Sequence[int], rule: AttentionRule, backend: Any, *,
    heads: tuple[int, int] = (4, 2), with_sinks: bool = False, is_saved: bool = False,
    dtype: torch.dtype = torch.float64, bound: float = 1e-12, emulated: bool = False,
    sp_size: int = 4, segment_tokens: int = 1,
) -> None:  # fmt: skip
    plan = ChunkPlan(tuple(lens), tuple(chunks), (1,), ((),), sp_size=sp_size)
    sinks, dsinks = draw(heads[0]) if with_sinks else None, torch.zeros(heads[0]).double()
    wholes, truths = [], []
    for s, n in enumerate(lens):
        whole = [
            draw(num, n, H, seed=3 * s + i) for i, num in enumerate((heads[0], *heads[1:] * 2))
        ]
        whole = [x.detach().to(dtype).double().requires_grad_() for x in whole]
        out = dense(*whole, rule, sinks)
        dout = draw(heads[0], n, H, seed=3 * s + 2).detach().to(dtype).double()
        grads = torch.autograd.grad(out, [*whole, *([sinks] if with_sinks else [])], dout)
        if with_sinks:
            dsinks += grads[3]
        wholes.append((*whole, dout))
        truths.append((out.detach(), *grads[:3]))

    def process(exchange: SwitchExchange) -> Any:
        with EmulatedCUDA() if emulated else nullcontext():
            return walk(
                plan, wholes, rule, sinks, backend(), exchange, is_saved=is_saved, dtype=dtype
            )

    # a prefix comes in blocks of few keys, some behind a window
    with patch("furlong.kv.store.segment_tokens", lambda *_: segment_tokens):
        outcomes = run_pool(Switch(sp_size), process)
    for found, own_dsinks in outcomes:
        for rows, given in found:
            for (s, a, b), row in rows.runs():
                for mine, truth in zip(given, truths[s], strict=True):
                    torch.testing.assert_close(
                        mine[:, row : row + b - a].double(), truth[:, a:b], rtol=bound, atol=bound
                    )
            if not rows.tokens:
                assert not torch.stack([x.abs().sum() for x in given]).any()
        if with_sinks:
            dsinks -= own_dsinks
    assert float(dsinks.abs().max()) <= bound

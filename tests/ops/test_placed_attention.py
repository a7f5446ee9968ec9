"""Slices on nested places, attended chunk by chunk, against dense attention of whole sequences."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulated_cuda import EmulatedCUDA
from helpers.random_chunks import random_chunks
from helpers.switch import Switch, SwitchExchange, run_pool
from test_chunk_attention import dense, draw, token_major
from torch import Tensor

from furlong.errors import UnsupportedModelError
from furlong.kv.arena import Arena
from furlong.kv.pools.device import DevicePool
from furlong.kv.store import KVStore
from furlong.ops.cpu_flash import CPUFlash
from furlong.ops.cuda_flash import CUDAFlash
from furlong.ops.cudnn import CUDNN
from furlong.ops.layer_kv import AttentionRule
from furlong.ops.reference import Reference
from furlong.plan.passes import Pass
from furlong.plan.plan import Chunk, ChunkPlan, Place, Slice, piece_lens
from furlong.plan.rows import ChunkRows, rows_of
from furlong.runtime.cells.cell import Cell
from furlong.runtime.cells.layout import chunk_pieces

H = 8
Whole = tuple[Tensor, ...]
"""q (N, T, H), k, v (K, T, H), and dout (N, T, H) of a sequence."""


def local(wholes: Sequence[Whole], which: int, rows: ChunkRows, dtype: torch.dtype) -> Tensor:
    """A process's rows of q, k, v or dout, as a model's projections lie in memory."""
    parts = [wholes[s][which].detach()[:, a:b] for s, a, b in rows.tokens]
    parts = parts or [torch.ones_like(wholes[0][which].detach()[:, :1])]
    return token_major(parts).to(dtype)


def walk(
    plan: ChunkPlan, wholes: Sequence[Whole], rule: AttentionRule, sinks: Tensor | None,
    backend: Any, exchange: SwitchExchange, *, is_known: bool, dtype: torch.dtype,
) -> tuple[list[tuple[ChunkRows, list[Tensor]]], Tensor | None]:  # fmt: skip
    """One process's out, dq, dk, dv of each chunk, and its gradient of the sinks."""
    heads, sp_size = (wholes[0][0].shape[0], wholes[0][1].shape[0]), plan.sp_size
    arena = Arena(torch.device("cpu"), poison=True)
    store, own_sinks = KVStore(arena, piece_lens(plan)), None
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
        if is_known:
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
    heads: tuple[int, int] = (4, 2), with_sinks: bool = False, is_known: bool = False,
    dtype: torch.dtype = torch.float64, bound: float = 1e-12, emulated: bool = False,
    sp_size: int = 4,
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
                plan, wholes, rule, sinks, backend(), exchange, is_known=is_known, dtype=dtype
            )

    with ExitStack() as stack:  # a prefix comes key by key, some behind a window
        for name in ("_MAX_FORWARD_TOKENS", "_MAX_BACKWARD_TOKENS"):
            stack.enter_context(patch(f"furlong.kv.store.{name}", 1))
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


def on(first: int, size: int, *slices: tuple[int, int, int]) -> list[Slice]:
    return [Slice(*given, Place(first, size)) for given in slices]


LENS = [26, 2, 12, 6, 9, 7, 3, 1, 8]
CHUNKS = [
    Chunk(tuple(slices)) for slices in (
        [*on(0, 4, (0, 0, 9), (1, 0, 2)), *on(0, 2, (2, 0, 6)), *on(2, 2, (3, 0, 5)),
         *on(0, 1, (4, 0, 4), (5, 0, 7)), *on(3, 1, (6, 0, 3))],
        [*on(0, 4, (0, 9, 21)), *on(0, 2, (2, 6, 11)), *on(2, 2, (3, 5, 6)), *on(0, 1, (4, 4, 9))],
        [*on(0, 4, (0, 21, 26)), *on(0, 2, (2, 11, 12), (7, 0, 1)), *on(1, 1, (8, 0, 8))],
    )
]  # fmt: skip


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (2, 1), (3, 3)])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("window, softcap", [(None, None), (6, None), (1, 2.0)])
def test_places_give_the_whole_and_all_its_gradients(heads, is_known, window, softcap):
    rule = AttentionRule(0.4, window, softcap)
    check(CHUNKS, LENS, rule, Reference, heads=heads, is_known=is_known, with_sinks=True)


@pytest.mark.parametrize("heads", [(4, 2), (2, 1), (3, 3)])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("block", [1, 4, 7, 30])
def test_attention_blocks(heads, is_known, block):
    rule = AttentionRule(0.4, block=block)
    check(CHUNKS, LENS, rule, Reference, heads=heads, is_known=is_known, with_sinks=True)


@pytest.mark.parametrize("heads", [(4, 2), (2, 1)])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("backend", [CPUFlash, CUDAFlash, CUDNN])
def test_kernels_give_the_same(backend, window, heads, small_cudnn):
    rule = AttentionRule(0.4, window)
    check(CHUNKS, LENS, rule, backend, heads=heads, emulated=backend is not CPUFlash)


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("backend", [Reference, CPUFlash, CUDAFlash, CUDNN])
def test_bfloat16(backend, heads, is_known, small_cudnn):
    """Copies of heads and gathered keys are added up in float32; what travels is rounded once."""
    check(
        CHUNKS, LENS, AttentionRule(0.4), backend, heads=heads, is_known=is_known,
        dtype=torch.bfloat16, bound=4e-2, emulated=backend in (CUDAFlash, CUDNN),
    )  # fmt: skip


@pytest.mark.parametrize("sp_size", [3, 4, 6, 8])
def test_random_chunks(sp_size):
    source = random.Random(sp_size)
    for _ in range(6):
        lens, chunks = random_chunks(
            source, sp_size, num_chunks=3, num_sequences=source.randint(1, 9), max_tokens=24
        )
        window = source.choice((None, 5))
        rule = AttentionRule(0.4, window, block=None if window else source.choice((None, 4, 11)))
        heads = source.choice(((4, 2), (2, 2), (6, 2), (12, 3)))
        check(
            chunks, lens, rule, Reference, heads=heads, is_known=source.random() < 0.5,
            with_sinks=source.random() < 0.5, sp_size=sp_size,
        )  # fmt: skip


def test_heads_that_the_config_does_not_name_are_refused():
    """Rows were divided for four key-value heads, the layer has three."""
    rows = rows_of(Chunk(tuple(on(0, 4, (0, 0, 8)))), 0, sp_size=4, q_heads=4, kv_heads=4)
    arena = Arena(torch.device("cpu"))
    cell = Cell(
        rows, {}, KVStore(arena, {}), Reference(), DevicePool(arena), range(1),
        exchange=SwitchExchange(Switch(4), 0),
    )  # fmt: skip
    q, k, v = torch.ones(6, 2, H), torch.ones(3, 2, H), torch.ones(3, 2, H)
    with pytest.raises(UnsupportedModelError, match="6 query and 3 key-value heads"):
        cell.attend(Pass("values"), 0, q, k, v, AttentionRule(1.0), None)

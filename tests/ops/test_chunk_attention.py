"""Sequences attended chunk by chunk, against dense attention of each whole one under autograd."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from emulated_cuda import EmulatedCUDA
from torch import Tensor

from furlong.ops.chunk_attention import chunk_attention
from furlong.ops.cpu_flash import CPUFlash
from furlong.ops.cuda_flash import CUDAFlash
from furlong.ops.cudnn import CUDNN
from furlong.ops.layer_kv import AttentionRule, Relayed
from furlong.ops.reference import Reference
from furlong.plan.plan import Chunk, Slice
from furlong.plan.rows import ChunkRows, rows_of

Slices = list[tuple[int, int, int]]
"""(sequence, start, stop) of each slice of a chunk."""

PLANS: dict[str, list[Slices]] = {
    "one sequence, and another beside its tail": [
        [(0, 0, 9)], [(0, 9, 10)], [(0, 10, 23), (1, 0, 5)],
    ],
    "a prefix in front of every slice": [
        [(0, 0, 7), (1, 0, 4), (2, 0, 1)],
        [(2, 1, 6), (0, 7, 8), (3, 0, 3), (1, 4, 9)],
        [(1, 9, 10), (0, 8, 19), (2, 6, 9)],
    ],
    "many short ones, and a prefix in their midst": [
        [(0, 0, 6)],
        [(1, 0, 1), (2, 0, 3), (3, 0, 3), (0, 6, 11), (4, 0, 1), (5, 0, 7), (6, 0, 2)],
    ],
}  # fmt: skip


@dataclass
class Lent:
    """A prefix block that is poisoned when the next one is asked for."""

    k: Tensor
    v: Tensor
    distance: int
    grads: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add_grad(self, dk: Tensor, dv: Tensor) -> None:
        assert dk.shape == self.k.shape and dv.shape == self.v.shape
        self.grads.append((dk.clone(), dv.clone()))


@dataclass
class Stored:
    """K,V (K, T, H) of a whole sequence, and what has been sent back to them."""

    k: Tensor
    v: Tensor
    dk: Tensor
    dv: Tensor


@dataclass
class Layer:
    """The simplest store: prefixes in blocks of a few tokens, newest first where they go back."""

    stored: list[Stored]
    slices: Slices
    block_tokens: int = 4

    def keeps(self, slice_index: int) -> bool:
        return False  # everything is stored beforehand

    def prefix(self, slice_index: int, window: int | None, *, gradients: bool) -> Iterator[Lent]:
        sequence, start, _ = self.slices[slice_index]
        of = self.stored[sequence]
        first = 0 if window is None else max(0, start - window + 1)
        starts = list(range(first, start, self.block_tokens))
        for at in reversed(starts) if gradients else starts:
            keys = slice(at, min(at + self.block_tokens, start))
            tokens = torch.stack((of.k[:, keys], of.v[:, keys])).permute(2, 0, 1, 3).contiguous()
            lent = Lent(*tokens.permute(1, 2, 0, 3).unbind(), start - at)  # from (S, 2, K, H)
            del tokens
            gone = [weakref.ref(lent), weakref.ref(lent.k), weakref.ref(lent.v)]
            k, v, grads = lent.k, lent.v, lent.grads
            yield lent
            del lent
            assert gone[0]() is None, "chunk attention still holds the block"
            assert len(grads) == gradients, "each block's gradients, once, before the next"
            for dk, dv in grads:
                of.dk[:, keys] += dk
                of.dv[:, keys] += dv
            k.fill_(torch.nan)
            v.fill_(torch.nan)
            del k, v
            assert gone[1]() is None and gone[2]() is None, "nobody else may hold its tensors"

    def relayed(self, slice_index: int) -> Relayed | None:
        sequence, start, stop = self.slices[slice_index]
        of = self.stored[sequence]
        sent = (of.dk[:, start:stop] != 0).any(-1).any(0)
        if not sent.any():
            return None
        first = int(sent.nonzero()[0])
        return first, of.dk[:, start + first : stop], of.dv[:, start + first : stop]


def on_one_device(slices: Slices) -> ChunkRows:
    chunk = Chunk(tuple(Slice(*given) for given in slices))
    return rows_of(chunk, 0, sp_size=1, q_heads=1, kv_heads=1)


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


def check_plan(
    plan, rule, sinks, backend, *, heads=(4, 2), is_known=False, dtype=torch.float64, bound=1e-12
):
    """Values and all gradients of a plan's chunks, in a dtype, against each whole sequence."""

    def assert_near(mine, truth):
        torch.testing.assert_close(mine.double(), truth, rtol=bound, atol=bound)

    lens: dict[int, int] = {}
    for sequence, _, stop in itertools.chain(*plan):
        lens[sequence] = max(lens.get(sequence, 0), stop)
    wide = torch.promote_types(dtype, torch.float32)
    wholes, truths, stored = [], [], []
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    douts = []
    for sequence in range(len(lens)):
        n = lens[sequence]
        q, k, v, dout = (
            draw(num, n, 8, seed=2 * sequence + i).detach().to(dtype).double().requires_grad_()
            for num, i in ((heads[0], 1), (heads[1], 1), (heads[1], 2), (heads[0], 2))
        )
        out = dense(q, k, v, rule, sinks)
        grads = torch.autograd.grad(out, [q, k, v] + [sinks] * (sinks is not None), dout)
        if sinks is not None:
            dsinks += grads[3]
        wholes.append((q, k, v))
        douts.append(dout)
        truths.append((out.detach(), *grads[:3]))
        own = (k.detach().to(dtype), v.detach().to(dtype))
        stored.append(Stored(*own, *(torch.zeros_like(t, dtype=wide) for t in own)))
    parts = []
    for slices in plan:
        leaves = [
            token_major([wholes[s][i].detach()[:, a:b].to(dtype) for s, a, b in slices])
            for i in range(3)
        ]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        stops = list(itertools.accumulate(b - a for _, a, b in slices))
        rows = [slice(stop - (b - a), stop) for stop, (_, a, b) in zip(stops, slices, strict=True)]
        sink = None if sinks is None else sinks.detach().requires_grad_()
        call = {
            "rows": on_one_device(slices), "layer_kv": Layer(stored, slices), "rule": rule,
            "backend": backend, "sinks": sink,
        }  # fmt: skip
        out, known = chunk_attention(*leaves, **call)
        if is_known:
            out, _ = chunk_attention(*leaves, **call, known=known)
        for (s, a, b), r in zip(slices, rows, strict=True):
            assert_near(out[:, r], truths[s][0][:, a:b])
        parts.append((slices, rows, out, leaves + [sink] * (sinks is not None)))
    for slices, rows, out, leaves in reversed(parts):  # later chunks send before earlier go back
        dout = token_major([douts[s].detach()[:, a:b].to(dtype) for s, a, b in slices])
        grads = torch.autograd.grad(out, leaves, dout)
        for (s, a, b), r in zip(slices, rows, strict=True):
            for mine, truth in zip(grads[:3], truths[s][1:], strict=True):
                assert_near(mine[:, r], truth[:, a:b])
        if sinks is not None:
            dsinks -= grads[3]
    if sinks is not None:
        assert_near(dsinks, torch.zeros_like(dsinks))


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_chunks_give_the_whole_and_all_its_gradients(plan, window, with_sinks, is_known):
    sinks = draw(4) if with_sinks else None
    check_plan(PLANS[plan], AttentionRule(0.4, window), sinks, Reference(), is_known=is_known)


@pytest.mark.parametrize("block", [1, 4, 7, 30])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_attention_blocks(plan, is_known, block):
    """A token sees those of its own block: some are open between chunks, some lie within one."""
    rule = AttentionRule(0.4, block=block)
    check_plan(PLANS[plan], rule, draw(4), Reference(), is_known=is_known)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("window, softcap", [(None, None), (6, None), (None, 2.0), (6, 2.0)])
@pytest.mark.parametrize("plan", PLANS)
def test_the_cpu_kernel_gives_the_same(plan, window, softcap, heads):
    rule = AttentionRule(0.4, window, softcap)
    check_plan(PLANS[plan], rule, draw(heads[0]), CPUFlash(), heads=heads)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 6, 20])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("backend", [CUDAFlash, CUDNN])
def test_the_cuda_kernels_give_the_same(backend, plan, window, heads, small_cudnn):
    with EmulatedCUDA():
        check_plan(PLANS[plan], AttentionRule(0.4, window), draw(heads[0]), backend(), heads=heads)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("backend", [Reference, CPUFlash, CUDAFlash, CUDNN])
def test_bfloat16(backend, plan, window, small_cudnn):
    """Partial results are merged in float32 and rounded as often as one kernel would."""
    with EmulatedCUDA():
        check_plan(
            PLANS[plan], AttentionRule(0.4, window), None, backend(),
            dtype=torch.bfloat16, bound=3e-2,
        )  # fmt: skip


class NothingBefore:
    """A layer of whole sequences that says what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def keeps(self, slice_index):
        return False

    def prefix(self, slice_index, window, *, gradients):
        self.asked.append(("prefix", slice_index, window, gradients))
        return iter(())

    def relayed(self, slice_index):
        self.asked.append(("relayed", slice_index))


@pytest.mark.parametrize("trains_kv", [False, True])
def test_gradients_are_asked_for_only_where_they_travel(trains_kv):
    q, k, v = draw(2, 5, 8), draw(2, 5, 8), draw(2, 5, 8)
    layer = NothingBefore()
    own = (k, v) if trains_kv else (k.detach(), v.detach())
    out, _ = chunk_attention(
        q, *own, rows=on_one_device([(0, 0, 2), (1, 0, 3)]), layer_kv=layer,
        rule=AttentionRule(0.4, 3), backend=Reference(),
    )  # fmt: skip
    assert layer.asked == [("prefix", 0, 3, False), ("prefix", 1, 3, False)]
    layer.asked.clear()
    out.sum().backward()
    expected = {("prefix", i, 3, trains_kv) for i in (0, 1)}
    expected |= {("relayed", i) for i in (0, 1)} if trains_kv else set()
    assert set(layer.asked) == expected and len(layer.asked) == len(expected)


def test_a_forward_inside_a_backward_sends_nothing():
    """A checkpoint's recompute walks the prefix as a forward, then the backward as a backward."""
    q, k, v = draw(2, 5, 8), draw(2, 5, 8), draw(2, 5, 8)
    layer = NothingBefore()

    def attend(q, k, v):
        return chunk_attention(
            q, k, v, rows=on_one_device([(0, 0, 5)]), layer_kv=layer, rule=AttentionRule(0.4),
            backend=Reference(),
        )[0]  # fmt: skip

    out = torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)
    out.sum().backward()
    asked = [entry[-1] for entry in layer.asked if entry[0] == "prefix"]
    assert asked == [False, False, True]


def launches(backend, lens, window):
    """Kernels that a forward and a backward of one layer start, for slices of some lengths."""
    rows, num = on_one_device([(i, 0, n) for i, n in enumerate(lens)]), sum(lens)
    q, dout = (token_major([torch.randn(4, num, 8)]).requires_grad_() for _ in range(2))
    k, v = (token_major([torch.randn(2, num, 8)]).requires_grad_() for _ in range(2))
    with EmulatedCUDA(computes=False) as counted:
        out, _ = chunk_attention(
            q, k, v, rows=rows, layer_kv=NothingBefore(), rule=AttentionRule(0.3, window),
            backend=backend,
        )  # fmt: skip
        torch.autograd.grad(out, (q, k, v), dout.detach())
    return sum(counted.launches.values())


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("backend", [CUDAFlash, CUDNN])
def test_many_short_sequences_launch_no_more_kernels_than_a_long_one(backend, window):
    one, many = launches(backend(), [4000], window), launches(backend(), [20] * 200, window)
    copies = 1  # of the slices' ends to the device, once per chunk
    assert many + copies <= 2 * one
    assert one == 2, "one kernel forward, one backward, and nothing around them"
    assert launches(Looped(), [20] * 20, window) > 2 * one  # the count can fail


class Looped(CUDAFlash):
    """One call per slice."""

    def packed_forward(self, *args):
        return Reference.packed_forward(self, *args)

    def packed_backward(self, *args):
        return Reference.packed_backward(self, *args)

"""A sequence attended chunk by chunk, against dense attention of the whole under autograd."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from furlong.ops.chunk_attention import AttentionRule, chunk_attention, merge
from furlong.ops.reference import Reference

NUM_TOKENS, CUTS = 23, (0, 9, 10, 23)
OTHER = 5
"""Tokens of a second sequence, which shares the last chunk."""


@dataclass
class Stored:
    """A prefix block as the simplest store would hand it out."""

    k: Tensor
    v: Tensor
    start: int
    grads: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    distance: int = 0

    def add_grad(self, dk: Tensor, dv: Tensor) -> None:
        self.grads.append((dk, dv))


@dataclass
class Layer:
    blocks: list[Stored]
    own: Stored
    start: int

    def prefix_blocks(self, window):
        for block in self.blocks:
            block.distance = self.start - block.start
            yield block

    def relayed(self):
        for dk, dv in self.own.grads:
            yield slice(0, dk.shape[1]), dk, dv


def draw(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def dense(q, k, v, rule, sinks):
    """Causal attention of one whole sequence; q (N, T, H), k and v (K, T, H)."""
    k, v = (t.repeat_interleave(q.shape[0] // k.shape[0], 0) for t in (k, v))
    scores = q @ k.mT * rule.scale
    behind = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    seen = (behind >= 0) & (behind < (rule.window or q.shape[1]))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[1], 1)], -1)
    return scores.softmax(-1)[..., : q.shape[1]] @ v


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_chunks_give_the_whole_and_all_its_gradients(window, with_sinks, is_known):
    rule = AttentionRule(0.4, window)
    total = NUM_TOKENS + OTHER
    q, k, v, dout = draw(4, total, 8), draw(2, total, 8), draw(2, total, 8), draw(4, total, 8)
    sinks = draw(4) if with_sinks else None
    leaves = [q, k, v] + [sinks] * with_sinks
    long, other = slice(0, NUM_TOKENS), slice(NUM_TOKENS, total)
    whole = torch.cat([dense(q[:, s], k[:, s], v[:, s], rule, sinks) for s in (long, other)], dim=1)
    truth = torch.autograd.grad(whole, leaves, dout)

    outs, chunks, blocks = [], [], []
    for start, stop in pairwise(CUTS):
        is_last = stop == NUM_TOKENS
        rows = slice(start, total if is_last else stop)
        parts = [t.detach()[:, rows].requires_grad_() for t in (q, k, v)]
        own = Stored(parts[1].detach(), parts[2].detach(), start)
        layer = Layer(list(blocks), own, start)
        slices = [slice(0, stop - start)] + [slice(stop - start, total - start)] * is_last
        sink = sinks.detach().requires_grad_() if with_sinks else None
        call = {
            "slices": slices, "layer_kv": layer, "rule": rule, "backend": Reference(),
            "sinks": sink,
        }  # fmt: skip
        out, lse = chunk_attention(*parts, **call)
        if is_known:
            out, _ = chunk_attention(*parts, **call, known=(out.detach(), lse))
        outs.append(out)
        chunks.append((rows, out, parts + [sink] * with_sinks))
        blocks.append(own)
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-12, atol=1e-12)

    given = [torch.zeros_like(leaf) for leaf in leaves]
    for rows, out, parts in reversed(chunks):  # later chunks send before earlier ones go back
        grads = torch.autograd.grad(out, parts, dout[:, rows])
        for sum_, grad in zip(given[:3], grads[:3], strict=True):
            sum_[:, rows] += grad
        if with_sinks:
            given[3] += grads[3]
    for mine, expected in zip(given, truth, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_merging_two_sets_of_keys_is_attention_over_both():
    scores, values = draw(3, 7, 10), draw(3, 10, 4)
    parts = [
        (scores[..., keys].softmax(-1) @ values[:, keys], scores[..., keys].logsumexp(-1))
        for keys in (slice(0, 4), slice(4, 10))
    ]
    out, lse = merge(*parts[0], *parts[1])
    torch.testing.assert_close(out, scores.softmax(-1) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(-1))

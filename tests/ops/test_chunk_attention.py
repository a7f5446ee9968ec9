"""Sequences attended chunk by chunk, against dense attention of each whole one under autograd."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from emulated_cuda import EmulatedCUDA
from helpers.covering import Design
from whole_sequences import check, draw, token_major

from furlong.ops.attention import AttentionRule, chunk_attention
from furlong.ops.backends.base import each_square, each_square_backward
from furlong.ops.backends.cpu_flash import CPUFlash
from furlong.ops.backends.cuda_flash import CUDAFlash
from furlong.ops.backends.cudnn import CUDNN
from furlong.ops.backends.reference import Reference
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


def on_one_device(slices: Slices) -> ChunkRows:
    chunk = Chunk(tuple(Slice(*given) for given in slices))
    return rows_of(chunk, 0, sp_size=1, q_heads=1, kv_heads=1)


RULES = {
    "all": AttentionRule(0.4),
    "the own token": AttentionRule(0.4, 1),
    "a window": AttentionRule(0.4, 6),
    "a long window": AttentionRule(0.4, 20),
    "capped": AttentionRule(0.4, None, 2.0),
    "capped in a window": AttentionRule(0.4, 6, 2.0),
    **{f"blocks of {n}": AttentionRule(0.4, block=n) for n in (1, 4, 7, 30)},
}
"""In blocks some tokens are open between chunks, some lie within one."""


CUDA = (CUDAFlash, CUDNN)
WALKS = Design(
    {
        "plan": list(PLANS),
        "rule": list(RULES),
        "with_sinks": (False, True),
        "is_saved": (False, True),
        "backend": (Reference, CPUFlash, *CUDA),
        "heads": ((4, 2), (2, 2), (6, 2), (4, 1)),
        "dtype": (torch.float64, torch.bfloat16),
    },
    {"backend": lambda c: RULES[c["rule"]].softcap is None or c["backend"] not in CUDA},
    steering=("rule", "backend"),
)


@pytest.mark.parametrize(list(WALKS.dials), WALKS.cases(2))
def test_chunks_give_the_whole_and_all_its_gradients(
    plan, rule, with_sinks, is_saved, backend, heads, dtype, small_cudnn
):
    """On one device, with a prefix in blocks of four tokens. In 16 bits partial results are merged
    in float32, and rounded as often as by one kernel."""
    chunks = [Chunk(tuple(Slice(*given) for given in slices)) for slices in PLANS[plan]]
    lens: dict[int, int] = {}
    for sequence, _, stop in itertools.chain(*PLANS[plan]):
        lens[sequence] = max(lens.get(sequence, 0), stop)
    check(
        chunks, [lens[sequence] for sequence in range(len(lens))], RULES[rule], backend,
        heads=heads, dtype=dtype, bound=1e-12 if dtype == torch.float64 else 3e-2,
        with_sinks=with_sinks and dtype == torch.float64, is_saved=is_saved,
        emulated=backend in CUDA, sp_size=1, segment_tokens=4,
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

    def later_grads(self, slice_index):
        self.asked.append(("later_grads", slice_index))


class Lent:
    """A prefix block; tensors of it are valid until the next one is asked for."""

    def __init__(self, distance):
        self.k, self.v = draw(2, 4, 8).detach(), draw(2, 4, 8).detach()
        self.distance, self.num_added = distance, 0

    def add_grad(self, dk, dv):
        assert dk.shape == self.k.shape and dv.shape == self.v.shape
        self.num_added += 1


class Lending(NothingBefore):
    """A layer with two blocks before its slice, which sees that each is given back."""

    def prefix(self, slice_index, window, *, gradients):
        self.asked.append(("prefix", slice_index, window, gradients))
        for distance in (8, 4):
            lent = Lent(distance)
            tensors = weakref.ref(lent.k), weakref.ref(lent.v)
            yield lent
            assert lent.num_added == gradients, "each block's gradients, once, before the next"
            gone = weakref.ref(lent)
            del lent
            assert gone() is None, "chunk attention still holds the block"
            assert tensors[0]() is tensors[1]() is None, "or its tensors"


@pytest.mark.parametrize("window", [None, 9])
def test_each_block_is_done_with_before_the_next_is_asked_for(window):
    q, k, v = draw(4, 5, 8), draw(2, 5, 8), draw(2, 5, 8)
    layer = Lending()
    out, _ = chunk_attention(
        q, k, v, rows=on_one_device([(0, 8, 13)]), layer_kv=layer,
        rule=AttentionRule(0.4, window), backend=Reference(),
    )  # fmt: skip
    out.sum().backward()
    assert [entry[-1] for entry in layer.asked if entry[0] == "prefix"] == [False, True]


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
    expected |= {("later_grads", i) for i in (0, 1)} if trains_kv else set()
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
    # rows of which cuDNN takes all: of 4,000 it leaves 32 to another call
    one, many = launches(backend(), [4096], window), launches(backend(), [16] * 256, window)
    copies = 1  # of the slices' ends to the device, once per chunk
    assert many + copies <= 2 * one
    assert one == 2, "one kernel forward, one backward, and nothing around them"
    assert launches(Looped(), [20] * 20, window) > 2 * one  # the count can fail


class Looped(CUDAFlash):
    """One call per slice."""

    def forward(self, q, k, v, block):
        return each_square(super(), q, k, v, block)

    def backward(self, *given):
        return each_square_backward(super(), *given)

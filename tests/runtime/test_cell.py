"""A cell: what its attention writes, remembers and recalls, by the pass."""

from __future__ import annotations

import pytest
import torch

from furlong.kv.arena import Arena
from furlong.kv.pools import DevicePool
from furlong.kv.store import KVStore
from furlong.ops.attention import AttentionRule
from furlong.ops.backends.select import ProbedBackend
from furlong.plan.passes import Pass
from furlong.plan.plan import Chunk, Slice
from furlong.plan.rows import rows_of
from furlong.runtime.cell import Cell, Piece

CPU = torch.device("cpu")
T, N, K, H = 5, 4, 2, 8
RULE = AttentionRule(H**-0.5, None, None)
LAYERS = range(2, 5)


class CountingPool(DevicePool):
    """Counts what is asked for, and how many leases are open."""

    def __init__(self):
        super().__init__(Arena(CPU, poison=True), poison=True)
        self.prefetched, self.open, self.asked = [], 0, []

    def prefetch(self, h):
        self.prefetched.append(h)

    def get(self, h):
        self.asked.append(h)
        self.open += 1
        lease = super().get(h)
        end = lease._end

        def ending(writes):
            self.open -= 1
            end(writes)

        lease._end = ending
        return lease


@pytest.fixture
def pool():
    return CountingPool()


@pytest.fixture
def cell(pool):
    """The first of two pieces of a sequence, in three layers."""
    store = KVStore(pool.arena, {0: [T, T]})
    rows = rows_of(Chunk((Slice(0, 0, T),)), 0, sp_size=1, q_heads=N, kv_heads=K)
    piece = Piece(0, 0, 0, T, continues=True)
    events = [("attention", layer) for layer in LAYERS]
    return Cell(rows, {0: piece}, store, ProbedBackend(), pool, LAYERS, events)


def given(layer: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(layer)
    return [
        torch.randn(n, T, H, generator=generator, dtype=torch.float64).requires_grad_()
        for n in (N, K, K)
    ]


def attend(cell: Cell, what: Pass, layer: int, inputs=None) -> torch.Tensor:
    return cell.attend(what, layer, *(inputs or given(layer)), RULE, None)


def test_what_is_remembered_comes_back_bit_for_bit_and_runs_no_attention(cell, pool, monkeypatch):
    with torch.no_grad():
        first = [attend(cell, Pass("values", remembers=2), layer) for layer in LAYERS]
    assert set(cell.saved_attention) == {2, 3} and pool.open == 0
    backend = cell.backend
    monkeypatch.setattr(type(backend), "forward", lambda *_, **__: pytest.fail("attends again"))
    again = Pass("graph", remembered=2)
    for layer in LAYERS[:-1]:
        assert torch.equal(attend(cell, again, layer), first[layer - 2])
    with pytest.raises(pytest.fail.Exception, match="attends again"):
        attend(cell, again, LAYERS[-1])


def test_a_graph_keeps_what_it_recalls_until_the_backward_and_other_passes_one_layer(cell, pool):
    with torch.no_grad():
        for layer in LAYERS:
            attend(cell, Pass("values", remembers=3), layer)
        for layer in LAYERS:
            attend(cell, Pass("to last kv" if layer < 4 else "values", remembered=3), layer)
            assert pool.open == 2, "the layer before has used its own"
    cell.end_pass()
    assert pool.open == 0
    inputs = {layer: given(layer) for layer in LAYERS}
    outs = [attend(cell, Pass("graph", remembered=3), n, own) for n, own in inputs.items()]
    assert pool.open == 6, "a graph uses them until its backward"
    torch.autograd.backward([out.sum() for out in outs])
    for layer, own in inputs.items():
        plain = given(layer)
        attend(cell, Pass("graph"), layer, plain).sum().backward()
        for mine, truth in zip(own, plain, strict=True):
            torch.testing.assert_close(mine.grad, truth.grad, rtol=1e-12, atol=1e-14)
    cell.forget()
    assert pool.open == pool.held_bytes == 0 and not cell.saved_attention
    cell.forget()


def test_the_next_layer_is_on_its_way_while_this_one_computes(cell, pool):
    with torch.no_grad():
        for layer in LAYERS:
            attend(cell, Pass("values", remembers=2), layer)
    what = Pass("graph", remembered=2)
    cell.begin_pass(what)
    assert pool.prefetched == list(cell.saved_attention[2])
    attend(cell, what, 2)
    assert pool.prefetched == [*cell.saved_attention[2], *cell.saved_attention[3]]
    attend(cell, what, 3)
    assert len(pool.prefetched) == 4, "the third layer is not remembered"
    cell.begin_pass(Pass("graph"))
    assert len(pool.prefetched) == 4

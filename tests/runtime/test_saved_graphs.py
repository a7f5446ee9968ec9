"""Graphs off the device: the same gradients, each storage once, nothing left."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from helpers.batches import batch
from helpers.tiny_families import build

import furlong
from furlong.kv.arena import Arena
from furlong.kv.pools import DevicePool
from furlong.runtime import cell
from furlong.runtime.cell import SavedGraph


def test_a_storage_goes_out_once_and_parameters_stay():
    pool = DevicePool(Arena(torch.device("cpu")))
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(64, 64)
    graph = SavedGraph(pool)
    with graph.saving([weight]):
        y = (x @ weight).sigmoid()  # saves x, weight and its own output
        z = y * y + y.T * 2 + y * x  # saves y again, and x
    assert pool.held_bytes == 2 * x.nbytes
    (gradient,) = torch.autograd.grad(z.sum(), weight)
    plain = (x @ weight).sigmoid()
    (truth,) = torch.autograd.grad((plain * plain + plain.T * 2 + plain * x).sum(), weight)
    assert torch.equal(gradient, truth)
    graph.drop()
    pool.close()


def test_a_compiler_sees_no_more_than_without():
    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def run(x):
        return (x[x > 0] * x.sum()).sin()  # what a mask takes is saved between two graphs

    graphs, x = [], torch.randn(2000, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(run, backend=counting)(x)
    num_graphs = len(graphs)
    torch._dynamo.reset()
    with SavedGraph(DevicePool(Arena(x.device))).saving([]):
        torch.compile(run, backend=counting)(x)
    assert 2 * num_graphs == len(graphs) > 0


def test_what_is_changed_in_place_afterwards_comes_back_as_it_was_saved():
    pool = DevicePool(Arena(torch.device("cpu")))
    x = torch.randn(64, 64, requires_grad=True)
    graph = SavedGraph(pool)
    with graph.saving([]):
        y = x * 2
        z = y.sin()  # saves y
        y.mul_(3)
        w = y.sin()  # saves y anew
    (gradient,) = torch.autograd.grad(z.sum() + w.sum(), x)
    inside = x.detach() * 2
    assert torch.allclose(gradient, 2 * inside.cos() + 6 * (3 * inside).cos())
    graph.drop()
    pool.close()


def test_what_went_out_is_not_kept_in_memory_as_well():
    """Nor is a graph without its backward, as a step that failed leaves it."""
    pool = DevicePool(Arena(torch.device("cpu")))
    weight = torch.randn(64, 64, requires_grad=True)
    graph = SavedGraph(pool)
    with graph.saving([weight]):
        y = weight.exp()
        z = y.sin()  # saves y
    gone = [weakref.ref(y), weakref.ref(z)]
    del y
    assert gone[0]() is None
    del z
    assert gone[1]() is None
    graph.drop()
    pool.close()


@pytest.mark.parametrize("min_bytes", [1, 4096])
def test_no_graph_is_left_where_a_stage_computes_more_than_its_output(min_bytes, monkeypatch):
    """The final norm runs behind every stage, and no backward reaches it there."""
    monkeypatch.setattr(cell, "_MIN_BYTES", min_bytes)
    options = furlong.ChunkOptions(
        size=8, keep="all", order="layer-first", offload={"graphs": "cpu"}
    )
    furlong.forward_backward(build("llama"), batch([23, 4]), options)
    gc.collect()
    assert not [left for left in gc.get_objects() if type(left) is SavedGraph]


def test_a_graph_without_a_backward_is_freed():
    pool = DevicePool(Arena(torch.device("cpu")))
    small = torch.randn(4, requires_grad=True)
    graph = SavedGraph(pool)
    with graph.saving([]):
        y = small.exp()
        z = y * y
    left = weakref.ref(y)
    del y, z
    gc.collect()
    assert left() is None
    pool.close()


def test_what_was_sent_is_free_as_soon_as_the_forward_is_over():
    pool = DevicePool(Arena(torch.device("cpu")))
    x = torch.randn(64, 64, requires_grad=True)
    graph = SavedGraph(pool)
    with graph.saving([]):
        y = x * 2
        z = y.sin()
        left = weakref.ref(y)
        del y
        assert left() is not None, "its address could be another tensor's next"
    assert left() is None
    z.sum().backward()
    graph.drop()
    pool.close()

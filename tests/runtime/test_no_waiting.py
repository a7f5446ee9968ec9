"""The host never waits for the device between actions: one number is read, at a step's end."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from helpers.batches import batch
from helpers.executors import executor_of
from helpers.tiny_families import build
from torch.utils._python_dispatch import TorchDispatchMode

import furlong
from furlong.kv.arena import Arena
from furlong.kv.pools import Pools, Storage
from furlong.models.decoder import HFDecoder
from furlong.ops.backends.select import ProbedBackend
from furlong.planners.orders import plan_on_device
from furlong.runtime.distributed.comms import Comms

LENS = [21, 4, 17]
ORDERS = {
    "chunk-first": {},
    "layer-first": {"order": "layer-first", "keep": "input", "recompute_layers": 1},
}


class CountingReads(TorchDispatchMode):
    """Counts reads of what tensors hold: `.item()`, `.tolist()`, `float()`, `if tensor`."""

    def __init__(self):
        super().__init__()
        self.num_reads = 0

    def __enter__(self):
        plain = torch.Tensor.tolist

        def counted(x):
            self.num_reads += 1
            return plain(x)

        self._patch = patch.object(torch.Tensor, "tolist", counted)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *given):
        self._patch.stop()
        return super().__exit__(*given)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_reads += func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.is_nonzero.default,
        )
        return func(*args, **(kwargs or {}))


def num_reads(size: int, **dials) -> int:
    model = HFDecoder(build("llama"))
    plan = plan_on_device(LENS, furlong.ChunkOptions(size=size, **dials), num_layers=3)
    sequences = batch(LENS)
    backend, pools = ProbedBackend(), Pools(Arena(model.device), Storage())
    for _ in range(2):  # kernels are probed on first use
        with model.installed():
            executor = executor_of(model, plan, sequences, backend=backend, pools=pools)
            with CountingReads() as counted:
                executor.run()
    return counted.num_reads


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.few(2)
def test_a_step_reads_one_number(order, size, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waits for the device"))
    assert num_reads(size, **ORDERS[order]) == 1


def test_a_call_of_one_process_sends_nothing_to_the_device_and_back(monkeypatch):
    """Its labels are counted on the host, its loss is read at the end."""
    added, plain = [], Comms.add_up
    monkeypatch.setattr(Comms, "add_up", lambda self, x: added.append(x) or plain(self, x))
    furlong.forward_backward(build("llama"), batch(LENS), furlong.ChunkOptions(size=8))
    # what the host has counted, as the check's labels are, is an integer and stays there
    assert [x.is_floating_point() for x in added].count(True) == 1


TOUCHES_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view"}


class CountingKernels(TorchDispatchMode):
    """Counts operators that compute or move something: kernels, on a GPU."""

    num_kernels = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.num_kernels += not func.is_view and name not in TOUCHES_NOTHING
        return func(*args, **(kwargs or {}))


def test_a_layer_has_no_more_kernels_than_in_transformers():
    """A chunk without a prefix that remembers its attention, beside a checkpointed layer."""
    sequences, found = batch([16] * 4), []
    options = furlong.ChunkOptions(size=16, keep="attention", num_retained=0)
    for num_layers in (2, 4):
        model = build("qwen2", torch.float32, num_hidden_layers=num_layers).train()
        furlong.forward_backward(model, sequences, options)
        with CountingKernels() as own:
            furlong.forward_backward(model, sequences, options)
        model.set_attn_implementation("sdpa")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with CountingKernels() as plain:
            for one in sequences:
                ids = one["input_ids"][None]
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append((own.num_kernels, plain.num_kernels))
    (own_2, plain_2), (own_4, plain_4) = found
    assert 0 < own_4 - own_2 <= plain_4 - plain_2

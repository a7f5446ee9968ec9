"""Memory of a process that computes on a CPU does not grow with the number of its actions."""

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_families import build
from peft import LoraConfig, get_peft_model

import furlong
from furlong.runtime import profile
from furlong.runtime.profile import ProcessHeap

MIB = 2**20
ACTIONS = """
import torch
from furlong.runtime.profile import ProcessHeap, memory_bytes
cpu, kept = torch.device("cpu"), []
heap = ProcessHeap(cpu, maps_small=True)
before = memory_bytes(cpu)
for kib in range(80, 120):  # blocks for which no hole of the action before has room
    freed = []
    for _ in range(20):
        freed.append(torch.ones(kib * 256))
        kept.append(torch.ones(kib * 256))
    del freed
    heap.end()
print(memory_bytes(cpu) - before - sum(x.nbytes for x in kept))
"""


@pytest.fixture
def calls(monkeypatch):
    """What the C library is asked for, in a process that holds `held` bytes."""
    calls = SimpleNamespace(options=[], trims=0, held=100 * MIB)

    def trim(_):
        calls.trims += 1
        calls.held = calls.clean

    library = SimpleNamespace(mallopt=lambda *given: calls.options.append(given), malloc_trim=trim)
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: library)
    monkeypatch.setattr(profile, "memory_bytes", lambda _: calls.held)
    return calls


def test_what_is_free_goes_back_when_a_step_has_grown_by_it(calls):
    heap = ProcessHeap(torch.device("cpu"), maps_small=False)
    assert calls.options == [(-3, 2 * MIB)]
    for held, clean, trims in ((104, 0, 0), (120, 110, 1), (114, 0, 1), (115, 114, 2), (118, 0, 2)):
        calls.held, calls.clean = held * MIB, clean * MIB
        heap.end()
        assert calls.trims == trims, held
    ProcessHeap(torch.device("cpu"), maps_small=True)
    assert calls.options[1:] == [(-3, 2**17)]


@pytest.mark.parametrize(("has_adapters", "mapped_bytes"), [(False, 2**21), (True, 2**17)])
def test_small_blocks_go_back_under_adapters(calls, has_adapters, mapped_bytes):
    model = build("llama").train()
    if has_adapters:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    ids = torch.arange(8)
    furlong.forward_backward(model, [{"input_ids": ids, "labels": ids}])
    assert calls.options[-1] == (-3, mapped_bytes)


@pytest.mark.parametrize(
    ("variable", "value", "device"),
    [
        ("MALLOC_MMAP_THRESHOLD_", "131072", "cpu"),
        ("MALLOC_TRIM_THRESHOLD_", "0", "cpu"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072", "cpu"),
        ("LANG", "C", "cuda"),
    ],
)
def test_settings_of_the_users_own_and_other_devices_are_left_alone(
    calls, monkeypatch, variable, value, device
):
    monkeypatch.setenv(variable, value)
    heap = ProcessHeap(torch.device(device), maps_small=True)
    calls.held *= 2
    heap.end()
    assert (calls.options, calls.trims) == ([], 0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries keep other memory")
@pytest.mark.parametrize("is_ours", [True, False])
def test_memory_does_not_grow_with_the_number_of_actions(is_ours):
    """Each of 40 frees about as much as it leaves behind, 77 MiB in all."""
    given = {} if is_ours else {"MALLOC_MMAP_THRESHOLD_": str(2**25)}
    ended = subprocess.run(
        [sys.executable, "-c", ACTIONS], capture_output=True, text=True, check=True,
        env=os.environ | given,
    )  # fmt: skip
    assert (int(ended.stdout) <= 16 * MIB) == is_ours

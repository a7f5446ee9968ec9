"""What ran when: records in the order of the device's work, without waiting for it."""

import time

import pytest
import torch

from furlong.kv.arena import Arena
from furlong.kv.pools import Pools, Storage
from furlong.plan.plan import Backward, Forward
from furlong.runtime import profile
from furlong.runtime.profile import MemoryMeter, Recorder, Stopwatch

CPU = torch.device("cpu")


class StubEvent:
    """A CUDA event of a device that takes a millisecond from one event to the next."""

    made: list["StubEvent"]
    synchronized: list["StubEvent"]

    def __init__(self, *, enable_timing):
        assert enable_timing
        self.at_ms = float(len(self.made))
        self.stream = None
        self.made.append(self)

    def record(self, stream):
        self.stream = stream

    def synchronize(self):
        self.synchronized.append(self)

    def elapsed_time(self, other):
        assert self.synchronized, "times are known once the device has got there"
        return other.at_ms - self.at_ms


@pytest.fixture
def stub_events(monkeypatch):
    StubEvent.made, StubEvent.synchronized = [], []
    monkeypatch.setattr(torch.cuda, "Event", StubEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    return StubEvent


def test_cuda_marks_are_events_of_the_current_stream_and_wait_once(stub_events):
    watch = Stopwatch(torch.device("cuda:1"), time.perf_counter)
    for _ in range(4):
        watch.mark()
    assert [event.stream for event in stub_events.made] == ["stream of cuda:1"] * 4
    assert stub_events.synchronized == []
    assert watch.seconds() == pytest.approx([0, 1e-3, 2e-3, 3e-3])
    assert stub_events.synchronized == [stub_events.made[-1]]


def test_records_follow_each_other_with_their_memory(monkeypatch, stub_events):
    pools = Pools(Arena(CPU), Storage())
    peaks = iter([100, 300])
    cuda = torch.device("cuda")
    monkeypatch.setattr(profile, "Stopwatch", lambda _, clock: Stopwatch(cuda, clock))

    class Meter:
        def __init__(self, device, *, exact):
            assert exact

        def begin(self): ...
        def end(self):
            return next(peaks)

    monkeypatch.setattr(profile, "MemoryMeter", Meter)
    noted = Recorder(pools, 2, exact_peaks=True)
    noted.begin(Forward(0, 0, "kv"))
    handle = pools.of("cpu").put(torch.zeros(8))
    noted.end(Forward(0, 0, "kv"))
    noted.begin(Forward(0, 0, "kv"))
    pools.of("cpu").drop(handle)
    noted.end(Backward(0, 0))
    assert stub_events.synchronized == [], "nothing has waited so far"
    first, second = noted.timeline().records
    assert (first.rank, first.text, second.text) == (2, "F0.0 kv", "B0.0")
    assert first.stop_s == second.start_s == pytest.approx(1e-3)
    assert (first.device_bytes, second.device_bytes) == (100, 300)
    assert (first.offloaded_bytes, second.offloaded_bytes) == (32, 0)
    pools.close()


@pytest.mark.parametrize("exact", [False, True])
def test_the_statistics_are_read_once_per_action(exact, monkeypatch):
    reads, peak_resets = [], []
    use = iter([(5, 9), (6, 9), (4, 12), (4, 12)])  # at the start, behind each of three actions

    def read(device):
        current, peak = next(use)
        reads.append(current)
        return {"allocated_bytes": {"all": {"current": current, "peak": peak}}}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", read)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", peak_resets.append)
    meter = MemoryMeter(torch.device("cuda"), exact=exact)
    if exact:
        next(use)
    peaks = []
    for _ in range(3):
        meter.begin()
        peaks.append(meter.end())
    assert peaks == ([9, 12, 12] if exact else [6, 12, 4])
    assert len(reads) == 3 + (not exact) and len(peak_resets) == 3 * exact

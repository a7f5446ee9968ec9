"""The peak of each action, by one read of the statistics."""

import pytest
import torch

from furlong.runtime.profile import MemoryMeter


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

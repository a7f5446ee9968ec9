"""Measurements without a plan: the peak of a CPU, copies between tiers, the optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from furlong.cost.calibration import relative_line
from furlong.cost.machine import Link
from furlong.kv.pools.contract import Pool
from furlong.kv.pools.disk import DiskPool
from furlong.kv.pools.host import HostPool
from furlong.runtime.stopwatch import Clock

_RECORD_BYTES = (2**18, 2**20, 2**22)
"""Bytes of a put or get; a segment of K,V has 1 to 8 MiB."""
_TOTAL_BYTES = 2**26
_NUM_REPEATS = 5
_MATRIX = 1024
_MOST_PARAMETERS = 2**25
"""About as many are enough to tell the optimizer's rate, whose state takes twice their memory."""


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best of a few products of large square matrices."""
    a = torch.randn(_MATRIX, _MATRIX, device=device).to(dtype)
    seconds = _shortest_s(lambda: a @ a, device)
    return 2.0 * _MATRIX**3 / seconds


def optimizer_rate(model: Any, device: torch.device) -> float:
    """Parameters per second of AdamW's step."""
    parameters: list[Any] = []
    for parameter in model.parameters():
        if parameter.requires_grad and sum(p.numel() for p in parameters) < _MOST_PARAMETERS:
            parameters.append(parameter)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=0.0)
    optimizer.step()  # makes its state
    seconds = _shortest_s(optimizer.step, device, repeats=2)
    model.zero_grad(set_to_none=True)
    return float(sum(p.numel() for p in parameters)) / seconds


def copy_links(device: torch.device, disk_dir: Path) -> dict[str, Link]:
    """Links to the tiers below a device, by the pools' own puts and gets: host (of a GPU), disk.

    Raises ConfigError for a folder that cannot be the disk tier's.
    """
    links = {"disk": _link(lambda: DiskPool(disk_dir, device), device)}
    if device.type == "cuda":
        links["host"] = _link(lambda: HostPool(device), device)
    return links


def _link(open_pool: Callable[[], Pool], device: torch.device) -> Link:
    """The slower direction's seconds per byte and per operation."""
    directions: dict[str, list[float]] = {"out": [], "back": []}
    for num_bytes in _RECORD_BYTES:
        x = torch.zeros(num_bytes // 4, device=device)
        count = max(4, _TOTAL_BYTES // num_bytes // 4)
        seconds = [_round_trip_s(open_pool(), x, count) for _ in range(2)]
        for i, direction in enumerate(directions.values()):
            direction.append(min(pair[i] for pair in seconds) / count)
    slower = max(directions.values(), key=lambda seconds: seconds[-1])
    each, latency = relative_line([float(n) for n in _RECORD_BYTES], slower)
    return Link(latency_s=latency, bytes_per_s=1 / each)


def _round_trip_s(pool: Pool, x: Tensor, count: int) -> tuple[float, float]:
    """Seconds of `count` puts, then of as many gets with the next one on its way."""
    started_s = time.perf_counter()
    handles = [pool.put(x) for _ in range(count)]
    pool.get(handles[-1]).release()  # reads behind the last write
    _wait(x)
    written_s = time.perf_counter()
    for i, handle in enumerate(handles):
        if i + 1 < count:
            pool.prefetch(handles[i + 1])
        pool.get(handle).release()
    _wait(x)
    read_s = time.perf_counter()
    for handle in handles:
        pool.drop(handle)
    pool.close()
    return written_s - started_s, read_s - written_s


def _wait(x: Tensor) -> None:
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)


def _shortest_s(
    work: Callable[[], Any], device: torch.device, *, repeats: int = _NUM_REPEATS
) -> float:
    clock = clock_of(device)
    best_s = float("inf")
    for _ in range(repeats):
        start_s = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, clock() - start_s)
    return best_s


def clock_of(device: torch.device) -> Clock:
    """The clock for a device's actions: where one thread computes, that thread's own time, which
    other processes do not stretch."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter

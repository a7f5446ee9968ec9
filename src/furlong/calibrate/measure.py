"""Measurements without a plan: peak FLOP/s of a CPU, optimizer, copies and collectives.

Latency and bandwidth of a link are those of a line that is fitted to the seconds of a few sizes.
All processes that torchrun has started measure collectives together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from furlong.calibrate.fit import relative_line
from furlong.cost.machine import Collective, Link
from furlong.kv.pools import CpuPool, DiskPool, Pool
from furlong.ops.sequence_parallel import AllToAll, combine, combined, dispatch, dispatched
from furlong.plan.plan import Chunk, Place, Slice
from furlong.plan.rows import rows_of
from furlong.runtime.profile import ReadClock

_RECORD_BYTES = (2**18, 2**20, 2**22)
"""Bytes of one put or get; a segment of K,V has 1 to 8 MiB."""
_TOTAL_BYTES = 2**26
_NUM_REPEATS = 5
_MATRIX = 1024
_MOST_PARAMETERS = 2**25
"""Maximum number of parameters to time the optimizer with; its states take twice their memory."""
_COLLECTIVE_BYTES = (2**14, 2**18, 2**21, 2**23)
"""Sizes of the larger buffer of a collective."""
_HEAD_DIM = 64


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of a few products of large square matrices."""
    a = torch.randn(_MATRIX, _MATRIX, device=device).to(dtype)
    seconds = _shortest_s(lambda: a @ a, device)
    return 2.0 * _MATRIX**3 / seconds


def optimizer_rate(model: Any, device: torch.device) -> float:
    """Return how many parameters AdamW updates per second, measured on steps of this model."""
    parameters: list[Any] = []
    for parameter in model.parameters():
        if parameter.requires_grad and sum(p.numel() for p in parameters) < _MOST_PARAMETERS:
            parameters.append(parameter)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=device.type == "cuda")
    optimizer.step()  # creates its states
    seconds = _shortest_s(optimizer.step, device, repeats=2)
    model.zero_grad(set_to_none=True)
    return float(sum(p.numel() for p in parameters)) / seconds


def copy_links(device: torch.device, disk_dir: Path) -> dict[str, Link]:
    """Measure copies between a device and the pools that hold offloaded tensors. Return the links
    by name: "disk" and, for a GPU, "host".

    Raises ConfigError for a `disk_dir` that cannot hold the pool's file.
    """
    links = {"disk": _link(lambda: DiskPool(disk_dir, device), device)}
    if device.type == "cuda":
        links["host"] = _link(lambda: CpuPool(device), device)
    return links


def _link(open_pool: Callable[[], Pool], device: torch.device) -> Link:
    """Measure copies to a pool and back from it, and return the link of the slower direction."""
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
    """Return the seconds of `count` copies into a pool and of `count` copies back, as measured, and
    close the pool. Each copy back is prefetched during the copy before it."""
    started_s = time.perf_counter()
    handles = [pool.put(x) for _ in range(count)]
    pool.get(handles[-1]).release()  # waits for the last write
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


def clock_of(device: torch.device) -> ReadClock:
    """Return the clock for actions on a device. If a single CPU thread computes, return its CPU
    time, which other processes do not lengthen; otherwise return wall time."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def world_size() -> int:
    """Return the number of processes that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def processes(device: torch.device) -> Iterator[bool]:
    """Context manager: join torchrun's processes in a group; yields whether this is process 0."""
    if world_size() == 1:
        yield True
        return
    if device.type == "cuda":  # else each process also has a context on the first GPU
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield dist.get_rank() == 0
        dist.barrier()
    finally:
        dist.destroy_process_group()


def collective_links(device: torch.device) -> dict[str, Link]:
    """Measure the link of each collective over all processes, which must all call this.

    Keys are names of collectives, with the suffix " between nodes" if there are several nodes.
    Bandwidths are bus bandwidths, as in `cost.machine`; the bandwidth of an all-to-all includes
    packing. A collective that the backend lacks is left out.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size())))
    suffix = " between nodes" if local < dist.get_world_size() else ""
    links = {}
    for name in get_args(Collective):
        try:
            seconds = [_seconds(name, num_bytes, device) for num_bytes in _COLLECTIVE_BYTES]
        except RuntimeError as error:
            if "support" not in str(error):
                raise
            continue
        moved = [_moved_bytes(name, num_bytes) for num_bytes in _COLLECTIVE_BYTES]
        each, latency = relative_line(moved, seconds)
        if each > 0:  # an all-to-all is measured as two, which share its bytes
            latency /= 2 if name == "all_to_all" else 1
            links[f"{name}{suffix}"] = Link(latency, 1 / each)
    return links


def _moved_bytes(name: Collective, num_bytes: int) -> float:
    """Return how many bytes a device sends if the collective's larger buffer has `num_bytes`."""
    if name == "p2p":
        return num_bytes
    size = dist.get_world_size()
    return num_bytes * (size - 1) / size * (2 if name == "all_reduce" else 1)


def _seconds(name: Collective, num_bytes: int, device: torch.device) -> float:
    """Return the seconds of a collective: those of the shortest of a few calls, on the slowest
    process."""
    call = _call(name, num_bytes, device)
    call()
    shortest = float("inf")
    for _ in range(_NUM_REPEATS):
        dist.barrier()
        started_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        shortest = min(shortest, time.perf_counter() - started_s)
    slowest = torch.tensor(shortest, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _call(name: Collective, num_bytes: int, device: torch.device) -> Callable[[], object]:
    """Return a function that calls a collective on new buffers, the larger one of `num_bytes`."""
    size, rank = dist.get_world_size(), dist.get_rank()
    part = torch.zeros(max(1, num_bytes // 4 // size), device=device)
    wide = torch.zeros(part.numel() * size, device=device)
    other = torch.zeros_like(wide)
    match name:
        case "all_reduce":
            return lambda: dist.all_reduce(wide)
        case "all_gather":
            gather = _renamed("all_gather_single", "all_gather_into_tensor")
            return lambda: gather(wide, part)
        case "reduce_scatter":
            scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
            return lambda: scatter(part, wide)
        case "all_to_all":
            return _attention_ways(num_bytes, device)
        case "p2p":
            return lambda: _to_the_next(wide, other, rank, size)


def _attention_ways(num_bytes: int, device: torch.device) -> Callable[[], object]:
    """Return a function that runs both all-to-alls of sequence-parallel attention (q, k, v to the
    heads' processes, the output back), packed as in a layer, with about `num_bytes` in all."""
    size, rank = dist.get_world_size(), dist.get_rank()
    num_tokens = max(1, num_bytes // (4 * 4 * size * _HEAD_DIM))
    chunk = Chunk((Slice(0, 0, num_tokens * size, Place(0, size)),))
    (level,) = rows_of(chunk, rank, sp_size=size, q_heads=size, kv_heads=size).exchanged
    assert dist.group.WORLD is not None
    exchange = AllToAll({size: dist.group.WORLD})
    q, k, v = (torch.zeros(size, num_tokens, _HEAD_DIM, device=device) for _ in range(3))

    def there_and_back() -> object:
        came_in = dispatch(exchange, level, (q,), (k, v))()
        (rows,) = dispatched(level, came_in, (size,), (size, size))
        back = combine(exchange, level, [(rows[:1].contiguous(),)])()
        return combined(level, back, (size,), ())[0].transpose(0, 1).contiguous()

    return there_and_back


def _renamed(name: str, before: str) -> Callable[..., object]:
    """Return the function `name` of torch.distributed, or the function `before`, which is its name
    up to torch 2.12."""
    function: Callable[..., object] = getattr(dist, name, None) or getattr(dist, before)
    return function


def _to_the_next(wide: torch.Tensor, other: torch.Tensor, rank: int, size: int) -> None:
    """Send `wide` to the next process, and receive `other` from the previous one."""
    operations = [
        dist.P2POp(dist.isend, wide, (rank + 1) % size),
        dist.P2POp(dist.irecv, other, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()

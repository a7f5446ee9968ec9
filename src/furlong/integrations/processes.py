"""Processes of one trainer: equal weights, and sums over all of them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor, nn

from furlong.errors import ConfigError, DataError

_BUCKET_BYTES = 2**25


class Replica(nn.Module):
    """A whole model as a trainer wraps it: one of several, whose gradients `add_up_gradients` adds
    up. In place of `DistributedDataParallel`, which would do so for each chunk, or not at all."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@torch.no_grad()
def make_equal(model: nn.Module) -> None:
    """Give all processes the weights and buffers of the first one.

    Processes with other seeds would else train other models. Raises ConfigError, on all, unless
    they have the same parameters.
    """
    rows = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()]
    device = next(model.parameters()).device
    found = _gathered([zlib.crc32(repr(rows).encode())], device)
    other = next((process for process, own in enumerate(found) if own != found[0]), None)
    if other is not None:
        raise ConfigError(
            given=f"another model on process {other} than on process 0",
            required="parameters of the same names, shapes and dtypes, trained on all or on none",
            source="the model that was passed to the trainer of each process",
            change="make the same model on all processes; their weights may differ",
        )
    for x in chain(model.parameters(), model.buffers()):
        whole = x.contiguous()
        dist.broadcast(whole, 0)
        x.copy_(whole)


def require_parts(model: nn.Module) -> None:
    """Raise ConfigError unless each process has a part of each trained weight, by whose address
    accelerate tells an optimizer's parameters apart."""
    size = dist.get_world_size()
    for name, parameter in model.named_parameters():
        rows = parameter.shape[0]
        if parameter.requires_grad and -(-rows // size) * (size - 1) >= rows:
            raise ConfigError(
                given=f"{name} of {rows} rows, divided among {size} processes by FSDP2",
                required="a row for each process at least",
                source="the model that was passed, and the number of processes",
                change="leave FSDP out, so that each process has the whole model",
            )


def counted_together(num_batches: int, num_labels: int, device: torch.device) -> int:
    """The labels of all processes up to their next update.

    Raises DataError, on all, unless each has the same number of batches: gradients are added up
    after the last one.
    """
    found = _gathered([num_batches, num_labels], device)
    numbers = [batches for batches, _ in found]
    if len(set(numbers)) > 1:
        raise DataError(
            given=f"{', '.join(map(str, numbers))} batches on the processes, before an update",
            required="the same number of batches on each process",
            source="the data loaders of the processes",
            change="leave even_batches in accelerator_config as it is, or drop the last batch",
        )
    return sum(labels for _, labels in found)


def last_round(loader: Any, num_processes: int) -> tuple[int, int]:
    """Samples that each process gets at the end of accelerate's data loader, and how many of all
    are no repeats; 0 where none are repeated, or where nobody knows."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    while not isinstance(sampler, BatchSamplerShard):
        if not hasattr(sampler, "batch_sampler"):
            return loader.total_batch_size // num_processes, max(0, loader.remainder)
        sampler = sampler.batch_sampler  # of one that skips batches when a run is resumed
    samples = getattr(sampler.batch_sampler, "sampler", None)
    if samples is None or sampler.drop_last or not sampler.batch_size:
        return 0, 0
    num_samples = sampler.batch_size // (num_processes if sampler.split_batches else 1)
    return num_samples, len(samples) % (num_samples * num_processes)


def add_up_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Put the sum of all processes' gradients in the place of each one's own.

    A parameter that has a gradient on some gets one on all; without any it stays without.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    has_gradient = torch.tensor(
        [p.grad is not None for p in trained], dtype=torch.int32, device=trained[0].device
    )
    dist.all_reduce(has_gradient, dist.ReduceOp.MAX)
    gradients = []
    for parameter, is_needed in zip(trained, has_gradient.tolist(), strict=True):
        if is_needed:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([x.flatten() for x in bucket]) if bucket[1:] else bucket[0].flatten()
        dist.all_reduce(flat)
        for x, part in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
            x.copy_(part.view_as(x))


def added_up(loss_sum: float, count: int, device: torch.device) -> tuple[float, int]:
    """A sum of losses and the number of its labels, over all processes."""
    totals = torch.tensor([loss_sum, count], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    whole, labels = totals.tolist()
    return whole, int(labels)


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one dtype on one device, about `_BUCKET_BYTES` together."""
    bucket: list[Tensor] = []
    for x in gradients:
        size = sum(y.nbytes for y in bucket) + x.nbytes
        if bucket and (
            size > _BUCKET_BYTES or (x.dtype, x.device) != (bucket[0].dtype, bucket[0].device)
        ):
            yield bucket
            bucket = []
        bucket.append(x)
    if bucket:
        yield bucket


def _gathered(numbers: list[int], device: torch.device) -> list[list[int]]:
    """The numbers of each process."""
    own = torch.tensor(numbers, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    rows: list[list[int]] = torch.stack(found).tolist()
    return rows

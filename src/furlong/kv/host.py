"""The pool in host memory: pinned for CUDA, so that copies run beside the computation."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from furlong.kv.arena import Extents
from furlong.kv.pools import STAGING_BYTES, Budget, Lane, StagedPool, StreamLane, ThreadLane
from furlong.units import format_bytes

_ALIGNMENT_BYTES = 64
_MIN_SLAB_BYTES = 2**26
_MAX_RESERVED_BYTES = 2**32
"""A slab that is taken beforehand has at most so many: pages may run out."""
_RECORDS_PER_SLAB = 4


class HostPool(StagedPool):
    """Tensors of `device` in host memory.

    On CUDA two streams copy, one each way, and the compute stream waits for them, never the host.
    On a CPU two threads do the same.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        budget: Budget | None = None,
        staging_bytes: int = STAGING_BYTES,
        poison: bool = False,
    ) -> None:
        cuda = device.type == "cuda"
        super().__init__(
            _HostPlaces(device), device, partial(_stream, device) if cuda else ThreadLane,
            budget=budget, staging_bytes=staging_bytes, poison=poison,
        )  # fmt: skip

    def reserve(self, num_bytes: int, limit_bytes: int | None) -> None:
        """Take memory for so many bytes in all, where it has to be pinned; elsewhere it costs
        nothing until it is used. A few more are for the ends of slabs, within the limit."""
        places = self._places
        assert isinstance(places, _HostPlaces)
        if places.device.type == "cuda":
            wanted = num_bytes + num_bytes // 32
            places.reserve(wanted if limit_bytes is None else min(wanted, limit_bytes))


def _stream(device: torch.device, _: str) -> Lane:
    return StreamLane(device)


@dataclass(frozen=True, slots=True)
class _Place:
    slab: int
    start: int
    memory: Tensor  # (num_bytes,) uint8


@dataclass
class _HostPlaces:
    """Slabs whose sizes are powers of two, to which torch would round pinned memory up anyway."""

    device: torch.device
    slabs: list[tuple[Tensor, Extents]] = field(default_factory=list)
    refused: bool = False
    """Whether the system has refused pinned memory."""

    name = "host memory"
    budget_key = "memory.host"
    stages_on_host = False

    def take(self, num_bytes: int) -> _Place:
        size = _aligned(num_bytes)
        for index, (_, extents) in enumerate(self.slabs):
            start = extents.take(size)
            if start is not None:
                return self._place(index, start, num_bytes)
        slab_bytes = 1 << (max(_MIN_SLAB_BYTES, _RECORDS_PER_SLAB * size) - 1).bit_length()
        extents = Extents(slab_bytes)
        self.slabs.append((self._allocate(slab_bytes), extents))
        start = extents.take(size)
        assert start is not None
        return self._place(len(self.slabs) - 1, start, num_bytes)

    def reserve(self, num_bytes: int) -> None:
        missing = num_bytes - sum(memory.numel() for memory, _ in self.slabs)
        while missing > 0 and not self.refused:
            power = 1 << max(_MIN_SLAB_BYTES, missing).bit_length() - 1
            memory = self._allocate(min(power, _MAX_RESERVED_BYTES))
            self.slabs.append((memory, Extents(memory.numel())))
            missing -= memory.numel()

    def give(self, place: _Place) -> None:
        self.slabs[place.slab][1].give(place.start, _aligned(place.memory.numel()))

    def allocate_staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def write(self, place: _Place, staged: Tensor) -> None:
        self._copy(place.memory, staged)

    def read(self, place: _Place, staged: Tensor) -> None:
        self._copy(staged, place.memory)

    def close(self) -> None:
        self.slabs.clear()

    def _place(self, slab: int, start: int, num_bytes: int) -> _Place:
        return _Place(slab, start, self.slabs[slab][0][start : start + num_bytes])

    def _copy(self, to: Tensor, source: Tensor) -> None:
        if self.device.type == "cuda":
            to.copy_(source, non_blocking=True)
        else:
            np.copyto(to.numpy(), source.numpy())  # a torch copy would take a team of threads

    def _allocate(self, num_bytes: int) -> Tensor:
        if self.device.type == "cuda" and not self.refused:
            start_s = time.perf_counter()
            pinned = pinned_memory(num_bytes)
            if pinned is not None:
                logging.getLogger(__name__).info(
                    "pinned %s of host memory in %.1f s, once",
                    format_bytes(num_bytes), time.perf_counter() - start_s,
                )  # fmt: skip
                return pinned
            self.refused = True
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def pinned_memory(num_bytes: int) -> Tensor | None:
    """Pinned uint8 memory, or None with a message where the system refuses it."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        logging.getLogger(__name__).warning(
            "the system refuses %s of pinned host memory (%s): pageable memory is used instead, "
            "copies to it hold up the computation; raise `ulimit -l` or lower memory.host",
            format_bytes(num_bytes), str(error).splitlines()[0],
        )  # fmt: skip
        return None


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

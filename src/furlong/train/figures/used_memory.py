"""Bytes of a device's memory that training takes, in the terms of predictions and budgets.

That is weights, gradients, optimizer and all that a step needs. The interpreter, its libraries, the
data set's mapped files and what other processes hold are not counted. On CUDA it is what the
allocator has given out. On a CPU it is the process's own memory: the bytes of weights and optimizer
are counted, and what the process has taken since is measured, with all that the C library's heap
keeps of what was freed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from furlong.runtime.profile import (
    file_bytes,
    give_back_memory,
    memory_bytes,
    peak_memory_bytes,
    reset_peak_memory,
)
from furlong.units import format_bytes

SCRATCH_BYTES = 2**26
"""Bytes of libraries and of the heap that no plan counts: a budget may be passed by so much."""


class OverBudgetError(MemoryError):
    """A step took more than the budget of the device."""


class UsedMemory:
    """Made before the first step, when weights and the optimizer's state are there."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, *,
        budget_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """`budget_bytes`: what `check` holds a CPU to; None: nothing."""
        held = list(parameters)
        self.device = held[0].device
        self.budget_bytes = budget_bytes if self.device.type != "cuda" else None
        self._base_bytes = 0
        if self.device.type != "cuda":
            state_bytes = sum(_own_bytes(p) for p in held) + _state_bytes(optimizer)
            give_back_memory(self.device)
            self._base_bytes = memory_bytes(self.device) - file_bytes() - state_bytes

    def restart(self) -> None:
        """Let the peak start again from what is in use now."""
        if self.device.type != "cuda":
            give_back_memory(self.device)  # else a step counts what was freed before it
        reset_peak_memory(self.device)

    def peak_bytes(self) -> int:
        """The most since `restart`."""
        file = 0 if self.device.type == "cuda" else file_bytes()
        return max(0, peak_memory_bytes(self.device) - file - self._base_bytes)

    def check(self) -> None:
        """Raises OverBudgetError if the peak is above the budget."""
        if self.budget_bytes is None:
            return
        peak_bytes = self.peak_bytes()
        if peak_bytes > self.budget_bytes + SCRATCH_BYTES:
            raise OverBudgetError(
                f"{format_bytes(peak_bytes)} in use, memory.device is"
                f" {format_bytes(self.budget_bytes)}"
            )


def _own_bytes(x: torch.Tensor) -> int:
    """Bytes of a tensor on this process, which may hold a part of it."""
    return (x.to_local() if isinstance(x, DTensor) else x).nbytes


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        _own_bytes(value)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )

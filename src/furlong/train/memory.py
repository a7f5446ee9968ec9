"""Memory that training takes on a device, held to a budget, and chunks that shrink until it fits.

Counted are weights, gradients, optimizer and all that a step needs, in the terms of predictions and
budgets: not the interpreter, its libraries, the data set's mapped files and other processes. On
CUDA it is what the allocator has given out. On a CPU it is the process's own memory: the bytes of
weights and optimizer are counted, and what the process has taken since is measured, with all that
the C library's heap keeps of what was freed.

What has failed is freed and put back as it was, the chunk is halved, and the call is made again
with a plan of the smaller chunks. The gradients are the same: exactness holds for any chunk size.
Where chunks are sampled the estimate is of the same gradient, with other draws.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from furlong.errors import ConfigError, first_line
from furlong.models.quantized import scales_of
from furlong.ops.backends.select import is_out_of_memory
from furlong.planners.options import ChunkOptions
from furlong.runtime.profile import (
    file_bytes,
    give_back_memory,
    memory_bytes,
    peak_memory_bytes,
    reset_peak_memory,
)
from furlong.runtime.rng import RNGState
from furlong.train.optim import local, state_tensors
from furlong.units import format_bytes

_T = TypeVar("_T")
SCRATCH_BYTES = 2**26
"""Bytes of libraries and of the heap that no plan counts: a budget may be passed by so much."""
SMALLEST_TOKENS = 64
"""Chunks of so many tokens are not halved: smaller ones save hardly any memory, for what a step
needs then does not depend on them."""


class OverBudgetError(MemoryError):
    """A step took more than the budget of the device."""


class UsedMemory:
    """Made before the first step, when weights and the optimizer's state are there."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer,
        device: torch.device, *, budget_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """`device`: where they compute. `budget_bytes`: what `check` holds a CPU to; None:
        nothing."""
        held = list(parameters)
        self.device = device
        self._on_cpu = self.device.type != "cuda"
        self.budget_bytes = budget_bytes if self._on_cpu else None
        self._base_bytes = 0
        if self._on_cpu:
            states = [state_tensors(optimizer, parameter) for parameter in optimizer.state]
            tensors = [*held, *(x for own in states for x in own.values())]
            counted = [*map(local, tensors), *(scale for p in held for scale in scales_of(p))]
            give_back_memory(self.device)
            self._base_bytes = memory_bytes(self.device) - file_bytes()
            self._base_bytes -= sum(x.nbytes for x in counted)

    def restart(self) -> None:
        """Let the peak start again from what is in use now."""
        if self._on_cpu:
            give_back_memory(self.device)  # else a step counts what was freed before it
        reset_peak_memory(self.device)

    def peak_bytes(self) -> int:
        """The most since `restart`."""
        file = file_bytes() if self._on_cpu else 0
        return max(0, peak_memory_bytes(self.device) - file - self._base_bytes)

    def check(self) -> None:
        """Raises OverBudgetError if the peak is above the budget."""
        budget_bytes = self.budget_bytes
        if budget_bytes is None or (used := self.peak_bytes()) <= budget_bytes + SCRATCH_BYTES:
            return
        told = f"{format_bytes(used)} in use, memory.device is {format_bytes(budget_bytes)}"
        raise OverBudgetError(told)


class Fitting:
    """The options of a run, which a step that does not fit replaces by those of smaller chunks."""

    def __init__(
        self,
        options: ChunkOptions,
        *,
        say: Callable[[str], None] = print,
        changed: Callable[[ChunkOptions], None] = lambda options: None,
    ) -> None:
        """`changed` is told the new options."""
        self.options = options
        self._say, self._changed = say, changed

    def compute(
        self,
        call: Callable[[ChunkOptions], _T],
        *,
        name: str,
        num_tokens: int,
        device: torch.device,
        undo: Callable[[], None] = lambda: None,
    ) -> _T:
        """The outcome of `call` with the options that fit.

        `name`: what messages call it; `num_tokens`: those of its batch. After a failure `undo`
        takes back what it has left, and random generators are as before it. Raises ConfigError
        after two failures with the smallest chunks.
        """
        before = RNGState.read(device)

        def take_back() -> None:
            undo()
            before.write(device)

        tried: list[int] = []
        while True:
            result, reason = try_call(lambda: call(self.options), device, take_back)
            if not reason:
                return result  # type: ignore[return-value]
            tried.append(self.options.size)
            if tried.count(self.options.size) > 1:
                raise _nothing_fits(name, tried, reason).on_all()
            self._shrink(name, num_tokens, reason)

    def _shrink(self, name: str, num_tokens: int, reason: str) -> None:
        old = self.options
        if old.size <= SMALLEST_TOKENS:
            self._say(f"{name} did not fit ({reason}): once more with chunks of {old.size} tokens")
            return
        size = old.size // 2
        while size >= num_tokens and size > SMALLEST_TOKENS:  # as many chunks as before: one
            size //= 2
        new = replace(old, size=max(size, SMALLEST_TOKENS))
        words = f"chunks of {new.size} tokens from now on, {old.size} before"
        if old.keep == "all":  # graphs of all chunks together do not depend on their size
            new = replace(new, keep="attention")
            words += "; they keep attention, all before"
        if old.sampling is not None:
            words += "; other chunks are drawn of them"
        self.options = new
        self._changed(new)
        self._say(f"{name} did not fit ({reason}): {words}")


def try_call(
    call: Callable[[], _T], device: torch.device, undo: Callable[[], None] = lambda: None
) -> tuple[_T | None, str]:
    """The outcome of `call` and nothing; or None and the reason, where memory did not suffice for
    it. Then `undo` takes back what it has left, and memory that nothing holds is freed."""
    try:
        return call(), ""
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = first_line(error)
    # The error and the frames that it held are gone: now their memory can be freed.
    undo()
    gc.collect()  # what the error has left may lie in a cycle
    give_back_memory(device)
    return None, reason


def _nothing_fits(name: str, tried: list[int], reason: str) -> ConfigError:
    sizes = ", ".join(map(str, dict.fromkeys(tried)))
    return ConfigError(
        given=f"{name}, which did not fit with chunks of {sizes} tokens, the last tried twice:"
        f" {reason}",
        required="memory for one step with one of these sizes",
        source="memory.device" if "memory.device" in reason else "the memory of the device",
        change="raise memory.device or use a device with more memory, keep less or elsewhere"
        " (chunks.keep, offload), or use shorter sequences (data.max_seq_len);"
        " where there is a checkpoint, --resume goes on from it",
    )

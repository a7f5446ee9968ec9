"""Training's memory on a device, checked against a budget; chunks shrink until a step fits.

Memory means the bytes of weights, gradients, optimizer states and a step's tensors, as in
predictions and budgets. The interpreter, libraries, mapped files of data sets and other processes
do not count. On CUDA, it is the caching allocator's allocated memory. On a CPU, it is the bytes of
weights and optimizer, plus the growth of the process since, including freed memory that the C
library's heap keeps.

When a call runs out of memory, its effects are undone, the chunk size is halved, and the call is
repeated. Gradients are exact for any chunk size, so they are the same. With sampled chunks, other
chunks are drawn to estimate the same gradient.

With several processes, a process that runs out of memory ends the run, since the others wait for it
in collectives. It records the smaller chunks, which a resumed run uses.
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
from furlong.train.processes import ALONE, Processes
from furlong.units import format_bytes

_T = TypeVar("_T")
SCRATCH_BYTES = 2**26
"""Tolerance above a budget, for memory of libraries and the heap that no plan counts."""
SMALLEST_TOKENS = 64
"""Smallest chunk size to shrink to: below it, a step's memory hardly depends on the chunk size."""


class OverBudgetError(MemoryError):
    """A step exceeded the device's memory budget."""


class UsedMemory:
    """Measures training memory. Create it once weights and optimizer states are allocated."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer | None,
        device: torch.device, *, budget_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """`device`: the compute device. `budget_bytes`: limit for `check`, used on a CPU only."""
        held = list(parameters)
        self.device = device
        self._on_cpu = self.device.type != "cuda"
        self.budget_bytes = budget_bytes if self._on_cpu else None  # CUDA runs out by itself
        self._base_bytes = 0
        if self._on_cpu:
            states = (
                [state_tensors(optimizer, parameter) for parameter in optimizer.state]
                if optimizer
                else []
            )
            tensors = [*held, *(x for own in states for x in own.values())]
            counted = [*map(local, tensors), *(scale for p in held for scale in scales_of(p))]
            give_back_memory(self.device)  # else freed memory would hide later growth
            # mapped files are left out: the system may drop their pages at any time
            self._base_bytes = memory_bytes(self.device) - file_bytes()
            self._base_bytes -= sum(x.nbytes for x in counted)

    def restart(self) -> None:
        """Reset the peak to the memory in use now."""
        if self._on_cpu:
            give_back_memory(self.device)  # else memory freed before would count
        reset_peak_memory(self.device)

    def peak_bytes(self) -> int:
        """Return the peak bytes since `restart`."""
        file = file_bytes() if self._on_cpu else 0
        return max(0, peak_memory_bytes(self.device) - file - self._base_bytes)

    def check(self) -> None:
        """Raise OverBudgetError if the peak is above the budget."""
        budget_bytes = self.budget_bytes
        if budget_bytes is None or (used := self.peak_bytes()) <= budget_bytes + SCRATCH_BYTES:
            return
        told = f"{format_bytes(used)} in use, memory.device is {format_bytes(budget_bytes)}"
        raise OverBudgetError(told)


class Fitting:
    """The chunk options of a run. When a step runs out of memory, smaller chunks replace them."""

    def __init__(
        self,
        options: ChunkOptions,
        *,
        say: Callable[[str], None] = print,
        changed: Callable[[ChunkOptions], bool] = lambda options: False,
        processes: Processes = ALONE,
        whose: str = "",
    ) -> None:
        """
        Args:
            say: Prints a message.
            changed: Called with the new options when chunks shrink; returns whether a resumed run
                will use these options.
            processes: The processes of the run. With more than one, running out of memory ends the
                run.
            whose: A word that says in messages whose chunks these are.
        """
        self.options, self._whose = options, f"{whose} " * bool(whose)
        self._say, self._changed, self._processes = say, changed, processes

    def compute(
        self,
        call: Callable[[ChunkOptions], _T],
        *,
        name: str,
        num_tokens: int,
        device: torch.device,
        undo: Callable[[], None] = lambda: None,
    ) -> _T:
        """Return the result of `call(options)`, retried with smaller chunks until memory suffices.

        Args:
            name: What the call computes, for messages.
            num_tokens: Number of tokens of the batch.
            undo: Reverts a failed call; random generators are restored, too.

        Raises:
            ConfigError: After two failures with the smallest chunks. With several processes, after
                the first failure, on the process that ran out of memory.
        """
        if self._processes.num_processes > 1:
            # no second try: the other processes still wait in collectives of the first one
            try:
                return call(self.options)
            except Exception as error:
                if is_out_of_memory(error):
                    raise self._ended(name, num_tokens, first_line(error)) from error
                raise
        before = RNGState.read(device)  # a repeated call must draw the same dropout masks

        def take_back() -> None:
            undo()
            before.write(device)

        tried: list[int] = []
        while True:
            result, reason = try_call(lambda: call(self.options), device, take_back)
            if not reason:
                return result  # type: ignore[return-value]
            tried.append(self.options.size)
            # the smallest size is tried twice: `try_call` has freed cached memory in between
            if tried.count(self.options.size) > 1:
                raise _nothing_fits(name, tried, reason).on_all()
            self._shrink(name, num_tokens, reason)

    def _shrink(self, name: str, num_tokens: int, reason: str) -> None:
        old = self.options
        if old.size <= SMALLEST_TOKENS:
            self._say(f"{name} did not fit ({reason}): once more with chunks of {old.size} tokens")
            return
        self.options, words = _smaller(old, num_tokens)
        self._changed(self.options)
        self._say(f"{name} did not fit ({reason}): {self._whose}{words}")

    def _ended(self, name: str, num_tokens: int, reason: str) -> ConfigError:
        """Record smaller chunks for a resume. Return the error that ends a run of several
        processes. `reason`: the out-of-memory error, in words."""
        old = self.options
        if old.size <= SMALLEST_TOKENS:
            return _nothing_fits(name, [old.size], reason)
        new, words = _smaller(old, num_tokens)
        change = f"set chunks.size to {new.size} or less"
        if self._changed(new):
            change = f"go on with --resume (torchrun --max-restarts does), which takes {words}"
        return ConfigError(
            given=f"{name}, which did not fit on process {self._processes.launch.number} with"
            f" chunks of {old.size} tokens: {reason}",
            required="memory for one step",
            source=_limit_of(reason),
            change=change,
        )


def _smaller(old: ChunkOptions, num_tokens: int) -> tuple[ChunkOptions, str]:
    """Return options that need less memory for a batch of `num_tokens`, and the change in words."""
    size = old.size // 2
    while size >= num_tokens and size > SMALLEST_TOKENS:  # would still be a single chunk
        size //= 2
    new = replace(old, size=max(size, SMALLEST_TOKENS))
    words = f"chunks of {new.size} tokens from now on, {old.size} before"
    if old.keep == "all":  # graphs of all chunks together do not depend on their size
        new = replace(new, keep="attention")
        words += "; they keep attention, all before"
    if old.sampling is not None:
        words += "; other chunks are drawn of them"
    return new, words


def try_call(
    call: Callable[[], _T], device: torch.device, undo: Callable[[], None] = lambda: None
) -> tuple[_T | None, str]:
    """Return (result, ""), or (None, reason) if `call` ran out of memory; `undo` then reverts it,
    and cached memory is freed."""
    try:
        return call(), ""
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = first_line(error)
    # Out of the except block, the error no longer holds frames and their tensors.
    undo()
    gc.collect()  # tensors of failed frames may be in reference cycles
    give_back_memory(device)
    return None, reason


def _nothing_fits(name: str, tried: list[int], reason: str) -> ConfigError:
    sizes = ", ".join(map(str, dict.fromkeys(tried)))
    return ConfigError(
        given=f"{name}, which did not fit with chunks of {sizes} tokens"
        f"{', the last tried twice' * (len(tried) > 1)}: {reason}",
        required="memory for one step with one of these sizes",
        source=_limit_of(reason),
        change="raise memory.device or use a device with more memory, keep less or elsewhere"
        " (chunks.keep, offload), or use shorter sequences (data.max_seq_len);"
        " where there is a checkpoint, --resume goes on from it",
    )


def _limit_of(reason: str) -> str:
    return "memory.device" if "memory.device" in reason else "the memory of the device"

"""What a contender's process measures: the time and the memory of one step.

torch is loaded by what measures: whoever reads measurements does without.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from furlong.units import format_bytes

_MOST_UNRESET_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Measurement:
    """One step of one contender."""

    step_s: float
    cpu_s: float
    """Seconds that all cores together spent on the process during the step."""
    extra_bytes: int
    """Highest memory in use during the step minus what was in use before the warm-up."""
    loss: float
    grad_norm: float
    num_tokens: int


def measure(
    model: Any,
    step: Callable[[], float],
    start: Callable[[], object],
    warm_up: Callable[[], object],
    num_tokens: int,
) -> Measurement:
    """A step after a start and a warm-up; it returns the loss and leaves gradients on the model.

    `start` is a step of a few tokens, which loads what is loaded once; what is in use behind it is
    where the step's memory is counted from. So buffers that a contender holds from the warm-up on
    count as the step's. Memory that the warm-up freed goes back to the system first: a step that
    takes it again is charged for it.
    """
    (measurement,) = measure_each(model, [step], start, warm_up, num_tokens)
    return measurement


def measure_each(
    model: Any,
    steps: Sequence[Callable[[], float]],
    start: Callable[[], object],
    warm_up: Callable[[], object],
    num_tokens: int,
) -> list[Measurement]:
    """`measure` of several steps, one behind the other after one start and one warm-up."""
    from furlong.runtime.profile import memory_bytes

    device = next(model.parameters()).device
    start()
    release(model)
    before_bytes = memory_bytes(device)
    warm_up()
    return [_measure(model, step, before_bytes, num_tokens) for step in steps]


def _measure(
    model: Any, step: Callable[[], float], before_bytes: int, num_tokens: int
) -> Measurement:
    import torch

    from furlong.runtime.profile import memory_bytes, peak_memory_bytes, reset_peak_memory

    device = next(model.parameters()).device
    release(model)
    reset_peak_memory(device)
    unreset_bytes = peak_memory_bytes(device) - memory_bytes(device)
    if unreset_bytes > _MOST_UNRESET_BYTES:
        raise RuntimeError(
            f"the peak is {format_bytes(unreset_bytes)} above the memory in use after its reset: "
            "this system cannot reset it (Linux does, by /proc/self/clear_refs)"
        )
    cpu_s, timer = time.process_time(), Timer(device)
    loss = step()
    step_s, cpu_s = timer.seconds(), time.process_time() - cpu_s
    extra_bytes = peak_memory_bytes(device) - before_bytes
    norms = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
    grad_norm = float(torch.stack(norms).norm())
    return Measurement(step_s, cpu_s, extra_bytes, loss, grad_norm, num_tokens)


class Timer:
    """Seconds since it was made: by events on a CUDA device, by the clock elsewhere."""

    def __init__(self, device: Any) -> None:
        import torch

        self._events: list[Any] | None = None
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()
        self._start_s = time.perf_counter()

    def seconds(self) -> float:
        if self._events is None:
            return time.perf_counter() - self._start_s
        self._events[1].record()
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


def release(model: Any) -> None:
    """Drop the gradients of a model, and give freed memory back to the system."""
    import torch

    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)

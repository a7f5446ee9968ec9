"""Runs plans on a model and notes what every action took."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from furlong.api import Engine
from furlong.plan.plan import ChunkPlan
from furlong.planners.options import ChunkOptions
from furlong.runtime.memory.measure import memory_bytes
from furlong.runtime.memory.pools import Storage
from furlong.runtime.stopwatch import Clock


@dataclass(frozen=True, slots=True)
class Measured:
    """One plan, run once or several times."""

    plan: ChunkPlan
    seconds: tuple[float, ...]
    """Seconds of each action, the shortest of all runs."""
    step_s: float
    """The sum of the actions, in the fastest run."""
    before_bytes: int
    """In use before the plan."""
    peak_bytes: int
    """In use at most while it ran."""


class Bench:
    """A model on a device, ready to run plans of random tokens."""

    def __init__(
        self, model: Any, *, compute_dtype: torch.dtype, vocab_size: int,
        storage: Storage | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._engine = Engine(model, compute_dtype=compute_dtype, storage=storage)
        self._device = next(model.parameters()).device
        self._vocab_size = vocab_size
        clock, pools = clock_of(self._device), self._engine._followed.kept.opened
        # a thread's own time stands still while it waits for a tier
        self._clock = clock if clock is time.perf_counter else lambda: clock() + pools.waited_s

    def run(self, seq_lens: Sequence[int], options: ChunkOptions) -> Measured:
        """One step without an optimizer; gradients are dropped."""
        plan = self._engine.plan(seq_lens, options)
        self._model.zero_grad(set_to_none=True)
        tidy()
        before_bytes = memory_bytes(self._device)
        result = self._engine.run(
            plan, random_sequences(seq_lens, self._vocab_size), exact_peaks=True, clock=self._clock
        )
        self._model.zero_grad(set_to_none=True)
        seconds = tuple(r.stop_s - r.start_s for r in result.timeline.records)
        peak_bytes = result.timeline.peak_device_bytes
        return Measured(plan, seconds, sum(seconds), before_bytes, peak_bytes)


def merged(runs: Sequence[Measured]) -> Measured:
    """Several runs of one plan as one: the shortest seconds, the median bytes."""
    return Measured(
        runs[0].plan,
        tuple(map(min, zip(*(run.seconds for run in runs), strict=True))),
        min(run.step_s for run in runs),
        round(statistics.median(run.before_bytes for run in runs)),
        round(statistics.median(run.peak_bytes for run in runs)),
    )


def clock_of(device: torch.device) -> Clock:
    """The clock for a device's actions: where one thread computes, that thread's own time, which
    other processes do not stretch."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def random_sequences(seq_lens: Sequence[int], vocab_size: int) -> list[dict[str, Tensor]]:
    """Sequences of these lengths in which every token has a label."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(vocab_size, (n,), generator=generator) for n in seq_lens]
    return [{"input_ids": i, "labels": i} for i in ids]


def tidy() -> None:
    """Give back to the system what is free."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

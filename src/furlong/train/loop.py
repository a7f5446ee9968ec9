"""The steps of a run, with evaluations between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from furlong.data.loader import Batch
from furlong.planners.options import ChunkOptions
from furlong.train.metrics import MetricsLog
from furlong.train.step import train_step, trained_parameters

if TYPE_CHECKING:
    from furlong.api import Engine


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """Totals of the steps; evaluation losses are None without held-out data."""

    losses: tuple[float, ...]
    """Mean loss of each step's global batch, before its update."""
    num_tokens: int
    steps_s: float
    """Seconds in steps, evaluations left out."""
    peak_memory_bytes: int
    num_skipped_batches: int
    eval_loss_before: float | None
    eval_loss_after: float | None


def run_steps(
    engine: Engine,
    model: nn.Module,
    batches: Iterator[Batch],
    options: ChunkOptions,
    *,
    num_steps: int,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    max_grad_norm: float | None,
    log: MetricsLog,
    evaluate: Callable[[], float] | None = None,
    eval_every_steps: int = 0,
) -> LoopFigures:
    """Takes `num_steps` optimizer steps; batches without any label are skipped and counted.

    `evaluate` returns the held-out loss; it runs before the first step, every `eval_every_steps`
    steps (never if 0) and after the last.
    """
    parameters = trained_parameters(model)
    losses: list[float] = []
    num_tokens = peak_bytes = num_skipped = 0
    steps_s = 0.0

    def held_out_loss(step: int) -> float | None:
        if evaluate is None:
            return None
        started_s = time.perf_counter()
        loss = evaluate()
        log.evaluation(step, loss, time.perf_counter() - started_s)
        return loss

    before = after = held_out_loss(0)
    for step in range(1, num_steps + 1):
        started_s = time.perf_counter()
        while (batch := next(batches)).num_valid_tokens == 0:
            num_skipped += 1
            log.skipped(step)
        figures = train_step(
            engine,
            batch,
            options,
            step=step,
            parameters=parameters,
            optimizer=optimizer,
            scheduler=scheduler,
            max_grad_norm=max_grad_norm,
            data_s=time.perf_counter() - started_s,
        )
        log.step(step, figures)
        losses.append(figures.loss)
        num_tokens += figures.num_tokens
        steps_s += figures.step_s
        peak_bytes = max(peak_bytes, figures.peak_memory_bytes)
        if step == num_steps or (eval_every_steps and step % eval_every_steps == 0):
            after = held_out_loss(step)
    return LoopFigures(tuple(losses), num_tokens, steps_s, peak_bytes, num_skipped, before, after)

"""One optimizer step over a global batch, and a pass over held-out data."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from furlong.data.loader import Batch
from furlong.errors import FurlongError
from furlong.planners.options import ChunkOptions
from furlong.runtime.memory import peak_memory_bytes, reset_peak_memory

if TYPE_CHECKING:
    from furlong.api import Engine


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one optimizer step did and what it took."""

    loss: float
    """Mean over the labels of the global batch, before the update."""
    grad_norm: float
    """Before clipping."""
    lr: float
    num_sequences: int
    num_tokens: int
    num_valid_tokens: int
    longest_tokens: int
    tokens_per_s: float
    peak_memory_bytes: int
    forward_s: float
    recompute_s: float
    backward_s: float
    data_s: float
    step_s: float
    """The whole step, data included."""


def train_step(
    engine: Engine,
    batch: Batch,
    options: ChunkOptions,
    *,
    step: int,
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    max_grad_norm: float | None,
    data_s: float = 0.0,
) -> StepFigures:
    """Gradients of the mean loss of the global batch, clipping, one update.

    Raises FurlongError, with the weights as they were, when loss or gradient are not finite.
    """
    device = parameters[0].device
    started_s = time.perf_counter()
    reset_peak_memory(device)
    optimizer.zero_grad()
    result = engine.forward_backward(batch.tensors(device), options, batch.num_valid_tokens)
    norm = float(nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf))
    if not (math.isfinite(result.loss) and math.isfinite(norm)):
        optimizer.zero_grad()
        raise _not_finite(step, batch, result.loss, norm)
    lr = float(scheduler.get_last_lr()[0])
    optimizer.step()
    scheduler.step()
    seconds = result.timeline.seconds_by_kind()
    step_s = time.perf_counter() - started_s + data_s
    return StepFigures(
        loss=result.loss,
        grad_norm=norm,
        lr=lr,
        num_sequences=len(batch.sequences),
        num_tokens=batch.num_tokens,
        num_valid_tokens=batch.num_valid_tokens,
        longest_tokens=max(sequence.seq_len for sequence in batch.sequences),
        tokens_per_s=batch.num_tokens / step_s,
        peak_memory_bytes=peak_memory_bytes(device),
        forward_s=seconds.get("F", 0.0),
        recompute_s=seconds.get("R", 0.0) + seconds.get("K", 0.0),
        backward_s=seconds.get("B", 0.0),
        data_s=data_s,
        step_s=step_s,
    )


def evaluate(
    engine: Engine, model: nn.Module, batches: Iterable[Batch], options: ChunkOptions
) -> float:
    """Mean loss over the labels of all batches, through the same engine, without dropout."""
    device = next(model.parameters()).device
    loss_sum, num_valid_tokens = 0.0, 0
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            if batch.num_valid_tokens == 0:
                continue
            result = engine.forward_backward(batch.tensors(device), options, backward=False)
            loss_sum += result.loss_sum
            num_valid_tokens += result.num_valid_tokens
    finally:
        model.train(was_training)
    return loss_sum / num_valid_tokens


def _not_finite(step: int, batch: Batch, loss: float, norm: float) -> FurlongError:
    names = [f"{sequence.seq_id} ({sequence.origin})" for sequence in batch.sequences]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return FurlongError(
        f"step {step}: loss {loss}, gradient norm {norm}; the weights are those of step {step - 1}."
        f" Sequences of the step: {shown}. A lower train.lr or a longer warm-up often helps."
    )


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What the optimizer updates."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]

"""One optimizer step over a global batch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from furlong.data.loader import Batch
from furlong.errors import DivergenceError
from furlong.planners.options import ChunkOptions
from furlong.runtime.profile import memory_bytes, peak_memory_bytes
from furlong.train.batches.draws import drawn_share, step_options
from furlong.train.batches.engines import Engines
from furlong.train.batches.fitting import Fitting
from furlong.train.figures.mfu import MfuMeter
from furlong.train.figures.used_memory import UsedMemory
from furlong.train.processes import STEP

if TYPE_CHECKING:
    from furlong.runtime.step import StepResult


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """Figures of one optimizer step that was taken."""

    loss: float | None
    """Mean over the labels, or the pairs, of the global batch, before the update. A sampled step
    estimates it from the drawn chunks, unless it reports the loss of all; None where these have no
    label."""
    grad_norm: float
    """Before clipping."""
    lr: float
    num_sequences: int
    num_tokens: int
    num_valid_tokens: int
    longest_tokens: int
    tokens_per_s: float
    peak_memory_bytes: int
    """Most bytes in use during the step: on CUDA those of the allocator, on a CPU the resident set
    of the whole process."""
    step_memory_bytes: int
    """How far that peak lies above what was in use just before the step."""
    used_memory_bytes: int
    """Most bytes at a time of weights, gradients, optimizer and all that the plan needed: what is
    predicted and budgeted, see `UsedMemory`."""
    gradients_s: float
    """Seconds of the plan's actions, without the update."""
    chunk_size: int
    """Most tokens in a chunk: less than before if the step did not fit."""
    forward_s: float
    recompute_s: float
    backward_s: float
    data_s: float
    """Seconds until the batch was there."""
    step_s: float
    """The whole step, data included."""
    mfu: float | None = None
    """Model FLOPs utilisation, 0 to 1; None where the device's peak is not known, and of a sampled
    step, which leaves work out."""
    host_bytes: int | None = None
    """Most bytes at a time in the tier host; None where nothing was there."""
    disk_bytes: int | None = None
    plan_s: float | None = None
    """Seconds in which the first process waited for the step's plan; None where it plans as it
    goes, alone."""
    plan_method: str | None = None
    """Names of the plan's planners (`planners.search`), those of all replicas; None for one
    process."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other figures of the loss, by name: of pairs, means over those of the global batch."""
    drawn_share: float | None = None
    """Share of the step's chunks that were drawn, whole sequences among them; None: all, for the
    gradient is exact."""


def train_step(
    engines: Engines,
    batch: Batch,
    fitting: Fitting,
    *,
    step: int,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    max_grad_norm: float | None,
    used: UsedMemory,
    saved_step: int = 0,
    data_s: float = 0.0,
    meter: MfuMeter | None = None,
) -> tuple[TrainedStep, StepResult]:
    """Gradients of the mean loss of the global batch, clipping, one update.

    Where memory does not suffice, `fitting` takes smaller chunks and the gradients are computed
    anew. `saved_step`: that of the newest checkpoint, for the error; 0: there is none. Raises
    DivergenceError, with the weights as they were, when loss or gradient are not
    finite, and ConfigError when the smallest chunks do not fit.
    """
    started_s = time.perf_counter()
    optimizer.zero_grad()
    before_bytes = memory_bytes(used.device)
    result = _gradients(engines, batch, fitting, step, optimizer, used)
    norm = engines.engine.clip_gradients(max_grad_norm)
    loss = _finite_loss(step, batch, result, norm, optimizer, engines, saved_step)
    lr = float(scheduler.get_last_lr()[0])
    optimizer.step()
    scheduler.step()
    engines.processes.at(f"after {STEP} {step}")
    seconds, share = result.timeline.seconds_by_kind(), drawn_share(result.plan)
    step_s = time.perf_counter() - started_s + data_s
    peak_bytes = peak_memory_bytes(used.device)
    figures = TrainedStep(
        loss=loss,
        grad_norm=norm,
        lr=lr,
        num_sequences=len(batch.sequences),
        num_tokens=batch.num_tokens,
        num_valid_tokens=batch.num_valid_tokens,
        longest_tokens=max(batch.seq_lens),
        tokens_per_s=batch.num_tokens / step_s,
        peak_memory_bytes=peak_bytes,
        step_memory_bytes=max(0, peak_bytes - before_bytes),
        used_memory_bytes=used.peak_bytes(),
        gradients_s=result.timeline.duration_s,
        chunk_size=fitting.options.size,
        forward_s=seconds.get("F", 0.0),
        recompute_s=seconds.get("R", 0.0) + seconds.get("K", 0.0),
        backward_s=seconds.get("B", 0.0),
        data_s=data_s,
        step_s=step_s,
        mfu=meter.mfu(batch.seq_lens, step_s) if meter and share is None else None,
        host_bytes=result.host_bytes or None,
        disk_bytes=result.disk_bytes or None,
        plan_s=engines.waited_s,
        plan_method=engines.method,
        metrics=result.metrics,
        drawn_share=share,
    )
    return figures, result


def _gradients(
    engines: Engines,
    batch: Batch,
    fitting: Fitting,
    step: int,
    optimizer: torch.optim.Optimizer,
    used: UsedMemory,
) -> StepResult:
    """Gradients of the mean loss of the global batch, in chunks that fit; a sampled one's draw is
    that of the step, however often it is tried."""

    def call(options: ChunkOptions) -> StepResult:
        used.restart()
        drawn = step_options(options, step)
        return engines.compute(batch, drawn, used.device, name=f"{STEP} {step}", watch=used.check)

    result = fitting.compute(
        call, name=f"step {step}", num_tokens=batch.num_tokens, device=used.device,
        undo=optimizer.zero_grad,
    )  # fmt: skip
    engines.processes.at(f"{STEP} {step} update")
    return result


def _finite_loss(
    step: int,
    batch: Batch,
    result: StepResult,
    norm: float,
    optimizer: torch.optim.Optimizer,
    engines: Engines,
    saved_step: int,
) -> float | None:
    """The loss; None where it is estimated from drawn chunks and none of them has a label.

    Such a draw leaves gradients of zeros: a loss that is truly not a number leaves others. Raises
    DivergenceError, with no gradients and on all processes, when loss or norm are not finite.
    """
    is_estimated = result.plan is not None and not result.plan.report_loss
    if is_estimated and norm == 0 and math.isnan(result.loss):
        return None
    if not (math.isfinite(result.loss) and math.isfinite(norm)):
        optimizer.zero_grad()
        raise engines.processes.alike(_not_finite(step, batch, result.loss, norm, saved_step))
    return result.loss


def _not_finite(
    step: int, batch: Batch, loss: float, norm: float, saved_step: int
) -> DivergenceError:
    names = [f"{sequence.seq_id} ({sequence.origin})" for sequence in batch.sequences]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return DivergenceError(
        given=f"loss {loss}, gradient norm {norm} in step {step}; the weights are still those of"
        f" step {step - 1}",
        required="finite figures",
        source=f"the sequences of step {step}: {shown}",
        change="look at these sequences, or start anew with a lower train.lr or a longer"
        " train.warmup_ratio; "
        + (
            f"the checkpoint of step {saved_step} is whole, furlong export makes a model of it"
            if saved_step
            else "there is no checkpoint (train.save_every_steps says when one is written)"
        ),
    )


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that the optimizer updates."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]

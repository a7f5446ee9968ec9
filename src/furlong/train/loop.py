"""The steps of a run, with checkpoints and evaluations between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from furlong.data.loader import Batch, LoaderState, told_ahead
from furlong.plan.plan import ChunkPlan
from furlong.simulate.predict import Prediction
from furlong.train.batches.engines import Engines
from furlong.train.batches.fitting import Fitting
from furlong.train.evaluation import HELD_OUT, Evaluation
from furlong.train.figures.metrics import MetricsLog
from furlong.train.figures.mfu import MfuMeter
from furlong.train.figures.used_memory import SCRATCH_BYTES, UsedMemory
from furlong.train.setup.optimizer import make_state
from furlong.train.step import TrainedStep, train_step
from furlong.units import format_bytes

if TYPE_CHECKING:
    from furlong.runtime.step import StepResult


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come. With weights, optimizer and generators, it is the whole state."""

    step: int = 0
    data: LoaderState = field(default_factory=LoaderState)
    num_tokens: int = 0
    steps_s: float = 0.0
    """Seconds in steps, evaluations and checkpoints left out."""
    peak_memory_bytes: int = 0
    num_skipped_batches: int = 0
    last_loss: float | None = None
    """Mean loss of the last step's global batch, before its update; of the last step that had one,
    see `TrainedStep.loss`."""
    eval_loss_before: float | None = None
    """Held-out loss before the first step."""

    def after(self, batch: Batch, figures: TrainedStep, num_skipped: int) -> Progress:
        """The progress when one more step has been taken."""
        return replace(
            self,
            step=self.step + 1,
            data=batch.next_state,
            num_tokens=self.num_tokens + figures.num_tokens,
            steps_s=self.steps_s + figures.step_s,
            peak_memory_bytes=max(self.peak_memory_bytes, figures.peak_memory_bytes),
            num_skipped_batches=self.num_skipped_batches + num_skipped,
            last_loss=self.last_loss if figures.loss is None else figures.loss,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"data": self.data.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        return cls(**{**values, "data": LoaderState.from_dict(values["data"])})


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """Outcome of the loop."""

    progress: Progress
    losses: tuple[float | None, ...]
    """Mean loss of each step's global batch, before its update; steps of this call only. None: see
    `TrainedStep.loss`."""
    eval_loss_after: float | None
    """Held-out loss after the last step; None without held-out data or when it was stopped."""
    stopped: bool
    """Whether `should_stop` ended the loop before its last step and evaluation were done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """Actions between the steps, and how often; 0 = never."""

    evaluate: Callable[[UsedMemory], Mapping[str, Evaluation] | None] | None = None
    """By name of the data set; None when it was stopped. Runs also before the first step and after
    the last, with the budget of the steps."""
    eval_every_steps: int = 0
    save: Callable[[Progress], object] | None = None
    """Runs also after the last step, and when the loop is asked to stop."""
    save_every_steps: int = 0
    measured: Callable[[int, StepResult], None] | None = None
    """Gets the number and the result of the first step, of those that are saved and of the last."""
    predict: Callable[[ChunkPlan], Prediction] | None = None
    """Predicts the time and memory of a plan, for the report of the first step."""
    check: Callable[[int, Batch, UsedMemory], None] | None = None
    """Gets the number and the batch of a step before it is taken."""
    should_stop: Callable[[], bool] = field(default=lambda: False)
    """Asked after every step."""


def run_steps(
    engines: Engines,
    model: nn.Module,
    batches: Iterator[Batch],
    fitting: Fitting,
    *,
    num_steps: int,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    max_grad_norm: float | None,
    log: MetricsLog,
    progress: Progress = Progress(),
    cadence: Cadence = Cadence(),
    meter: MfuMeter | None = None,
    budget_bytes: int | None = None,
) -> LoopFigures:
    """Takes optimizer steps until there are `num_steps`, from where `progress` is.

    `budget_bytes`: of everything in RAM, on a CPU; a step that takes more is repeated in smaller
    chunks. `batches` begins with the batch at `progress.data`; batches without any label are
    skipped and counted.
    """
    make_state(optimizer)
    used = UsedMemory(model.parameters(), optimizer, budget_bytes=budget_bytes)
    losses: list[float | None] = []
    saved_step = progress.step
    batches = told_ahead(batches, lambda batch: engines.expect(batch, fitting.options))
    after, stopped = _evaluate(progress.step, num_steps, cadence, log, used)
    if progress.step == 0:
        progress = replace(progress, eval_loss_before=after)
    while progress.step < num_steps and not stopped:
        batch, num_skipped, data_s = _next_batch(batches, progress.step + 1, log)
        if cadence.check:
            cadence.check(progress.step + 1, batch, used)
        figures, result = train_step(
            engines,
            batch,
            fitting,
            step=progress.step + 1,
            optimizer=optimizer,
            scheduler=scheduler,
            max_grad_norm=max_grad_norm,
            used=used,
            saved_step=saved_step,
            data_s=data_s,
            meter=meter,
        )
        progress = progress.after(batch, figures, num_skipped)
        losses.append(figures.loss)
        log.step(progress.step, figures)
        _tell(progress.step, num_steps, cadence, log, figures, result, budget_bytes)
        if cadence.save and _is_due(progress.step, num_steps, cadence.save_every_steps):
            cadence.save(progress)
            saved_step = progress.step
        after, stopped = _evaluate(progress.step, num_steps, cadence, log, used)
    if stopped and cadence.save and saved_step < progress.step:
        cadence.save(progress)
    return LoopFigures(progress, tuple(losses), after, stopped)


def _tell(
    step: int,
    num_steps: int,
    cadence: Cadence,
    log: MetricsLog,
    figures: TrainedStep,
    result: StepResult,
    budget_bytes: int | None,
) -> None:
    """Report a step as measured; the first one also as predicted, and what it has taken beyond the
    budget."""
    if step == 1 and budget_bytes is not None and figures.used_memory_bytes > budget_bytes:
        log.say(
            f"warning: step 1 has used {format_bytes(figures.used_memory_bytes)}, memory.device is"
            f" {format_bytes(budget_bytes)}; up to {format_bytes(SCRATCH_BYTES)} more is let pass,"
            " as the libraries' own"
        )
    if step == 1 and cadence.predict and result.plan:
        log.predicted(step, figures, cadence.predict(result.plan))
    if cadence.measured and (step == 1 or _is_due(step, num_steps, cadence.save_every_steps)):
        cadence.measured(step, result)


def _next_batch(batches: Iterator[Batch], step: int, log: MetricsLog) -> tuple[Batch, int, float]:
    """The next batch with a label, how many without one came before it, and the seconds of that."""
    started_s = time.perf_counter()
    num_skipped = 0
    while (batch := next(batches)).num_valid_tokens == 0:
        num_skipped += 1
        log.skipped(step)
    return batch, num_skipped, time.perf_counter() - started_s


def _evaluate(
    step: int, num_steps: int, cadence: Cadence, log: MetricsLog, used: UsedMemory
) -> tuple[float | None, bool]:
    """The held-out loss if an evaluation is due, and whether the loop has been asked to stop.

    A checkpoint is taken before the evaluation of its step: a resumed run repeats that one.
    """
    if cadence.evaluate is None or not (
        step == 0 or _is_due(step, num_steps, cadence.eval_every_steps)
    ):
        return None, step < num_steps and cadence.should_stop()
    started_s = time.perf_counter()
    evaluations = cadence.evaluate(used)
    if evaluations is None:
        return None, True
    log.evaluation(step, evaluations, time.perf_counter() - started_s)
    held_out = evaluations.get(HELD_OUT)
    stopped = step < num_steps and cadence.should_stop()
    return (None if held_out is None else held_out.loss), stopped


def _is_due(step: int, num_steps: int, every_steps: int) -> bool:
    return step == num_steps or (every_steps > 0 and step % every_steps == 0)

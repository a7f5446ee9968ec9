"""A run's progress, and when it saves, evaluates and ends.

Everything here depends on numbers only, not on a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from furlong.config.schema import TrainConfig
from furlong.data.loader import LoaderState, TrainBatch
from furlong.data.stream import Cursor
from furlong.errors import CheckpointError, difference_words, differing, in_short

if TYPE_CHECKING:
    from furlong.train.metrics import StepFigures


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Newest and best evaluations on held-out data, except the evaluation before the first step."""

    step: int = 0
    """Step of the newest evaluation."""
    best_step: int = 0
    """Step of the lowest loss; 0: none yet."""
    best_loss: float | None = None
    num_since_best: int = 0

    def after(self, step: int, loss: float) -> HeldOut:
        """Return the newest and best evaluations after one more evaluation. Return them unchanged
        if a resumed run repeats an evaluation of `step`."""
        if step <= self.step:
            return self
        if loss < (float("inf") if self.best_loss is None else self.best_loss):
            return HeldOut(step, step, loss)
        return replace(self, step=step, num_since_best=self.num_since_best + 1)


@dataclass(frozen=True, slots=True)
class Progress:
    """A run's progress. With weights, optimizer and generators it is the run's whole state."""

    step: int = 0
    data: LoaderState = field(default_factory=LoaderState)
    num_tokens: int = 0
    steps_s: float = 0.0
    """Seconds spent in steps, without evaluations and checkpoints."""
    peak_memory_bytes: int = 0
    num_skipped_batches: int = 0
    last_loss: float | None = None
    """Mean loss of the global batch, before the update, in the last step with a loss (see
    `StepFigures.loss`)."""
    eval_loss_before: float | None = None
    """Held-out loss before the first step."""
    held_out: HeldOut = HeldOut()

    def after(self, batch: TrainBatch, figures: StepFigures) -> Progress:
        """Return the progress after one more step."""
        return replace(
            self,
            step=self.step + 1,
            data=batch.next_state,
            num_tokens=self.num_tokens + figures.num_tokens,
            steps_s=self.steps_s + figures.step_s,
            peak_memory_bytes=max(self.peak_memory_bytes, figures.peak_memory_bytes),
            last_loss=self.last_loss if figures.loss is None else figures.loss,
        )

    def skipping(self, batch: TrainBatch) -> Progress:
        """Return the progress after skipping a batch without labels."""
        return replace(
            self, data=batch.next_state, num_skipped_batches=self.num_skipped_batches + 1
        )

    def evaluated(self, loss: float | None) -> Progress:
        """Return the progress after an evaluation; `loss` is None without held-out data."""
        if self.step == 0 or loss is None:
            return replace(self, eval_loss_before=loss if self.step == 0 else self.eval_loss_before)
        return replace(self, held_out=self.held_out.after(self.step, loss))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Return the progress from the result of `dataclasses.asdict`."""
        parts = {"data": LoaderState(**values["data"]), "held_out": HeldOut(**values["held_out"])}
        return cls(**{**values, **parts})


@dataclass(frozen=True, slots=True)
class Cadence:
    """When a run saves, evaluates and ends."""

    num_steps: int
    save_every: Fraction
    """Steps between two checkpoints; 0: there are none."""
    eval_every: Fraction
    """Steps between two evaluations; 0: none but the first and the last."""
    early_stopping: int | None = None

    @classmethod
    def of(cls, settings: TrainConfig, num_steps: int, steps_per_epoch: int) -> Cadence:
        """Return the cadence of a run's settings. With `saves_per_epoch` or `evals_per_epoch`, an
        interval may be fractional, such as 2.5 steps. A checkpoint or evaluation is then due at the
        first whole step at or after each multiple, such as steps 3, 5 and 8."""

        def every(steps: int | None, per_epoch: float | None) -> Fraction:
            if per_epoch is None:
                return Fraction(steps or 0)
            return steps_per_epoch / Fraction(str(per_epoch))

        return cls(
            num_steps,
            every(settings.save_every_steps, settings.saves_per_epoch),
            every(settings.eval_every_steps, settings.evals_per_epoch),
            settings.early_stopping,
        )

    @property
    def num_saves(self) -> int:
        """Number of checkpoints that the whole run writes."""
        if not self.save_every:
            return 0
        return min(self.num_steps, math.ceil(self.num_steps / self.save_every))

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after a step."""
        return self.save_every > 0 and self._is_due(step, self.save_every)

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due after a step, or before the first one."""
        return step == 0 or self._is_due(step, self.eval_every)

    def ends(self, progress: Progress) -> bool:
        """Whether the run is over: after its last step, or by early stopping."""
        return progress.step >= self.num_steps or self.ends_early(progress)

    def ends_early(self, progress: Progress) -> bool:
        """Whether `early_stopping` evaluations in a row have not lowered the held-out loss."""
        most = self.early_stopping
        return most is not None and progress.held_out.num_since_best >= most

    def _is_due(self, step: int, every: Fraction) -> bool:
        return step == self.num_steps or (every > 0 and step // every > (step - 1) // every)


def progress_of(
    values: Mapping[str, Any], own: Mapping[str, Any], num_batches: Callable[[int], int]
) -> Progress:
    """Return the progress that `values`, a state dict of a trainer, contains.

    Raises CheckpointError if one of these conditions fails:

    - `values` has the same keys, tensor shapes and dtypes as `own`, this trainer's state dict.
    - The batch number is below `num_batches(epoch)`.
    - A stream has a position in each of its sources, or in none before the first batch.
    """

    def keys(of: Any) -> Any:
        return {name: keys(x) for name, x in of.items()} if isinstance(of, Mapping) else True

    def forms(of: Mapping[str, Any]) -> dict[str, Any]:
        tensors = {
            name: (tuple(getattr(x, "shape", ())), getattr(x, "dtype", None))
            for name, x in of.get("tensors", {}).items()
        }
        return dict.fromkeys(of, True) | tensors | {"progress": keys(of.get("progress"))}

    if found := differing(forms(values), forms(own)):
        raise _not_whole(difference_words(found, "in this trainer"))
    at, step = values["progress"]["data"], values["progress"]["step"]
    num_sources = len(own["progress"]["data"]["sources"])
    is_place = (
        all(type(x) is int and x >= 0 for x in (step, at["epoch"]))
        and at["batch"] in range(num_batches(at["epoch"]))
        and isinstance(at["sources"], list | tuple)
        and all(keys(source) == keys(asdict(Cursor())) for source in at["sources"])
    )
    if not is_place:
        raise _not_whole(f"step {in_short(step, 20)} and progress.data = {in_short(at, 80)}")
    if num_sources and len(at["sources"]) not in (0, num_sources):
        raise _not_whole(f"{len(at['sources'])} sources, {num_sources} in this trainer")
    return Progress.from_dict(values["progress"])


def _not_whole(found: str) -> CheckpointError:
    return CheckpointError(
        given=f"a state with {found}",
        required="the tensors and the progress of this run, with its model and its layout",
        source="load_state_dict of Trainer",
        change="pass all that state_dict has returned, of a trainer of the same run file",
    )

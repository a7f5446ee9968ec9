"""A global batch of pairs: the mean of their losses, on one device or on several processes.

One device takes each pair in a call of two phases: between them live keys and values of two
sequences, however many pairs a batch has. Several processes evaluate the batch first, wherever its
sequences lie, and make the losses of what all have then: the gradient is that of a plan in which
each sequence counts as often as the loss changes with its log-probability. That is one forward
more, and any layout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from furlong import values
from furlong.api import Engine
from furlong.data.loader import Batch, LoaderState, sequence_tensors
from furlong.data.tokenize import IGNORE_INDEX
from furlong.data.tokenize import Sequence as Tokens
from furlong.plan.plan import Backward, Forward
from furlong.planners.options import ChunkOptions
from furlong.runtime.step import StepResult
from furlong.timeline import Record, Timeline
from furlong.train.batches.engines import Engines
from furlong.train.preference.losses import Answer, PairLoss, figures_of, means
from furlong.train.preference.refusals import draws_twice
from furlong.train.processes import ALONE, REFERENCE, Processes


class PairEngines(Engines):
    """The engines of a run whose batches are pairs, chosen and rejected by turns."""

    def __init__(
        self, engine: Engine, loss: PairLoss, processes: Processes = ALONE, *more: Any
    ) -> None:
        """`more`: see `Engines`."""
        super().__init__(engine, processes, *more)
        self._loss = loss

    def compute(
        self,
        batch: Batch,
        options: ChunkOptions,
        device: torch.device,
        *,
        name: str,
        backward: bool = True,
        weights: Sequence[float] | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Gradients of the mean loss of the batch's pairs, or their losses alone. `loss_sum` is
        that of the pairs."""
        if self.engine.ranks is None:
            return self._alone(batch, options, device, backward, watch)
        known = {"name": name, "watch": watch}
        result = super().compute(batch, options, device, backward=False, **known)  # type: ignore[arg-type]
        if backward and self.processes.any(result.has_drawn):
            raise self.processes.alike(draws_twice(self.processes.num_processes))
        # the same on all processes, which then agree on what each sequence counts
        sums = torch.stack([-losses.sum() for losses in result.token_losses]).requires_grad_()
        answers = [_answer(own, x) for own, x in zip(batch.sequences, sums, strict=True)]
        pairs = list(zip(answers[::2], answers[1::2], strict=True))
        losses = [self._loss(*pair) for pair in pairs]
        loss_sum, metrics = (
            torch.stack(losses).sum(),
            means([figures_of(self._loss, *p) for p in pairs]),
        )
        if backward:
            (slopes,) = torch.autograd.grad(loss_sum / len(pairs), sums)
            counts = (-slopes * batch.num_valid_tokens).tolist()  # a plan divides by its labels
            result = super().compute(batch, options, device, weights=counts, **known)  # type: ignore[arg-type]
        total = float(loss_sum.detach())
        return replace(result, loss=total / len(pairs), loss_sum=total, metrics=metrics)

    def log_probs(
        self, sequences: Sequence[Tokens], options: ChunkOptions, device: torch.device
    ) -> list[npt.NDArray[Any]]:
        """The log-probabilities of each sequence's tokens with a label, the same on all processes.
        Call it under `torch.no_grad`."""
        learnt = [np.flatnonzero(own.labels[1:] != IGNORE_INDEX) for own in sequences]
        if self.engine.ranks is None:
            tensors = [sequence_tensors(sequence, device) for sequence in sequences]
            found = self.engine.token_values(tensors, options, values.log_prob())
            return [x.cpu().numpy()[at + 1] for x, at in zip(found, learnt, strict=True)]
        batch = Batch(tuple(sequences), LoaderState())
        result = super().compute(batch, options, device, name=REFERENCE, backward=False)
        return [-x.numpy()[at] for x, at in zip(result.token_losses, learnt, strict=True)]

    def _alone(
        self, batch: Batch, options: ChunkOptions, device: torch.device, backward: bool,
        watch: Callable[[], None],
    ) -> StepResult:  # fmt: skip
        """One call for each pair, whose gradients add up."""
        pairs = list(zip(batch.sequences[::2], batch.sequences[1::2], strict=True))
        clock = _Clock(time.perf_counter())
        losses, found = [], []
        for number, pair in enumerate(pairs):
            with torch.set_grad_enabled(backward):
                tensors = [sequence_tensors(sequence, device) for sequence in pair]
                given = self.engine.token_values(
                    tensors, options, values.log_prob(), gradients="added", watch=watch
                )
                sums = [x.double().sum() for x in given]
                chosen, rejected = map(_answer, pair, sums)
                loss = self._loss(chosen, rejected)
            losses.append(float(loss.detach()))
            found.append(figures_of(self._loss, chosen, rejected))
            clock.note(Forward(number, 0, options.kept))
            if backward:
                (loss / len(pairs)).backward()  # type: ignore[no-untyped-call]
                clock.note(Backward(number, 0))
        loss_sum = sum(losses)
        return StepResult(
            loss_sum / len(pairs), loss_sum, batch.num_valid_tokens, Timeline(tuple(clock.records)),
            metrics=means(found),
        )  # fmt: skip


def _answer(sequence: Tokens, log_prob: Tensor) -> Answer:
    """The answer of a sequence whose reference is known, of the summed log-probability."""
    assert sequence.reference is not None  # attached before the first step
    return Answer(
        log_prob, float(sequence.reference.sum(dtype="float64")),
        int((sequence.labels[1:] != IGNORE_INDEX).sum()),
    )  # fmt: skip


@dataclass
class _Clock:
    """Seconds of each pair's forward and backward, which waited for the device; a backward holds
    what it computes again."""

    started_s: float

    def __post_init__(self) -> None:
        self.records: list[Record] = []

    def note(self, action: Forward | Backward) -> None:
        start_s = self.records[-1].stop_s if self.records else 0.0
        stop_s = time.perf_counter() - self.started_s
        self.records.append(Record(0, "compute", action, start_s, stop_s, 0, 0))

"""The losses that `train.loss` names, with their data format and metrics.

docs/extend.md says how to add one. Torch is imported only when a loss is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from furlong.config.schema import Format, RunConfig, TrainConfig
from furlong.errors import ConfigError, DivergenceError
from furlong.plan.lengths import Call, choose_calls
from furlong.plan.plan import Backward, Forward
from furlong.planners.decide import check_pair_options
from furlong.planners.options import ChunkOptions
from furlong.timeline import Record, Timeline

if TYPE_CHECKING:
    from torch import Tensor

    from furlong.data.dataset import DataSet
    from furlong.data.loader import TrainBatch
    from furlong.data.stream import StreamSet
    from furlong.data.tokenize import Sequence as Tokens
    from furlong.runtime.step import StepResult
    from furlong.train.batches import BatchEngine

_T = TypeVar("_T")
METRICS = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
    "logps/chosen", "logps/rejected",
)  # fmt: skip
"""Metrics of a pair, under TRL's names."""


class Objective:
    """A loss with its options. The base class is the cross-entropy of all labels
    (`train.loss: sft`)."""

    format: ClassVar[Format | None] = None
    """The required `data.format`; None: any."""
    unit_size: ClassVar[int] = 1
    """Sequences per unit; a pair loss has one term for each unit of two."""
    needs_reference: ClassVar[bool] = False
    """Whether log-probabilities of the initial model are computed before the first step."""
    num_learnt: ClassVar[int] = 1
    """Number of first sequences of a unit that are trained on; the others are only evaluated."""

    def in_two_phases(self, num_processes: int) -> bool:
        """Whether a step computes the loss terms one by one. Each is then an engine call with two
        phases: all forwards first, then, once the loss term is computed, all backwards."""
        return False

    def check(self, config: RunConfig, num_processes: int) -> None:
        """Raise ConfigError for settings that the loss does not support, before data is read."""

    def check_model(self, *, adds_router_loss: bool) -> None:
        """Raise ConfigError for a model that the loss does not support, before anything is
        computed."""

    def compute(
        self,
        engine: BatchEngine,
        batch: TrainBatch,
        options: ChunkOptions,
        *,
        backward: bool = True,
        watch: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Compute gradients of a global batch's mean loss or, without `backward`, only its losses.
        A collective; see `BatchEngine.compute`."""
        return engine.compute(batch, options, backward=backward, watch=watch)

    def calls(self, data: DataSet | StreamSet, size: int | str) -> tuple[Call, ...]:
        """Return the sequence lengths of engine calls for which the run's options are chosen:
        typical calls and the largest call. Return () for a loss that is never `in_two_phases`.
        `size`: the setting `chunks.size`."""
        return ()

    def num_terms(self, batch: TrainBatch) -> int:
        """Return the number of terms in a batch's mean loss."""
        return batch.num_valid_tokens

    def num_of(self, figure: str, batch: TrainBatch) -> int:
        """Return the number of terms over which the metric named `figure` is the mean."""
        return self.num_terms(batch)

    def learnt(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with only the sequences that are trained on."""
        return replace(batch, sequences=tuple(self._learnt(batch.sequences)))

    def _learnt(self, of_sequences: Sequence[_T]) -> list[_T]:
        numbered = enumerate(of_sequences)
        return [one for number, one in numbered if number % self.unit_size < self.num_learnt]


@dataclass(frozen=True, slots=True)
class AnswerLogProb:
    """The log-probabilities of an answer by two models, each summed over its tokens, in float64."""

    log_prob: Tensor
    """Log-probability by the model, with a graph."""
    reference: float
    """Log-probability by the reference model."""
    num_tokens: int
    desirable: bool | None = None
    """Whether the answer is desirable, if the data says so (KTO)."""

    @property
    def log_ratio(self) -> Tensor:
        return self.log_prob - self.reference


class AnswerLoss(Objective):
    """A loss of answers relative to a reference model. A unit of two sequences, such as a pair,
    gives one loss term.

    A single process runs one unit at a time: its forward, its loss, its backward. So only the kept
    tensors of two sequences are in memory at a time, whatever the batch size.

    Several processes first evaluate the log-probabilities of the whole batch in any layout, from
    which each process computes all losses. Then they train the batch again for the gradients, with
    each sequence's log-probability weighted by the derivative of the loss. This costs one more
    forward. Sequences that begin alike share their prompt (`BatchEngine.tree_tokens`).
    """

    name: ClassVar[str]
    """The value of `train.loss`."""
    unit_size = 2
    needs_reference = True

    def shared(self, batch: TrainBatch, beside: Sequence[AnswerLogProb]) -> float:
        """Return a number that is computed once from the whole batch and passed to each loss term.
        `beside`: the answers of the batch that are not trained on."""
        raise NotImplementedError

    def term(self, answers: Sequence[AnswerLogProb], shared: float) -> Tensor:
        """Return the loss term of one unit, which is an answer or a pair. The loss of a batch is
        the mean over units. `shared`: the result of `self.shared` for the batch."""
        raise NotImplementedError

    def figures(self, answers: Sequence[AnswerLogProb], shared: float) -> dict[str, float]:
        """Return the metrics of one unit (an answer or a pair), by name."""
        raise NotImplementedError

    def in_two_phases(self, num_processes: int) -> bool:
        return num_processes == 1

    def check(self, config: RunConfig, num_processes: int) -> None:
        if num_processes == 1:
            check_pair_options(config)
            return
        if config.chunks.sample is not None:
            raise ConfigError(
                given=f"chunks.sample with train.loss: {self.name}",
                required="exact gradients",
                source="chunks.sample and train.loss",
                change="remove chunks.sample",
            )

    def check_model(self, *, adds_router_loss: bool) -> None:
        if adds_router_loss:
            raise ConfigError(
                given=f"train.loss: {self.name} and a model with output_router_logits: true",
                required="no router loss: it is defined beside the cross-entropy of a batch",
                source="train.loss, and the model's config.json or model.config",
                change="set model.config: {output_router_logits: false}",
            )

    def num_terms(self, batch: TrainBatch) -> int:
        return len(batch.sequences) // 2

    def compute(
        self,
        engine: BatchEngine,
        batch: TrainBatch,
        options: ChunkOptions,
        *,
        backward: bool = True,
        watch: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Compute the loss as `Objective.compute` does. The result's `loss_sum` is the sum of loss
        terms."""
        if engine.is_alone:
            return self._alone(engine, batch, options, backward, watch)
        import torch

        processes = engine.processes
        result = engine.compute(batch, options, backward=False, watch=watch)
        if backward and processes.any(result.has_drawn):
            raise ConfigError(
                given=f"train.loss: {self.name} with {processes.num_processes} processes and a"
                " model that draws random numbers in train mode (dropout, jitter or sampling)",
                required="no draws: losses are made of one forward, gradients of another",
                source="the model's config.json, or model.lora.dropout",
                change="set its dropouts to 0, or start one process",
            ).on_all()
        # equal on all processes, and so are the weights below
        sums = torch.stack([-losses.sum() for losses in result.token_losses]).requires_grad_()
        answers = list(map(_answer, batch.sequences, sums))
        shared = self.shared(batch, self._beside(answers))
        units = self._units(answers)
        loss_sum = torch.stack([self.term(unit, shared) for unit in units]).sum()
        metrics = means([self.figures(unit, shared) for unit in units])
        if backward:
            (slopes,) = torch.autograd.grad(loss_sum / len(units), sums)
            learnt = self.learnt(batch)
            # the step divides by its labels
            counts = [-slope * learnt.num_valid_tokens for slope in self._learnt(slopes.tolist())]
            result = engine.compute(learnt, options, weights=counts, watch=watch)
        total = float(loss_sum.detach())
        return replace(result, loss=total / len(units), loss_sum=total, metrics=metrics)

    def calls(self, data: DataSet | StreamSet, size: int | str) -> tuple[Call, ...]:
        from furlong.data.dataset import DataSet

        assert isinstance(data, DataSet)  # a stream has no reference
        learnt = data.seq_lens.reshape(-1, self.unit_size)[:, : self.num_learnt]
        return choose_calls(learnt, data.num_shared, None if isinstance(size, str) else size)

    def _beside(self, of_sequences: Sequence[_T]) -> list[_T]:
        return [one for n, one in enumerate(of_sequences) if n % self.unit_size >= self.num_learnt]

    def _units(self, of_sequences: Sequence[_T]) -> list[Sequence[_T]]:
        """Return the values in `of_sequences`, one for each sequence of the batch, grouped by unit
        (loss term). Values of sequences that are not trained on are left out."""
        starts = range(0, len(of_sequences), self.unit_size)
        return [of_sequences[start : start + self.num_learnt] for start in starts]

    def _alone(
        self,
        engine: BatchEngine,
        batch: TrainBatch,
        options: ChunkOptions,
        backward: bool,
        watch: Callable[[], None],
    ) -> StepResult:
        """Compute one loss term after the other on a single process, and accumulate gradients."""
        import torch

        from furlong import values
        from furlong.data.loader import sequence_tensors
        from furlong.runtime.step import StepResult

        beside = self._beside(batch.sequences)
        with torch.no_grad():
            evaluated = log_probs(engine, beside, options) if beside else []
        sums = [torch.tensor(own.sum(dtype="float64")) for own in evaluated]
        shared = self.shared(batch, list(map(_answer, beside, sums)))
        units, losses, found = self._units(batch.sequences), [], []
        started_s, records = time.perf_counter(), list[Record]()

        def note(action: Forward | Backward) -> None:
            """Record that an action ends now; the time of a backward includes its recomputes."""
            start_s = records[-1].stop_s if records else 0.0
            stop_s = time.perf_counter() - started_s
            records.append(Record(0, "compute", action, start_s, stop_s, 0, 0))

        for number, unit in enumerate(units):
            with torch.set_grad_enabled(backward):
                tensors = [sequence_tensors(sequence) for sequence in unit]
                given = engine.engine.token_values(
                    tensors, options, values.log_prob(), gradients="added", watch=watch
                )
                answers = list(map(_answer, unit, [x.double().sum() for x in given]))
                loss = self.term(answers, shared)
            losses.append(float(loss.detach()))
            found.append(self.figures(answers, shared))
            note(Forward(number, 0, options.kept))
            if backward:
                (loss / len(units)).backward()  # type: ignore[no-untyped-call]
                note(Backward(number, 0))
        loss_sum = sum(losses)
        return StepResult(
            loss_sum / len(units), loss_sum, batch.num_valid_tokens, Timeline(tuple(records)),
            metrics=means(found),
        )  # fmt: skip


@dataclass(frozen=True)
class PairLoss(AnswerLoss):
    """Losses of pairs, with chosen and rejected answers alternating in a batch: `train.loss: dpo`.

    An answer's log-ratio is its log-probability by the model minus that by the reference. A reward
    is beta times the log-ratio, as in DPO (Rafailov et al., 2023, equation 5). `label_smoothing` is
    the assumed share of swapped pairs. `loss_type` selects the loss of the two answers:

        sigmoid             DPO; with smoothing, conservative DPO
        sigmoid_norm        DPO, with log-ratios divided by the number of tokens
        robust              unbiased under swapped pairs (Chowdhury et al., 2024, equation 12)
        ipo                 squared distance of the difference of log-ratios per token from
                            1 / (2 beta); beta is tau (Azar et al., 2023, eq. 17)
        apo_zero, apo_down  anchored (D'Oosterlinck et al., 2024, equations 7 and 8)

    The mean cross-entropy over all chosen tokens of the batch, times `sft_weight`, is added to the
    loss.
    """

    loss_type: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    sft_weight: float = 0.0

    name = "dpo"
    format = "preference"
    num_learnt = 2

    def shared(self, batch: TrainBatch, beside: Sequence[AnswerLogProb]) -> float:
        """Return the factor that turns a chosen answer's cross-entropy into a part of its pair's
        loss."""
        num_tokens = sum(one.num_valid_tokens for one in batch.sequences[::2])
        return self.sft_weight * self.num_terms(batch) / num_tokens

    def term(self, answers: Sequence[AnswerLogProb], shared: float) -> Tensor:
        from torch.nn.functional import logsigmoid, sigmoid

        ratios = [answer.log_ratio for answer in answers]
        if self.loss_type in ("sigmoid_norm", "ipo"):
            ratios = [r / answer.num_tokens for r, answer in zip(ratios, answers, strict=True)]
        chosen, delta = self.beta * ratios[0], self.beta * (ratios[0] - ratios[1])
        right, wrong, share = -logsigmoid(delta), -logsigmoid(-delta), self.label_smoothing
        match self.loss_type:
            case "ipo":
                loss = ((ratios[0] - ratios[1]) - 1 / (2 * self.beta)) ** 2
            case "apo_zero":
                loss = sigmoid(-chosen) + sigmoid(self.beta * ratios[1])
            case "apo_down":
                loss = sigmoid(chosen) + sigmoid(-delta)
            case "robust":
                loss = ((1 - share) * right - share * wrong) / (1 - 2 * share)
            case _:
                loss = (1 - share) * right + share * wrong if share else right
        return loss - shared * answers[0].log_prob if shared else loss

    def figures(self, answers: Sequence[AnswerLogProb], shared: float) -> dict[str, float]:
        """Return the metrics of a pair, by the names in `METRICS`."""
        log_probs = [float(answer.log_prob.detach()) for answer in answers]
        rewards = [
            self.beta * (log_prob - answer.reference)
            for log_prob, answer in zip(log_probs, answers, strict=True)
        ]
        accuracy, margin = float(rewards[0] > rewards[1]), rewards[0] - rewards[1]
        return dict(zip(METRICS, (*rewards, accuracy, margin, *log_probs), strict=True))


@dataclass(frozen=True)
class KTOLoss(AnswerLoss):
    """The loss of desirable and undesirable answers: `train.loss: kto` (Ethayarajh et al., 2024,
    equation 7).

    In a batch, each answer is followed by a mismatched one: its prompt with another record's
    answer. The mean log-ratio of all mismatched answers, at least 0 and without a gradient, is the
    reference point. It is subtracted from the log-ratio of each answer.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    name = "kto"
    format = "unpaired"

    def shared(self, batch: TrainBatch, beside: Sequence[AnswerLogProb]) -> float:
        """Return the estimated KL divergence from the reference model."""
        return max(0.0, sum(float(one.log_ratio.detach()) for one in beside) / len(beside))

    def term(self, answers: Sequence[AnswerLogProb], shared: float) -> Tensor:
        from torch.nn.functional import sigmoid

        (answer,) = answers
        reward = self.beta * (answer.log_ratio - shared)
        if answer.desirable:
            return self.desirable_weight * sigmoid(-reward)
        return self.undesirable_weight * sigmoid(reward)

    def figures(self, answers: Sequence[AnswerLogProb], shared: float) -> dict[str, float]:
        """Return the metrics of an answer, named `chosen` if it is desirable, else `rejected`."""
        (answer,) = answers
        log_prob = float(answer.log_prob.detach())
        kind = "chosen" if answer.desirable else "rejected"
        reward = self.beta * (log_prob - answer.reference)
        return {f"rewards/{kind}": reward, f"logps/{kind}": log_prob, "kl": shared}

    def num_of(self, figure: str, batch: TrainBatch) -> int:
        if figure == "kl":
            return self.num_terms(batch)
        is_of_wanted = figure.endswith("chosen")
        return sum(one.desirable is is_of_wanted for one in self._learnt(batch.sequences))


OBJECTIVES: dict[str, Callable[[TrainConfig], Objective]] = {
    "sft": lambda settings: Objective(),
    "dpo": lambda settings: PairLoss(
        settings.loss_type, settings.beta, settings.label_smoothing, settings.sft_weight
    ),
    "kto": lambda settings: KTOLoss(
        settings.beta, settings.desirable_weight, settings.undesirable_weight
    ),
}


def objective_of(settings: TrainConfig) -> Objective:
    """Return the loss that a run trains, with its options."""
    return OBJECTIVES[settings.loss](settings)


def log_probs(
    engine: BatchEngine, sequences: Iterable[Tokens], options: ChunkOptions
) -> list[npt.NDArray[Any]]:
    """Return the log-probabilities of each sequence's labelled tokens, equal on all processes. Call
    it under `torch.no_grad`."""
    from furlong import values
    from furlong.data.loader import LoaderState, TrainBatch, sequence_tensors
    from furlong.data.tokenize import IGNORE_INDEX

    known = list(sequences)
    learnt = [np.flatnonzero(own.labels[1:] != IGNORE_INDEX) for own in known]
    if engine.is_alone:
        tensors = [sequence_tensors(sequence) for sequence in known]
        found = engine.engine.token_values(tensors, options, values.log_prob())
        return [x.cpu().numpy()[at + 1] for x, at in zip(found, learnt, strict=True)]
    result = engine.compute(TrainBatch(tuple(known), LoaderState()), options, backward=False)
    return [-x.numpy()[at] for x, at in zip(result.token_losses, learnt, strict=True)]


def means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the mappings that have it."""
    listed: dict[str, list[float]] = {}
    for own in found:
        for name, value in own.items():
            listed.setdefault(name, []).append(value)
    return {name: sum(all_values) / len(all_values) for name, all_values in listed.items()}


def _answer(sequence: Tokens, log_prob: Tensor) -> AnswerLogProb:
    """Return the log-probabilities of an answer: `log_prob` by the model, and the reference
    model's, which is stored in the sequence."""
    from furlong.data.tokenize import IGNORE_INDEX

    assert sequence.reference is not None  # attached before the first step
    num_tokens = int((sequence.labels[1:] != IGNORE_INDEX).sum())
    reference = float(sequence.reference.sum(dtype="float64"))
    return AnswerLogProb(log_prob, reference, num_tokens, sequence.desirable)


def diverged(
    batch: TrainBatch, step: int, figures: str, most: float | None, kept: str
) -> DivergenceError:
    """Return the error for a step whose loss or gradient norm is not finite, or whose loss is too
    large.

    Args:
        figures: Loss and gradient norm, in words.
        most: The exceeded limit `train.max_loss`; None if a figure is not finite.
        kept: The newest checkpoint, in words.
    """
    names = [f"{sequence.seq_id} ({sequence.origin})" for sequence in batch.sequences]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    required, mend = "finite figures", ""
    if most is not None:
        required, mend = f"a loss of at most train.max_loss = {most:g}", ", raise train.max_loss"
    return DivergenceError(
        given=f"{figures} in step {step}; the weights are still those of step {step - 1}",
        required=required,
        source=f"the sequences of step {step}: {', '.join(names[:8])}{more}",
        change=f"look at these sequences{mend}, or start anew with a lower train.lr or a longer"
        f" train.warmup_steps; {kept}",
    )

"""Evaluation: mean losses of data sets, overall and by position, with the training engine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from furlong.data.dataset import DataSet
from furlong.data.loader import TrainBatch, Units, sequence_indices
from furlong.data.tokenize import Sequence
from furlong.ops.loss import IGNORE_INDEX
from furlong.planners.options import ChunkOptions
from furlong.report.beyond import Beyond, PositionSpan
from furlong.runtime.rng import modes_kept
from furlong.train.batches import BatchEngine
from furlong.train.memory import Fitting, UsedMemory
from furlong.train.objective import Objective

if TYPE_CHECKING:
    from furlong.runtime.step import StepResult

HELD_OUT, TRAINING = "held-out", "training"
"""Names of the evaluated data: `data.eval`, and a share of the training sequences."""
_FIRST_POSITIONS = 64
"""Positions below this are one bucket, since they have few tokens."""
_FEWEST_TOKENS = 16
"""Fewest labelled tokens of a span that is shown; fewer have no mean to speak of."""
_SPANS = 512
"""Most spans of a quarter of the trained length; the last one takes all later positions."""


@dataclass(frozen=True, slots=True)
class PositionBucket:
    """The labelled tokens at positions [start, stop) of their sequences."""

    start: int
    stop: int
    loss: float
    """Mean over the bucket's tokens."""
    num_valid_tokens: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean loss over all labels of a data set, and per bucket of positions (powers of two).

    A token's position is the number of tokens before it. A model that uses its long context
    predicts late tokens better. Late tokens come from long documents only, so compare a bucket with
    itself, over time or between models.
    """

    loss: float
    """NaN without labels."""
    num_valid_tokens: int
    by_position: tuple[PositionBucket, ...] = ()
    """Ascending, without empty buckets; () for pairs."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other metrics of the loss, by name."""
    beyond: Beyond | None = None
    """None if no sequence is longer than those to train on, and for pairs."""


def evaluate(
    engine: BatchEngine,
    batches: Iterable[TrainBatch],
    fitting: Fitting,
    *,
    objective: Objective | None = None,
    used: UsedMemory | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    trained_tokens: int | None = None,
) -> Evaluation | None:
    """Return the mean loss of all batches, computed without gradients and with the model in eval
    mode. Afterwards every module has its earlier mode again. Return None if `should_stop()` becomes
    true.

    Args:
        fitting: The chunk options. Chunks shrink if memory does not suffice.
        objective: The loss; None: cross-entropy.
        used: Memory meter whose budget the evaluation must not exceed; None: no budget.
        should_stop: Called before each batch.
        trained_tokens: Maximum number of tokens in a sequence to train on, for `Evaluation.beyond`.
    """
    objective = objective or Objective()
    loss_sum, num_terms, num_valid_tokens = 0.0, 0, 0
    by_name: Counter[str] = Counter()
    num_by_name: Counter[str] = Counter()
    sums = torch.zeros(64, dtype=torch.float64)
    counts = torch.zeros(64, dtype=torch.int64)
    table = torch.zeros(0 if trained_tokens is None else _SPANS, 6, dtype=torch.float64)
    with evaluating(engine.model):
        for batch in batches:
            if should_stop():
                return None
            if batch.num_valid_tokens == 0:
                continue

            def call(options: ChunkOptions, batch: TrainBatch = batch) -> StepResult:
                if used is not None:
                    used.restart()
                watch = used.check if used is not None else lambda: None
                return objective.compute(engine, batch, options, backward=False, watch=watch)

            result = fitting.compute(
                call, name="an evaluation", num_tokens=batch.num_tokens, device=engine.device
            )
            own = objective.num_terms(batch)
            loss_sum += result.loss_sum
            num_terms += own
            num_valid_tokens += result.num_valid_tokens
            for name, mean in result.metrics.items():
                count = objective.num_of(name, batch)
                by_name[name] += mean * count  # type: ignore[assignment]
                num_by_name[name] += count
            for number in engine.share(len(batch.sequences)) if objective.unit_size == 1 else ():
                labels = torch.from_numpy(batch.sequences[number].labels.astype(np.int64))
                losses = result.token_losses[number]
                _add_by_position(losses, labels, sums, counts)
                if trained_tokens is not None:
                    _add_spans(losses, labels, trained_tokens, table)
    local = torch.cat([sums, counts.double(), table.flatten()])
    figures = torch.tensor(engine.processes.sums(local.tolist()), dtype=torch.float64)
    sums, counts = figures[:128].view(2, -1)
    metrics = {name: total / num_by_name[name] for name, total in by_name.items()}
    by_position = _buckets(sums, counts.long())
    beyond = None if trained_tokens is None else _beyond(figures[128:].view(-1, 6), trained_tokens)
    loss = loss_sum / num_terms if num_terms else math.nan
    return Evaluation(loss, num_valid_tokens, by_position, metrics, beyond)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager: put the model in eval mode, then restore the mode of every module."""
    with modes_kept(model):
        model.eval()
        yield


def draw_share(data: DataSet, share: float, seed: int) -> tuple[list[Sequence], Units]:
    """Return a random share of the sequences, in data order, and the (start, stop) indices of their
    units in the returned list. A unit is a set of sequences drawn together, such as a pair. At
    least one unit is drawn. Equal seeds draw equal shares."""
    num_chosen = max(1, round(share * len(data.units)))
    chosen = np.sort(np.random.default_rng(seed).permutation(len(data.units))[:num_chosen])
    units = data.units[chosen]
    stops = np.cumsum(units[:, 1] - units[:, 0])
    starts = np.concatenate([[0], stops[:-1]])
    return [data[i] for i in sequence_indices(units).tolist()], np.stack([starts, stops], axis=1)


def _add_by_position(losses: Tensor, labels: Tensor, sums: Tensor, counts: Tensor) -> None:
    """Add a sequence's token losses to `sums` and `counts`, at index floor(log2(p)) for position p;
    positions below 64 share one index. `losses`: (T,), where losses[t] is the loss of the token at
    position t + 1. `labels`: (T,), unshifted."""
    positions = torch.nonzero(labels[1:] != IGNORE_INDEX).flatten() + 1
    # frexp is exact: p = m * 2**e with m in [0.5, 1).
    index = torch.frexp(positions.double()).exponent.long() - 1
    index.clamp_(min=_FIRST_POSITIONS.bit_length() - 2)
    sums.index_add_(0, index, losses[positions - 1])
    counts.index_add_(0, index, torch.ones_like(index))


def _width(trained_tokens: int) -> int:
    """Return the number of positions in a span: a quarter of the trained length."""
    return max(1, trained_tokens // 4)


def _add_spans(losses: Tensor, labels: Tensor, trained_tokens: int, table: Tensor) -> None:
    """Add a sequence to the sums of all spans that it reaches. `losses`, `labels`: as in
    `_add_by_position`. `table`: (spans, 6), the columns sum, sum of squares and count of the
    span's losses, then the same of the trained positions of the sequences that reach it."""
    if len(labels) <= trained_tokens:
        return
    positions = torch.nonzero(labels[1:] != IGNORE_INDEX).flatten() + 1
    values = losses[positions - 1].double()
    is_trained = (positions >= trained_tokens // 2) & (positions < trained_tokens)
    if not is_trained.any():  # nothing to compare with
        return
    index = (positions // _width(trained_tokens)).clamp_(max=len(table) - 1)
    table[:, :3].index_add_(0, index, _moments(values))
    table[index.unique(), 3:] += _moments(values[is_trained]).sum(0)


def _moments(values: Tensor) -> Tensor:
    """Return a row (x, x^2, 1) for each value x: (N, 3)."""
    return torch.stack([values, values.square(), torch.ones_like(values)], 1)


def _beyond(table: Tensor, trained_tokens: int) -> Beyond | None:
    width, spans = _width(trained_tokens), []
    fewest = min(_FEWEST_TOKENS, width)
    for number in torch.nonzero(table[:, 2] >= fewest).flatten().tolist():
        (loss, error), (trained, of_trained) = map(_mean_and_error, table[number].view(2, 3))
        spans.append(
            PositionSpan(
                start=number * width,
                stop=(number + 1) * width,
                loss=loss,
                trained_loss=trained,
                loss_error=error,
                trained_error=of_trained,
                num_valid_tokens=int(table[number, 2]),
            )
        )
    beyond = Beyond(trained_tokens, tuple(spans))
    return beyond if beyond.outside else None


def _mean_and_error(moments: Tensor) -> tuple[float, float]:
    """Return the mean of some values and its standard error. `moments`: (3,), their sum, sum of
    squares and count."""
    total, squares, count = moments.tolist()
    mean = total / count
    return mean, math.sqrt(max(0.0, squares / count - mean * mean) / max(1.0, count - 1))


def _buckets(sums: Tensor, counts: Tensor) -> tuple[PositionBucket, ...]:
    return tuple(
        PositionBucket(
            start=0 if 2 ** (index + 1) <= _FIRST_POSITIONS else 2**index,
            stop=2 ** (index + 1),
            loss=float(sums[index] / counts[index]),
            num_valid_tokens=int(counts[index]),
        )
        for index in torch.nonzero(counts).flatten().tolist()
    )

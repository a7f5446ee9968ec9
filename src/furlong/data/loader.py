"""Draw global batches of sequences, in an order determined by seed and epoch.

The position in that order is a small value, `LoaderState`: each batch carries the state after it,
and `iterate_batches` continues from any state without reading the sequences before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from furlong.data.tokenize import Sequence
from furlong.plan.lengths import StepSize
from furlong.units import count_words

Units = npt.NDArray[np.int64]
"""(U, 2) half-open ranges of the sequences of each record, which are drawn and counted as one."""


class Sequences(Protocol):
    """Protocol of a data set or a list: sequences that are read by their number."""

    def __len__(self) -> int: ...
    def __getitem__(self, seq_id: int, /) -> Sequence: ...


@dataclass(frozen=True, slots=True)
class LoaderState:
    """The position of the next batch. With the data set and the seed, it determines all further
    batches."""

    epoch: int = 0
    batch: int = 0
    sources: Items[dict[str, Any]] = ()
    """Cursors of sources that are read while training, as plain values; epoch and batch stay 0."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The sequences of one optimizer step, and the loader's state after them.

    Tokens stay on disk until `tensors` or `part` reads them into CPU memory. The engine copies the
    tokens of each chunk to its device.
    """

    sequences: tuple[Sequence, ...]
    """The sequences; in a batch of pairs, chosen and rejected alternate."""
    next_state: LoaderState

    @property
    def seq_lens(self) -> tuple[int, ...]:
        return tuple(sequence.seq_len for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(sequence.seq_len for sequence in self.sequences)

    @property
    def num_valid_tokens(self) -> int:
        return sum(sequence.num_valid_tokens for sequence in self.sequences)

    def tensors(self) -> list[dict[str, torch.Tensor]]:
        """Return one `{"input_ids": (T,) int64, "labels": (T,) int64}` per sequence, on the CPU."""
        return [sequence_tensors(sequence) for sequence in self.sequences]

    def part(self, numbers: Iterable[int]) -> dict[int, dict[str, torch.Tensor]]:
        """Return the tensors of some sequences, by their index in the batch, reading no others."""
        return {number: sequence_tensors(self.sequences[number]) for number in numbers}


def sequence_tensors(sequence: Sequence) -> dict[str, torch.Tensor]:
    """Return `{"input_ids": (T,) int64, "labels": (T,) int64}` of a sequence, on the CPU."""
    return {
        "input_ids": torch.from_numpy(sequence.input_ids.astype(np.int64)),
        "labels": torch.from_numpy(sequence.labels.astype(np.int64)),
    }


@dataclass(frozen=True, slots=True)
class Mixture:
    """The numbers of draws from each source in an epoch.

    An epoch draws `floor(w * n + 1/2)` times, at least once, from a source of n sequences with
    weight w. Over all epochs, the draws go through the source pass after pass, each in a new random
    order. So, at any time, the numbers of draws of two sequences of a source differ by at most one.
    """

    sizes: tuple[int, ...]
    """The number of sequences of each source, in the order of the data set."""
    weights: tuple[float, ...]

    @property
    def draws(self) -> tuple[int, ...]:
        """The number of sequences (or pairs) that an epoch draws from each source."""
        return tuple(
            max(1, math.floor(weight * size + 0.5)) if size else 0
            for size, weight in zip(self.sizes, self.weights, strict=True)
        )

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """Return `(sum(draws),)` indices of sequences (or pairs): the draws of an epoch,
        shuffled."""
        start, drawn = 0, []
        for source, (size, draws) in enumerate(zip(self.sizes, self.draws, strict=True)):
            drawn.append(start + _draw(size, draws, (seed, source), epoch))
            start += size
        shuffle = np.random.default_rng((seed, epoch))
        return np.concatenate(drawn)[shuffle.permutation(sum(self.draws))]


def _draw(size: int, draws: int, seed: tuple[int, int], epoch: int) -> npt.NDArray[np.int64]:
    """Return the indices of the sequences that an epoch draws from a source of `size` sequences.

    Random permutations of the source, each with another seed, follow each other without end. Epoch
    number `epoch` takes `draws` elements of them, from position epoch * draws on. The result is in
    no certain order: the caller shuffles it.
    """
    first, stop = epoch * draws, (epoch + 1) * draws
    drawn = [np.zeros(0, np.int64)]
    while first < stop:
        number, begin = divmod(first, size)
        end = min(size, begin + stop - first)
        if end - begin == size:  # a whole pass needs no order: the epoch is shuffled afterwards
            drawn.append(np.arange(size))
        else:
            drawn.append(np.random.default_rng((*seed, number, 1)).permutation(size)[begin:end])
        first += end - begin
    return np.concatenate(drawn)


@dataclass(frozen=True, slots=True)
class Epochs:
    """The global batches of each epoch: the epoch's draws are cut into batches, and no batch spans
    two epochs."""

    mixture: Mixture
    size: StepSize
    seed: int
    lens: npt.NDArray[np.int64]
    """(U,) the lengths of what is drawn."""

    def batches(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """Return, for each batch of an epoch, the indices of its draws (sequences or pairs)."""
        order = self.mixture.order(self.seed, epoch)
        return np.split(order, self.size.stops(self.lens[order].tolist())[:-1])


def count_steps(num_epochs: float, epochs: Epochs, has_label: npt.NDArray[np.bool_]) -> int:
    """Return the number of optimizer steps in some epochs, at least 1. Batches without a label take
    no step.

    Args:
        num_epochs: may be a fraction.
        epochs: the batches.
        has_label: (U,) whether each draw has a label.
    """
    num_steps = 0
    for epoch in range(math.ceil(num_epochs)):
        batches = epochs.batches(epoch)
        part = batches[: math.ceil(min(1, num_epochs - epoch) * len(batches))]
        num_steps += sum(bool(has_label[batch].any()) for batch in part)
    return max(1, num_steps)


def describe_batches(epochs: Epochs, noun: str = "sequence") -> str:
    """Return the sizes of the first epoch's global batches in words. `noun`: the word for a drawn
    item.

    Raises:
        ConfigError: an epoch is smaller than one batch.
    """
    num_draws, size = sum(epochs.mixture.draws), epochs.size
    size.check(num_draws, noun)
    batches = epochs.batches(0)
    line = f"{count_words(num_draws, noun)} per epoch in {count_words(len(batches), 'batch')}"
    if size.tokens is None:
        rest = len(batches[-1])
        return f"{line} of {size}" + (f", the last one of {rest:,}" * (rest != size.sequences))
    longer = int((epochs.lens > size.tokens).sum())
    more = f"; {longer:,} longer, each by itself" if longer else ""
    return f"{line} of {size} (the first epoch){more}"


def iterate_batches(
    sequences: Sequences, units: Units, epochs: Epochs, *, state: LoaderState = LoaderState()
) -> Iterator[TrainBatch]:
    """Yield batches without end, in a new order in each epoch.

    Args:
        sequences: the data set.
        units: the sequences of each draw, such as the two of a pair.
        epochs: the batches of each epoch.
        state: where to begin; the sequences before it are not read.
    """
    epoch, first = state.epoch, state.batch
    while True:
        batches = epochs.batches(epoch)
        for number in range(first, len(batches)):
            last = number + 1 == len(batches)
            yield TrainBatch(
                _drawn(sequences, units[batches[number]]),
                LoaderState(epoch + 1, 0) if last else LoaderState(epoch, number + 1),
            )
        epoch, first = epoch + 1, 0


def in_order(sequences: Sequences, units: Units, size: StepSize) -> Iterator[TrainBatch]:
    """Yield the batches of one unshuffled pass over `units` (sequences or pairs), to evaluate."""
    lens: Items[int] = range(len(units))
    if size.tokens is not None:
        lens = [sum(own.seq_len for own in _drawn(sequences, units[i : i + 1])) for i in lens]
    start = 0
    for number, stop in enumerate(size.stops(lens), start=1):
        yield TrainBatch(_drawn(sequences, units[start:stop]), LoaderState(0, number))
        start = stop


def each_alone(num_sequences: int) -> Units:
    """Return ranges of one sequence each, so that every sequence is drawn by itself."""
    numbers = np.arange(num_sequences)
    return np.stack([numbers, numbers + 1], axis=1)


def sequence_indices(units: Units) -> npt.NDArray[np.int64]:
    """Return the indices of all sequences in the half-open ranges `units`, in their order."""
    counts = units[:, 1] - units[:, 0]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(units[:, 0], counts) + within


def _drawn(sequences: Sequences, units: Units) -> tuple[Sequence, ...]:
    return tuple(sequences[row] for row in sequence_indices(units).tolist())


def with_lookahead(
    batches: Iterator[TrainBatch], on_next: Callable[[TrainBatch], None]
) -> Iterator[TrainBatch]:
    """Yield the batches, with one batch of lookahead: before a batch is yielded, `on_next` has been
    called with that batch and with the next one."""
    following = next(batches)
    on_next(following)
    for batch in batches:
        on_next(batch)
        yield following
        following = batch
    yield following

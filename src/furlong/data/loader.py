"""Global batches of sequences, in an order that seed and epoch fix.

The position in that order is a small value, `LoaderState`: every batch carries the state after it,
and `iterate_batches` goes on from any state without reading a sequence that lies before it.
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
"""(U, 2) numbers of the first sequence of each record and of the one behind its last: what is drawn
and counted as one."""


class Sequences(Protocol):
    """Sequences by number, such as those of a data set or a list."""

    def __len__(self) -> int: ...
    def __getitem__(self, seq_id: int, /) -> Sequence: ...


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Which batch comes next: with the data set and the seed, enough to go on from there."""

    epoch: int = 0
    batch: int = 0
    sources: Items[dict[str, Any]] = ()
    """Places in sources that are read while training, as plain values; of these epoch and batch
    stay 0."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences between two optimizer steps, and the state after them. Their tokens lie on
    disk until `tensors` asks for them; the engine reads them on the CPU and sends each chunk's."""

    sequences: tuple[Sequence, ...]
    """In a batch of pairs, chosen and rejected by turns."""
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
        """One `{"input_ids": (T,) int64, "labels": (T,) int64}` per sequence."""
        return [sequence_tensors(sequence) for sequence in self.sequences]

    def part(self, numbers: Iterable[int]) -> dict[int, dict[str, torch.Tensor]]:
        """The same of some sequences, by their place in the batch; of the others nothing is
        read."""
        return {number: sequence_tensors(self.sequences[number]) for number in numbers}


def sequence_tensors(sequence: Sequence) -> dict[str, torch.Tensor]:
    """`{"input_ids": (T,) int64, "labels": (T,) int64}`, read from disk, on the CPU."""
    return {
        "input_ids": torch.from_numpy(sequence.input_ids.astype(np.int64)),
        "labels": torch.from_numpy(sequence.labels.astype(np.int64)),
    }


@dataclass(frozen=True, slots=True)
class Mixture:
    """How often an epoch draws from each source.

    A source of n sequences with weight w is drawn from `floor(w * n + 1/2)` times in an epoch, at
    least once. Epoch after epoch these draws go round the source in passes, each pass in a random
    order of its own, so that after any number of epochs two sequences of one source have been drawn
    equally often or differ by one.
    """

    sizes: tuple[int, ...]
    """Sequences of each source; together they are the data set, source after source."""
    weights: tuple[float, ...]

    @property
    def draws(self) -> tuple[int, ...]:
        """Sequences that an epoch takes from each source."""
        return tuple(
            max(1, math.floor(weight * size + 0.5)) if size else 0
            for size, weight in zip(self.sizes, self.weights, strict=True)
        )

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """`(sum(draws),)` indices into the data set: the draws of an epoch, shuffled together."""
        start, drawn = 0, []
        for source, (size, draws) in enumerate(zip(self.sizes, self.draws, strict=True)):
            drawn.append(start + _draw(size, draws, (seed, source), epoch))
            start += size
        shuffle = np.random.default_rng((seed, epoch))
        return np.concatenate(drawn)[shuffle.permutation(sum(self.draws))]


def _draw(size: int, draws: int, seed: tuple[int, int], epoch: int) -> npt.NDArray[np.int64]:
    """Indices [epoch * draws, (epoch + 1) * draws) of the passes over a source, end to end."""
    first, stop = epoch * draws, (epoch + 1) * draws
    drawn = [np.zeros(0, np.int64)]
    while first < stop:
        number, begin = divmod(first, size)
        end = min(size, begin + stop - first)
        if end - begin == size:  # a whole pass: its order is that of the shuffle that follows
            drawn.append(np.arange(size))
        else:
            drawn.append(np.random.default_rng((*seed, number, 1)).permutation(size)[begin:end])
        first += end - begin
    return np.concatenate(drawn)


@dataclass(frozen=True, slots=True)
class Epochs:
    """The global batches of each epoch: its draws in their order, cut to batches of one size.
    No batch reaches into the next epoch."""

    mixture: Mixture
    size: StepSize
    seed: int
    lens: npt.NDArray[np.int64]
    """(U,) tokens of what is drawn."""

    def batches(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """The numbers of what each batch of an epoch draws."""
        order = self.mixture.order(self.seed, epoch)
        return np.split(order, self.size.stops(self.lens[order].tolist())[:-1])


def count_steps(num_epochs: float, epochs: Epochs, has_label: npt.NDArray[np.bool_]) -> int:
    """Steps of so many epochs, at least one: their batches but for those that are skipped.

    has_label: (U,), which draws have something to learn.
    """
    num_steps = 0
    for epoch in range(math.ceil(num_epochs)):
        batches = epochs.batches(epoch)
        part = batches[: math.ceil(min(1, num_epochs - epoch) * len(batches))]
        num_steps += sum(bool(has_label[batch].any()) for batch in part)
    return max(1, num_steps)


def describe_batches(epochs: Epochs, noun: str = "sequence") -> str:
    """The sizes of the first epoch's global batches, for people. `noun`: what is drawn.

    Raises ConfigError if an epoch is smaller than one batch.
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
) -> Iterator[Batch]:
    """Endless batches of `units`; every epoch has an order of its own. `state` is where to begin:
    the sequences before it are not read."""
    epoch, first = state.epoch, state.batch
    while True:
        batches = epochs.batches(epoch)
        for number in range(first, len(batches)):
            last = number + 1 == len(batches)
            yield Batch(
                _drawn(sequences, units[batches[number]]),
                LoaderState(epoch + 1, 0) if last else LoaderState(epoch, number + 1),
            )
        epoch, first = epoch + 1, 0


def in_order(sequences: Sequences, units: Units, size: StepSize) -> Iterator[Batch]:
    """One pass without shuffling: the batches of an evaluation."""
    lens: Items[int] = range(len(units))
    if size.tokens is not None:
        lens = [sum(own.seq_len for own in _drawn(sequences, units[i : i + 1])) for i in lens]
    start = 0
    for number, stop in enumerate(size.stops(lens), start=1):
        yield Batch(_drawn(sequences, units[start:stop]), LoaderState(0, number))
        start = stop


def each_alone(num_sequences: int) -> Units:
    """Each sequence by itself."""
    numbers = np.arange(num_sequences)
    return np.stack([numbers, numbers + 1], axis=1)


def rows_of(units: Units) -> npt.NDArray[np.int64]:
    """The numbers of the sequences in `units`, unit after unit."""
    counts = units[:, 1] - units[:, 0]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(units[:, 0], counts) + within


def _drawn(sequences: Sequences, units: Units) -> tuple[Sequence, ...]:
    return tuple(sequences[row] for row in rows_of(units).tolist())


def told_ahead(batches: Iterator[Batch], tell: Callable[[Batch], None]) -> Iterator[Batch]:
    """The same batches; `tell` gets each before the one in front of it is handed out."""
    following = next(batches)
    tell(following)
    for batch in batches:
        tell(batch)
        yield following
        following = batch
    yield following

"""Global batches of sequences, in an order that seed and epoch fix.

The position in that order is a small value, `LoaderState`: every batch carries the state after it,
and `iterate_batches` goes on from any state without reading a sequence that lies before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from furlong.data.tokenize import Sequence
from furlong.errors import ConfigError
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


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences between two optimizer steps, and the state after them. Their tokens lie on
    disk until `tensors` asks for them."""

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

    def tensors(self, device: torch.device) -> list[dict[str, torch.Tensor]]:
        """One `{"input_ids": (T,) int64, "labels": (T,) int64}` per sequence."""
        return [sequence_tensors(sequence, device) for sequence in self.sequences]

    def part(
        self, numbers: Iterable[int], device: torch.device
    ) -> dict[int, dict[str, torch.Tensor]]:
        """The same of some sequences, by their place in the batch; of the others nothing is
        read."""
        return {number: sequence_tensors(self.sequences[number], device) for number in numbers}


def sequence_tensors(sequence: Sequence, device: torch.device) -> dict[str, torch.Tensor]:
    """`{"input_ids": (T,) int64, "labels": (T,) int64}`, read from disk."""
    return {
        "input_ids": torch.from_numpy(sequence.input_ids.astype(np.int64)).to(device),
        "labels": torch.from_numpy(sequence.labels.astype(np.int64)).to(device),
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


def batches_per_epoch(num_draws: int, sequences_per_step: int) -> int:
    """Global batches of one epoch; the last one may be smaller."""
    return math.ceil(num_draws / sequences_per_step)


def count_steps(
    epochs: float,
    has_label: npt.NDArray[np.bool_],
    mixture: Mixture,
    *,
    sequences_per_step: int,
    seed: int,
) -> int:
    """Steps of so many epochs, at least one: their batches but for those that are skipped.

    has_label: (N,), which sequences have something to learn.
    """
    per_epoch = batches_per_epoch(sum(mixture.draws), sequences_per_step)
    num_batches = math.ceil(epochs * per_epoch)
    if has_label.all():
        return num_batches
    num_steps = 0
    for epoch in range(math.ceil(epochs)):
        drawn = has_label[mixture.order(seed, epoch)]
        labelled = np.logical_or.reduceat(drawn, np.arange(0, len(drawn), sequences_per_step))
        num_steps += int(np.count_nonzero(labelled[: num_batches - epoch * per_epoch]))
    return max(1, num_steps)


def describe_batches(num_draws: int, sequences_per_step: int, noun: str = "sequence") -> str:
    """The sizes of an epoch's global batches, for people. `noun`: what is drawn.

    Raises ConfigError if an epoch is smaller than one batch.
    """
    if sequences_per_step > num_draws:
        raise ConfigError(
            given=f"train.sequences_per_step = {sequences_per_step:,}",
            required=f"at most {num_draws:,}, the training {noun}s of an epoch",
            source="train.sequences_per_step, by default 32",
            change=f"set train.sequences_per_step to {num_draws} or less, add data, or raise the"
            " weights of its sources",
        )
    count = batches_per_epoch(num_draws, sequences_per_step)
    line = f"{count_words(num_draws, noun)} per epoch in {count_words(count, 'batch')}"
    rest = num_draws % sequences_per_step
    return f"{line} of {sequences_per_step:,}" + (f", the last one of {rest:,}" if rest else "")


def iterate_batches(
    sequences: Sequences,
    *,
    sequences_per_step: int,
    seed: int,
    state: LoaderState = LoaderState(),
    mixture: Mixture | None = None,
    units: Units | None = None,
) -> Iterator[Batch]:
    """Endless; every epoch has an order of its own.

    `units` are drawn and counted, by default each sequence by itself. Without `mixture` an epoch
    goes through all of them once. `state` is where to begin: the sequences before it are not read.
    """
    units = _each(len(sequences)) if units is None else units
    mixture = mixture or Mixture((len(units),), (1.0,))
    epoch, batch = state.epoch, state.batch
    per_epoch = batches_per_epoch(sum(mixture.draws), sequences_per_step)
    while True:
        order = mixture.order(seed, epoch)
        for index in range(batch, per_epoch):
            chosen = order[index * sequences_per_step : (index + 1) * sequences_per_step]
            last = index + 1 == per_epoch
            yield Batch(
                _drawn(sequences, units[chosen]),
                LoaderState(epoch + 1, 0) if last else LoaderState(epoch, index + 1),
            )
        epoch, batch = epoch + 1, 0


def in_order(
    sequences: Sequences,
    sequences_per_step: int,
    *,
    units: Units | None = None,
) -> Iterator[Batch]:
    """One pass without shuffling: the batches of an evaluation."""
    units = _each(len(sequences)) if units is None else units
    for number, start in enumerate(range(0, len(units), sequences_per_step), start=1):
        drawn = _drawn(sequences, units[start : start + sequences_per_step])
        yield Batch(drawn, LoaderState(0, number))


def _each(num_sequences: int) -> Units:
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

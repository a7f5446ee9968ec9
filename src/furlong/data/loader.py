"""Global batches of sequences, in an order that seed and epoch fix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch

from furlong.data.tokenize import Sequence


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Which batch comes next: enough to go on from there."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences between two optimizer steps, and the state after them."""

    sequences: tuple[Sequence, ...]
    next_state: LoaderState

    @property
    def num_tokens(self) -> int:
        return sum(sequence.seq_len for sequence in self.sequences)

    @property
    def num_valid_tokens(self) -> int:
        return sum(sequence.num_valid_tokens for sequence in self.sequences)

    def tensors(self, device: torch.device) -> list[dict[str, torch.Tensor]]:
        """One `{"input_ids": (T,) int64, "labels": (T,) int64}` per sequence."""
        return [
            {
                "input_ids": torch.from_numpy(sequence.input_ids).to(device, torch.int64),
                "labels": torch.from_numpy(sequence.labels).to(device, torch.int64),
            }
            for sequence in self.sequences
        ]


def batches_per_epoch(num_sequences: int, sequences_per_step: int) -> int:
    """Global batches of one pass; the last one may be smaller."""
    return math.ceil(num_sequences / sequences_per_step)


def iterate_batches(
    sequences: Items[Sequence],
    *,
    sequences_per_step: int,
    seed: int,
    state: LoaderState = LoaderState(),
) -> Iterator[Batch]:
    """Endless: every epoch goes through all sequences once, in an order of its own."""
    epoch, batch = state.epoch, state.batch
    per_epoch = batches_per_epoch(len(sequences), sequences_per_step)
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(len(sequences))
        for index in range(batch, per_epoch):
            chosen = order[index * sequences_per_step : (index + 1) * sequences_per_step]
            last = index + 1 == per_epoch
            yield Batch(
                tuple(sequences[i] for i in chosen),
                LoaderState(epoch + 1, 0) if last else LoaderState(epoch, index + 1),
            )
        epoch, batch = epoch + 1, 0


def in_order(sequences: Items[Sequence], sequences_per_step: int) -> Iterator[Batch]:
    """One pass without shuffling: the batches of an evaluation."""
    for start in range(0, len(sequences), sequences_per_step):
        chosen = tuple(sequences[start : start + sequences_per_step])
        yield Batch(chosen, LoaderState(0, start // sequences_per_step + 1))

"""Random batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from furlong.testing import TokenSequences


def batch(
    lens: Sequence[int], *, vocab_size: int = 96, seed: int = 0, masked: Sequence[range] = ()
) -> TokenSequences:
    """Return random sequences; `masked[i]` are the tokens of sequence i that have no label."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for index, num_tokens in enumerate(lens):
        input_ids = torch.randint(3, vocab_size, (num_tokens,), generator=generator)
        labels = input_ids.clone()
        if index < len(masked):
            labels[list(masked[index])] = -100
        sequences.append({"input_ids": input_ids, "labels": labels})
    return sequences

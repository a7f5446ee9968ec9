"""Cuts long sequences into pieces of equal tokens or of equal work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

from furlong.plan.values import Slice


def split_long(seq_lens: Sequence[int], chunk_size: int) -> dict[int, list[Slice]]:
    """The pieces of every sequence longer than `chunk_size`, by its seq_id.

    All pieces but the last have `chunk_size` tokens; the last has the rest (ChunkFlow, Algorithm 1,
    first half).
    """
    return {
        seq_id: [
            Slice(seq_id, start, min(start + chunk_size, seq_len))
            for start in range(0, seq_len, chunk_size)
        ]
        for seq_id, seq_len in enumerate(seq_lens)
        if seq_len > chunk_size
    }


def split_equal_work(
    seq_id: int, seq_len: int, num_slices: int, *, quadratic: float = 0.0, linear: float = 1.0
) -> list[Slice]:
    """Pieces of one sequence that cost about the same, longest first.

    Tokens up to x cost quadratic * x^2 + linear * x (attention, and all else); the default cuts
    equal tokens. Bounds are rounded to tokens; a sequence of fewer tokens than slices gets fewer.
    """
    count = min(num_slices, seq_len)
    starts = [0]
    for bound in equal_work_bounds(seq_len, count, quadratic=quadratic, linear=linear):
        latest = seq_len - (count - len(starts))
        starts.append(min(max(round(bound), starts[-1] + 1), latest))
    return [Slice(seq_id, a, b) for a, b in pairwise(starts)]


def equal_work_bounds(
    seq_len: float, num_slices: int, *, quadratic: float, linear: float
) -> list[float]:
    """Tokens at which `num_slices` slices stop so that all cost quadratic * x^2 + linear * x alike.

    The same idea in InfiniPipe's mesh and in Seq1F1B: f(bound j) = j / num_slices * f(seq_len).
    """
    work = quadratic * seq_len**2 + linear * seq_len
    if num_slices < 1 or quadratic < 0 or linear < 0 or work <= 0:
        raise ValueError(f"no {num_slices} slices by {quadratic} x^2 + {linear} x of {seq_len}")
    shares = [work * j / num_slices for j in range(1, num_slices + 1)]
    # the root of quadratic x^2 + linear x - share in the form that also holds where quadratic is 0
    return [
        2 * share / (linear + sqrt(linear * linear + 4 * quadratic * share)) for share in shares
    ]

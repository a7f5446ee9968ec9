"""Hybrid context parallelism of Megatron-Core: a sequence gets as many devices as its length asks.

`--hybrid-context-parallel --max-seqlen-per-dp-cp-rank N` (NVIDIA, Megatron-LM,
core/pipeline_parallel/hybrid_cp_schedule.py, commit d98e8a6): a sequence is shared by the next
power of two of length / N devices. Here the sequences on most devices go first, the longest of them
first, each to the place that is done with it earliest by the cost model's seconds, where Megatron
counts length squared / devices, runs one sequence at a time and lets groups of sequences wait for
each other; and N is searched, which Megatron leaves to the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from furlong.planners.places import Division, Setting, earliest_first, smallest
from papers.published.fastest import plan_fastest

_STEPS_PER_DOUBLING = 4
"""Numbers of tokens per device that are tried between one and twice as many."""


def _by_length(setting: Setting, num_micro_batches: int) -> Iterator[Division]:
    lens, sizes = np.array(setting.batch.seq_lens), np.array(setting.batch.sizes)
    is_power = sizes & (sizes - 1) == 0
    tokens = np.where(is_power, lens[:, None] / sizes, np.inf)
    most = [lens.max() / 2 ** (n / _STEPS_PER_DOUBLING) for n in range(4 * len(sizes))]
    for kinds in dict.fromkeys(smallest(setting, tokens <= n) for n in most):
        if (division := earliest_first(setting, num_micro_batches, kinds)) is not None:
            yield division


plan_hybrid_cp = partial(plan_fastest, divide=_by_length)

"""The least that sequences take on the places of a pool, and a lower bound of a step.

K sequences, Z sizes of places, P parts of passes, W processes
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from furlong.cost.seconds import Array
from furlong.planners.places import TOKENS, Setting


@dataclass(frozen=True)
class Least:
    """A setting with a number of micro-batches: seconds of all processes of a place together, with
    attention as efficient as it is for a process of most tokens."""

    num_slots: int
    """Slots of one micro-batch: W."""
    num_micro_batches: int
    sizes: NDArray[np.int64]
    fits: NDArray[np.bool_]
    """(K, Z) whether a place of a size has room for a sequence."""
    matrices_s: Array
    """(P, K)"""
    attention_s: Array
    """(P, K)"""
    exchanges_s: Array
    """(P, K, Z) without latencies."""
    exposed_s: Array
    """(P, K, Z) what of them is hidden not even by the attention of one more sequence that fills
    every process of the place up."""
    process_s: Array
    """(P,) of a process that has a token."""
    latency_s: Array
    """(P,) of a process that shares a sequence."""
    floor_s: Array
    """(P,) of a micro-batch, whatever is in it."""
    rest_s: Array
    """(P,) of all micro-batches but any one."""

    @classmethod
    def of(cls, setting: Setting, num_micro_batches: int, limit_s: float = np.inf) -> Least:
        """`limit_s`: of a step, so that a process has no more tokens than its matrices take."""
        batch, full = setting.batch, setting.device_tokens
        rows = batch.exchange_rows
        lens, sizes = np.array(batch.seq_lens), np.array(batch.sizes)
        once_s = _seconds(setting, 1)
        token_s = (_seconds(setting, 2) - once_s)[..., 0]
        process_s = once_s[:, 0, 0] - token_s[:, 0]
        most = float((limit_s - process_s.sum()) / token_s[:, 0].sum())
        most = max(1.0, min(full, float(lens.sum()), most))  # tokens of a process
        full_s = _seconds(setting, most)
        attention_s = (_seconds(setting, most, slice(rows.stop, None)) - full_s)[..., 0]
        exchanged_s = _seconds(setting, most, rows) - full_s
        moved_s = _seconds(setting, most, rows, 2) - full_s - exchanged_s
        waits_s = (exchanged_s - moved_s)[..., 1:]
        others = num_micro_batches - 1
        # one micro-batch holds no more than fits: the others the rest, of the shortest sequences
        left, order = max(0, int(lens.sum()) - batch.pool_size * full), np.argsort(lens)
        shortest = order[np.cumsum(lens[order]) <= left]
        left_s = token_s[:, 0] * left + attention_s[:, shortest].sum(axis=1)
        return cls(
            num_slots=batch.pool_size,
            num_micro_batches=num_micro_batches,
            sizes=sizes,
            fits=setting.fits,
            matrices_s=token_s * lens,
            attention_s=attention_s,
            exchanges_s=moved_s * sizes,
            exposed_s=(moved_s - _hidden_s(setting, most)).clip(min=0) * sizes,
            process_s=process_s,
            latency_s=waits_s.min(axis=(1, 2)) if waits_s.size else 0 * process_s,
            floor_s=setting.floor_s,
            rest_s=np.maximum(
                others * setting.floor_s, others * process_s + left_s / batch.pool_size
            ),
        )

    @property
    def even_s(self) -> Array:
        """(P,) seconds of the step's parts with all work spread evenly over all slots."""
        work_s = (self.matrices_s + self.attention_s).sum(axis=1) / self.num_slots
        even_s: Array = self.num_micro_batches * np.maximum(
            self.floor_s, self.process_s + work_s / self.num_micro_batches
        )
        return even_s

    @property
    def alone_s(self) -> Array:
        """(K, Z) seconds of the step if a sequence is on a place of each size, whatever the others
        are on; infinite where it does not fit."""
        work_s = (self.matrices_s + self.attention_s)[..., None] + self.exchanges_s
        own_s = work_s / self.sizes + self.process_s[:, None, None]
        own_s[..., 1:] += self.latency_s[:, None, None]
        own_s = np.maximum(own_s, self.floor_s[:, None, None]) + self.rest_s[:, None, None]
        step_s = np.maximum(own_s, self.even_s[:, None, None]).sum(axis=0)
        return np.where(self.fits, step_s, np.inf)

    @property
    def step_s(self) -> float:
        """Seconds that no step undercuts: neither is it shorter than all work spread evenly, nor
        than with any one sequence on its best place."""
        return float(max(self.even_s.sum(), self.alone_s.min(axis=1).max()))


def _seconds(setting: Setting, tokens: float, rows: slice = slice(0), times: float = 1.0) -> Array:
    """(P, K, Z) seconds of a process with so many tokens, and of all else of a sequence's load only
    some sums, so many times."""
    loads = setting.batch.added.transpose(2, 0, 1)
    own = np.zeros_like(loads)
    own[TOKENS], own[rows] = tokens, times * loads[rows]
    return setting.seconds(own, floors=False)


def _hidden_s(setting: Setting, most: float) -> Array:
    """(P, K, Z) seconds of attention of a sequence that takes all the room that another leaves on
    a process of at most so many tokens: of several that do it is less."""
    batch = setting.batch
    loads = batch.added.transpose(2, 0, 1)
    own, keys = np.zeros_like(loads), batch.exchange_rows.stop
    room = (setting.device_tokens - setting.held(loads)).clip(min=0, max=most)
    own[TOKENS] = most
    own[keys : keys + len(batch.windows)] = room * (room + 1 + batch.model.hardware.tile_tokens) / 2
    return setting.seconds(own, floors=False) - _seconds(setting, most)

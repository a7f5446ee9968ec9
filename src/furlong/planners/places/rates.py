"""Loads that sequences add to the processes of a pool, and the seconds that these then take.

A load is a column of sums over the slices of one process in one micro-batch: everything that the
cost model's rates depend on. Loads add, and the project's own `PlanCosts` prices them, for many
ways to place a sequence at once: a planner sees what the plan will be charged.

    F sums of a load, K sequences, Z sizes of places, P parts of a step's passes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from furlong.cost.memory import gathered_tokens
from furlong.cost.model import CostModel, PlanCosts
from furlong.cost.seconds import Array, ChunkTable, attention_calls, computed_keys
from furlong.plan.plan import Backward, Chunk, Forward, Place, Slice, place_sizes
from furlong.planners.chunks import chunk_by_chunk

TOKENS, _CALLS, GATHERED = range(3)
"""Sums of a load that do not depend on sizes or windows: tokens, calls of attention, and tokens of
which K,V come beyond the process's own part (`cost.memory.stored_layers.gathered_tokens`)."""
_NUM_PLAIN = 3
_A_LITTLE = 1e-6
"""Tokens of a process that has next to nothing to do."""


@dataclass(frozen=True)
class PoolBatch:
    """Whole sequences that are to be placed in a pool."""

    seq_lens: tuple[int, ...]
    model: CostModel
    pool_size: int
    sizes: tuple[int, ...]
    """Sizes of places, rising from 1: powers of two that divide the pool."""
    added: Array
    """(K, Z, F) what each sequence adds to every process of a place of each size."""

    @classmethod
    def of(cls, seq_lens: Sequence[int], model: CostModel, pool_size: int) -> PoolBatch:
        sizes = tuple(n for n in place_sizes(pool_size) if n & (n - 1) == 0)
        added = np.array([[_added(n, size, sizes, model) for size in sizes] for n in seq_lens])
        return cls(tuple(seq_lens), model, pool_size, sizes, added)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(dict.fromkeys(self.model.shape.windows))

    @property
    def exchange_rows(self) -> slice:
        """Sums of a load: tokens of the slices on the process's place of each size but 1; sums of
        attended keys follow."""
        return slice(_NUM_PLAIN, _NUM_PLAIN + len(self.sizes) - 1)

    def table(self, loads: Array) -> ChunkTable:
        """Loads (F, ...) as the cost model takes them."""
        exchanged = self.exchange_rows
        shared = exchanged.stop + len(self.windows)
        return ChunkTable(
            tokens=loads[TOKENS],
            num_slices=loads[_CALLS],
            exchanged_tokens=dict(zip(self.sizes[1:], loads[exchanged], strict=True)),
            local_keys=dict(zip(self.windows, loads[exchanged.stop : shared], strict=True)),
            shared_keys=dict(zip(self.windows, loads[shared:], strict=True)),
            prefix_tokens={},
            prefix_keys={},
        )


def _added(seq_len: int, size: int, sizes: Sequence[int], model: CostModel) -> list[float]:
    """(F,) what a sequence adds to each process of a place."""
    windows = dict.fromkeys(model.shape.windows)
    tile_tokens = model.hardware.tile_tokens
    keys = [computed_keys(0, seq_len, window, tile_tokens) / size for window in windows]
    exchanged = [seq_len * float(size == other) for other in sizes[1:]]
    nothing = [0.0] * len(keys)
    own = [*keys, *nothing] if size == 1 else [*nothing, *keys]
    piece, calls = Slice(0, 0, seq_len, Place(0, size)), attention_calls(model.shape, size)
    gathered = gathered_tokens(piece, 0, model.shape)
    return [seq_len / size, calls, gathered, *exchanged, *own]


class Rates:
    """Seconds of loads, with one number of checkpointed layers."""

    def __init__(self, batch: PoolBatch, recompute_layers: int) -> None:
        self.batch = batch
        self.recompute_layers = recompute_layers
        model = batch.model
        # the rates are the same for all micro-batches of the pool
        probe = chunk_by_chunk(
            (1,), [[Chunk((Slice(0, 0, 1),))]], num_layers=model.shape.num_layers,
            sp_size=batch.pool_size, recompute_layers=recompute_layers,
        )  # fmt: skip
        self._costs = model.costs(probe)
        zero_stage = min(2, model.training.zero_stage)
        floorless = replace(
            model,
            hardware=replace(model.hardware, layer_launch_s=0.0, pass_launch_s=0.0),
            # experts are read once, whatever visits them
            shape=replace(
                model.shape,
                layers=tuple(replace(n, num_experts=n.num_active) for n in model.shape.layers),
            ),
            training=replace(model.training, zero_stage=zero_stage),
        )
        self._floorless = floorless.costs(probe)
        cells = (a for a in probe.actions[0] if isinstance(a, (Forward, Backward)))
        self._parts = tuple(part for cell in cells for part in self._costs.parts(cell))
        little = np.where(batch.added[0] > 0, _A_LITTLE, 0.0).T
        little[batch.exchange_rows.stop :] = 0.0  # no keys
        self.least_s: Array = self.seconds(little)[:, 0]
        """(P,) of a micro-batch, whatever is in it."""
        self.fixed_s: Array = self.seconds(little, floors=False).sum(axis=0)
        """(Z,) what a process takes that has anything to do on a place, before its first token and
        without what has a floor: launches and gathered weights."""
        alone = self.seconds(batch.added.transpose(2, 0, 1), floors=False).sum(axis=0)
        self.alone_s: Array = alone - self.fixed_s
        """(K, Z) what each sequence adds to that on every process of its place."""

    def seconds(self, loads: Array, *, floors: bool = True) -> Array:
        """(P, ...) seconds of every part of the passes for loads (F, ...)."""
        costs: PlanCosts = self._costs if floors else self._floorless
        table = self.batch.table(loads)
        return costs.process_seconds(self._parts, 0, table)

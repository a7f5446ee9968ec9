"""Bytes that a plan moves between the device and the tiers below it, by kind and action.

attention      written by the Forward that remembers, read by the Recompute, and by a RebuildKV
               that peeks at them
inputs         written by the pass that delivers them, read by every pass of their own stage but
               the Backward, overwritten by their gradient, which the Backward of the stage
               before reads
graphs         of retained cells: written by the Forward, read by the Backward
kv             a segment is written once its last piece is, and read by every later pass whose
               attention runs and sees any of it
kv_gradients   all of a prefix but its newest segments is read (but for the first time) and
               written by every backward; those of a cell's own K,V that are not on the device
               are read
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from furlong.plan.values import Tier, Tiers

Kind = Literal["kv", "kv_gradients", "inputs", "attention", "graphs"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class PlanTraffic:
    """Bytes and operations of one rank; one row per action, one column per kind."""

    tiers: Tiers
    read: NDArray[np.float64]
    """(actions, kinds) bytes from the kind's tier to the device."""
    written: NDArray[np.float64]
    """(actions, kinds) bytes from the device to the kind's tier."""
    num_reads: NDArray[np.float64]
    """(actions, kinds) number of operations."""
    num_writes: NDArray[np.float64]

    def by_kind(self) -> dict[Kind, tuple[int, int]]:
        """(read, written) bytes of each kind that moves at all, by the whole plan."""
        sums = zip(KINDS, self.read.sum(axis=0), self.written.sum(axis=0), strict=True)
        rounded = {
            kind: (round(float(read)), round(float(written))) for kind, read, written in sums
        }
        return {kind: moved for kind, moved in rounded.items() if any(moved)}

    def of(self, tier: Tier) -> list[int]:
        """The columns of the kinds that live in a tier."""
        return [i for i, kind in enumerate(KINDS) if tier_of(self.tiers, kind) == tier]


def tier_of(tiers: Tiers, kind: Kind) -> Tier:
    """The tier of a kind; gradients of K,V lie where K,V do."""
    tier: Tier = getattr(tiers, kind.removesuffix("_gradients"))
    return tier

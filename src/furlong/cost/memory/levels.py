"""Bytes in use, by tier and by what they are for, while a walk adds and takes away."""

from __future__ import annotations

from typing import Literal, get_args

from furlong.cost.memory.stored_kv import StoreLevel
from furlong.cost.memory.traffic import KINDS, Kind, tier_of
from furlong.plan.values import Tier, Tiers

Part = Literal[
    "weights", "gradients", "optimizer", "activations", "kv", "kv_gradients", "logits", "buffers"
]
PARTS: tuple[Part, ...] = get_args(Part)
_INDEX = {part: i for i, part in enumerate(PARTS)}
_KINDS = {"input": "inputs", "attention": "attention", "graph": "graphs"}
"""What of a cell may live in a lower tier, and the kind of memory that it is in `Tiers`."""


class Levels:
    """Bytes that one process has in use now; `held` has a name, a chunk and a stage."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._device = [0.0] * len(PARTS)
        self._lower: dict[Tier, float] = {"host": 0.0, "disk": 0.0}
        self._passing = [0.0] * len(PARTS)
        self._travels = {kind: tier_of(tiers, kind) != "device" for kind in KINDS}
        self.moved = [[0.0] * len(KINDS) for _ in range(4)]
        """Bytes read, bytes written, reads and writes by kind, so far; K,V apart."""
        self.held: dict[tuple[str, int, int], tuple[Tier, Part, float]] = {}

    def now(self, store: StoreLevel) -> tuple[list[float], list[float]]:
        """Parts on the device, then (host, disk), with what the store holds. What passes by is
        gone afterwards."""
        device = [a + b for a, b in zip(self._device, self._passing, strict=True)]
        self._passing = [0.0] * len(PARTS)
        device[_INDEX["kv"]] += store.kv
        device[_INDEX["kv_gradients"]] += store.gradients
        lower = dict(self._lower)
        if self._tiers.kv != "device":
            lower[self._tiers.kv] += store.lower
        return device, [lower["host"], lower["disk"]]

    def add(self, part: Part, num_bytes: float) -> None:
        """For good, on the device."""
        self._device[_INDEX[part]] += num_bytes

    def pass_by(self, part: Part, num_bytes: float) -> None:
        """On the device until the next question for what is there now."""
        self._passing[_INDEX[part]] += num_bytes

    def hold(self, name: str, chunk: int, stage: int, part: Part, num_bytes: float) -> None:
        """Until it is let go, in the tier of its kind."""
        key = name, chunk, stage
        assert key not in self.held, f"{name} of {chunk}.{stage} is there"
        kind = _KINDS.get(name)
        tier: Tier = getattr(self._tiers, kind) if kind else "device"
        self.held[key] = tier, part, num_bytes
        self._change(tier, part, num_bytes)

    def move(self, kind: Kind, num_bytes: float, *, writes: bool, operations: int = 1) -> None:
        """Count bytes between the device and the tier of `kind`, unless that is the device."""
        if self._travels[kind]:
            column = KINDS.index(kind)
            self.moved[writes][column] += num_bytes
            self.moved[2 + writes][column] += operations

    def let_go(self, name: str, chunk: int, stage: int) -> float:
        """Its bytes; 0 if it is not there."""
        found = self.held.pop((name, chunk, stage), None)
        if found is None:
            return 0.0
        tier, part, num_bytes = found
        self._change(tier, part, -num_bytes)
        return num_bytes

    def _change(self, tier: Tier, part: Part, num_bytes: float) -> None:
        if tier == "device":
            self._device[_INDEX[part]] += num_bytes
        else:
            self._lower[tier] += num_bytes

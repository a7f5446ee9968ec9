"""Bytes in use, by tier and by what they are for, while a walk adds and takes away."""

from __future__ import annotations

from typing import Literal, get_args

from furlong.cost.memory.traffic import KINDS, Kind, tier_of
from furlong.plan.values import Tier, Tiers

Part = Literal[
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "kv",
    "kv_gradients",
    "states",
    "logits",
    "buffers",
]
PARTS: tuple[Part, ...] = get_args(Part)


class Levels:
    """Bytes that one process has in use now, and those that have gone from tier to tier so far."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._device = dict.fromkeys(PARTS, 0.0)
        self._passing = dict.fromkeys(PARTS, 0.0)
        self._lower: dict[Tier, float] = {"host": 0.0, "disk": 0.0}
        self._columns = {k: i for i, k in enumerate(KINDS) if tier_of(tiers, k) != "device"}
        self.moved = [[0.0] * len(KINDS) for _ in range(4)]
        """Bytes read, bytes written, reads and writes; a column for each kind."""
        self.largest: dict[Tier, float] = {"host": 0.0, "disk": 0.0}
        """Bytes of the largest tensor that went to a tier."""
        self.staged = 0.0
        """Bytes that passed by through the host tier's buffers when `now` was asked last."""
        self.held: dict[tuple[str, int, int], tuple[Tier, Part, float]] = {}
        """(name, chunk, stage) -> its tier, part and bytes."""

    def now(self) -> tuple[list[float], list[float]]:
        """Bytes of the parts on the device, then of (host, disk). Those that pass by are gone
        after."""
        device = [self._device[part] + self._passing[part] for part in PARTS]
        if self._tiers.kv == "host":
            self.staged = self._passing["kv"] + self._passing["kv_gradients"]
        self._passing = dict.fromkeys(PARTS, 0.0)
        return device, [*self._lower.values()]

    def add(self, part: Part, num_bytes: float, tier: Tier = "device") -> None:
        """Bytes that stay, or go where they are negative."""
        if tier == "device":
            self._device[part] += num_bytes
        else:
            self._lower[tier] += num_bytes

    def pass_by(self, part: Part, num_bytes: float) -> None:
        """Bytes on the device until the next question for what is there now."""
        self._passing[part] += num_bytes

    def hold(self, name: str, chunk: int, stage: int, part: Part, num_bytes: float) -> None:
        """Bytes until they are let go: in the tier of their kind, if `name` is one."""
        key = name, chunk, stage
        assert key not in self.held, f"{name} of {chunk}.{stage} is there"
        tier: Tier = self._tiers.kv if name == "states" else getattr(self._tiers, name, "device")
        self.held[key] = tier, part, num_bytes
        self.add(part, num_bytes, tier)

    def let_go(self, name: str, chunk: int, stage: int) -> float:
        """The bytes that it had; 0 if it is not there."""
        if (found := self.held.pop((name, chunk, stage), None)) is None:
            return 0.0
        tier, part, num_bytes = found
        self.add(part, -num_bytes, tier)
        return num_bytes

    def read(self, kind: Kind, num_bytes: float, operations: int = 1) -> None:
        """Count bytes from the tier of `kind` to the device, unless that is the same."""
        self._move(0, kind, num_bytes, operations)

    def write(
        self, kind: Kind, num_bytes: float, operations: int = 1, largest: float | None = None
    ) -> None:
        """Count bytes from the device to the tier of `kind`, unless that is the same; `largest`:
        those of its largest tensor, where they are not all of one size."""
        self._move(1, kind, num_bytes, operations)
        if (tier := tier_of(self._tiers, kind)) != "device" and operations:
            size = num_bytes / operations if largest is None else largest
            self.largest[tier] = max(self.largest[tier], size)

    def _move(self, row: int, kind: Kind, num_bytes: float, operations: int) -> None:
        if (column := self._columns.get(kind)) is not None:
            self.moved[row][column] += num_bytes
            self.moved[2 + row][column] += operations

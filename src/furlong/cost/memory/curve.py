"""Bytes of a rank in every tier while each of its actions runs: the outcome of a walk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from furlong.cost.memory.levels import PARTS, Part


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes of one rank while each of its actions runs."""

    device: NDArray[np.int64]
    """(actions, parts) bytes at the moment of the action when their sum is highest."""
    host: NDArray[np.int64]
    """(actions,) bytes in the host's memory."""
    disk: NDArray[np.int64]
    """(actions,) bytes on disk."""

    @property
    def device_bytes(self) -> list[int]:
        totals: list[int] = self.device.sum(axis=1).tolist()
        return totals

    @property
    def lower_bytes(self) -> list[int]:
        """Bytes in host and disk together, as a timeline's records count them."""
        totals: list[int] = (self.host + self.disk).tolist()
        return totals

    @property
    def peak(self) -> dict[Part, int]:
        """Bytes of the parts at the action whose sum is highest."""
        if not len(self.device):
            return dict.fromkeys(PARTS, 0)
        at = int(self.device.sum(axis=1).argmax())
        return {part: int(self.device[at, i]) for i, part in enumerate(PARTS)}

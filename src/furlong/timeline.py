"""What an interpreter of a plan leaves behind, whether it ran the plan or simulated it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Lane = Literal["compute", "copy", "link"]


@dataclass(frozen=True, slots=True)
class Record:
    """One action of one rank: when it ran and what was allocated when it ended."""

    rank: int
    lane: Lane
    action: str
    """The action's text form, as in `furlong.plan.text`."""
    start_s: float
    """Seconds since the start of the step."""
    stop_s: float
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The records of one step, in the order in which they ended."""

    records: tuple[Record, ...]

    @property
    def duration_s(self) -> float:
        """Seconds from the start of the step to the end of its last action."""
        return max((r.stop_s for r in self.records), default=0.0)

    @property
    def peak_device_bytes(self) -> int:
        return max((r.device_bytes for r in self.records), default=0)

    def seconds_by_kind(self) -> dict[str, float]:
        """Seconds per kind of action (`F`, `R`, `B`, `K`, `send`, ...), summed over ranks."""
        seconds: dict[str, float] = defaultdict(float)
        for record in self.records:
            kind = record.action[0] if record.action[0].isupper() else record.action.split()[0]
            seconds[kind] += record.stop_s - record.start_s
        return dict(seconds)


def concatenate(timelines: Iterable[Timeline]) -> Timeline:
    """One timeline of several that ran one after another on the same clock."""
    return Timeline(tuple(record for timeline in timelines for record in timeline.records))

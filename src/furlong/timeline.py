"""The timeline that an interpreter of a plan leaves behind, whether it ran or simulated it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from furlong.errors import UserError
from furlong.plan.plan import (
    Action,
    Backward,
    Forward,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Reshard,
    Send,
    Unshard,
)
from furlong.plan.text import format_action, parse_action

Lane = Literal["compute", "copy", "link"]
_KINDS: dict[type[Action], str] = {
    Forward: "F",
    Recompute: "R",
    RebuildKV: "K",
    Backward: "B",
    Send: "send",
    Recv: "recv",
    Unshard: "unshard",
    Reshard: "reshard",
    Reduce: "reduce",
}


@dataclass(frozen=True, slots=True)
class Record:
    """One action of one rank: when it ran, and the most that was in use while it did."""

    rank: int
    lane: Lane
    action: Action
    """The action; on the lane "copy" the one beside which copies between tiers ran."""
    start_s: float
    """Seconds since the start of the step."""
    stop_s: float
    device_bytes: int
    """The peak of device memory while the action ran."""
    host_bytes: int
    """The peak of the tiers below the device, host and disk, while the action ran."""

    @property
    def text(self) -> str:
        """The action's short form, as in `furlong.plan.text`; "copy ..." on the lane "copy"."""
        text = format_action(self.action)
        return f"copy {text}" if self.lane == "copy" else text


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
        """Seconds per kind (`F`, `R`, `B`, `K`, `send`, ..., `copy`), summed over ranks."""
        seconds: dict[str, float] = defaultdict(float)
        for record in self.records:
            kind = "copy" if record.lane == "copy" else _KINDS[type(record.action)]
            seconds[kind] += record.stop_s - record.start_s
        return dict(seconds)

    def to_json(self) -> list[list[Any]]:
        """One list of plain values per record, in the order of Record's fields; actions as text."""
        return [
            [
                *(r.rank, r.lane, format_action(r.action)),
                *(r.start_s, r.stop_s, r.device_bytes, r.host_bytes),
            ]
            for r in self.records
        ]

    @classmethod
    def from_json(cls, rows: object) -> Timeline:
        """The timeline that `to_json` told. Raises ValueError for anything else."""
        if not isinstance(rows, list):
            raise ValueError(f"a {type(rows).__name__} in the place of a list of records")
        return cls(tuple(_read_record(row) for row in rows))


def _read_record(row: object) -> Record:
    match row:
        case [
            int(rank),
            ("compute" | "copy" | "link") as lane,
            str(action),
            float() | int() as start_s,
            float() | int() as stop_s,
            int(device_bytes),
            int(host_bytes),
        ] if rank >= 0 and 0 <= start_s <= stop_s:
            try:
                parsed = parse_action(action)
            except UserError as error:
                raise ValueError(f"{action!r:.80} is no action of a timeline") from error
            return Record(rank, lane, parsed, start_s, stop_s, device_bytes, host_bytes)
    raise ValueError(f"{row!r:.80} is no record of a timeline")


def concatenate(timelines: Iterable[Timeline]) -> Timeline:
    """One timeline of several that ran one after another on the same clock."""
    return Timeline(tuple(record for timeline in timelines for record in timeline.records))

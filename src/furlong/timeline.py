"""The timeline of a step: when each action of its plan ran, measured by the executor or simulated.

A run writes its timeline and plan to a file in its folder at its first step, at each step with a
checkpoint, and at its last step.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from furlong.errors import ConfigError, PlanError, UserError
from furlong.plan.check import check
from furlong.plan.plan import Action, ChunkPlan
from furlong.plan.text import format_action, load_plan, parse_action, save_plan

MEASURED = "timeline.json"
"""Name of a measured step's file in a run folder."""
_VERSION = 1
Lane = Literal["compute", "copy", "link"]


@dataclass(frozen=True, slots=True)
class Record:
    """One action of one rank: when it ran, and its peak memory."""

    rank: int
    lane: Lane
    action: Action
    """The action; on the lane "copy", the one during which offloaded tensors were copied."""
    start_s: float
    """Seconds since the start of the step."""
    stop_s: float
    device_bytes: int
    """Peak of device memory during the action."""
    offloaded_bytes: int
    """Peak of offloaded bytes, in CPU memory and on disk together, during the action."""

    @property
    def text(self) -> str:
        """The action's short form, as in `furlong.plan.text`. A copy of offloaded tensors is "copy"
        and the action during which it ran."""
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
        """Return the seconds of each kind of action, summed over ranks. Kinds are `F` (forward),
        `R` (recompute), `B` (backward), `K` (keys and values computed again), `send`, ...,
        `copy`."""
        seconds: dict[str, float] = defaultdict(float)
        for record in self.records:
            word = record.text.split()[0]
            # an action is a capital letter with its cell, or a word
            seconds[word[0] if word[0].isupper() else word] += record.stop_s - record.start_s
        return dict(seconds)

    def to_json(self) -> list[list[Any]]:
        """Return a list per record, in the order of Record's fields, with actions as text."""
        return [
            [
                *(r.rank, r.lane, format_action(r.action)),
                *(r.start_s, r.stop_s, r.device_bytes, r.offloaded_bytes),
            ]
            for r in self.records
        ]

    @classmethod
    def from_json(cls, rows: object) -> Timeline:
        """Read the result of `to_json`. Raises ValueError or UserError for any other value."""
        if not isinstance(rows, list):
            raise ValueError(f"a {type(rows).__name__} in the place of a list of records")
        return cls(tuple(map(_read_record, rows)))


def _read_record(row: object) -> Record:
    match row:
        case [
            int(rank), ("compute" | "copy" | "link") as lane, str(text),
            float() | int() as start_s, float() | int() as stop_s,
            int(device_bytes), int(offloaded_bytes),
        ] if rank >= 0 and 0 <= start_s <= stop_s:  # fmt: skip
            action = parse_action(text)
            return Record(rank, lane, action, start_s, stop_s, device_bytes, offloaded_bytes)
    raise ValueError(f"{row!r:.80} is no record of a timeline")


class MeasuredStep(NamedTuple):
    """An optimizer step with its plan and timeline."""

    step: int
    plan: ChunkPlan
    timeline: Timeline

    def to_json(self) -> dict[str, Any]:
        """Return the step as plain values for JSON, which `read_measured` reads back."""
        plan = json.loads(save_plan(self.plan))
        records = self.timeline.to_json()
        return {"version": _VERSION, "step": self.step, "plan": plan, "records": records}


def read_measured(file: Path) -> MeasuredStep:
    """Read the measured step of a run. Raises ConfigError for a missing or invalid file."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.get("version") != _VERSION:
            raise ValueError(f"not version {_VERSION} of a measured step")
        if type(values.get("step")) is not int:
            raise ValueError("no step")
        plan = load_plan(json.dumps(values.get("plan")))
        check(plan)
        timeline = Timeline.from_json(values.get("records"))
        if any(record.rank >= len(plan.actions) for record in timeline.records):
            raise ValueError("a record of a rank that the plan does not have")
        return MeasuredStep(values["step"], plan, timeline)
    except (OSError, UserError, PlanError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "given", None) or str(error)
        raise ConfigError(
            given=f"{file}: {reason}",
            required="the folder of a run that has taken a step; it leaves its timeline there",
            source="the run folder",
            change="name another folder, or let the run take a step",
        ) from error

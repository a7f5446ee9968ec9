"""A step as it was measured: its plan and its timeline in one file of the run's folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.errors import ConfigError, PlanError, UserError
from furlong.plan.check import check
from furlong.plan.plan import ChunkPlan
from furlong.plan.text import load_plan, save_plan
from furlong.timeline import Timeline

MEASURED = "timeline.json"
"""The name of the file in a run folder."""
_VERSION = 1


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """An optimizer step: its plan, and when each action ran."""

    step: int
    plan: ChunkPlan
    timeline: Timeline

    def to_json(self) -> dict[str, Any]:
        """Plain values that `read_measured` reads."""
        plan = json.loads(save_plan(self.plan))
        records = self.timeline.to_json()
        return {"version": _VERSION, "step": self.step, "plan": plan, "records": records}


def read_measured(file: Path) -> MeasuredStep:
    """The step that a run left. Raises ConfigError."""
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
        reason = "no such file" if isinstance(error, FileNotFoundError) else reason
        raise ConfigError(
            given=f"{file}: {reason}",
            required="the folder of a run that has taken a step; it leaves its timeline there",
            source="the run folder",
            change="name another folder, or let the run take a step",
        ) from error

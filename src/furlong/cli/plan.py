"""`furlong plan`: prints, checks, simulates and draws a saved plan."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from furlong.errors import ConfigError, PlanError, UserError
from furlong.plan.check import check
from furlong.plan.text import format_plan, load_plan
from furlong.plan.values import ChunkPlan
from furlong.report.scene import Panel
from furlong.report.tables import format_figures
from furlong.report.timeline import PICTURES, TRACES, save_timelines
from furlong.simulate.clock import simulate
from furlong.simulate.figures import measure
from furlong.simulate.unit_costs import UnitCosts

_UNITS = "units"
_ABOUT_UNITS = "one unit: a token's forward through a stage of average height; no hardware is given"


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            given=message,
            required=self.format_usage().removeprefix("usage: ").strip(),
            source="the command line",
            change="see furlong plan --help",
        )


def run(arguments: Sequence[str]) -> int:
    parser = _Parser(
        prog="furlong plan",
        allow_abbrev=False,
        description="Print a saved plan, check it, simulate it and draw its timeline.",
    )
    parser.add_argument("plan", metavar="PLAN.json", help="a saved plan")
    parser.add_argument(
        "--picture", metavar="FILE", type=Path, help=f"draw the timeline: {', '.join(PICTURES)}"
    )
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="write a trace that Perfetto opens: .json"
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    chosen = parser.parse_args(arguments)
    for flag, path, endings in (
        ("--picture", chosen.picture, PICTURES), ("--trace", chosen.trace, TRACES)
    ):  # fmt: skip
        if path is not None and path.suffix.lower() not in endings:
            raise ConfigError(
                given=f"{flag} {path}",
                required=f"a name that ends in {', '.join(endings)}",
                source="the command line",
                change="give the file another ending",
            )
    _show(_load(chosen.plan), chosen.plan, chosen.picture, chosen.trace, as_json=chosen.json)
    return 0


def _show(
    plan: ChunkPlan, name: str, picture: Path | None, trace: Path | None, *, as_json: bool
) -> None:
    timeline = simulate(plan, UnitCosts(plan))
    figures = measure(timeline)
    if as_json:
        print(json.dumps({"time_unit": _UNITS, **figures.to_json()}, indent=1))
    else:
        print(format_plan(plan))
        print(format_figures(figures, _UNITS))
        print(_ABOUT_UNITS)
    panel = Panel(timeline, plan, Path(name).stem, time_unit=_UNITS)
    for path in (picture, trace):
        if path is not None:
            save_timelines([panel], path)
            if not as_json:
                print(f"wrote {path}")


def _load(file: str) -> ChunkPlan:
    try:
        plan = load_plan(Path(file).read_text(encoding="utf-8"))
        check(plan)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            given=f"{file}: {getattr(error, 'strerror', None) or error}",
            required="a saved plan that can be read",
            source="the command line",
            change="check the path",
        ) from error
    except UserError as error:
        raise ConfigError(
            given=error.given, required=error.required, source=f"{file}, {error.source}",
            change=error.change,
        ) from error  # fmt: skip
    except PlanError as error:
        raise ConfigError(
            given=f"a plan with a {error}",
            required="a plan that keeps every rule",
            source=file,
            change="undo what was edited by hand, or make the plan again",
        ) from error
    return plan

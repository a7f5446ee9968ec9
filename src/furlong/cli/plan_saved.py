"""Plans that are there already: saved ones, simulated again; those of a run, as measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from furlong.cli.plan_files import draw
from furlong.cli.plan_subject import check_num_devices, model_shape_of, training_of
from furlong.errors import ConfigError, PlanError, UserError
from furlong.plan.check import check
from furlong.plan.lengths import read_lengths
from furlong.plan.text import format_plan, load_plan
from furlong.plan.values import ChunkPlan
from furlong.report.measured import MEASURED, read_measured
from furlong.report.pictures.scene import Panel
from furlong.report.tables import format_figures
from furlong.simulate.clock import simulate
from furlong.simulate.figures import measure
from furlong.simulate.unit_costs import UnitCosts

_UNITS = "units"
_ABOUT_UNITS = (
    "one unit: a token's forward through a stage of average height; no hardware is given"
    " (--model and --hardware predict seconds)"
)


def show_plan(file: str, chosen: argparse.Namespace) -> None:
    """A saved plan: in units without hardware, in seconds and bytes with a model and hardware."""
    plan = _load(file)
    if chosen.out is not None:
        raise ConfigError(
            given=f"{file} with --out",
            required="a plan that is searched",
            source="the command line",
            change="copy the file",
        )
    if (chosen.model is None) != (chosen.hardware is None):
        raise ConfigError(
            given="one of --model and --hardware",
            required="both, to predict seconds and bytes; or none",
            source="the command line",
            change="add the other one",
        )
    if chosen.model is not None:
        _show_predicted(plan, file, chosen)
        return
    timeline = simulate(plan, UnitCosts(plan))
    figures = measure(timeline)
    if chosen.json:
        print(json.dumps({"time_unit": _UNITS, **figures.to_json()}, indent=1))
    else:
        print(format_plan(plan))
        print(format_figures(figures, _UNITS))
        print(_ABOUT_UNITS)
    draw(Panel(timeline, plan, Path(file).stem, time_unit=_UNITS), chosen)


def show_run(folder: Path, chosen: argparse.Namespace) -> None:
    """The last measured step of a run."""
    measured = read_measured(folder / MEASURED)
    figures = measure(measured.timeline)
    if chosen.json:
        print(json.dumps({"step": measured.step, "time_unit": "s", **figures.to_json()}, indent=1))
    else:
        print(f"step {measured.step} of {folder}, measured")
        print(format_plan(measured.plan))
        print(format_figures(figures))
    title = f"{folder.resolve().name}, step {measured.step}, measured"
    draw(Panel(measured.timeline, measured.plan, title), chosen)


def _show_predicted(plan: ChunkPlan, file: str, chosen: argparse.Namespace) -> None:
    from furlong.cost.devices.hardware import hardware
    from furlong.cost.model import CostModel
    from furlong.report.plan_report import report_plan
    from furlong.report.plan_text import format_report

    spec = hardware(chosen.hardware)
    shape = model_shape_of(chosen.model)
    if sum(plan.stages) != shape.num_layers:
        raise ConfigError(
            given=f"a model of {shape.num_layers} layers, {chosen.model}",
            required=f"one of {sum(plan.stages)} layers, as the plan's stages have them",
            source=f"--model and {file}",
            change="give the model that the plan was made for",
        )
    training = training_of(chosen, len(plan.actions) * plan.sp_size)
    report = report_plan(plan, CostModel(shape, spec, training), chosen.memory)
    if chosen.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        print(format_report(report))
    draw(report.panel(Path(file).stem), chosen)


def _load(file: str) -> ChunkPlan:
    try:
        plan = load_plan(Path(file).read_text(encoding="utf-8"))
        check(plan)
        check_num_devices(len(plan.actions) * plan.sp_size, "the plan's ranks and sp_size")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            given=f"{file}: {getattr(error, 'strerror', None) or error}",
            required="a run file (.yaml), a saved plan or a run folder that can be read",
            source="the command line",
            change="check the path",
        ) from error
    except UserError as error:
        change = f"write --lengths {file}" if _has_lengths(file) else error.change
        raise ConfigError(
            given=error.given, required=error.required, source=f"{file}, {error.source}",
            change=change,
        ) from error  # fmt: skip
    except PlanError as error:
        raise ConfigError(
            given=f"a plan with a {error}",
            required="a plan that keeps every rule",
            source=file,
            change="undo what was edited by hand, or make the plan again",
        ) from error
    return plan


def _has_lengths(file: str) -> bool:
    try:
        read_lengths(Path(file))
    except UserError:
        return False
    return True

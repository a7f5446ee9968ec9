"""Plans that are there already: saved ones, simulated again; those of a run, as measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from furlong.cli.flag_types import check_num_devices, refusal
from furlong.cli.planning.files import draw
from furlong.cli.planning.model import check_zero, figures_of, run_of, spec_of
from furlong.config.sources import RunFlags
from furlong.cost.model import CostModel
from furlong.errors import PlanError, UserError
from furlong.plan.check import check
from furlong.plan.lengths import read_lengths
from furlong.plan.plan import ChunkPlan
from furlong.plan.text import format_plan, load_plan, read_made_for
from furlong.planners.budget import fit
from furlong.report.measured import MEASURED, read_measured
from furlong.report.report import report_plan
from furlong.report.scene import Panel
from furlong.report.text import format_report, line, runs_words
from furlong.report.words import format_figures, is_alone
from furlong.simulate.clock import simulate
from furlong.simulate.figures import measure
from furlong.simulate.unit_costs import UnitCosts
from furlong.units import count_words

_UNITS = "units"
_ABOUT_UNITS = (
    "one unit: a token's forward through a stage of average height; no hardware is given"
    " (--model.name and --hardware predict seconds)"
)
_ABOUT_PEAKS = (
    "device peak: all memory in use; on a CPU that of the whole process, which plans do not predict"
)


def show_plan(file: str, flags: RunFlags) -> None:
    """A saved plan in seconds and bytes, of the model and the hardware that it was saved with or
    that flags name; without them in units."""
    chosen = flags.own
    if chosen.out is not None:
        raise refusal(f"{file} with --out", "a plan that is searched", "copy the file")
    text, plan = _load(file)
    saved = _checked(read_made_for(text), sum(plan.seq_lens), file)
    named = any(name.startswith("--model") for name in flags.names)
    if saved or (named and chosen.hardware is not None):
        _show_predicted(plan, file, flags, saved)
        return
    if named or chosen.hardware is not None:
        both = "both, to predict seconds and bytes; or none"
        raise refusal("one of --model.name and --hardware", both, "add the other one")
    panel = Panel(simulate(plan, UnitCosts(plan)), plan, Path(file).stem, time_unit=_UNITS)
    _show_timeline(panel, {}, "", chosen)
    if not chosen.json:
        print(_ABOUT_UNITS)
    draw([panel], chosen)


def show_run(folder: Path, chosen: argparse.Namespace) -> None:
    """The last measured step of a run."""
    measured = read_measured(folder / MEASURED)
    title = f"{folder.resolve().name}, step {measured.step}, measured"
    panel = Panel(measured.timeline, measured.plan, title)
    head = f"step {measured.step} of {folder}, measured\n"
    _show_timeline(panel, {"step": measured.step}, head, chosen)
    if not chosen.json:
        print(_ABOUT_PEAKS)
    draw([panel], chosen)


def _show_timeline(
    panel: Panel, values: dict[str, Any], head: str, chosen: argparse.Namespace
) -> None:
    """Print a plan and the figures of its timeline, under `head`; or these and `values` as JSON."""
    figures = measure(panel.timeline, panel.plan)
    if chosen.json:
        print(json.dumps({**values, "time_unit": panel.time_unit, **figures.to_json()}, indent=1))
    else:
        print(head + format_plan(panel.plan))
        print(format_figures(figures, panel.time_unit, alone=is_alone(panel.plan)))


def _show_predicted(plan: ChunkPlan, file: str, flags: RunFlags, saved: Mapping[str, Any]) -> None:
    chosen = flags.own
    config = run_of(flags, saved.get("run", {}))
    zero = saved.get("zero") if chosen.zero is None else chosen.zero
    spec = spec_of(chosen.hardware or str(saved.get("hardware")))
    if config.memory.host != "auto":
        spec = replace(spec, host_bytes=config.memory.host)
    num_devices = len(plan.actions) * plan.sp_size
    check_zero(chosen.zero, num_devices)
    if chosen.zero is not None and (chosen.zero == 3) != plan.regathers:
        comes = "with every pass" if plan.regathers else "once in a step"
        required = "3" if plan.regathers else "0, 1 or 2"
        raise refusal(
            f"--zero {chosen.zero} for a plan that gathers weights {comes}", required,
            "leave --zero out, or make the plan again", f"--zero, and regathers in {file}",
        )  # fmt: skip
    if zero == 3 and not plan.regathers:
        zero = 1  # the plan says what it gathers, whatever it was made for
    figures = figures_of(config, spec, num_devices, zero, calibrate=not chosen.no_calibration)
    shape, budget = figures.model.shape, config.memory.device
    if sum(plan.stages) != shape.num_layers:
        given = f"a model of {count_words(shape.num_layers, 'layer')}, {config.model.name}"
        required = (
            f"one of {count_words(sum(plan.stages), 'layer')}, as the plan's stages have them"
        )
        change = "give the model that the plan was made for"
        raise refusal(given, required, change, f"--model.name and {file}")
    budget_bytes = None if budget == "auto" else budget
    report = report_plan(plan, figures.model, budget_bytes, saved.get("num_tokens"))
    refusal_words = _does_not_fit(plan, figures.model, budget_bytes)
    if chosen.json:
        values = report.to_json()
        if refusal_words:
            values |= {"runs_here": False, "missing_to_run": refusal_words}
        print(json.dumps(values | {"fits": not refusal_words}, indent=1))
    else:
        print(line("devices", f"{num_devices} x {spec.name}, {config.model.name}"))
        if refusal_words:
            print(line("warning", f"it does not fit: {refusal_words}"))
        print(format_report(report))
        print(line("runs here", "no, it does not fit" if refusal_words else runs_words(report)))
    title, note = str(saved.get("title", Path(file).stem)), str(saved.get("note", ""))
    draw([report.panel(title, note)], chosen)


def _does_not_fit(plan: ChunkPlan, model: CostModel, budget_bytes: int | None) -> str:
    """The memory that a plan lacks, in words; empty where it fits."""
    try:
        fit(plan, model, budget_bytes)
    except UserError as error:
        return f"{error.given}; required: {error.required}"
    return ""


def _checked(saved: Any, most_tokens: int, file: str) -> Mapping[str, Any]:
    """The model and devices of a saved plan of at most so many tokens, as `--out` writes them.

    Raises ConfigError where they were edited.
    """
    kinds = {"run": dict, "hardware": str, "zero": int, "num_tokens": int}
    if saved == {}:
        return {}
    is_whole = isinstance(saved, dict) and all(
        type(saved.get(name)) is kind for name, kind in kinds.items()
    )
    if not (is_whole and saved["zero"] in range(4) and 0 < saved["num_tokens"] <= most_tokens):
        required = f"{', '.join(kinds)} as furlong plan --out writes them"
        change = "make the plan again, or remove made_for"
        raise refusal(f"made_for = {saved!r:.80}", required, change, file)
    found: Mapping[str, Any] = saved
    return found


def _load(file: str) -> tuple[str, ChunkPlan]:
    try:
        text = Path(file).read_text(encoding="utf-8")
        plan = load_plan(text)
        check(plan)
        check_num_devices(len(plan.actions) * plan.sp_size, "the plan's ranks and sp_size")
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(
            f"{file}: {getattr(error, 'strerror', None) or error}",
            "a run file (.yaml), a saved plan or a run folder that can be read", "check the path",
        ) from error  # fmt: skip
    except UserError as error:
        change = f"write --lengths {file}" if _has_lengths(file) else error.change
        raise refusal(error.given, error.required, change, f"{file}, {error.source}") from error
    except PlanError as error:
        required, change = "a plan that keeps every rule", "undo edits, or make the plan again"
        raise refusal(f"a plan with a {error}", required, change, file) from error
    return text, plan


def _has_lengths(file: str) -> bool:
    try:
        read_lengths(Path(file))
    except UserError:
        return False
    return True

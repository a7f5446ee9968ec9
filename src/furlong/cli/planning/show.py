"""The answers of `furlong plan`: searched plans, methods compared, saved and measured plans.

A plan is shown in one way, wherever it comes from: as a page or as JSON, saved, drawn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from furlong.cli.flag_types import check_num_devices, refusal
from furlong.cli.planning.question import (
    PlanSubject,
    figures_of,
    run_of,
    spec_of,
    subject_of,
)
from furlong.config.sources import RunFlags
from furlong.cost.model import CostModel
from furlong.errors import PlanError, UserError
from furlong.plan.check import check
from furlong.plan.lengths import count_lengths, read_lengths
from furlong.plan.plan import ChunkPlan, Layout
from furlong.plan.text import format_plan, load_plan, read_made_for, save_plan
from furlong.planners.decide import (
    Decision,
    Longest,
    decide,
    dials_in_words,
    division_in_words,
    longest_sequence,
)
from furlong.planners.options import ChunkOptions, dials_of
from furlong.planners.orders import plan_two_phases
from furlong.planners.pairs import check_dials, decide_pairs
from furlong.planners.predict import one_draw
from furlong.planners.question import Answer, fit
from furlong.planners.search import METHODS, best_plan, own_methods
from furlong.planners.spaco import Sampling, num_drawn, sampling_in_words
from furlong.report.measured import MEASURED, read_measured
from furlong.report.patience import Tell
from furlong.report.report import PlanReport, report_plan
from furlong.report.scene import Panel, is_alone
from furlong.report.text import (
    Row,
    comparison_json,
    format_comparison,
    format_figures,
    format_report,
    line,
    runs_words,
)
from furlong.report.timelines import save_timelines
from furlong.simulate.clock import UnitCosts, measure, simulate
from furlong.units import count_words, format_bytes, format_count, format_seconds

_SLOWEST = 2
"""Most seconds of a panel, in those of the fastest one: more would squeeze all others."""
_UNITS = "units"
_ABOUT_UNITS = (
    "one unit: a token's forward through a stage of average height; no hardware is given"
    " (--model.name and --hardware predict seconds)"
)
_ABOUT_PEAKS = (
    "device peak: all memory in use; on a CPU that of the whole process, which plans do not predict"
)


@dataclass(frozen=True)
class _Found:
    """The decision of a search, and the plan of the subject's batch."""

    decision: Decision
    answer: Answer
    method: str
    """Names of the planners of the batch's replicas."""
    plan: ChunkPlan
    model: CostModel

    def words(self) -> str:
        """The method, the layout and the dials."""
        layout = self.decision.layout
        division = division_in_words(layout, self.decision.stages)
        division = division if layout.num_devices > 1 else ""
        return ", ".join(filter(None, (self.method, division, self.dials_words())))

    def dials_words(self) -> str:
        """The dials; empty where all chunks are a method's own."""
        own = set(own_methods(self.answer.question)).issuperset(self.method.split(", "))
        return "" if own else dials_in_words(self.decision.options)

    def to_json(self) -> dict[str, Any]:
        decision, answer = self.decision, self.answer
        next_best = [
            _plain(t.candidate.method, t.candidate.layout, t.candidate.options)
            | {"step_s": t.step_s}
            for t in answer.tried[1:2]
        ]
        return _plain(self.method, decision.layout, decision.options) | {
            "next_best": next_best[0] if next_best else None,
            "search": {
                "num_tried": len(answer.tried),
                "num_refused": len(answer.refused),
                "num_pruned": answer.num_pruned,
                "seconds": answer.seconds,
            },
        }


def _plain(method: str, layout: Layout, options: ChunkOptions) -> dict[str, Any]:
    return {"method": method, "layout": asdict(layout), "dials": dials_of(options)}


def _find(subject: PlanSubject, method: str | None = None, tell: Tell | None = None) -> _Found:
    """The decision of a run on the subject's devices, of one `method` or the subject's own.

    Raises ConfigError where no plan is predicted to fit.
    """
    question, batch = subject.question, subject.batch
    decision = decide(
        batch.lengths or count_lengths(batch.seq_lens),
        sequences_per_step=len(batch.seq_lens),
        model=question.model,
        limits=question.limits,
        budget_words=subject.budget_words,
        num_devices=question.num_devices,
        seed=batch.seed,
        steps=None if subject.is_run else batch.seq_lens,
        given=question.given,
        method=method or question.method,
        must_fit=True,
        alone=subject.is_run,
        tell=tell,
    )
    answer, model = decision.answer, decision.model
    assert answer is not None and model is not None
    name, plan = best_plan(batch.seq_lens, answer)
    return _Found(decision, answer, name, one_draw(plan, decision.options), model)


def show_search(flags: RunFlags, tell: Tell) -> None:
    """The fastest plan that fits of what the command line asks for. Raises ConfigError."""
    tell("reading what is to be planned")
    subject = subject_of(flags)
    tell("")
    if subject.config.train.loss == "dpo":
        _show_pair(flags, subject)
    else:
        _show_found(flags, subject, tell)


def _show_page(
    report: PlanReport, chosen: argparse.Namespace, *, above: Mapping[str, str],
    below: Mapping[str, str], values: Mapping[str, Any], title: str, note: str, head: str = "",
    made_for: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Print a plan between lines `above` and `below`, whose empty ones are left out, or `values`
    as JSON; save it with `made_for` and draw it, as far as that is asked for."""
    if chosen.json:
        print(json.dumps(values, indent=1))
    else:
        page = [line(name, text) for name, text in above.items() if text]
        page += [format_report(report)]
        page += [line(name, text) for name, text in below.items() if text]
        print(head + "\n".join(page))
    if made_for is not None and chosen.out is not None:
        with _writing(chosen.out):
            chosen.out.write_text(save_plan(report.plan, made_for), encoding="utf-8")
        if not chosen.json:
            print(f"wrote {chosen.out}")
    _draw([report.panel(title, note)], chosen)


def _draw(
    panels: Sequence[Panel], chosen: argparse.Namespace, *, most_ranks: int = 16, note: str = ""
) -> None:
    """Write the picture and the trace that are asked for, and print that they are written; `note`:
    words for the picture in the place of those for its ranks. Raises ConfigError where a file
    cannot be written."""
    for path in (chosen.picture, chosen.trace):
        if path is not None:
            with _writing(path):
                shown = save_timelines(panels, path, most_ranks=most_ranks)
            if not chosen.json:
                print(f"wrote {path}{note or (f'; {shown}' if shown else '')}")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises ConfigError in the place of the system's error."""
    try:
        yield
    except OSError as error:
        given = f"{path}: {error.strerror}"
        raise refusal(given, "a file that can be written", "choose another place") from error


def _show_found(flags: RunFlags, subject: PlanSubject, tell: Tell) -> None:
    chosen, question = flags.own, subject.question
    sampling = question.given.get("sample")
    found = _find(subject, tell=tell)
    decision, plan = found.decision, found.plan
    tell("a plan is found, it is measured")
    report = report_plan(
        plan, found.model, question.limits.device_bytes, sum(question.seq_lens),
        num_processes=question.num_devices,
    )  # fmt: skip
    tell("looking for the longest sequence that would fit")
    positions, own = subject.num_positions, max(question.seq_lens)
    longest = longest_sequence(
        found.answer, start=own,
        num_positions=None if positions is None or positions < own else positions,
    )  # fmt: skip
    values = subject.to_json() | found.to_json() | report.to_json() | {
        "longest_of_data_fits": _longest_fits(longest, subject),
        "longest_sequence_tokens": longest.num_tokens,
        "longest_sequence_limit": longest.limit,
        "auto": decision.words,
    }  # fmt: skip
    if decision.layout_words:
        values["parallel"] = decision.layout_words
    if sampling is not None:
        drawn = {"num_drawn": num_drawn(plan), "num_chunks": len(plan.chunks)}
        values["sample"] = asdict(sampling) | drawn
    words = found.words()
    above = {
        "plan": words,
        "sample": "" if sampling is None else _sample_words(plan, sampling),
    }
    below = {
        "longest": _longest_words(longest, subject),
        "runs here": runs_words(report, question.model.hardware.name),
        "auto": decision.words,
        "parallel": decision.layout_words,
        "search": _search_words(found),
    }
    tell("drawing it")
    _show_page(
        report, chosen, head=subject.words() + "\n", above=above, below=below, values=values,
        title=found.method, note=words,
        made_for=subject.made_for(found.model) | {"title": found.method, "note": words},
    )  # fmt: skip


def _sample_words(plan: ChunkPlan, sampling: Sampling) -> str:
    """The words for the draw of the plan that is shown."""
    return (
        f"{sampling_in_words(sampling)}: {num_drawn(plan):,} of"
        f" {count_words(len(plan.chunks), 'chunk')} drawn in this step, another draw every step\n"
        "labels are not known here: all chunks are drawn as those without labels are\n"
        "step and memory are those of this draw; the dials fit with every chunk drawn"
    )


def _longest_words(longest: Longest, subject: PlanSubject) -> str:
    tokens, own = subject.batch.longest_tokens, max(subject.question.seq_lens)
    fits = "fits" if _longest_fits(longest, subject) else "does not fit"
    where = "in the batch" if tokens == own else f"the batch has {own:,}"
    words = f"{count_words(tokens, 'token')} in the data ({where}): {fits}\nalone "
    if not longest.num_tokens:
        return f"{words}not even one token would, under the dials above"
    if longest.limit == "positions":
        most = f"{longest.num_tokens:,}"
        return f"{words}{most} would, under the dials above: the model's {most} positions"
    bound = "" if longest.limit == "memory" else "at least "
    words += f"{bound}{format_count(longest.num_tokens)} would, under the dials above"
    positions = subject.num_positions
    if positions is not None and positions < tokens:
        words += f"\nbut the model has {positions:,} positions: longer sequences need model.rope"
    return words


def _longest_fits(longest: Longest, subject: PlanSubject) -> bool:
    tokens = subject.batch.longest_tokens
    return tokens <= max(longest.num_tokens, *subject.question.seq_lens)


def _search_words(found: _Found) -> str:
    answer = found.answer
    return (
        f"{count_words(len(answer.tried), 'candidate')} fit and were timed;"
        f" {len(answer.refused)} did not fit, {answer.num_pruned} were left out by their bounds"
        f" ({format_seconds(answer.seconds)})"
    )


def _show_pair(flags: RunFlags, subject: PlanSubject) -> None:
    """The plan of one call of a run on pairs, which takes the longest pair in two phases."""
    question, limits = subject.question, subject.question.limits
    _require_one_pair(flags, subject)
    check_dials(subject.config.chunks)
    hardware, (first, second) = question.model.hardware, question.seq_lens
    decision = decide_pairs(
        [(first, second)], model=question.model, budgets=limits,
        budget_words=subject.budget_words, dials=question.dials,
    )  # fmt: skip
    if decision is None:
        raise refusal(
            f"a pair of {first:,} tokens each, of which no plan fits",
            "what both keep between forward and backward, within"
            f" {format_bytes(limits.limit_bytes)}",
            "raise memory.device, set chunks.keep: input, lower data.max_seq_len, or use LoRA",
            "the search over plans in two phases",
        )
    options, words = decision.options, dials_in_words(decision.options)
    plan = plan_two_phases((first, second), options, num_layers=question.model.shape.num_layers)
    report = report_plan(plan, question.model, limits.device_bytes, first + second, num_processes=1)
    own = {"method": "two phases", "dials": dials_of(options), "auto": decision.words}
    _show_page(
        report, flags.own, head=subject.words() + "\n", above={"plan": f"two phases, {words}"},
        below={"runs here": runs_words(report, hardware.name), "auto": decision.words},
        values=subject.to_json() | own | report.to_json(), title="two phases", note=words,
        made_for=subject.made_for(question.model),
    )  # fmt: skip


def _require_one_pair(flags: RunFlags, subject: PlanSubject) -> None:
    """Raise ConfigError for training on pairs, asked for more than one pair on one device."""
    if subject.config.train.loss == "sft":
        return
    own, count = flags.own, subject.question.num_devices
    for given in (
        f"{count} devices" if count > 1 else "", own.compare and "--compare",
        own.sequences and f"--sequences {own.sequences}",
    ):  # fmt: skip
        if given:
            raise refusal(
                f"{given} with train.loss: dpo",
                "one device, and one pair: each call of a step takes a pair in two phases",
                "leave it out, or plan with --train.loss=sft",
            )


def show_comparison(flags: RunFlags, tell: Tell) -> None:
    """One batch under every method, each with its own best plan: a table, and panels. Raises
    ConfigError where no method has a plan."""
    chosen = flags.own
    subject = subject_of(flags)
    _require_one_pair(flags, subject)
    found: dict[str, _Found] = {}
    rows: list[Row] = []
    for name in ("auto", *METHODS):
        try:
            found[name] = _find(subject, name, _telling(name, tell))
        except (UserError, PlanError) as error:
            rows.append(Row(name, refusal=_reason(error)))
    question, panels = subject.question, []
    reports = {
        name: report_plan(
            one.plan, one.model, question.limits.device_bytes, sum(question.seq_lens),
            num_processes=question.num_devices,
        )
        for name, one in found.items()
    }  # fmt: skip
    fastest_s = min((report.step_s for report in reports.values()), default=0.0)
    for name, one in found.items():
        report, layout = reports[name], one.decision.layout
        words = one.dials_words() if one.method == name else f"{one.method}: {one.dials_words()}"
        sizes = f"{layout.dp} x {layout.sp} x {layout.pp}"
        rows.append(Row(name, sizes, words.removesuffix(": "), report))
        if name != "auto" and report.step_s <= _SLOWEST * fastest_s:
            panels.append(report.panel(name, one.words()))
    if chosen.json:
        print(json.dumps({**subject.to_json(), "methods": comparison_json(rows)}, indent=1))
    else:
        print(subject.words())
        print(format_comparison(rows))
    if not found:
        raise refusal(
            f"none of {count_words(len(rows), 'method')} has a plan that fits", "at least one",
            "do what one of them says", "the refusals above",
        )  # fmt: skip
    tell("drawing them")
    panels.sort(key=lambda panel: panel.timeline.duration_s)
    note = f": plans of at most {_SLOWEST} times the best one's time"
    _draw(panels, chosen, most_ranks=2, note=note)


def _telling(method: str, tell: Tell) -> Tell:
    return lambda words: tell(f"{method}: {words}")


def _reason(error: UserError | PlanError) -> str:
    if isinstance(error, UserError):
        return f"{error.given}; required: {error.required}; to mend it: {error.change}"
    return str(error).splitlines()[0]


def show_saved(file: str, flags: RunFlags) -> None:
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
    _show_timeline(panel, chosen, about=_ABOUT_UNITS)


def show_run(folder: Path, chosen: argparse.Namespace) -> None:
    """The last measured step of a run."""
    measured = read_measured(folder / MEASURED)
    title = f"{folder.resolve().name}, step {measured.step}, measured"
    head = f"step {measured.step} of {folder}, measured\n"
    panel = Panel(measured.timeline, measured.plan, title)
    _show_timeline(panel, chosen, head=head, about=_ABOUT_PEAKS, step=measured.step)


def _show_timeline(
    panel: Panel, chosen: argparse.Namespace, *, about: str, head: str = "", **values: int
) -> None:
    """Print a plan and the figures of its timeline, or these and `values` as JSON; draw them."""
    figures = measure(panel.timeline, panel.plan)
    if chosen.json:
        print(json.dumps({**values, "time_unit": panel.time_unit, **figures.to_json()}, indent=1))
    else:
        print(head + format_plan(panel.plan))
        print(format_figures(figures, panel.time_unit, alone=is_alone(panel.plan)))
        print(about)
    _draw([panel], chosen)


def _show_predicted(plan: ChunkPlan, file: str, flags: RunFlags, saved: Mapping[str, Any]) -> None:
    chosen = flags.own
    config = run_of(flags, saved.get("run", {}))
    spec = spec_of(chosen.hardware or str(saved.get("hardware")))
    if config.memory.host != "auto":
        spec = replace(spec, host_bytes=config.memory.host)
    num_devices = len(plan.actions) * plan.sp_size
    figures = figures_of(config, spec, num_devices, calibrate=not chosen.no_calibration)
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
    lacks = _does_not_fit(plan, figures.model, budget_bytes)
    values = report.to_json() | ({"runs_here": False, "missing_to_run": lacks} if lacks else {})
    above = {
        "devices": f"{num_devices} x {spec.name}, {config.model.name}",
        "warning": f"it does not fit: {lacks}" if lacks else "",
    }
    _show_page(
        report, chosen, above=above, values=values | {"fits": not lacks},
        below={"runs here": "no, it does not fit" if lacks else runs_words(report)},
        title=str(saved.get("title", Path(file).stem)), note=str(saved.get("note", "")),
    )  # fmt: skip


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
    kinds = {"run": dict, "hardware": str, "num_tokens": int}
    if saved == {}:
        return {}
    is_whole = isinstance(saved, dict) and all(
        type(saved.get(name)) is kind for name, kind in kinds.items()
    )
    if not (is_whole and 0 < saved["num_tokens"] <= most_tokens):
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

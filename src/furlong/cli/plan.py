"""`furlong plan`: chooses a plan, or shows one that was saved or measured.

Every plan is shown in the same way: as a page or as JSON, and, if asked, saved and drawn.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import ceil, inf
from pathlib import Path
from typing import Any, NamedTuple

from furlong.cli.output import check_output, writing
from furlong.cli.plan_question import (
    MAX_DEVICES,
    PlanQuestion,
    check_num_devices,
    missing,
    planned_model,
    question_of,
    run_of,
    spec_of,
)
from furlong.config.sources import FlagParser, RunFlags, is_run_file, read_flags
from furlong.cost.machine import known_machines
from furlong.cost.training import RankWeights
from furlong.errors import PlanError, UserError, in_short, refusal
from furlong.plan.check import check
from furlong.plan.lengths import Call, count_lengths
from furlong.plan.plan import ONE_DEVICE, ChunkPlan, Layout
from furlong.plan.text import format_plan, load_plan, read_made_for, save_plan
from furlong.planners.candidates import KEEPS
from furlong.planners.decide import (
    MAX_STEP_TOKENS,
    Decision,
    check_pair_options,
    decide,
    division_in_words,
    longest_sequence,
    share_of,
)
from furlong.planners.options import (
    SMALLEST_CHUNK,
    ChunkOptions,
    option_values,
    options_in_words,
    value_in_words,
)
from furlong.planners.question import SIZES, Answer, Space
from furlong.planners.search import METHODS, best_plan, candidates_of, has_own_chunks
from furlong.planners.spaco import num_drawn, one_draw, sampling_in_words
from furlong.report.patience import Tell, patience
from furlong.report.report import PlanReport, report_plan
from furlong.report.scene import Panel, save_trace
from furlong.report.text import (
    MethodRow,
    between_words,
    comparison_json,
    format_comparison,
    format_figures,
    format_report,
    line,
    runs_words,
)
from furlong.simulate.clock import measure
from furlong.timeline import MEASURED, read_measured
from furlong.units import DAY_S, count_words, format_bytes, format_count, format_seconds

_USAGE = """\
furlong plan RUN.yaml [FLAGS]
       furlong plan --lengths FILE|PRESET|N --model.name CONFIG.json|NAME --hardware NAME [FLAGS]
       furlong plan PLAN.json [--model.name M --hardware H]
       furlong plan RUN_FOLDER"""
_ABOUT = """\
Chooses the fastest plan of a batch that fits: no data, weights or devices are needed. Prints what
it does, predicted seconds and memory. A saved plan, or the measured one of a run, is shown again.
Beside the flags that come first all keys of furlong train are flags: sizes of parallel, chunks and
memory that are given hold, what is left out or auto is searched.
"""
_OF_A_PLAN = (
    "--model", "--memory", "--hardware", "--no-calibration",
    "--json", "--out", "--picture", "--trace",
)  # fmt: skip
"""Prefixes of the flags that are allowed with a saved plan or a run folder."""
_PICTURES = (".png", ".svg")
_FILES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "out": ((".json",), ("chunks", "actions")),
    "picture": (_PICTURES, ()),
    "trace": ((".json",), ("traceEvents",)),
}
"""Flag -> (suffixes, keys of the JSON object) of the file that it writes."""
_APART: tuple[tuple[tuple[str, ...], str], ...] = (
    (("smallest", "compare"), "one of both: --compare shows every method on given devices"),
    (("smallest", "hardware", "devices"), "one of the last two at most: the other is looked for"),
    (("compare", "out"), "one plan to write: --compare makes one per method"),
    (("compare", "trace"), "one plan to write: --compare makes one per method"),
    (("compare", "verbose"), "one of both: --compare has no choice to explain"),
)
"""(flags that exclude each other, what is required instead)."""
_ABOUT_PEAKS = (
    "device peak: all memory in use; on a CPU that of the whole process, which plans do not predict"
)


def run(arguments: Sequence[str]) -> int:
    flags = parse_flags(arguments)
    own, subject = flags.own, flags.own.subject
    if subject is None or is_run_file(subject):
        with patience("comparing methods" if own.compare else "searching for a plan") as tell:
            if own.compare:
                _show_comparison(flags, tell)
            elif own.smallest:
                _show_smallest(flags, tell)
            else:
                tell("reading what is to be planned")
                question = question_of(flags)
                tell("")
                _show_found(find(question, tell), question, own, tell)
        return 0
    for name in sorted(flags.names):
        if not name.startswith(_OF_A_PLAN):
            raise refusal(
                f"{subject} with a flag of the search ({name})",
                "a saved plan or a run folder alone: nothing is searched",
                "leave the flag out, or name a run file or --lengths in its place",
            )
    if Path(subject).is_dir():
        _show_run(Path(subject), own)
    else:
        _show_saved(subject, flags)
    return 0


def parse_flags(arguments: Sequence[str]) -> RunFlags:
    """Return the parsed command line. Raises ConfigError; `--help` ends the process with
    SystemExit(0)."""
    parser = FlagParser("plan", takes="--section.key=value", description=_ABOUT, usage=_USAGE)
    parser.add_argument("subject", nargs="?", metavar="RUN.yaml|PLAN.json|RUN_FOLDER")
    _add_flags(parser)
    flags = read_flags(parser, arguments)
    _check_outputs(flags.own)
    return flags


# fmt: off
def _add_flags(parser: ArgumentParser) -> None:
    flag = parser.add_argument_group("the batch, the devices and the search").add_argument
    flag("--lengths", metavar="FILE|PRESET|N",
         help="lengths that furlong lengths wrote, a preset (docs/presets.md), or one of N tokens")
    flag("--sequences", type=int, metavar="N",
         help="sequences of a step: the longest, and others drawn by train.seed"
         " (default: what train says of a run; all of a file; 64 of a preset)")
    flag("--hardware", metavar="NAME",
         help="a known device (docs/presets.md); cpu, and a run's default: this machine")
    flag("--devices", type=int, metavar="N",
         help="how many (default: the product of the sizes of parallel)")
    flag("--no-calibration", action="store_true",
         help="predict with assumed figures, not with those that furlong calibrate has measured")
    flag("--smallest", action="store_true",
         help="find the smallest known card that holds the batch, or how many of --hardware do")
    flag = parser.add_argument_group("what comes out").add_argument
    flag("--compare", action="store_true",
         help="the same batch under every method, each with its best layout")
    flag("--verbose", action="store_true",
         help="what furlong train prints of its choice, instead of short reasons")
    flag("--json", action="store_true", help="print one JSON object")
    flag("--out", metavar="FILE", type=Path, help="save the plan: .json")
    flag("--picture", metavar="FILE", type=Path, help=f"draw the timeline: {', '.join(_PICTURES)}")
    flag("--trace", metavar="FILE", type=Path, help="write a trace that Perfetto opens: .json")
# fmt: on


def _check_outputs(chosen: Namespace) -> None:
    for name, (endings, keys) in _FILES.items():
        path: Path | None = getattr(chosen, name)
        if path is not None:
            check_output(path, f"--{name}", endings, *keys)
    if chosen.out is not None and chosen.out == chosen.trace:
        given = f"--out and --trace {chosen.out}"
        raise refusal(given, "two files: a plan and a trace", "give one of them another name")
    for names, required in _APART:
        if all(getattr(chosen, name) for name in names):
            given = " with ".join(f"--{name}" for name in names)
            raise refusal(given, required, "leave one of them out")


class Found(NamedTuple):
    """The plan chosen for a batch, with the decision and the search that led to it."""

    decision: Decision
    answer: Answer
    method: str
    """Names of the planners of the batch's replicas."""
    report: PlanReport

    @property
    def options(self) -> str:
        """The chunk options in words; empty if the plan's methods have no such options."""
        is_own = all(map(has_own_chunks, self.method.split(", ")))
        return "" if is_own else options_in_words(self.decision.options)

    @property
    def words(self) -> str:
        """The method, the layout and the options in words."""
        layout, stages = self.decision.layout, self.decision.stages
        division = division_in_words(layout, stages) if layout.num_devices > 1 else ""
        return ", ".join(filter(None, (self.method, division, self.options)))


def find(question: PlanQuestion, tell: Tell, method: str | None = None) -> Found:
    """Return the plan for the question's batch and devices, chosen as a run would. `method`:
    planning method to use instead of `chunks.method`.

    Raises ConfigError if no plan is predicted to fit.
    """
    batch, config = question.batch, question.config
    calls: tuple[Call, ...] = ()
    if config.train.is_of_pairs:
        check_pair_options(config)
        number = len(batch.seq_lens)
        calls = tuple(call for call in batch.lengths.calls if len(call.seq_lens) == number)
        calls = calls or (Call(batch.seq_lens),)
    # a large batch on several devices is decided by sampled steps, as in a run
    asked = replace(question.asked, method=method or config.chunks.method, calls=calls)
    is_large = asked.num_devices > 1 and sum(batch.seq_lens) > MAX_STEP_TOKENS
    decision = decide(
        asked,
        count_lengths(batch.seq_lens) if is_large and not question.is_run else batch.lengths,
        size=batch.size, budget_words=question.budget_words, seed=config.train.seed,
        longest=batch.longest_tokens if config.data.streaming else None,
        steps=None if question.is_run or is_large else batch.seq_lens,
        must_fit=True, alone=question.is_run, tell=tell, may_cut_short=True,
    )  # fmt: skip
    answer, model = decision.answer, decision.model
    assert answer is not None and model is not None
    name, plan = best_plan(answer.best.longest if calls else batch.seq_lens, answer)
    plan = one_draw(plan, decision.options.sampling)
    tell("a plan is found, it is measured")
    return Found(
        decision, answer, name,
        report_plan(
            plan, model, asked.limits.device_bytes, disk_budget_bytes=asked.limits.disk_bytes,
            num_processes=asked.num_devices,
            refused=question.refused or _refused_start(question, share_of(model, decision)),
        ),
    )  # fmt: skip


def _refused_start(question: PlanQuestion, own: RankWeights) -> str:
    """Return the reason why a run cannot start although its plan fits; "" if it can start. The
    kernels `liger` and `hub` are first compared on the unsharded model, which must then fit on each
    device. `own`: sizes of a process's weights."""
    kernels, training = question.config.model.kernels, own.training
    master = training.master_bytes or training.compute_bytes
    whole = (own.in_use - own.trained) * training.compute_bytes + own.trained * master
    fits = not own.divides or whole <= question.asked.limits.device_bytes
    if kernels not in ("liger", "hub") or fits:
        return ""
    return (
        f"model.kernels = {kernels} compares them with the whole model, {format_bytes(whole)} on"
        " each device; without model.kernels each reads its share"
    )


def _show_found(
    found: Found, question: PlanQuestion, chosen: Namespace, tell: Tell, smallest: str = ""
) -> None:
    decision, answer, method, report = found
    if answer.question.calls:
        seq_lens = tuple(answer.best.longest)
        question = replace(question, batch=replace(question.batch, seq_lens=seq_lens))
    plan, num_tried, num_refused = report.plan, len(answer.tried), len(answer.refused)
    above = question.lines() | {"plan": found.words}
    values = question.to_json() | {
        "method": method, "options": option_values(decision.options),
        "auto": decision.words, "parallel": decision.layout_words,
    } | report.to_json()  # fmt: skip
    if (sampling := decision.options.sampling) is not None:
        drawn, chunks = num_drawn(plan), len(plan.chunks)
        above["sample"] = (
            f"{sampling_in_words(sampling)}: {drawn:,} of {count_words(chunks, 'chunk')} drawn in"
            " this step, another draw every step"
            "\nstep and memory are those of this draw; the options fit with every chunk drawn"
        )
        values["sample"] = asdict(sampling) | {"num_drawn": drawn, "num_chunks": chunks}
    if answer.is_cut_short:
        longest_words, longest = "", dict[str, Any]()
    else:
        tell("looking for the longest sequence that would fit")
        longest_words, longest = _longest(question, answer, report)
    # candidates of methods without chunk options have no `longest`
    next_best = [
        {"method": one.method, "layout": asdict(one.layout),
         "options": option_values(one.options) if one.longest else {}, "step_s": one.step_s}
        for one in answer.tried[1:2]
    ]  # fmt: skip
    run_words, run = _of_run(question, found)
    why = reasons(answer)
    values |= longest | run | {
        "reasons": why,
        "next_best": next_best[0] if next_best else None,
        "search": {
            "num_tried": num_tried, "num_refused": num_refused,
            "num_pruned": answer.num_pruned, "seconds": answer.seconds,
            "is_cut_short": answer.is_cut_short,
        },
    }  # fmt: skip
    is_told = chosen.verbose
    below = {
        "run": run_words,
        "longest": longest_words,
        "runs here": runs_words(report, question.asked.model.hardware.name),
        "auto": decision.words if is_told else "\n".join(why),
        "parallel": decision.layout_words if is_told else "",
        "smallest": smallest,
        "search": f"{count_words(num_tried, 'candidate')} fit and"
        f" {'was' if num_tried == 1 else 'were'} timed; {num_refused} did not fit,"
        f" {answer.num_pruned} were left out by their bounds ({format_seconds(answer.seconds)})"
        + "; cut short by a signal: this is the best so far, and others were not tried"
        * answer.is_cut_short,
    }
    tell("drawing it")
    _show_page(report, chosen, above, below, values)
    if chosen.out is not None:
        with writing(chosen.out):
            made_for = question.made_for()
            if decision.offload_weights:
                made_for["run"]["offload"] = {"weights": "cpu"}
            chosen.out.write_text(save_plan(plan, made_for), encoding="utf-8")
        if not chosen.json:
            print(f"wrote {chosen.out}")
    _draw([report.panel(method, found.words)], chosen)


def _of_run(question: PlanQuestion, found: Found) -> tuple[str, dict[str, Any]]:
    """Return (text, JSON values) about a whole run: its predicted time, and the mean time of its
    steps.

    Both are empty if the number of steps is unknown. They are also empty for losses that compare
    sequences, since a step of such a loss is several engine calls.
    """
    asked, report, train = found.answer.question, found.report, question.config.train
    if not question.is_long or train.is_of_pairs:
        return "", {}
    lengths, per_step = question.batch.lengths, asked.size.sequences or 1
    step_s, tokens = report.whole_step_s, sum(report.plan.seq_lens)
    if question.is_run:  # the shown plan has the longest sequence; this is the mean
        step_s = found.answer.best.step_s + report.update_s * (asked.num_devices == 1)
        tokens = round(per_step * lengths.num_tokens / lengths.num_sequences)
    steps = train.steps or ceil((train.epochs or 1) * ceil(lengths.num_sequences / per_step))
    machine, seconds = asked.model.hardware, steps * step_s
    per_day = tokens / step_s * DAY_S if step_s else 0.0
    words = (
        f"{between_words(machine, seconds)}\n{count_words(steps, 'step')} of"
        f" {format_seconds(step_s)} on average, {format_count(per_day)} tokens a day;"
        " evaluations and checkpoints come on top"
    )
    return words, {
        "run": {
            "steps": steps, "step_s": step_s, "seconds": seconds,
            "seconds_between": machine.seconds_between(seconds), "tokens_per_day": per_day,
        }
    }  # fmt: skip


def _longest(
    question: PlanQuestion, answer: Answer, report: PlanReport
) -> tuple[str, dict[str, Any]]:
    """Return (text, JSON values) about the longest sequence of the data: whether it fits, and how
    long a sequence may be at most. If the plan of the batch exceeds a memory budget, the longest
    sequence counts as not fitting."""
    tokens, own = question.batch.longest_tokens, max(question.batch.seq_lens)
    positions = question.asked.model.shape.num_positions
    is_beyond = positions is not None and positions < own
    is_pair = len(answer.best.longest) == 2 and bool(answer.question.calls)
    most = None if is_beyond else positions
    longest = longest_sequence(answer, start=own, num_positions=most)
    fits = not report.lacks and tokens <= max(longest.num_tokens, own)
    digits = 10 ** max(0, len(str(longest.num_tokens)) - 3)  # it is exact to 1 %
    count = f"{longest.num_tokens // digits * digits:,}"
    values = {
        "longest_of_data_fits": fits,
        "longest_sequence_tokens": longest.num_tokens,
        "longest_sequence_limit": longest.limit,
    }
    may = {
        "positions": f"{longest.num_tokens:,} tokens: the model's positions",
        "memory": f"{count} tokens",
        "trials": f"at least {count} tokens",
    }
    words = (
        f"{count_words(tokens, 'token')} in the data"
        f" ({'in the batch' if tokens == own else f'the batch has {own:,}'}):"
        f" {'fits' if fits else 'does not fit'}\n"
        f"{'two that share nothing' if is_pair else 'one sequence alone'} may have"
        f" {may[longest.limit]}{' by memory' if is_beyond else ''}"
    )
    return words, values


_FORWARD, _DEEP = "chunk-first", "layer-first"


def reasons(answer: Answer) -> list[str]:
    """Return one line for each choice of the search, such as `size`. The line says what the
    alternatives cost. The order of lines is: weights on the CPU, layout sizes above 1, `reshard`,
    chunk size, `keep`, `offload`, `order`.

    A choice that was given, or that had no alternatives, has no line. `reshard` has a line only if
    the plan frees weights of stages. Costs are times of simulated plans. In a line, `about` marks a
    closed-form estimate and `at least` marks a bound.
    """
    return [*_of_weights(answer), *_of_layout(answer), *_of_options(answer)]


def _of_weights(answer: Answer) -> Iterator[str]:
    if answer.on_device is not None:
        trial, layout = answer.on_device.nearest
        limits, question = answer.question.limits, answer.on_device.question
        needed = question.state_bytes(layout) if trial is None else trial.needs.device_bytes
        lacking = format_bytes(max(0, needed - limits.limit_bytes))
        where = "" if layout == ONE_DEVICE else f", {layout}"
        narrow = ""
        if answer.on_device.question.fits_with_narrow_moments(layout):
            narrow = "; train.state_dtype: bfloat16 makes room for their state"
        yield f"weights on the CPU: on the device{where} at least {lacking} are lacking{narrow}"


def _of_layout(answer: Answer) -> Iterator[str]:
    question, best, others = answer.question, answer.best, dict[Layout, tuple[float, str]]()
    limits = question.limits
    lacking = [
        *((layout, num_bytes, " at least") for layout, num_bytes in answer.too_large),
        *((one.layout, limits.lacking(one.needs), "") for one in answer.refused[::-1]),
    ]
    for layout, num_bytes, at_least in lacking:
        words = f"lacks{at_least} {format_bytes(num_bytes)} per device"
        if (state_bytes := question.state_bytes(layout)) > limits.limit_bytes:
            words = f"needs {format_bytes(state_bytes)} per device for the weights and their state"
        others[layout] = inf, words
    for layout, seconds in answer.slower:
        others[layout] = seconds, f"at least {_more(max(1.0, seconds / best.step_s))}"
    for one in answer.tried[::-1]:
        others[one.layout] = one.step_s, _more(one.step_s / best.step_s)
    others.pop(best.layout, None)
    for name in [name for name in ("pp", "sp") if getattr(best.layout, name) > 1] or ["dp"]:
        size = getattr(best.layout, name)
        below = [layout for layout in others if getattr(layout, name) < size]
        if name not in question.given and below:
            # the fastest layout with size 1; if there is none, with a smaller size
            layout = min(below, key=lambda one: (getattr(one, name) > 1, others[one][0]))
            yield f"{name} {size}: {layout} {others[layout][1]}"


def _of_options(answer: Answer) -> Iterator[str]:
    best, chosen, question = answer.best, answer.by_options, answer.question
    if chosen is None:
        return
    if chosen is not best:
        yield f"{best.method}: chunks by options {_more(chosen.step_s / best.step_s)}"
        return
    own = _keys(chosen.options)
    for name, others in (
        ("reshard", [False] if own["reshard"] else []),
        ("size", [own["size"] // 2, own["size"] * 2]),
        ("keep", [keep for keep in ("all", *KEEPS) if keep != own["keep"]]),
        ("offload", ["none"] if own["offload"] != "none" else []),
        ("order", [_FORWARD if own["order"] == _DEEP else _DEEP]),
    ):
        if name in question.options or (name == "order" and chosen.layout.pp > 1):
            continue
        kept = {"reshard": False} if _FORWARD in others else {}
        costs = [
            (_words(value), _cost(answer, own | kept | {name: value}, name)) for value in others
        ]
        if told := ", ".join(f"{value} {cost}" for value, cost in costs if cost):
            yield f"{'chunks of' if name == 'size' else name} {_words(own[name])}: {told}"


def _keys(options: ChunkOptions) -> dict[str, Any]:
    """Return the values of reshard, size, keep, offload and order, by name."""
    names = ("reshard", "size", "keep", "offload", "order")
    values = {
        "offload": "none", "order": options.order, "reshard": False, **option_values(options)
    }  # fmt: skip
    return {name: values[name] for name in names}


def _cost(answer: Answer, wanted: dict[str, Any], name: str) -> str:
    """Return how much more time or memory the options `wanted` cost than the chosen options, in
    words.

    Args:
        wanted: Option values by name. They differ from the chosen ones in the option `name`; the
            offload and the number of retained chunks may differ, too.

    Returns:
        The text; "" if no candidate has these options, or if its estimated time is not longer.
    """
    question, chosen, limits = answer.question, answer.by_options, answer.question.limits
    assert chosen is not None
    compared = [key for key in wanted if key != "offload" or name == "offload"]

    def is_wanted(options: ChunkOptions) -> bool:
        keys = _keys(options)
        return all(keys[key] == wanted[key] for key in compared)

    alike = [one for one in answer.tried if one.layout == chosen.layout and one.longest]
    own = [one for one in alike if is_wanted(one.options)]
    if own:
        fastest = min(own, key=lambda one: one.step_s)
        more_bytes = fastest.needs.device_bytes - chosen.needs.device_bytes
        is_larger = fastest.step_s < chosen.step_s * 1.0005 and more_bytes > 0
        words = f" and {format_bytes(more_bytes)} more" if is_larger else ""
        return f"{_more(fastest.step_s / chosen.step_s)}{words}"
    if question.calls or not SMALLEST_CHUNK <= wanted["size"] < 2 * question.longest:
        return ""
    sizes = {key: size for key, size in question.given.items() if key in SIZES}
    fixed = {key: wanted[key] for key in compared}
    asked = replace(question, given={**sizes, **question.options, **fixed})
    refused = {one.options: one.needs for one in answer.refused if one.layout == chosen.layout}
    offered = list(candidates_of(question.method)(Space(asked, chosen.layout)))
    needs = {one.options: refused.get(one.options, one.least) for one in offered}
    lacking_bytes = {options: limits.lacking(least) for options, least in needs.items()}
    held = [one.estimate_s for one in offered if not lacking_bytes[one.options]]
    if held:  # without a longer estimate there is no reason to give
        ratio = min(held) / chosen.estimate_s
        return f"about {_more(ratio)}" if ratio >= 1.0005 else ""
    lacking = min(lacking_bytes.values(), default=0)
    at_least = "" if lacking in map(limits.lacking, refused.values()) else " at least"
    return f"lacks{at_least} {format_bytes(lacking)}" if lacking else ""


def _words(value: Any) -> str:
    if value == "none":
        return "on the device"
    return f"{value:,}" if type(value) is int else value_in_words(value)


def _more(ratio: float) -> str:
    """Return the ratio of two durations in words, such as `12.0% longer`."""
    if abs(ratio - 1) < 5e-4:
        return "as long"
    return f"{abs(ratio - 1):.1%} {'longer' if ratio > 1 else 'less'}"


def _show_smallest(flags: RunFlags, tell: Tell) -> None:
    """Print the plan on the smallest known card that holds the batch. With --hardware, use that
    card and print the plan on the fewest devices: the given number, or this number times a power of
    two. Raises ConfigError if no plan fits."""
    own, of_size, known = flags.own, dict[int, str](), known_machines()
    for name in sorted(known, key=lambda name: known[name].peak_flops_per_s):
        of_size.setdefault(known[name].memory_bytes, name)  # the slowest card of each size
    cards = [of_size[size] for size in sorted(of_size)]
    # an error that does not depend on the card is raised here, unchanged
    asked = question_of(_with(flags, hardware=cards[0] if own.hardware is None else own.hardware))
    least, budget = asked.asked.num_devices, asked.config.memory.device
    if own.hardware is None:
        enough = [card for card in cards if budget == "auto" or budget <= known[card].memory_bytes]
        trials = [(card, least) for card in enough or cards[-1:]]
    elif set(SIZES) <= asked.asked.given.keys() or asked.config.train.is_of_pairs:
        trials = [(own.hardware, least)]
    else:
        trials = [(own.hardware, least * 2**n) for n in range(11) if least * 2**n <= MAX_DEVICES]
    refused: dict[str, str] = {}
    for card, count in trials:
        changed = _with(flags, hardware=card, devices=count)
        question = question_of(changed, asked.batch)
        words = f"{count} x {card}"
        without = f"; no plan for {', '.join(refused)}" if refused else ""
        is_last = (card, count) == trials[-1]
        try:
            if not is_last and _is_too_small(question):
                refused[words] = ""
                continue
            found = find(question, _telling(words + without, tell))
        except UserError as error:
            refused[words] = str(error)
            if not is_last:
                continue
            if len(refused) > 1 and {*refused.values()} == {str(error)}:
                raise  # the same error on every card
            given = f"{words}, the last of --smallest: {error.given}"
            raise refusal(given, error.required, error.change) from error
        _show_found(found, question, changed.own, tell, words + without)
        return


def _is_too_small(question: PlanQuestion) -> bool:
    """Whether weights, gradients and optimizer alone exceed a device's budget in every layout, even
    if weights are offloaded to CPU memory where that is allowed. Then a search is pointless."""
    asked, limits = question.asked, question.asked.limits
    away = asked.offloading() if asked.may_offload_weights else asked
    below = inf if limits.cpu_bytes is None else limits.cpu_bytes
    return all(
        asked.state_bytes(layout) > limits.limit_bytes
        and (
            away is asked
            or layout.pp > 1
            or away.state_bytes(layout) > limits.limit_bytes
            or away.resharded(layout).host_bytes > below
        )
        for layout in asked.layouts()
    )


def _with(flags: RunFlags, **changed: Any) -> RunFlags:
    return flags._replace(own=Namespace(**vars(flags.own) | changed))


def _show_comparison(flags: RunFlags, tell: Tell) -> None:
    """Show the best plan of every method for one batch: a table, and a picture with panels. Raises
    ConfigError if no method has a plan."""
    question, chosen = question_of(flags), flags.own
    rows: list[MethodRow] = []
    panels: dict[str, Panel] = {}
    for name in ("auto", *METHODS):
        try:
            found = find(_exact(question, name), _telling(name, tell), name)
        except (UserError, PlanError) as error:
            reason = str(error).splitlines()[0]
            if isinstance(error, UserError):
                reason = f"{error.given}; required: {error.required}; to mend it: {error.change}"
            rows.append(MethodRow(name, refusal=reason))
            continue
        method, report = found.method, found.report
        words = found.options
        if method != name:
            words = ": ".join(filter(None, (method, words)))
        rows.append(MethodRow(name, words, report))
        # the method that auto has chosen is drawn once, under the method's name
        shown = method if name == "auto" else name
        panels[shown] = report.panel(name, found.words)
        if found.answer.is_cut_short:
            break
    if chosen.json:
        print(json.dumps(question.to_json() | {"methods": comparison_json(rows)}, indent=1))
    else:
        refused = f"no: {question.refused}" if question.refused else ""
        print(_lines(question.lines() | {"runs here": refused}))
        print(format_comparison(rows))
    if not panels:
        raise refusal(
            f"none of {count_words(len(rows), 'method')} has a plan that fits", "at least one",
            "do what one of them says", "the refusals above",
        )  # fmt: skip
    tell("drawing them")
    drawn = sorted(panels.values(), key=lambda panel: panel.timeline.duration_s)
    _draw(drawn, chosen, most_ranks=2)


def _exact(question: PlanQuestion, method: str) -> PlanQuestion:
    """Return the question for one method, for a comparison. Only SpaCO samples chunks. So the
    option `sample` is removed for methods other than `spaco` and `auto`."""
    given = question.asked.given
    if method in ("auto", "spaco") or "sample" not in given:
        return question
    given = {name: value for name, value in given.items() if name != "sample"}
    return replace(question, asked=replace(question.asked, given=given))


def _telling(what: str, tell: Tell) -> Tell:
    return lambda words: tell(f"{what}: {words}" if words else what)


def _show_saved(file: str, flags: RunFlags) -> None:
    """Print the predicted seconds and bytes of the plan saved in `file`. By default the model and
    the hardware are those that were saved with the plan; flags may name others."""
    chosen = flags.own
    if chosen.out is not None:
        raise refusal(f"{file} with --out", "a plan that is searched", "copy the file")
    plan, saved = _load(file)
    num_devices, hardware = len(plan.actions) * plan.sp_size, chosen.hardware or saved["hardware"]
    config = run_of(flags, saved["run"])
    if hardware is None:
        raise missing("--hardware")
    spec = spec_of(hardware, num_devices)
    if config.memory.cpu != "auto":
        spec = replace(spec, host_bytes=config.memory.cpu)
    longest = max(plan.seq_lens)
    model, refused = planned_model(
        config, spec, num_devices, longest, calibrate=not chosen.no_calibration
    )
    if sum(plan.stages) != model.shape.num_layers:
        raise refusal(
            f"a model of {count_words(model.shape.num_layers, 'layer')}, {config.model.name}",
            f"one of {count_words(sum(plan.stages), 'layer')}, as the plan's stages have them",
            "give the model that the plan was made for", f"--model.name and {file}",
        )  # fmt: skip
    budget = config.memory.device
    report = report_plan(
        plan, model, spec.budget(budget, num_devices)[0], refused=refused,
        disk_budget_bytes=config.memory.disk,
    )  # fmt: skip
    above = {"devices": f"{num_devices} x {spec.name}, {config.model.name}"}
    _show_page(report, chosen, above, {"runs here": runs_words(report)}, report.to_json())
    _draw([report.panel(Path(file).stem)], chosen)


def _show_run(folder: Path, chosen: Namespace) -> None:
    """Show the last measured step of a run."""
    step, plan, timeline = read_measured(folder / MEASURED)
    figures = measure(timeline, plan)
    if chosen.json:
        print(json.dumps({"step": step, **figures.to_json()}, indent=1))
    else:
        print(f"step {step} of {folder}, measured")
        print(format_plan(plan))
        print(format_figures(figures))
        print(_ABOUT_PEAKS)
    _draw([Panel(timeline, plan, f"{folder.resolve().name}, step {step}, measured")], chosen)


def _load(file: str) -> tuple[ChunkPlan, dict[str, Any]]:
    """Return a saved plan, and the run and the hardware saved with it (an empty dict and None if
    they were not saved)."""
    required = "a run file (.yaml), a saved plan or a run folder"
    try:
        text = Path(file).read_text(encoding="utf-8")
        plan = load_plan(text)
        check_num_devices(len(plan.actions) * plan.sp_size, "the plan's ranks and sp_size")
        check(plan)
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or error
        raise refusal(
            f"{file}: {words}", f"{required} that can be read", "check the path"
        ) from error
    except UserError as error:
        if '"actions"' in text:
            source = f"{file}, {error.source}"
            raise refusal(error.given, error.required, error.change, source) from error
        change = f"name one; a file of lengths comes as --lengths {file}"
        raise refusal(f"{file}, which is no saved plan", required, change) from error
    except PlanError as error:
        required, change = "a plan that keeps every rule", "undo edits, or make the plan again"
        raise refusal(f"a plan with a {error}", required, change, file) from error
    saved = read_made_for(text) or {"run": {}, "hardware": None}
    match saved:
        case {"run": dict(), "hardware": str() | None}:
            return plan, saved
    required = "run and hardware as furlong plan --out writes them"
    change = "make the plan again, or remove made_for"
    raise refusal(f"made_for = {in_short(repr(saved), 80)}", required, change, file)


def _show_page(
    report: PlanReport, chosen: Namespace, above: Mapping[str, str], below: Mapping[str, str],
    values: Mapping[str, Any],
) -> None:  # fmt: skip
    """Print a page about a plan: the lines `above`, the report, then the lines `below`. Lines with
    an empty text are not printed. With --json, print only `values`."""
    if chosen.json:
        print(json.dumps(values, indent=1))
    else:
        print("\n".join([_lines(above), format_report(report), _lines(below)]))


def _lines(texts: Mapping[str, str]) -> str:
    return "\n".join(line(name, text) for name, text in texts.items() if text)


def _draw(panels: Sequence[Panel], chosen: Namespace, *, most_ranks: int = 16) -> None:
    """Write the picture of all panels and the trace of the first panel, if flags ask for them;
    print the paths. Raises ConfigError if a file cannot be written."""
    if chosen.picture is not None:
        from furlong.report.picture import save_picture  # matplotlib loads slowly

        with writing(chosen.picture):
            shown = save_picture(panels, chosen.picture, most_ranks=most_ranks)
        if not chosen.json:
            print(f"wrote {chosen.picture}{f'; {shown}' if shown else ''}")
    if chosen.trace is not None:
        with writing(chosen.trace):
            save_trace(panels[0], chosen.trace)
        if not chosen.json:
            print(f"wrote {chosen.trace}")

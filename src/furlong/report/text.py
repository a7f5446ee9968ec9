"""Text for a terminal: a plan's report, and a table that compares methods on one batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from textwrap import wrap
from typing import Any

from furlong.cost.machine import Machine
from furlong.cost.memory import PARTS
from furlong.cost.training import RankWeights
from furlong.errors import in_short
from furlong.plan.plan import TARGETS, ChunkPlan
from furlong.plan.text import KIND_WORDS, offload_in_words
from furlong.report.report import PlanReport
from furlong.report.scene import (
    PART_WORDS,
    choose_ranks,
    figure_words,
    is_alone,
    lost_words,
    share_words,
)
from furlong.simulate.clock import SimulatedStep
from furlong.units import (
    DAY_S,
    bytes_alike,
    count_words,
    format_bytes,
    format_count,
    format_seconds,
)

_MAX_RANKS = 8
_INDENT, _WIDTH = 11, 80


def line(name: str, text: str) -> str:
    """Return a line of a plan's page: `name`, then `text` in a column, wrapped at 80 characters.
    Words are never broken, so that paths stay whole."""
    room = _WIDTH - _INDENT
    rows = [row for part in text.split("\n") for row in wrap(part, room, **_WHOLE_WORDS)]
    return name.ljust(_INDENT) + ("\n" + " " * _INDENT).join(rows)


_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def format_report(report: PlanReport) -> str:
    """Return a plan's page for the terminal: its chunks and actions, its seconds, its bytes."""
    plan, figures = report.plan, report.figures
    order = "1F1B over chunks" if len(plan.stages) > 1 else "chunk-first"
    if max(map(len, plan.held)) > 1:
        order = "layer-first, each stage for all chunks before the next"
    if plan.reshards:
        order = "layer-first, each stage for all chunks of the step before the next"
    is_uneven = report.pool_idle_ratio >= 5e-4
    slowest = ": the slowest of a pool holds the others up" if is_uneven else ""
    texts = {
        "chunks": _chunk_words(plan),
        "order": f"{order}: forwards ascending, backwards descending within a sequence",
        "offload": offload_in_words(plan.offload),
        "moved": "\n".join(_traffic_words(report)),
        "layout": _layout_words(report),
        "weights": _weights_words(report),
        "step": _step_words(report),
        "MFU": _mfu_words(report),
        "lost": f"{lost_words(figures)}{_inside_words(report)}",
        "pool": f"{report.pool_idle_ratio:.1%} of the processes' time in passes is idle{slowest}"
        if plan.sp_size > 1
        else "",
        "memory": _memory_words(report),
    }
    lines = [line(name, text) for name, text in texts.items() if text]
    return "\n".join([*lines, *_memory_parts(report)])


def between_words(machine: Machine, seconds: float) -> str:
    """Return predicted seconds as a text with their likely range and the reason for this range,
    such as the calibration's error."""
    low, high = map(format_seconds, machine.seconds_between(seconds))
    why = "while figures are assumed"
    if machine.time_error is not None:
        why = "by the calibration's error"
    return f"{format_seconds(seconds)} ({low} to {high} {why})"


def weights_words(own: RankWeights, *, reshards: bool) -> str:
    """Return a text that describes how a process holds its weights: sharded or offloaded. Return ""
    if all its weights are on its device. `own`: the weights of the process's rank."""
    if not own.divides:
        return ""
    held, whole = len(own.layers), own.whole_at_a_time(reshards=reshards)
    times, most = "once", f"all {held} layers"
    if reshards:
        most = f"{max(map(sum, pairwise(own.stages)))} of {held} layers"
        times = "twice" if len(own.stages) > 2 else "once"
    where = f"divided among {own.group_size} processes, {format_bytes(own.share_bytes)} each"
    come, device = "gathered", ""
    if own.training.offload_weights:
        each = f" of each of {own.group_size} processes" * (own.group_size > 1)
        where = f"on the CPU, {format_bytes(own.host_bytes)} with gradients and optimizer{each}"
        come, device = "brought", " on the device"
    if own.passes_gather:
        return (
            f"divided in pools of {own.group_size} processes, {format_bytes(own.share_bytes)} each,"
            f" {format_bytes(own.start_bytes)} at the start; 2 of {held} layers and what is beside"
            f" them whole at a time ({format_bytes(whole)}), gathered with every pass"
        )
    return (
        f"{where}, {format_bytes(own.start_bytes)}{device} at the start;"
        f" {most} whole at a time ({format_bytes(whole)}), {come} {times} a step"
    )


def _weights_words(report: PlanReport) -> str:
    words = weights_words(report.weights, reshards=report.plan.reshards)
    if not words:
        return ""
    waits_s = report.breakdown["collectives"] * report.step_s
    if report.weights.training.offload_weights:
        update = f", the update there takes {format_seconds(report.update_s)}"
        return (
            f"{words}: {format_bytes(report.brought_bytes)} come down,"
            f" {format_bytes(round(report.weights.returned_bytes))} of gradients go up;"
            f" {format_seconds(waits_s)} are not hidden{update if report.update_s else ''}"
        )
    return (
        f"{words}: {format_seconds(report.gathers_s)} on the links; of gathers and sums of"
        f" gradients {format_seconds(waits_s)} are not hidden"
    )


def _step_words(report: PlanReport) -> str:
    seconds, num_devices = report.whole_step_s, _num_devices(report.plan)
    tokens = f"{format_count(report.tokens_per_s)} tokens/s"
    if num_devices > 1:
        tokens += f", {format_count(report.tokens_per_s / num_devices)} per device"
    if seconds:
        tokens += f"; {format_count(sum(report.plan.seq_lens) / seconds * DAY_S)} a day"
    return f"{between_words(report.model.hardware, seconds)}\n{tokens}"


def _mfu_words(report: PlanReport) -> str:
    masked, unmasked = report.mfu(), report.mfu(masked=False)
    if masked is None or unmasked is None:
        return ""
    peak = report.model.hardware.peak_flops_per_s / 1e12
    return (
        f"{masked:.1%} of {peak:,.4g} TFLOP/s{'' if is_alone(report.plan) else ' each'}, by causal"
        f" pairs; {unmasked:.1%} by all, as PaLM and torchtitan count"
    )


def _inside_words(report: PlanReport) -> str:
    """Return a text line about waits that are part of forwards and backwards, such as all-to-all;
    "" if there are none."""
    shares, found = report.figures.shares(), report.breakdown
    inside = {
        "all-to-all": found["all_to_all"],
        "gathering weights": found["collectives"] - shares["collectives"],
        "copies": found["copies"] - shares["copies"],
    }
    words = share_words(inside)
    return f"\nwaits inside passes: {words}" if words else ""


def runs_words(report: PlanReport, train_on: str = "") -> str:
    """Return a text that says whether this release can run the plan, and how. `train_on`: the
    device of each process, by name, if `furlong train` would choose this plan there; else empty."""
    if report.refused:
        return f"no: {report.refused}"
    if report.missing:
        return f"no: it needs {report.missing}; furlong train makes a plan of its own"
    if train_on:
        if report.num_processes == 1:
            return f"yes: furlong train decides for it on one {train_on}"
        started = f"torchrun --nproc-per-node {report.num_processes} -m furlong train"
        return f"yes: {started}\ndecides for it, each process on one {train_on}"
    return "yes, from Python: furlong.Engine.run takes a plan; furlong train chooses its own"


def _chunk_words(plan: ChunkPlan) -> str:
    kinds = Counter(map(plan.kind, range(len(plan.chunks))))
    dummies = kinds.pop("dummy", 0)
    named = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    sizes = [chunk.num_tokens for chunk in plan.chunks if not chunk.is_dummy]
    span = count_words(sizes[0], "token")
    if min(sizes) < max(sizes):
        mean = sum(sizes) / len(sizes)
        span = f"{min(sizes):,} to {max(sizes):,} tokens, mean {mean:,.0f}"
    more = f"; besides {count_words(dummies, 'dummy chunk')}, to run in lockstep" if dummies else ""
    if plan.trees:
        branches = sum(s.parent is not None for chunk in plan.chunks for s in chunk.slices)
        more += f"; {count_words(branches, 'branch')} of {count_words(len(plan.trees), 'sequence')}"
    return f"{count_words(len(sizes), 'chunk')} ({named}) of {span}{more}"


def _traffic_words(report: PlanReport) -> list[str]:
    """Return a line for each kind of offloaded tensors: the bytes that all ranks write and read."""
    written: Counter[str] = Counter()
    read: Counter[str] = Counter()
    for own in report.memory:
        for kind, moved in own.traffic.to_json().items():
            name = f"{KIND_WORDS[kind]}, {moved['offload']}"
            written[name] += moved["written_bytes"]
            read[name] += moved["read_bytes"]
    return [
        f"{name}: {format_bytes(written[name])} written, {format_bytes(read[name])} read"
        for name in written
    ]


def _layout_words(report: PlanReport) -> str:
    """Return in words the layout and the layers of each stage."""
    plan, layout, of_pool = report.plan, report.layout, ""
    sizes, size = plan.sizes_of_places, plan.sp_size
    if layout["sp"] < size:
        of_pool = f", in pools of {size} that shard no sequence"
    elif sizes != (size,):
        of_pool = f", sequences on {' or '.join(map(str, sizes))} of a pool's {size} devices"
    axes = " x ".join(f"{name} {layout[name]}" for name in ("dp", "sp", "pp"))
    devices = f"{axes} = {count_words(_num_devices(plan), 'device')}{of_pool}"
    runs = [(height, len(list(equal))) for height, equal in groupby(plan.stages)]
    layers = ", ".join(f"{num} x {height}" if num > 1 else f"{height}" for height, num in runs)
    passes_states = layout["sp"] > 1 and any(n.is_recurrent for n in report.model.shape.layers)
    return (
        f"{'one device' if is_alone(plan) else devices};"
        f" {count_words(len(plan.stages), 'stage')}, layers per stage: {layers}"
    ) + "; recurrent layers run on one device after the other of a group" * passes_states


def _memory_words(report: PlanReport) -> str:
    """Return in words the peak of the rank that needs most memory, and the rest of its budget."""
    peaks, budget = [rank.peak_bytes for rank in report.memory], report.budget_bytes
    left = budget - max(peaks)
    amounts = max(peaks), budget, abs(left)
    texts, unit = bytes_alike(amounts)
    peak, most, rest = (f"{text} {unit}" for text in texts)
    if texts[0] == "0.00":
        peak, most, rest = map(format_bytes, amounts)
    words = f"peak {peak}, budget {most}"
    if not is_alone(report.plan):
        words = f"peak {peak} on rank {peaks.index(max(peaks))}, budget {most} each"
    words += f": {rest} {'left' if left >= 0 else 'too much'}"
    if report.plan.sp_size > 1:
        words += f"; a rank is {report.plan.sp_size} devices"
    return words


def _memory_parts(report: PlanReport) -> list[str]:
    """Return the lines of a table of bytes, all in one unit. Rows: the parts of device memory at
    the peak, their sum, and the peaks of CPU memory and disk. Columns: groups of ranks with equal
    bytes. If all ranks are equal, the table is one line."""
    heads = [*(PART_WORDS.get(part, part) for part in PARTS), "device", *TARGETS]
    values = [
        [
            *(own.peak[part] for part in PARTS), own.peak_bytes,
            *(int(getattr(own, name).max(initial=0)) for name in TARGETS),
        ]
        for own in report.memory
    ]  # fmt: skip
    texts, unit = bytes_alike([num_bytes for own in values for num_bytes in own])
    rows = [(head, texts[place :: len(heads)]) for place, head in enumerate(heads)]
    rows = [(head, of_ranks) for head, of_ranks in rows if {*of_ranks} != {"0.00"}]
    shown = [head for head, _ in rows]
    ranks: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, held in enumerate(report.plan.held):
        span = f"{held[0]}-{held[-1]}" if len(held) > 1 else str(held[0]) if held else "-"
        ranks[span, *(of_ranks[rank] for _, of_ranks in rows)].append(rank)
    note = ""
    if len(ranks) > _MAX_RANKS:
        few, note = choose_ranks(report.plan, report.timeline, _MAX_RANKS)
        kept = {row: [rank for rank in own if rank in few] for row, own in ranks.items()}
        ranks = defaultdict(list, {row: own for row, own in kept.items() if own})
    if len(ranks) == 1:
        ((_, *row),) = ranks
        words = ", ".join(f"{name} {text}" for name, text in zip(shown, row, strict=True))
        return [line("", f"in {unit}: {words}")]
    columns = [["rank", "stages", *shown], *([_spans(own), *row] for row, own in ranks.items())]
    table = align([*zip(*columns, strict=True)], left=("rank",))
    return [line("", f"in {unit}, by rank{f' ({note})' if note else ''}:")] + [
        f"  {row}" for row in table
    ]


def _spans(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _num_devices(plan: ChunkPlan) -> int:
    return len(plan.actions) * plan.sp_size


def format_figures(figures: SimulatedStep) -> str:
    """Return lines for step time, bubble ratio, breakdown of the ranks' time, and memory peaks."""
    lines = [
        f"step {format_seconds(figures.duration_s)}, lost {lost_words(figures)}",
        figure_words(figures),
    ]
    for word, peaks in (
        ("device peak", figures.peak_device_bytes),
        ("offloaded peak", figures.peak_offloaded_bytes),
    ):  # fmt: skip
        if any(peaks):
            lines.append(f"{word} of each rank: {', '.join(map(format_bytes, peaks))}")
    return "\n".join(lines)


def align(rows: Sequence[Sequence[str]], *, left: Collection[str] = ()) -> list[str]:
    """Return the rows as lines with aligned columns, two spaces apart. Columns whose head is in
    `left` are aligned left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if head in left else cell.rjust(width)
            for head, cell, width in zip(rows[0], row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


_REASON = 160
"""Most characters of a refusal; `--json` has all of it."""


@dataclass(frozen=True)
class MethodRow:
    """A planning method with its best plan, or the reason why it has none."""

    method: str
    options: str = ""
    report: PlanReport | None = None
    refusal: str = ""


def format_comparison(rows: Sequence[MethodRow]) -> str:
    """Return a table of the methods that have a plan, fastest first. Below the table are the lost
    time (bubble) and the options of each method, and then the reasons why other methods have no
    plan."""
    planned = _by_time(rows)
    table = [
        ["method", "dp x sp x pp", "runs", "step", "vs best", "tokens/s", "lost", "peak"],
        *(
            [
                row.method, " x ".join(str(report.layout[name]) for name in ("dp", "sp", "pp")),
                "" if report.runs_here else "no", format_seconds(report.step_s),
                f"{report.step_s / planned[0][1].step_s:.2f}x", format_count(report.tokens_per_s),
                f"{report.figures.bubble_ratio:.1%}", format_bytes(report.peak_bytes),
            ]
            for row, report in planned
        ),
    ]  # fmt: skip
    columns = [own for own in zip(*table, strict=True) if any(own[1:])]
    lines = align(list(zip(*columns, strict=True)), left=("method",))
    for row, report in planned:
        pool = f"{report.pool_idle_ratio:.1%} of processes' time in pools is idle"
        told = [share_words(report.lost), _inside_words(report).lstrip("\n")]
        told += [pool if report.pool_idle_ratio >= 5e-4 else "", row.options]
        lines.append(line(row.method, "\n".join(filter(None, told))))
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.report is None:
            reasons.setdefault(row.refusal, []).append(row.method)
    for reason, methods in reasons.items():
        words = f"no plan for {', '.join(methods)}: {in_short(reason, _REASON)}"
        lines.append(line("", words))
    return "\n".join(lines)


def comparison_json(rows: Sequence[MethodRow]) -> list[dict[str, Any]]:
    """Return the methods as JSON values: those with a plan, fastest first, then the others."""
    planned = _by_time(rows)
    values: list[dict[str, Any]] = [
        {"method": row.method, "options": row.options}
        | {"relative": report.step_s / planned[0][1].step_s, **report.to_json()}
        for row, report in planned
    ]
    refused = [row for row in rows if row.report is None]
    return values + [{"method": row.method, "refusal": row.refusal} for row in refused]


def _by_time(rows: Sequence[MethodRow]) -> list[tuple[MethodRow, PlanReport]]:
    planned = [(row, row.report) for row in rows if row.report is not None]
    return sorted(planned, key=lambda pair: pair[1].step_s)

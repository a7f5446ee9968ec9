"""A plan's report as lines for a terminal.

Several methods on one batch: a table, and the refusals below it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from furlong.cost.memory import PARTS
from furlong.errors import in_short
from furlong.plan.plan import TARGETS, ChunkPlan
from furlong.plan.text import KIND_WORDS, offload_in_words
from furlong.report.report import PlanReport, Wait
from furlong.report.scene import (
    PART_WORDS,
    choose_ranks,
    figure_words,
    is_alone,
    share_words,
)
from furlong.simulate.clock import StepFigures
from furlong.units import count_words, format_bytes, format_count, format_seconds

_MAX_RANKS = 16
_INDENT = 11


def line(name: str, text: str) -> str:
    """One line of the page: a word, then what it says; further lines are indented."""
    return name.ljust(_INDENT) + text.replace("\n", "\n" + " " * _INDENT)


def format_report(report: PlanReport) -> str:
    """The page of a plan: its chunks and actions, its seconds, its bytes."""
    plan, figures, alone = report.plan, report.figures, is_alone(report.plan)
    breakdown = share_words({_words(name): share for name, share in report.breakdown.items()})
    each = f" ({format_count(report.tokens_per_s / _num_devices(plan))} per device)"
    whose = "" if alone else "ranks' "
    update = report.update_s
    order = "1F1B over chunks" if len(plan.stages) > 1 else "chunk-first"
    if max(map(len, plan.held)) > 1:
        order = "layer-first, each stage for all chunks before the next"
    is_uneven = report.pool_idle_ratio >= 5e-4
    slowest = ": the slowest of a pool holds the others up" if is_uneven else ""
    texts = {
        "chunks": _chunk_words(plan),
        "order": f"{order}: forwards ascending, backwards descending within a sequence",
        "offload": offload_in_words(plan.offload),
        "moved": "\n".join(_traffic_words(report)),
        "layout": _layout_words(report),
        "step": f"{format_seconds(report.step_s)} predicted,"
        f" {format_count(report.tokens_per_s)} tokens/s{'' if alone else each}"
        + (f"\n{format_seconds(report.step_s + update)} with the optimizer" if update else ""),
        "bubble": f"{figures.bubble_ratio:.1%} of the {whose}time is no first forward and no"
        f" backward\n{figure_words(figures)}",
        "pool": f"{report.pool_idle_ratio:.1%} of the processes' time in passes is idle{slowest}"
        if plan.sp_size > 1
        else "",
        "time": breakdown,
        "memory": _memory_words(report),
    }
    lines = [line(name, text) for name, text in texts.items() if text]
    return "\n".join([*lines, *("  " + row for row in _memory_table(report))])


def runs_words(report: PlanReport, train_on: str = "", refused: str = "") -> str:
    """Whether this release runs the plan. `train_on`: the device on which a run would decide for
    this very plan, one for each of the report's processes. `refused`: why it would not."""
    if refused:
        return f"no, furlong train refuses {refused}"
    if report.missing:
        own = "furlong train makes a plan of its own"
        return f"no, it needs {report.missing}; {own}"
    if train_on:
        if report.num_processes == 1:
            return f"yes: furlong train decides for it on one {train_on}"
        started = f"torchrun --nproc-per-node {report.num_processes}"
        return f"yes: {started} -m furlong train decides for it, each process on one {train_on}"
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
    """A text per kind of memory that travels, over all ranks."""
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
    """Replicas, pools, stages, and the layers of each stage."""
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
    return (
        f"{'one device' if is_alone(plan) else devices};"
        f" {count_words(len(plan.stages), 'stage')}, layers per stage: {layers}"
    )


def _memory_words(report: PlanReport) -> str:
    """The rank that needs most, and what is left of its budget."""
    peaks = [rank.peak_bytes for rank in report.memory]
    left = report.budget_bytes - max(peaks)
    over = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} too much"
    peak, budget = f"peak {format_bytes(max(peaks))}", f"budget {format_bytes(report.budget_bytes)}"
    if is_alone(report.plan):
        return f"{peak}, {budget}: {over}"
    of_pool = f"; a rank is {report.plan.sp_size} devices" if report.plan.sp_size > 1 else ""
    return f"{peak} on rank {peaks.index(max(peaks))}, {budget} per device: {over}{of_pool}"


def _memory_table(report: PlanReport) -> list[str]:
    """A row for ranks with equal ones: the parts at their peak, their sum, the peaks of CPU memory
    and disk."""
    peaks = [rank.peak for rank in report.memory]
    parts = [part for part in PARTS if any(peak[part] for peak in peaks)]
    lower = {
        name: values
        for name in TARGETS
        if any(values := [int(getattr(own, name).max(initial=0)) for own in report.memory])
    }
    names = [PART_WORDS.get(part, part) for part in parts]
    head = ["rank", "stages", *names, "device", *lower]
    ranks: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, held in enumerate(report.plan.held):
        values = [*(peaks[rank][part] for part in parts), report.memory[rank].peak_bytes]
        values += [of_ranks[rank] for of_ranks in lower.values()]
        span = f"{held[0]}-{held[-1]}" if len(held) > 1 else str(held[0]) if held else "-"
        ranks[span, *map(format_bytes, values)].append(rank)
    note = ""
    if len(ranks) > _MAX_RANKS:
        shown, note = choose_ranks(report.plan, report.timeline, _MAX_RANKS)
        kept = {row: [rank for rank in own if rank in shown] for row, own in ranks.items()}
        ranks = defaultdict(list, {row: own for row, own in kept.items() if own})
    rows = [head, *([_spans(own), *row] for row, own in ranks.items())]
    if is_alone(report.plan):
        rows = [row[2:] for row in rows]
    return [*align(rows), *([f"({note})"] if note else [])]


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


def format_figures(figures: StepFigures) -> str:
    """The step's time, its bubble ratio, what the ranks' time goes into, and the peaks of each."""
    lines = [
        f"step {format_seconds(figures.duration_s)}, bubble {figures.bubble_ratio:.2%} "
        "(time without a first forward or a backward)",
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
    """Lines of equal columns, two spaces apart; those whose heads are in `left` begin at the
    left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if head in left else cell.rjust(width)
            for head, cell, width in zip(rows[0], row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


_WIDTH = 160
"""Most characters of a reason for having no plan; `--json` has all of it."""
_WAITS: tuple[Wait, ...] = ("all_to_all", "collectives", "copies", "idle_and_p2p")
"""Columns of the time in which nothing is computed."""


@dataclass(frozen=True)
class Row:
    """A method and its best plan, or why it has none."""

    method: str
    options: str = ""
    report: PlanReport | None = None
    refusal: str = ""


def format_comparison(rows: Sequence[Row]) -> str:
    """The methods that have a plan, fastest first; in footnotes those that have none, with the
    reason."""
    planned = _by_time(rows)
    table = [[
        "method", "dp x sp x pp", "runs here", "s/step", "vs best", "tokens/s", "bubble",
        "idle in pools", *map(_words, _WAITS), "peak", "options",
    ]]  # fmt: skip
    for row, report in planned:
        shares = [report.breakdown[name] for name in _WAITS]
        layout = " x ".join(str(report.layout[name]) for name in ("dp", "sp", "pp"))
        table.append([
            row.method, layout, "no" if report.missing else "yes",
            format_seconds(report.step_s), f"{report.step_s / planned[0][1].step_s:.2f}x",
            format_count(report.tokens_per_s), f"{report.figures.bubble_ratio:.1%}",
            *(f"{share:.1%}" for share in (report.pool_idle_ratio, *shares)),
            format_bytes(report.peak_bytes), row.options,
        ])  # fmt: skip
    # columns in which every row says nothing, or no share, are left out
    columns = [
        own for own in zip(*table, strict=True) if not {"", "0.0%", "-0.0%"}.issuperset(own[1:])
    ]
    lines = align(list(zip(*columns, strict=True)), left=("method", "options"))
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.report is None:
            reasons.setdefault(row.refusal, []).append(row.method)
    for reason, methods in reasons.items():
        lines.append(in_short(f"{', '.join(methods)}: no plan: {reason}", _WIDTH))
    return "\n".join(lines)


def comparison_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The methods as plain values, in the same order."""
    planned = _by_time(rows)
    values: list[dict[str, Any]] = [
        {"method": row.method, "options": row.options}
        | {"relative": report.step_s / planned[0][1].step_s, **report.to_json()}
        for row, report in planned
    ]
    refused = [row for row in rows if row.report is None]
    return values + [{"method": row.method, "refusal": row.refusal} for row in refused]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _by_time(rows: Sequence[Row]) -> list[tuple[Row, PlanReport]]:
    planned = [(row, row.report) for row in rows if row.report is not None]
    return sorted(planned, key=lambda pair: pair[1].step_s)

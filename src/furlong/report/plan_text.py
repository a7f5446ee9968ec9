"""A plan's report as lines for a terminal."""

from __future__ import annotations

from collections import Counter, defaultdict

from furlong.cost.memory.levels import PARTS
from furlong.cost.memory.traffic import tier_of
from furlong.plan.text import tiers_in_words
from furlong.plan.values import ChunkPlan, Forward, Recompute
from furlong.report.pictures.ranks import choose_ranks, held_stages, ranks_per_replica
from furlong.report.plan_report import PlanReport
from furlong.report.tables import align
from furlong.report.words import BREAKDOWN_WORDS, MOVED_WORDS, PART_WORDS, count_words, share_words
from furlong.units import format_bytes, format_count, format_seconds

_MAX_RANKS = 16
_INDENT = 11


def line(name: str, text: str) -> str:
    """One line of the page: a word, then what it says; further lines are indented."""
    return name.ljust(_INDENT) + text.replace("\n", "\n" + " " * _INDENT)


def format_report(report: PlanReport) -> str:
    """The page of a plan: its chunks and actions, its seconds, its bytes."""
    plan, figures = report.plan, report.figures
    breakdown = "   ·   ".join(
        f"{word} {getattr(report.breakdown, name):.1%}"
        for name, word in BREAKDOWN_WORDS.items()
        if getattr(report.breakdown, name) >= 5e-4
    )
    lines = [
        line("chunks", _chunk_words(plan)),
        line("kept", _kept_words(plan)),
        line("recompute", "\n".join(recompute_words(plan))),
        line("order", order_words(plan)),
        line("tier", tiers_in_words(plan.tiers)),
        *([line("moved", "\n".join(moved))] if (moved := traffic_words(report)) else []),
        line("layout", layout_words(plan)),
        line(
            "step",
            f"{format_seconds(report.step_s)} predicted, {format_count(report.tokens_per_s)}"
            f" tokens/s ({format_count(report.tokens_per_s / _num_devices(plan))} per device)",
        ),
        line(
            "bubble",
            f"{figures.bubble_ratio:.1%} of the ranks' time is no first forward and no backward\n"
            + share_words(figures),
        ),
        line("time", breakdown),
        line("memory", memory_words(report)),
        *("  " + row for row in memory_table(report)),
    ]
    return "\n".join(lines)


def runs_words(report: PlanReport, train_on: str = "") -> str:
    """Whether this release runs the plan. `train_on`: the device on which a run would decide for
    this very plan."""
    if report.missing:
        return f"no, it needs {report.missing} (see --runnable)"
    if train_on:
        return f"yes: furlong train decides for it on one {train_on}"
    return "yes, from Python: furlong.Engine.run takes a plan; furlong train chooses its own"


def memory_words(report: PlanReport) -> str:
    """The rank that needs most, and what is left of its budget."""
    peaks = [rank.device_bytes for rank in report.memory]
    worst = max(range(len(peaks)), key=peaks.__getitem__)
    left = report.budget_bytes - peaks[worst]
    over = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} too much"
    return (
        f"peak {format_bytes(peaks[worst])} on rank {worst},"
        f" budget {format_bytes(report.budget_bytes)} per device: {over}"
        + (f"; a rank is {report.plan.sp_size} devices" if report.plan.sp_size > 1 else "")
    )


def traffic_words(report: PlanReport) -> list[str]:
    """A text per kind of memory that travels, over all ranks."""
    sums: dict[str, list[int]] = {}
    for traffic in report.traffic:
        for kind, moved in traffic.by_kind().items():
            name = f"{MOVED_WORDS[kind]}, {tier_of(traffic.tiers, kind)}"
            sums[name] = [a + b for a, b in zip(sums.get(name, (0, 0)), moved, strict=True)]
    return [
        f"{name}: {format_bytes(written)} written, {format_bytes(read)} read"
        for name, (read, written) in sums.items()
    ]


def memory_table(report: PlanReport) -> list[str]:
    """A row per rank: the parts at its peak, their sum, the peaks of host and disk."""
    shown = choose_ranks(report.plan, report.timeline, _MAX_RANKS)
    parts = [part for part in PARTS if any(rank.parts[part] for rank in report.memory)]
    lower = {
        name: [getattr(rank, f"{name}_bytes") for rank in report.memory]
        for name in ("host", "disk")
    }
    lower = {name: values for name, values in lower.items() if any(values)}
    names = [PART_WORDS.get(part, part) for part in parts]
    rows = [["rank", "stages", *names, "device", *lower]]
    stages = held_stages(report.plan)
    for rank in shown.ranks:
        own = report.memory[rank]
        values = [*(own.parts[part] for part in parts), own.device_bytes]
        values += [of_ranks[rank] for of_ranks in lower.values()]
        held = stages[rank]
        span = f"{held[0]}-{held[-1]}" if len(held) > 1 else str(held[0]) if held else "-"
        rows.append([str(rank), span, *map(format_bytes, values)])
    return [*align(rows), *([f"({shown.note})"] if shown.note else [])]


def layout_words(plan: ChunkPlan) -> str:
    """Replicas, groups, stages, and the layers of each stage."""
    per_replica = ranks_per_replica(plan)
    dp = len(plan.actions) // per_replica
    heights = Counter(plan.stages)
    layers = (
        ", ".join(map(str, plan.stages))
        if len(plan.stages) <= 16
        else ", ".join(f"{count} of {height}" for height, count in sorted(heights.items()))
    )
    return (
        f"dp {dp} x sp {plan.sp_size} x pp {per_replica}"
        f" = {count_words(_num_devices(plan), 'device')};"
        f" {count_words(len(plan.stages), 'stage')}, layers per stage: {layers}"
    )


def order_words(plan: ChunkPlan) -> str:
    """How the grid of chunks and stages is walked."""
    if max(len(stages) for stages in held_stages(plan)) > 1:
        return "layer-first: each rank finishes a stage for all chunks before the next"
    if len(plan.stages) > 1:
        return "1F1B over chunks: forwards ascending, backwards descending within a sequence"
    return "chunk-first: forwards ascending, backwards descending within a sequence"


def recompute_words(plan: ChunkPlan) -> list[str]:
    """A text per stage: cells that run again whole, layers that are checkpointed; equal stages
    share one."""
    whole: Counter[int] = Counter()
    layers: dict[int, list[int]] = defaultdict(list)
    cells: Counter[int] = Counter()
    for actions in plan.actions:
        for action in actions:
            if isinstance(action, Recompute):
                whole[action.stage] += 1
            elif isinstance(action, Forward):
                cells[action.stage] += 1
                layers[action.stage].append(action.recompute_layers)
    texts: dict[str, list[int]] = {}
    for stage in range(len(plan.stages)):
        text = f"{whole[stage]} of {count_words(cells[stage], 'chunk')} run again"
        if any(layers[stage]):
            low, high = min(layers[stage]), max(layers[stage])
            mean = sum(layers[stage]) / len(layers[stage])
            span = f"{low}" if low == high else f"{low} to {high} (mean {mean:.1f})"
            text += f", {span} of {plan.stages[stage]} layers checkpointed"
        texts.setdefault(text, []).append(stage)
    return [f"{_stages_words(stages)}: {text}" for text, stages in texts.items()]


def _stages_words(stages: list[int]) -> str:
    if len(stages) == 1:
        return f"stage {stages[0]}"
    if stages == list(range(stages[0], stages[-1] + 1)):
        return f"stages {stages[0]}-{stages[-1]}"
    return "stages " + ", ".join(map(str, stages))


def _chunk_words(plan: ChunkPlan) -> str:
    sizes = [chunk.num_tokens for chunk in plan.chunks]
    kinds = Counter(plan.kind(index) for index in range(len(plan.chunks)))
    named = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    span = f"{min(sizes):,} to {max(sizes):,}" if min(sizes) < max(sizes) else f"{sizes[0]:,}"
    mean = f", mean {sum(sizes) / len(sizes):,.0f}" if min(sizes) < max(sizes) else ""
    return f"{count_words(len(sizes), 'chunk')} ({named}) of {span} tokens{mean}"


def _kept_words(plan: ChunkPlan) -> str:
    words = {
        "all": "the graph",
        "attention": "input, K,V and attention",
        "kv": "input and K,V",
        "input": "the input",
    }
    cells = ", ".join(
        f"{words[keep]} of {count_words(n, 'cell')}" for keep, n in _kept_cells(plan).items()
    )
    if plan.groups:
        cells += f"; num_retained {num_retained(plan)}"
    return cells


def _kept_cells(plan: ChunkPlan) -> dict[str, int]:
    """How many cells keep what between forward and backward, by the values of Keep."""
    keeps = Counter(a.keep for acts in plan.actions for a in acts if isinstance(a, Forward))
    return {keep: keeps[keep] for keep in ("all", "attention", "kv", "input") if keeps[keep]}


def num_retained(plan: ChunkPlan) -> int:
    """The most chunks of one sequence that keep their graphs at a stage."""
    retained = {
        (action.chunk, action.stage)
        for actions in plan.actions
        for action in actions
        if isinstance(action, Forward) and action.keep == "all"
    }
    return max(
        (
            sum((chunk, stage) in retained for chunk in group)
            for group in plan.groups.values()
            for stage in range(len(plan.stages))
        ),
        default=0,
    )


def _num_devices(plan: ChunkPlan) -> int:
    return len(plan.actions) * plan.sp_size

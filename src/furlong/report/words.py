"""The words over a picture and beside a table, and tables of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from furlong.plan.plan import ChunkPlan, Tiers
from furlong.simulate.figures import StepFigures
from furlong.units import count_words, format_bytes, format_count, format_seconds, plural

SHARE_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recompute",
    "copies": "waiting for copies",
    "messages": "waiting for messages",
    "collectives": "waiting for collectives",
    "waiting": "idle",
}
"""Words for the names of StepFigures.shares()."""

_ALONE_WORDS = {"collectives": "adding gradients up"}
"""Words for the same on one device."""

BREAKDOWN_WORDS = {
    "compute": "compute",
    "all_to_all": "all-to-all",
    "collectives": "collectives",
    "copies": "copies",
    "idle_and_p2p": "idle and P2P",
}
"""Words for the fields of a plan report's Breakdown."""

MOVED_WORDS = {
    "kv": "K,V",
    "kv_gradients": "dK,dV",
    "inputs": "stage inputs",
    "attention": "attention outputs",
    "graphs": "graphs",
}
"""Words for the kinds of memory that may live in another tier."""

PART_WORDS = {"kv": "K,V", "kv_gradients": "dK,dV"}
"""The parts of memory that are not called what they are in code."""


def format_time(value: float, unit: str) -> str:
    """A time of a timeline in its unit."""
    if unit == "s":
        return format_seconds(value)
    return f"{value:,.0f} {unit}" if value >= 10_000 else f"{value:.4g} {unit}"


def title_words(name: str, figures: StepFigures, time_unit: str, *, alone: bool) -> str:
    """A picture's headline: the name of the plan, its bubble ratio, time and peak memory. `alone`:
    one device, which waits for no other."""
    parts = [name] if name else []
    parts += [
        *([] if alone else [f"bubble {figures.bubble_ratio:.1%}"]),
        f"step {format_time(figures.duration_s, time_unit)}",
    ]
    if peak := max(figures.peak_device_bytes, default=0):
        parts.append(f"peak {format_bytes(peak)}")
    return "   ·   ".join(parts)


def lower_words(tiers: Tiers) -> str:
    """The tiers below the device: host, disk, or both."""
    used = {tiers.kv, tiers.inputs, tiers.attention, tiers.graphs}
    return " and ".join(tier for tier in ("host", "disk") if tier in used) or "host"


def batch_words(plan: ChunkPlan) -> str:
    """The size of a plan's batch and of its grid."""
    dummies = sum(chunk.is_dummy for chunk in plan.chunks)
    counts = (
        count_words(len(plan.seq_lens), "sequence"),
        f"{format_count(sum(plan.seq_lens))} {plural(sum(plan.seq_lens), 'token')}",
        count_words(len(plan.chunks) - dummies, "chunk")
        + (f" and {count_words(dummies, 'dummy chunk')}" if dummies else ""),
        count_words(len(plan.stages), "stage"),
    )
    ranks = "" if is_alone(plan) else f", {count_words(len(plan.actions), 'rank')}"
    return ", ".join(counts) + ranks


def is_alone(plan: ChunkPlan) -> bool:
    """Whether a plan is of one device."""
    return len(plan.actions) * plan.sp_size == 1


def share_words(figures: StepFigures, *, alone: bool) -> str:
    """The shares of the ranks' time, in words."""
    words = SHARE_WORDS | (_ALONE_WORDS if alone else {})
    return "   ·   ".join(
        f"{words[name]} {share:.1%}" for name, share in figures.shares().items() if share >= 5e-4
    )


def format_figures(figures: StepFigures, time_unit: str = "s", *, alone: bool = False) -> str:
    """The step's time, its bubble ratio, and what each rank's time goes into.

    `time_unit`: "s", or another word where the costs had no hardware.
    """
    columns = [
        (word, f"{name}_s")
        for name, word in (SHARE_WORDS | (_ALONE_WORDS if alone else {})).items()
        if any(getattr(rank, f"{name}_s") > 0 for rank in figures.ranks)
    ]
    peaks = (
        ("device peak", figures.peak_device_bytes),
        ("host and disk peak", figures.peak_host_bytes),
    )
    shown_peaks = [(word, values) for word, values in peaks if any(values)]
    rows = [["rank", *(word for word, _ in columns), *(word for word, _ in shown_peaks)]]
    for index, rank in enumerate(figures.ranks):
        times = [format_time(getattr(rank, name), time_unit) for _, name in columns]
        rows.append([str(index), *times, *(format_bytes(v[index]) for _, v in shown_peaks)])
    if alone:
        rows = [row[1:] for row in rows]
    lines = [
        f"step {format_time(figures.duration_s, time_unit)}, bubble {figures.bubble_ratio:.2%} "
        "(time without a first forward or a backward)",
        share_words(figures, alone=alone),
    ]
    return "\n".join([*lines, *align(rows)])


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

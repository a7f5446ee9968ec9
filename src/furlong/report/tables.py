"""Figures as text for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from furlong.report.words import SHARE_WORDS, format_time, share_words
from furlong.simulate.figures import StepFigures
from furlong.units import format_bytes


def format_figures(figures: StepFigures, time_unit: str = "s") -> str:
    """The step's time, its bubble ratio, and what each rank's time goes into.

    `time_unit`: "s", or another word where the costs had no hardware.
    """
    columns = [
        (word, f"{name}_s")
        for name, word in SHARE_WORDS.items()
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
    lines = [
        f"step {format_time(figures.duration_s, time_unit)}, bubble {figures.bubble_ratio:.2%} "
        "(time without a first forward or a backward)",
        share_words(figures),
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

#!/usr/bin/env python3
"""Draw docs/pictures/memory.svg, the picture of the README: extra memory against length.

Measured on two CPU cores (Intel Xeon, torch 2.13.0, transformers 5.23.0), one round of
`benchmarks/long.py --rounds 1 --tokens 2048,4096,8192,16384 --warmup-tokens 512`.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

PICTURE = Path(__file__).parents[1] / "docs/pictures/memory.svg"
TOKENS = (2048, 4096, 8192, 16384)
# name, MiB at each length, colour (Okabe and Ito), where its name stands
CURVES = (
    ("transformers, gradient checkpointing", (402, 748, 1270, 2580), "#D55E00", "o"),
    ("furlong, all on the device", (472, 564, 664, 905), "#56B4E9", "s"),
    ("furlong, kept tensors on disk", (158, 167, 175, 198), "#0072B2", "^"),
)
INK = "#24292f"


def draw() -> Figure:
    """The figure: a line for each system, named at its end."""
    figure = Figure(figsize=(9, 3.7), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for name, mib, colour, marker in CURVES:
        gib = [value / 1024 for value in mib]
        axes.plot(TOKENS, gib, color=colour, marker=marker, markersize=6, linewidth=2.4)
        axes.annotate(
            f"{name}\n{gib[-1]:.2g} GiB" if gib[-1] >= 1 else f"{name}\n{mib[-1]:,} MiB",
            (TOKENS[-1], gib[-1]), xytext=(12, 0), textcoords="offset points", va="center",
            color=INK, fontsize=10.5, linespacing=1.35,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xlim(1850, 17500)
    axes.set_ylim(0, 2.75)
    axes.xaxis.set_major_locator(FixedLocator(TOKENS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(FixedLocator([0, 1, 2]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} GiB"))
    axes.set_xlabel("tokens of one sequence", color=INK)
    axes.set_title(
        "Memory of a training step beside model and optimizer",
        loc="left", fontsize=12.5, fontweight="bold", color=INK, pad=12,
    )  # fmt: skip
    axes.grid(True, axis="y", color="#e4e7eb", linewidth=0.8)
    axes.tick_params(length=0, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "furlong"
    draw().savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()

"""Losses by position beyond the trained length as a picture: from where on they rise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from furlong.report.scene import FAINT, INK, LIMIT, tint
from furlong.units import format_count

if TYPE_CHECKING:
    from furlong.train.evaluation import Beyond

_LINE = "#3d7ac6"


def save_beyond_picture(curves: Mapping[str, Beyond], path: Path, title: str | None = None) -> None:
    """Write a .png or .svg with the loss by position of some evaluations, less the loss of trained
    positions in the same sequences.

    The last curve is in colour, earlier ones in grey; of more than four, the first and the last
    three are drawn. A dot marks the position from which a curve rises, a vertical line the trained
    length. `curves`: by what they are of, such as "after step 10".
    """
    first, *others = curves
    shown = [first, *others[-3:]]
    figure = Figure(figsize=(9.0, 4.6), facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12)
    axes = figure.add_subplot()
    for number, name in enumerate(shown):
        beyond, is_last = curves[name], name == shown[-1]
        colour = _LINE if is_last else tint(FAINT, 0.6 * (1 - number / len(shown)))
        middles = [(each.start + each.stop) / 2 for each in beyond.stretches]
        rises = [each.loss - each.trained_loss for each in beyond.stretches]
        axes.plot(middles, rises, color=colour, linewidth=2 if is_last else 1.2, label=name)
        for middle, rise, each in zip(middles, rises, beyond.stretches, strict=True):
            if each.start == beyond.rises_from:
                axes.plot(middle, rise, "o", color=colour, markersize=6)
    trained = curves[shown[-1]].trained_tokens
    axes.legend(loc="upper right", frameon=False, fontsize=8, labelcolor=INK)
    axes.axvline(trained, color=LIMIT, linewidth=1.2)
    axes.annotate(f"trained on: {trained:,} tokens", (trained, 1), (4, -10), fontsize=8,
                  color=LIMIT, xycoords=("data", "axes fraction"),
                  textcoords="offset points")  # fmt: skip
    axes.set_title(title or "Loss by position, of sequences longer than those trained on; dot: it"
                   " rises from here", loc="left", fontsize=11, color=INK)  # fmt: skip
    axes.set_xlabel("position in the sequence, tokens", fontsize=9, color=FAINT, labelpad=6)
    axes.set_ylabel("loss above that of trained positions", fontsize=9, color=FAINT, labelpad=6)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_count(x)))
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    axes.tick_params(labelsize=9, labelcolor=INK, length=0)
    axes.grid(axis="y", color=tint(FAINT, 0.8), linewidth=0.7)
    axes.spines[["left", "right", "top"]].set_visible(False)
    figure.savefig(path, dpi=150)

"""The loss beyond the trained length: by position, in words and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from furlong.report.scene import FAINT, INK, LIMIT, tint
from furlong.units import format_count

_LINE = "#3d7ac6"
_ERRORS = 3.0
"""Standard errors by which a loss must lie above another to be called higher."""


@dataclass(frozen=True, slots=True)
class PositionSpan:
    """The labelled tokens at positions [start, stop) of the sequences longer than those that a run
    trains on, beside the positions that it trains on in the same sequences."""

    start: int
    stop: int
    loss: float
    """Mean over the span's tokens."""
    trained_loss: float
    """Mean over positions in the second half of the trained length, of those sequences that have
    tokens in the span."""
    loss_error: float
    """Standard error of `loss`, as if the tokens were independent."""
    trained_error: float
    """Standard error of `trained_loss`."""
    num_valid_tokens: int


@dataclass(frozen=True, slots=True)
class Beyond:
    """How the loss goes on beyond the length that a run trains on."""

    trained_tokens: int
    """Maximum number of tokens in a sequence to train on."""
    spans: tuple[PositionSpan, ...]
    """Ascending, from position 0 on, without empty ones."""

    @property
    def outside(self) -> list[PositionSpan]:
        """The spans beyond the trained length."""
        return [each for each in self.spans if each.start >= self.trained_tokens]

    @property
    def rises_from(self) -> int | None:
        """The first position beyond the trained length from which on the loss is higher than at
        the trained positions, by more than chance (see `_is_above`); None if there is none."""
        outside = self.outside
        rests = (outside[number:] for number in range(len(outside)))
        return next((rest[0].start for rest in rests if _is_above(rest)), None)


def beyond_in_words(beyond: Beyond) -> str:
    """Return what the loss does beyond the trained length, as words that follow "loss"."""
    last, position = beyond.spans[-1], beyond.rises_from
    within = f"beyond the {beyond.trained_tokens:,} tokens that are trained on"
    losses = f"{last.trained_loss:.3f} within them, {last.loss:.3f} at {last.start:,}"
    same = "in sequences that reach there"
    if position is None:
        return f"does not rise {within}: {losses} {same}"
    return f"rises {within}, from position {position:,}: {losses} {same}"


def save_beyond_picture(curves: Mapping[str, Beyond], path: Path) -> None:
    """Write a .png or .svg with the loss by position of some evaluations, less the loss of trained
    positions in the same sequences.

    The last curve is in colour, earlier ones in grey; of more than four, the first and the last
    three are drawn. A dot marks the position from which a curve rises, a vertical line the trained
    length. `curves`: by what they are of, such as "after step 10".
    """
    from matplotlib.figure import Figure  # late: an evaluation may draw nothing
    from matplotlib.ticker import FuncFormatter

    first, *others = curves
    shown = [first, *others[-3:]]
    figure = Figure(figsize=(9.0, 4.6), facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12)
    axes = figure.add_subplot()
    for number, name in enumerate(shown):
        beyond, is_last = curves[name], name == shown[-1]
        colour = _LINE if is_last else tint(FAINT, 0.6 * (1 - number / len(shown)))
        middles = [(each.start + each.stop) / 2 for each in beyond.spans]
        rises = [each.loss - each.trained_loss for each in beyond.spans]
        axes.plot(middles, rises, color=colour, linewidth=2 if is_last else 1.2, label=name)
        for middle, rise, each in zip(middles, rises, beyond.spans, strict=True):
            if each.start == beyond.rises_from:
                axes.plot(middle, rise, "o", color=colour, markersize=6)
    trained = curves[shown[-1]].trained_tokens
    axes.legend(loc="upper right", frameon=False, fontsize=8, labelcolor=INK)
    axes.axvline(trained, color=LIMIT, linewidth=1.2)
    axes.annotate(f"trained on: {trained:,} tokens", (trained, 1), (4, -10), fontsize=8,
                  color=LIMIT, xycoords=("data", "axes fraction"),
                  textcoords="offset points")  # fmt: skip
    axes.set_title("Loss by position, of sequences longer than those trained on; dot: it rises from"
                   " here", loc="left", fontsize=11, color=INK)  # fmt: skip
    axes.set_xlabel("position in the sequence, tokens", fontsize=9, color=FAINT, labelpad=6)
    axes.set_ylabel("loss above that of trained positions", fontsize=9, color=FAINT, labelpad=6)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_count(x)))
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    axes.tick_params(labelsize=9, labelcolor=INK, length=0)
    axes.grid(axis="y", color=tint(FAINT, 0.8), linewidth=0.7)
    axes.spines[["left", "right", "top"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _is_above(spans: Sequence[PositionSpan]) -> bool:
    """Return whether the first span has a higher loss than the trained positions, and all
    together by more than chance, and none a lower one by more than chance."""
    if spans[0].loss <= spans[0].trained_loss or any(
        each.loss + _ERRORS * each.loss_error < each.trained_loss for each in spans
    ):
        return False
    total = sum(each.num_valid_tokens for each in spans)
    shares = [each.num_valid_tokens / total for each in spans]
    rise = sum(
        share * (each.loss - each.trained_loss) for share, each in zip(shares, spans, strict=True)
    )
    # the trained positions are the same for all, so their error does not average out
    errors = [share * each.loss_error for share, each in zip(shares, spans, strict=True)]
    return rise > _ERRORS * math.hypot(*errors, max(each.trained_error for each in spans))

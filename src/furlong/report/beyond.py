"""The loss beyond the trained length: by position, in words, as a table and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from furlong.errors import in_yaml
from furlong.report.scene import FAINT, INK, LIMIT, SEQUENCE_COLOURS, tint
from furlong.report.text import align
from furlong.units import format_count

_LINE = "#3d7ac6"
_POSITIONS = "max_position_embeddings"
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
        """The first position beyond the trained length at which the loss begins to rise; None if it
        does not. It rises where it is higher than at the trained positions by more than chance
        (`_is_above`): over this span and the following higher ones, or over this span and all later
        ones. NaN is higher."""
        outside = self.outside
        for number, span in enumerate(outside):
            rest = outside[number:]
            run = list(takewhile(_is_higher, rest))
            if run and (_is_above(run) or _is_above(rest)):
                return span.start
        return None

    @property
    def unseen_rise(self) -> float:
        """The largest rise of the loss in the last span that would pass for chance."""
        last = self.spans[-1]
        return _ERRORS * math.hypot(last.loss_error, last.trained_error)

    @property
    def trained_loss(self) -> float:
        """Mean loss of the trained positions, in all sequences with tokens in the first span."""
        return self.spans[0].trained_loss


def beyond_in_words(beyond: Beyond) -> str:
    """Return what the loss does beyond the trained length, as words that follow "loss"."""
    last, position = beyond.spans[-1], beyond.rises_from
    within = f"beyond the {beyond.trained_tokens:,} tokens that are trained on"
    losses = f"{last.trained_loss:.3f} within them, {last.loss:.3f} at {last.start:,}"
    same = "in sequences that reach there"
    if position is None:
        return f"does not rise {within}: {losses} {same}"
    return f"rises {within}, from position {position:,}: {losses} {same}"


@dataclass(frozen=True, slots=True)
class TriedRope:
    """A RoPE and the loss of a model with it, not trained for it."""

    rope: Mapping[str, Any] | None
    """The value of `model.rope`; None: the model's own."""
    factor: float
    positions: int
    """Number of positions that the model's config then names."""
    beyond: Beyond

    @property
    def name(self) -> str:
        """The factor, in words."""
        return f"{self.factor:g}{' (its own)' * (self.rope is None)}"

    @property
    def mean(self) -> float:
        """Mean loss of all tokens."""
        spans = self.beyond.spans
        total = sum(each.loss * each.num_valid_tokens for each in spans)
        return total / sum(each.num_valid_tokens for each in spans)


def format_ropes(tried: Sequence[TriedRope], longest: int) -> str:
    """Return a title, then a table with a row per RoPE, the model's own first. `longest`: tokens of
    the longest sequence."""
    own, trained = tried[0].beyond, tried[0].beyond.trained_tokens
    title = f"loss of held-out sequences longer than {trained:,} tokens, by the factor of RoPE"
    if kinds := {str(each.rope["rope_type"]) for each in tried if each.rope is not None}:
        title += f" ({', '.join(kinds)}), untrained"
    rows = [
        ["factor", "positions", "holds to", f"at {trained // 2:,} to {trained - 1:,}", "cost",
         f"at {own.spans[-1].start:,} to {longest - 1:,}", "mean"]
    ]  # fmt: skip
    for each in tried:
        last, rises_from = each.beyond.spans[-1], each.beyond.rises_from
        rows.append(
            [each.name, f"{each.positions:,}",
             "the end" if rises_from is None else f"{rises_from:,}",
             f"{each.beyond.trained_loss:.3f}",
             f"{each.beyond.trained_loss - own.trained_loss:+.3f}" * (each.rope is not None),
             f"{last.loss:.3f}", f"{each.mean:.3f}"]
        )  # fmt: skip
    return "\n".join([title, *align(rows, left=("factor",))])


def chosen_rope(tried: Sequence[TriedRope], longest: int) -> str:
    """Return in words the RoPE to write into the run file: of those with positions for the longest
    sequence, `longest` tokens, whose loss does not rise, the one with the lowest mean loss, if that
    is below the mean with the model's own RoPE."""
    own, *others = tried
    if own.beyond.rises_from is None:
        needs = "it needs no model.rope"
        if own.positions < longest:
            needs += f"; write into the run file:\nmodel.config: {{{_POSITIONS}: {longest}}}"
        return f"the model's own RoPE holds to {longest:,} tokens{_as_far_as(own)}: {needs}"
    holding = [x for x in others if x.beyond.rises_from is None and x.positions >= longest]
    if holding:
        best = min(holding, key=lambda each: each.mean)
        why = ", of those that do with the lowest mean loss" * (len(holding) > 1)
        holds = f"factor {best.name} holds to {longest:,} tokens{_as_far_as(best)}{why}"
        if best.mean >= own.mean:
            return (
                f"{holds}; but its mean loss of {best.mean:.3f} is not below the {own.mean:.3f} of"
                " the model's own RoPE: try others (--factors), or train on sequences of that"
                " length"
            )
        cost = best.beyond.trained_loss - own.beyond.trained_loss
        return (
            f"{holds}; untrained, it adds {cost:.3f} to the loss of trained positions; write into"
            f" the run file:\nmodel.rope: {in_yaml(best.rope)}"
        )
    furthest = max(tried, key=lambda each: (each.beyond.rises_from or longest, -each.mean))
    reached = furthest.beyond.rises_from or longest
    return (
        f"no factor holds to {longest:,} tokens and gives as many positions; {furthest.name}"
        f" holds furthest, to {reached:,}: try others (--factors), or train on"
        " sequences of that length"
    )


def _as_far_as(tried: TriedRope) -> str:
    start, least = tried.beyond.spans[-1].start, tried.beyond.unseen_rise
    return f" (from {start:,} on a rise below {least:.3f} would not show)"


def save_beyond_picture(
    curves: Mapping[str, Beyond], path: Path, *, of_ropes: bool = False
) -> None:
    """Write a .png or .svg with the loss by position of some evaluations, less the loss of trained
    positions in the same sequences.

    The last curve is in colour, earlier ones in grey; of more than four, the first and the last
    three are drawn. A dot marks the position from which a curve rises, a vertical line the trained
    length.

    Args:
        curves: By what they are of, such as "after step 10".
        of_ropes: The curves are of the same weights with other RoPE, the model's own first: each
            is in a colour, less the loss of trained positions with the model's own.
    """
    from matplotlib.figure import Figure  # late: an evaluation may draw nothing
    from matplotlib.ticker import FuncFormatter

    first, *others = curves
    shown = [first, *others] if of_ropes else [first, *others[-3:]]
    figure = Figure(figsize=(9.0, 4.6), facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12)
    axes = figure.add_subplot()
    for number, name in enumerate(shown):
        beyond, is_last = curves[name], name == shown[-1]
        colour = _LINE if is_last else tint(FAINT, 0.6 * (1 - number / len(shown)))
        if of_ropes:
            colour = INK if number == 0 else SEQUENCE_COLOURS[(number - 1) % len(SEQUENCE_COLOURS)]
        middles = [(each.start + each.stop) / 2 for each in beyond.spans]
        bases = curves[first].spans if of_ropes else beyond.spans
        rises = [
            each.loss - base.trained_loss for each, base in zip(beyond.spans, bases, strict=True)
        ]
        is_thick = is_last or of_ropes
        axes.plot(middles, rises, color=colour, linewidth=2 if is_thick else 1.2, label=name)
        for middle, rise, each in zip(middles, rises, beyond.spans, strict=True):
            if each.start == beyond.rises_from:
                axes.plot(middle, rise, "o", color=colour, markersize=6)
    trained = curves[shown[-1]].trained_tokens
    legend = axes.legend(
        loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8, labelcolor=INK,
        title="factor of RoPE" if of_ropes else None, title_fontsize=8, alignment="left",
    )  # fmt: skip
    legend.get_title().set_color(INK)
    axes.axvline(trained, color=LIMIT, linewidth=1.2)
    axes.annotate(f"trained on: {trained:,} tokens", (trained, 1), (4, -10), fontsize=8,
                  color=LIMIT, xycoords=("data", "axes fraction"),
                  textcoords="offset points")  # fmt: skip
    of, own = "of sequences longer than those trained on", ""
    if of_ropes:
        of, own = "by factor of RoPE, not trained with it", " with its own RoPE"
    axes.set_title(f"Loss by position, {of}; dot: it rises from here", loc="left", fontsize=11,
                   color=INK)  # fmt: skip
    axes.set_xlabel("position in the sequence, tokens", fontsize=9, color=FAINT, labelpad=6)
    label = f"loss above that of trained positions{own}"
    axes.set_ylabel(label, fontsize=9, color=FAINT, labelpad=6)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_count(x)))
    axes.margins(x=0.03)
    axes.set_xlim(left=0)
    axes.tick_params(labelsize=9, labelcolor=INK, length=0)
    axes.grid(axis="y", color=tint(FAINT, 0.8), linewidth=0.7)
    axes.spines[["left", "right", "top"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _is_higher(span: PositionSpan) -> bool:
    return not span.loss <= span.trained_loss  # higher, or no number


def _is_above(spans: Sequence[PositionSpan]) -> bool:
    """Return whether all spans together have a higher loss than the trained positions by more than
    chance, and none a lower one by more than chance. A loss that is no number is higher."""
    if any(each.loss + _ERRORS * each.loss_error < each.trained_loss for each in spans):
        return False
    total = sum(each.num_valid_tokens for each in spans)
    shares = [each.num_valid_tokens / total for each in spans]
    rise = sum(
        share * (each.loss - each.trained_loss) for share, each in zip(shares, spans, strict=True)
    )
    # the trained positions are the same for all, so their error does not average out
    errors = [share * each.loss_error for share, each in zip(shares, spans, strict=True)]
    return not rise <= _ERRORS * math.hypot(*errors, max(each.trained_error for each in spans))

"""Length distribution of a data set as a table and as a picture: where tokens and FLOPs are."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from furlong.plan.lengths import LengthBucket, Lengths
from furlong.report.scene import FAINT, INK, LIMIT, tint
from furlong.report.text import align
from furlong.units import count_words, format_count, plural

_PERCENTILES = (("median", 50.0), ("p90", 90.0), ("p99", 99.0))
_SHARES = (("sequences", "#7b8798"), ("tokens", "#3d7ac6"), ("attention FLOPs", "#e38b29"))
_BAR = 0.27
"""Width of a bar; a bucket is 1 wide."""
_LABELLED_SHARE = 0.045
_FEWEST_BUCKETS = 6
_TITLE_CHARS = 62
"""Most characters of a title; of a longer one the end is shown."""


def format_lengths(lengths: Lengths, title: str) -> str:
    """Return the title, then a table with a row per bucket of lengths and a row of totals."""
    rows = [["tokens", "sequences", "share", "of the tokens", "of attention FLOPs"]]
    for bucket in lengths.buckets():
        span, shares = f"{bucket.above + 1:,} to {bucket.upto:,}", _shares(bucket, lengths)
        rows.append([span, f"{bucket.num_sequences:,}", *map(_percent, shares)])
    rows.append(["all", f"{lengths.num_sequences:,}", "", format_count(lengths.num_tokens), ""])
    return "\n".join([title, *align(rows)])


def summary_line(lengths: Lengths) -> str:
    """Return mean, median, p90, p99 and longest of the lengths, in words."""
    mean = lengths.num_tokens / lengths.num_sequences
    parts = [f"{name} {lengths.percentile(percent):,}" for name, percent in _PERCENTILES]
    return f"mean {mean:,.0f}, {', '.join(parts)}, longest {count_words(lengths.longest, 'token')}"


def save_lengths_picture(
    lengths: Lengths, path: Path, title: str, *, max_seq_len: int | None = None
) -> None:
    """Write a .png or .svg with the shares of sequences, tokens and attention FLOPs in each bucket
    of lengths. `max_seq_len` is marked if some sequences are longer."""
    buckets = lengths.buckets()
    about = (
        f"{count_words(lengths.num_sequences, 'sequence')},"
        f" {format_count(lengths.num_tokens)} {plural(lengths.num_tokens, 'token')};"
        f" {summary_line(lengths)}"
    )
    shown = title if len(title) <= _TITLE_CHARS else f"…{title[1 - _TITLE_CHARS :]}"
    inches = max(9.0, 1.9 + 0.76 * len(buckets)), 4.6
    figure = Figure(figsize=inches, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12)
    axes = figure.add_subplot()
    axes.set_title(shown, loc="left", fontsize=13, color=INK, weight="bold", pad=54,
                   parse_math=False)  # fmt: skip
    axes.annotate(about, (0, 1), (0, 36), xycoords="axes fraction", textcoords="offset points",
                  fontsize=9, color=FAINT)  # fmt: skip
    _draw_bars(axes, [_shares(bucket, lengths) for bucket in buckets])
    axes.set_xticks(range(len(buckets)), [f"≤ {_short(bucket.upto)}" for bucket in buckets])
    axes.set_xlabel("tokens in a sequence", fontsize=9, color=FAINT, labelpad=6)
    axes.set_ylabel("share of the whole", fontsize=9, color=FAINT, labelpad=6)
    if max_seq_len is not None and max_seq_len < lengths.longest:
        _draw_limit(axes, buckets, max_seq_len)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.04), ncols=len(_SHARES), frameon=False,
        borderaxespad=0, fontsize=9, handlelength=1.0, borderpad=0, labelcolor=INK,
    )  # fmt: skip
    figure.savefig(path, dpi=150)


def _draw_bars(axes: Axes, shares: Sequence[tuple[float, ...]]) -> None:
    for number, (name, colour) in enumerate(_SHARES):
        places = [x + (number - 1) * (_BAR + 0.02) for x in range(len(shares))]
        heights = [share[number] for share in shares]
        bars = axes.bar(places, heights, _BAR, color=colour, label=name)
        labels = [f"{floor(100 * own + 0.5)}%" if own >= _LABELLED_SHARE else "" for own in heights]
        axes.bar_label(bars, labels, padding=2, fontsize=7, color=tint(INK, 0.2))
    free = max(0, _FEWEST_BUCKETS - len(shares)) / 2
    axes.set_xlim(-0.6 - free, len(shares) - 0.4 + free)
    axes.set_ylim(0, 1.08 * max(map(max, shares)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.tick_params(labelsize=9, labelcolor=INK, length=0)
    axes.grid(axis="y", color=tint(FAINT, 0.8), linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines.bottom.set_color(tint(FAINT, 0.4))


def _draw_limit(axes: Axes, buckets: Sequence[LengthBucket], max_seq_len: int) -> None:
    """Draw a line at the length at which a run truncates sequences. Each bucket has the same width
    on the x axis; the position of the line inside a bucket is proportional to the length."""
    x, bucket = next((x, own) for x, own in enumerate(buckets) if max_seq_len <= own.upto)
    place = x - 0.5 + (max_seq_len - bucket.above) / (bucket.upto - bucket.above)
    axes.axvline(place, color=LIMIT, linewidth=1.2, linestyle=(0, (5, 3)))
    axes.annotate(
        f"data.max_seq_len {max_seq_len:,}", (place, 1), (0, 3), xycoords=("data", "axes fraction"),
        textcoords="offset points", fontsize=8.5, color=LIMIT, va="bottom",
        ha="right" if place > len(buckets) / 2 else "left",
    )  # fmt: skip


def _shares(bucket: LengthBucket, lengths: Lengths) -> tuple[float, float, float]:
    return (
        bucket.num_sequences / lengths.num_sequences,
        bucket.num_tokens / lengths.num_tokens,
        bucket.num_pairs / lengths.num_pairs,
    )


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{share:.1%}" if share >= 0.001 else "< 0.1%"


def _short(tokens: int) -> str:
    """Return a length as context lengths are written: `512`, `4K`, `128K` or `1M`."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size:
            return f"{tokens // size}{unit}"
    return str(tokens)

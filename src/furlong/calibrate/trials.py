"""Plans that a calibration runs: each tells some of the cost model's terms apart.

Sizes are in units of the largest chunk. What is held out differs from all that is fitted, in size,
keep, order or length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from furlong.planners.options import ChunkOptions
from furlong.units import count_words

TrialModel = Literal["own", "narrow"]
"""The user's widths in few layers; a narrow model of the same head size, whose passes are mostly
launches and attention."""


@dataclass(frozen=True, slots=True)
class Trial:
    subject: TrialModel
    seq_lens: tuple[int, ...]
    options: ChunkOptions
    held_out: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.seq_lens)

    def __str__(self) -> str:
        options, lens = self.options, self.seq_lens
        batch = (
            count_words(lens[0], "token") if len(lens) == 1 else f"{len(lens)} x {lens[0]:,} tokens"
        )
        order = f", layer-first {options.stage_layers}" if options.order == "layer-first" else ""
        layers = options.recompute_layers
        again = f", {count_words(layers, 'layer')} recomputed" if layers else ""
        return (
            f"{self.subject}: {batch}, chunks of {options.size:,}, keep {options.keep},"
            f" {options.num_retained} retained{order}{again}"
        )


def trials(largest: int) -> list[Trial]:
    """The plans, those that are fitted first; `largest`: tokens of the largest chunk."""

    def trial(
        subject: TrialModel, lengths: tuple[float, ...], size: float, held_out: bool = False,
        **options: Any,
    ) -> Trial:  # fmt: skip
        lens = tuple(max(1, round(n * largest)) for n in lengths)
        chosen = ChunkOptions(size=max(1, round(size * largest)), **options)
        return Trial(subject, lens, chosen, held_out)

    layer_first: dict[str, Any] = {"order": "layer-first", "stage_layers": 1, "num_retained": 0}
    fitted = [
        trial("own", (2,), 1 / 2, keep="kv", num_retained=1),
        trial("own", (1,), 1 / 4, keep="attention", num_retained=0),
        trial("own", (1 / 2,), 1 / 16, keep="kv", num_retained=1),
        trial("own", (1,), 1, keep="all"),
        trial("own", (1,), 1 / 4, keep="input", **layer_first),
        trial("own", (1 / 10,) * 10, 1, keep="kv"),
        trial("narrow", (2,), 1 / 2, keep="kv", num_retained=1),
        trial("narrow", (4,), 1, keep="attention", num_retained=0),
        trial("narrow", (1 / 2,), 1 / 16, keep="kv", num_retained=0),
        trial("narrow", (1 / 10,) * 10, 1, keep="kv"),
        trial("narrow", (1,), 1 / 4, keep="input", **layer_first),
    ]
    held_out = [
        trial("own", (3 / 2,), 3 / 8, True, keep="kv", num_retained=0),
        trial("own", (3 / 4,), 1 / 8, True, keep="attention", **layer_first),
        trial("own", (1 / 7,) * 5 + (1,), 3 / 4, True, keep="attention", num_retained=1),
        trial("narrow", (3,), 3 / 4, True, keep="input", num_retained=1),
        trial("narrow", (3 / 2,), 1 / 8, True, keep="attention", **layer_first),
    ]
    return fitted + held_out

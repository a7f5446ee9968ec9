"""Sequence lengths as the papers' data sets have them: what a table states, drawn with a seed.

A preset is a list of (tokens, share of sequences shorter than that). Between two stated points
sequences are spread evenly over the logarithm of their length; where nothing is stated below the
first or above the last point, `shortest_tokens` and `longest_tokens` bound the same spread. So a
sample keeps every stated share, and nothing else is known of it: see `assumed` of each preset and
docs/presets.md. K is 1,024 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from furlong.cost.inputs import look_up
from furlong.errors import ConfigError

K = 1024
TooLong = Literal["drop", "truncate"]


@dataclass(frozen=True, slots=True)
class LengthPreset:
    """A distribution of sequence lengths."""

    stated: tuple[tuple[int, float], ...]
    """(tokens, share of sequences with fewer), both rising; the last share may be below 1."""
    longest_tokens: int
    shortest_tokens: int
    source: str
    assumed: str
    """Assumptions, for the source does not say all."""

    def points(self) -> tuple[tuple[int, float], ...]:
        """The whole distribution: (tokens, share of sequences with fewer), from 0 to 1."""
        inside = [(tokens, share) for tokens, share in self.stated if tokens < self.longest_tokens]
        return ((self.shortest_tokens, 0.0), *inside, (self.longest_tokens, 1.0))


_BELOW_1K = "spread below 1K from 32 tokens on"
PRESETS: dict[str, LengthPreset] = {
    "lmsys-chunkflow": LengthPreset(
        ((K, 0.90499), (4 * K, 0.99539), (8 * K, 0.99908), (32 * K, 0.99987), (128 * K, 0.99996)),
        303 * K, 32, "LMSysChat1M, ChunkFlow Table 1", _BELOW_1K,
    ),
    "lmsys-skrull": LengthPreset(
        ((K, 0.8712), (4 * K, 0.9935), (8 * K, 0.9987), (32 * K, 0.9998), (128 * K, 0.9999)),
        1643 * K, 32, "LMSysChat1M, Skrull Table 1",
        f"{_BELOW_1K}; a sequence beyond 208K fits no micro-batch of Skrull's, so its data was "
        "filtered or cut in a way that the paper does not say",
    ),
    "chunkflow-evaluation": LengthPreset(
        ((K, 0.9817), (4 * K, 0.9972), (8 * K, 0.9983), (32 * K, 0.9992), (128 * K, 0.9998)),
        256 * K, 32, "ChunkFlow Table 2", _BELOW_1K,
    ),
    "wikipedia": LengthPreset(
        ((K, 0.8788), (4 * K, 0.9934), (8 * K, 0.9992), (32 * K, 0.9999)),
        78 * K, 32, "Wikipedia, Skrull Table 1", _BELOW_1K,
    ),
    "chatqa2": LengthPreset(
        ((K, 0.2192), (4 * K, 0.3148), (8 * K, 0.4043), (32 * K, 0.9986)),
        99 * K, 32, "ChatQA2-Long-SFT, Skrull Table 1", _BELOW_1K,
    ),
    "llama3-long-sft": LengthPreset(
        ((4 * K, 0.9989), (16 * K, 0.9989)),
        72 * K, 64, "Llama 3's long SFT mix: 99.89 % average under 1K, 0.11 % around 37K (Skrull "
        "3.1, ChunkFlow 1)",
        "short sequences spread from 64 to 4K (they average 0.95K), long ones from 16K to 72K "
        "(they average 37K)",
    ),
    "github": LengthPreset(
        ((8 * K, 0.915), (64 * K, 0.994)),
        512 * K, 500, "GitHub, InfiniPipe 1: 91.5 % have no more than 8K tokens, 0.6 % exceed 64K "
        "and hold 21.6 % of the tokens",
        "the bounds 500 and 512K, chosen together so that sequences beyond 64K hold 21.6 % of the "
        "tokens; InfiniPipe cuts at its context length (48K to 192K)",
    ),
    "commoncrawl": LengthPreset(
        ((8 * K, 0.97), (64 * K, 0.9995)),
        256 * K, 100, "CommonCrawl, InfiniPipe 5.1: named, its distribution is in a figure only",
        "every number: a long tail between those of wikipedia and github",
    ),
}  # fmt: skip


def length_preset(name: str) -> LengthPreset:
    """The preset of that name. Raises ConfigError that names the nearest."""
    return look_up(name, PRESETS, kind="length preset", source="the name of the lengths")


def sample_lengths(
    name: str,
    count: int,
    seed: int = 0,
    *,
    max_seq_len: int | None = None,
    too_long: TooLong = "drop",
) -> tuple[int, ...]:
    """Lengths of `count` sequences; the same for the same seed.

    too_long: what happens to sequences beyond `max_seq_len`: drop draws others in their place (as
    ChunkFlow excludes them), truncate cuts them (as InfiniPipe does).
    Raises ConfigError for an unknown name, and where `max_seq_len` would drop every sequence.
    """
    preset = length_preset(name)
    points = preset.points()
    shares = [share for _, share in points]
    logs = np.log([tokens for tokens, _ in points])
    highest = 1.0
    if max_seq_len is not None and max_seq_len < preset.longest_tokens and too_long == "drop":
        if max_seq_len <= preset.shortest_tokens:
            raise ConfigError(
                given=f"max_seq_len {max_seq_len}",
                required=f"more than {preset.shortest_tokens} tokens, {name}'s shortest sequence",
                source="the request for lengths",
                change="raise max_seq_len, or let sequences be truncated",
            )
        highest = float(np.interp(np.log(max_seq_len), logs, shares))
    drawn = np.random.default_rng(seed).random(count) * highest
    lengths = np.floor(np.exp(np.interp(drawn, shares, logs))).astype(np.int64)
    if max_seq_len is not None:
        lengths = np.minimum(lengths, max_seq_len)
    return tuple(int(length) for length in np.maximum(lengths, 1))

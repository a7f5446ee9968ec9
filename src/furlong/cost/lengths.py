"""Presets of sequence lengths: length distributions that papers state, and samples from them.

A preset is a list of points (tokens, share of sequences with fewer tokens). The paper states the
points, and samples keep their shares. Which lengths occur between two points is an assumption: they
are log-uniform, also from `shortest_tokens` to the first point and from the last point to
`longest_tokens`. Each preset states further assumptions in `assumed`; see also docs/presets.md. K
is 1,024 tokens.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from furlong.errors import ConfigError, look_up

K = 1024


@dataclass(frozen=True, slots=True)
class LengthPreset:
    """A distribution of sequence lengths."""

    stated: tuple[tuple[int, float], ...]
    """(tokens, share of sequences with fewer), both ascending; the last share may be below 1."""
    longest_tokens: int
    shortest_tokens: int
    source: str
    assumed: str
    """Assumptions beyond what the source states."""

    def points(self) -> tuple[tuple[int, float], ...]:
        """Return the points of the distribution, each (tokens, share of sequences with fewer
        tokens), in ascending order. The first point has share 0, the last one share 1."""
        inside = [(tokens, share) for tokens, share in self.stated if tokens < self.longest_tokens]
        return ((self.shortest_tokens, 0.0), *inside, (self.longest_tokens, 1.0))


@cache
def length_presets() -> dict[str, LengthPreset]:
    """Return the presets of length_presets.toml by name."""
    text = Path(__file__).with_name("length_presets.toml").read_text("utf-8")
    return {name: _preset(**values) for name, values in tomllib.loads(text).items()}


def _preset(stated: list[tuple[int, float]], longest_k: int, **values: Any) -> LengthPreset:
    in_tokens = tuple((K * length, share) for length, share in stated)
    return LengthPreset(stated=in_tokens, longest_tokens=K * longest_k, **values)


def length_preset(name: str) -> LengthPreset:
    """Return the preset of that name. Raises ConfigError that suggests the nearest name."""
    instead = "a number of tokens such as 8192, a .json of furlong lengths"
    return look_up(
        name, length_presets(), kind="length preset", source="--lengths", instead=instead
    )


def sample_lengths(
    name: str,
    count: int,
    seed: int = 0,
    *,
    max_seq_len: int | None = None,
) -> tuple[int, ...]:
    """Draw `count` lengths from the preset `name`. Sequences beyond `max_seq_len` are left out of
    the distribution, as in ChunkFlow, and not shortened.

    Raises ConfigError for an unknown name, and if `max_seq_len` leaves out all sequences.
    """
    preset = length_preset(name)
    points = preset.points()
    shares = [share for _, share in points]
    logs = np.log([tokens for tokens, _ in points])
    highest = 1.0
    if max_seq_len is not None and max_seq_len < preset.longest_tokens:
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
    if max_seq_len is not None:  # rounding may exceed it
        lengths = np.minimum(lengths, max_seq_len)
    return tuple(int(length) for length in np.maximum(lengths, 1))


def draw_with_longest(
    name: str, count: int, seed: int = 0, *, max_seq_len: int | None = None
) -> tuple[int, ...]:
    """Return `count` lengths: first the longest length of the preset `name` (or `max_seq_len`, if
    that is shorter), then `count` - 1 drawn lengths. No later draw has a longer sequence, so that a
    plan whose memory suffices for these lengths suffices for any step with such data."""
    others = sample_lengths(name, count - 1, seed, max_seq_len=max_seq_len)
    longest = length_preset(name).longest_tokens
    return (longest if max_seq_len is None else min(longest, max_seq_len), *others)

"""The lengths of a data set's sequences: `furlong lengths` writes them, `furlong plan` reads them.

{"version": 1, "lengths": [[812, 3], [4096, 1]]}     three sequences of 812 tokens, one of 4,096
{"version": 1, "lengths": [812, 4096, 812, 812]}     the same, for files written by hand
{..., "calls": [[4096, 812, 700], ...]}              for pairs (`Lengths.calls`): two sequences of
                                                     4,096 and 812 tokens, the first 700 equal
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Tag,
    ValidationError,
)

from furlong.errors import ConfigError, first_error
from furlong.files import os_errors_told, write_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

LENGTHS_VERSION = 1
MAX_TOKENS = 2**31
"""Upper bound on the tokens of a sequence."""
MAX_SEQUENCES = 10**8
"""Upper bound on the sequences of a file: a draw shuffles them all in memory."""

FIRST_BUCKET_TOKENS = 64

_Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
_Entry = Annotated[
    Annotated[_Tokens, Tag("tokens")] | Annotated[tuple[_Tokens, PositiveInt], Tag("pair")],
    Discriminator(lambda entry: "pair" if isinstance(entry, list) else "tokens"),
]


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of a global batch: a number of sequences, or a bound on their total tokens, up to
    which a batch is filled (with at least one sequence)."""

    sequences: int | None = None
    tokens: int | None = None

    def __str__(self) -> str:
        return f"{self.sequences:,}" if self.tokens is None else f"at most {self.tokens:,} tokens"

    def check(self, num_draws: int, noun: str = "sequence") -> None:
        """Raise ConfigError if an epoch of `num_draws` sequences is smaller than one batch. `noun`:
        word for a sequence in the error text."""
        if self.sequences is not None and self.sequences > num_draws:
            raise ConfigError(
                given=f"train.sequences_per_step = {self.sequences:,}",
                required=f"at most {num_draws:,}, the training {noun}s of an epoch",
                source="train.sequences_per_step (default 32)",
                change=f"set train.sequences_per_step to {num_draws} or less, add data, or raise"
                " the weights of its sources",
            )

    def stops(self, lens: Sequence[int]) -> list[int]:
        """Return the index at which each batch ends if sequences of `lens` tokens are batched in
        this order. The last batch may be smaller."""
        count = len(lens)
        if self.tokens is None:
            assert self.sequences is not None
            return [*range(self.sequences, count, self.sequences), count]
        ends, stops, start = list(accumulate(lens)), list[int](), 0
        while start < count:
            before = ends[start - 1] if start else 0
            start = max(start + 1, bisect_right(ends, before + self.tokens))
            stops.append(start)
        return stops

    def cut(self, lens: Sequence[int]) -> list[Sequence[int]]:
        """Return the sequence lengths `lens` cut into batches, in this order."""
        return [lens[i:j] for i, j in pairwise([0, *self.stops(lens)])]


@dataclass(frozen=True, slots=True)
class Call:
    """The sequence lengths of one engine call in two phases: all forwards, the caller's loss, then
    all backwards (`ChunkPlan.two_phases`)."""

    seq_lens: tuple[int, ...]
    shared: int = 0
    """Number of first tokens that all sequences share."""

    def planned(self, size: int) -> tuple[list[int], dict[int, list[tuple[int, int]]]]:
        """Return (sequence lengths, branches) to plan this call in chunks of `size` tokens.

        Two sequences that share at least their first chunk are planned as one sequence with a
        branch, as in `runtime.batch.join_prompts`. The branches are then {0: [(first token of the
        branch, token that it continues from)]}. Otherwise the lengths are those of the call, and
        there are no branches.
        """
        longer, *others = sorted(self.seq_lens, reverse=True)
        if not others or others[0] <= size or self.shared < size:
            return list(self.seq_lens), {}
        forks = {0: [(longer, self.shared)]} if self.shared < others[0] else {}
        return [longer + others[0] - self.shared], forks

    def num_tokens(self, size: int) -> int:
        """Return the number of tokens to compute in chunks of `size` tokens; a prompt that
        sequences share in one plan counts once."""
        return sum(self.planned(size)[0])


NUM_TIMED = 3
"""Number of calls whose steps are timed, evenly spread over their tokens."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A multiset of sequence lengths."""

    counts: tuple[tuple[int, int], ...]
    """`(seq_len, number of sequences)`, ascending in seq_len, without zeros."""
    calls: tuple[Call, ...] = field(default=(), kw_only=True)
    """Sample of calls that a run on pairs is planned for (`choose_calls`)."""

    @property
    def num_sequences(self) -> int:
        return sum(count for _, count in self.counts)

    @property
    def num_tokens(self) -> int:
        return sum(seq_len * count for seq_len, count in self.counts)

    @property
    def num_pairs(self) -> int:
        """Number of query-key pairs of causal attention, seq_len * (seq_len + 1) / 2 for each
        sequence. The FLOPs of full attention are proportional to it."""
        return sum(n * (n + 1) // 2 * count for n, count in self.counts)

    @property
    def longest(self) -> int:
        return self.counts[-1][0]

    def percentile(self, percent: float) -> int:
        """Return the shortest length that at least `percent` % of the sequences do not exceed."""
        rank = max(1, math.ceil(percent / 100 * self.num_sequences))
        for seq_len, count in self.counts:
            rank -= count
            if rank <= 0:
                return seq_len
        return self.longest

    def buckets(self) -> tuple[LengthBucket, ...]:
        """Return the sequences in buckets by length, which end at powers of two. Some buckets may
        be empty. The first one takes all lengths up to `FIRST_BUCKET_TOKENS`."""
        buckets = []
        for exponent in range(_exponent(self.counts[0][0]), _exponent(self.longest) + 1):
            upto = 2**exponent
            own = tuple(pair for pair in self.counts if _exponent(pair[0]) == exponent)
            above = upto // 2 if upto > FIRST_BUCKET_TOKENS else 0
            buckets.append(LengthBucket(own, above, upto))
        return tuple(buckets)


@dataclass(frozen=True, slots=True)
class LengthBucket(Lengths):
    """The sequences of more than `above` and at most `upto` tokens."""

    above: int
    upto: int


def count_lengths(seq_lens: Iterable[int]) -> Lengths:
    """Return `seq_lens` as a multiset. Raises ValueError if it is empty or has one below 1."""
    counted = Counter(int(seq_len) for seq_len in seq_lens)
    if not counted or min(counted) < 1:
        raise ValueError("lengths are positive, and there is at least one")
    return Lengths(tuple(sorted(counted.items())))


def choose_calls(
    seq_lens: NDArray[Any], shared_of: Callable[[int], int], size: int | None = None
) -> tuple[Call, ...]:
    """Return the calls to predict for a run on pairs. `NUM_TIMED` representative calls come first,
    for the step time. The others may need most memory: the call with most tokens for each chunk
    size (powers of two, and `size`), and the call with the longest sequence.

    Args:
        seq_lens: (U, n), tokens of the n sequences of each of U calls.
        shared_of: returns the number of first tokens that the two sequences of a call share. It is
            called for few calls only. The others never need most memory, since some call has at
            least as many tokens, even if its shared prompt counts once.
        size: the chunk size of the run, if it is set.
    """
    sums, number = seq_lens.sum(axis=1), len(seq_lens)
    order = (-sums).argsort(kind="stable").tolist()

    @cache
    def call(index: int) -> Call:
        lens = tuple(seq_lens[index].tolist())
        return Call(lens, shared_of(index) if len(lens) == 2 else 0)

    timed = [order[(2 * i + 1) * number // (2 * NUM_TIMED)] for i in reversed(range(NUM_TIMED))]
    large, most = list[Call](), 0
    for index in order:
        if sums[index] <= most:
            break
        large.append(call(index))
        most = max(most, large[-1].num_tokens(1))
    sizes = [2**n for n in range(int(seq_lens.max()).bit_length())] + [size] * (size is not None)
    largest = [max(large, key=lambda one: one.num_tokens(size)) for size in sizes]
    largest.append(call(int(seq_lens.max(axis=1).argmax())))
    return (*map(call, timed), *dict.fromkeys(largest))


def draw_lengths(lengths: Lengths, count: int, seed: int) -> tuple[int, ...]:
    """Return the lengths of `count` sequences in random order; every sequence is drawn once before
    one is drawn again. With the same seed, a longer draw begins with the shorter one."""
    import numpy as np

    generator = np.random.default_rng(seed)
    every = np.repeat([n for n, _ in lengths.counts], [times for _, times in lengths.counts])
    rounds = [generator.permutation(every) for _ in range(-(-count // len(every)))]
    return tuple(np.concatenate(rounds)[:count].tolist())


def write_lengths(file: Path, lengths: Lengths) -> None:
    """Write `lengths` to the file atomically. Raises ConfigError if it cannot be written."""
    values = {"version": LENGTHS_VERSION, "lengths": [list(pair) for pair in lengths.counts]}
    if lengths.calls:
        values["calls"] = [[*call.seq_lens, call.shared] for call in lengths.calls]
    text = json.dumps(values)
    required, source = "a file that can be written", "the place for the lengths"
    with os_errors_told(
        ConfigError, required=required, source=source, or_else=", or choose another file"
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text + "\n")


class _File(BaseModel, strict=True):
    """The JSON of a file of lengths."""

    version: Literal[1]
    lengths: list[_Entry] = Field(min_length=1)
    calls: list[Annotated[list[NonNegativeInt], Field(min_length=2, max_length=3)]] = []


def read_lengths(file: Path) -> Lengths:
    """Read lengths from a file of numbers, or of pairs (tokens, number of sequences). Raises
    ConfigError if the file is unreadable."""
    try:
        saved = _File.model_validate_json(file.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise _unreadable(file, first_error(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, getattr(error, "strerror", None) or str(error)) from error
    counted: Counter[int] = Counter()
    for entry in saved.lengths:
        seq_len, count = (entry, 1) if isinstance(entry, int) else entry
        counted[seq_len] += count
    if counted.total() > MAX_SEQUENCES:
        most = f"more than {MAX_SEQUENCES:,}: a sample of them does as well"
        raise _unreadable(file, f"{counted.total():.4g} sequences, {most}")
    calls = tuple(Call(tuple(lens), shared) for *lens, shared in saved.calls)
    if odd := [call for call in calls if min(call.seq_lens) < max(1, call.shared)]:
        raise _unreadable(file, f"calls, of which one has {odd[0].seq_lens} tokens")
    return Lengths(tuple(sorted(counted.items())), calls=calls)


def _exponent(seq_len: int) -> int:
    """Return n such that the length bucket of `seq_len` ends at 2**n tokens."""
    return (max(seq_len, FIRST_BUCKET_TOKENS) - 1).bit_length()


def _unreadable(file: Path, reason: str) -> ConfigError:
    return ConfigError(
        given=f"{file}: {reason}",
        required=f'{{"version": {LENGTHS_VERSION}, "lengths": [...]}} with a number of tokens per'
        " sequence, or pairs of tokens and number of sequences",
        source="the file of lengths",
        change="write it with: furlong lengths DATA --tokenizer T --out FILE",
    )

"""The batch that `furlong plan` plans: lengths of a run, a file or a preset."""

from __future__ import annotations

import os
import sys
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from furlong.cli.flag_types import MAX_BATCH, check_replaced, refusal
from furlong.plan.lengths import Lengths, count_lengths, draw_lengths, read_lengths, write_lengths
from furlong.units import count_words, format_count, plural

if TYPE_CHECKING:
    from furlong.config.schema import RunConfig
    from furlong.config.sources import RunFlags

_OF_A_PRESET = 64
"""Sequences that are drawn from a preset, which has no end."""
_LIMIT, _PER_STEP = "--data.max_seq_len", "--train.sequences_per_step"


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The sequences of one step."""

    seq_lens: tuple[int, ...]
    source: str
    """The origin of the sequences, in words."""
    longest_tokens: int
    """Tokens of the longest sequence of the data, which the batch has unless they are a preset."""
    lengths: Lengths | None = None
    """Lengths of all of the data; None for a preset."""
    seed: int = 0
    """Seed of the draw."""

    def __str__(self) -> str:
        count = count_words(len(self.seq_lens), "sequence")
        total = sum(self.seq_lens)
        tokens = f"{format_count(total)} {plural(total, 'token')}"
        return f"{count}, {tokens}, longest {max(self.seq_lens):,}: {self.source}"


def batch_of(flags: RunFlags, config: RunConfig) -> PlannedBatch:
    """The batch of a run file, of --data.train, or of --lengths. Raises ConfigError."""
    own, seed, too_long = flags.own, config.train.seed, config.data.too_long
    is_run = own.subject is not None or "--data.train" in flags.names
    limit = config.data.max_seq_len if is_run or _LIMIT in flags.names else None
    count = own.sequences
    if count is None and (is_run or _PER_STEP in flags.names):
        count = config.train.sequences_per_step
    name = own.lengths
    if name is not None and not os.path.exists(name) and not name.endswith(".json"):
        batch = _of_preset(name, count or _OF_A_PRESET, seed, limit)
        lengths = count_lengths(batch.seq_lens)
        return batch if config.train.loss == "sft" else _of_pair(lengths, batch.source, limit)
    if name is None:
        name, lengths = _counted(own.subject, config)
    else:
        lengths = read_lengths(Path(name))
    if (
        is_run and limit and too_long == "error" and _LIMIT not in flags.names
        and lengths.longest > limit
    ):  # fmt: skip
        raise refusal(
            f"a sequence of {count_words(lengths.longest, 'token')} in {name}",
            f"at most data.max_seq_len = {count_words(limit, 'token')}, with data.too_long: error",
            "raise data.max_seq_len, or set data.too_long to truncate or drop",
            f"{own.subject or 'no run file'}, key data.max_seq_len",
        )
    if limit is not None and too_long == "truncate":
        counts: Counter[int] = Counter()
        for seq_len, times in lengths.counts:
            counts[min(seq_len, limit)] += times
        lengths = Lengths(tuple(sorted(counts.items())))
    if config.train.loss == "dpo":
        return _of_pair(lengths, name, limit)
    return _draw(lengths, name, count, seed, limit)


def _of_pair(lengths: Lengths, source: str, max_seq_len: int | None) -> PlannedBatch:
    """The most that a pair may have: both answers as long as the longest sequence."""
    longest = max(n for n, _ in lengths.counts if max_seq_len is None or n <= max_seq_len)
    words = f"a pair of the longest of {source}, the most that is in one call"
    return PlannedBatch((longest, longest), words, longest, lengths)


def _draw(
    lengths: Lengths, source: str, count: int | None, seed: int, max_seq_len: int | None
) -> PlannedBatch:
    """The longest sequence and others in a random order, `count` in all, each once unless there are
    fewer; all of them for None. Raises ConfigError."""
    kept = [(n, times) for n, times in lengths.counts if max_seq_len is None or n <= max_seq_len]
    if not kept:
        shortest = count_words(lengths.counts[0][0], "token")
        least = f"at least {shortest}, the shortest sequence of {source}"
        given = f"max_seq_len {max_seq_len:,}"
        raise refusal(given, least, "raise max_seq_len", "the batch to plan")
    some = Lengths(tuple(kept))
    number, longest = some.num_sequences, some.longest
    left_out = lengths.num_sequences - number
    longer = f", {left_out:,} longer ones left out" if left_out else ""
    _check_count(number if count is None else count, source)
    if count is None or count >= number:
        again = f", {count / number:.3g} times over" if count and count > number else ""
        words = f"all of {source}{longer}{again}, in the order of seed {seed}"
        seq_lens = draw_lengths(some, count or number, seed)
        return PlannedBatch(seq_lens, words, longest, some, seed)
    others = Lengths((*kept[:-1], *([(longest, kept[-1][1] - 1)] if kept[-1][1] > 1 else [])))
    drawn = draw_lengths(others, count - 1, seed) if count > 1 else ()
    words = f"the longest of the {number:,} of {source}{longer}"
    if drawn:
        words += f", and {count - 1:,} others drawn with seed {seed}"
    return PlannedBatch((longest, *drawn), words, longest, some, seed)


def _of_preset(name: str, count: int, seed: int, limit: int | None) -> PlannedBatch:
    from furlong.cost.lengths import length_preset, sample_lengths

    _check_count(count, name)
    seq_lens = sample_lengths(name, count, seed, max_seq_len=limit)
    words = f" of at most {count_words(limit, 'token')}" if limit else ""
    longest = min(limit or sys.maxsize, length_preset(name).longest_tokens)
    return PlannedBatch(seq_lens, f"drawn from the preset {name}{words} with seed {seed}", longest)


def _counted(file: str | None, config: RunConfig) -> tuple[str, Lengths]:
    """The name and the lengths of a run's data. They are counted where there is no file of them
    beside the run file, or an old one: that loads torch and the tokenizer."""
    if file is None:
        return "data.train", _count(config)
    counted = Path(file).with_name(f"{Path(file).stem}.lengths.json")
    named = (s if isinstance(s, str) else s.path for s in config.data.train)
    sources = [Path(file), *map(Path, named)]
    if counted.exists():
        written = counted.stat().st_mtime
        if all(not path.exists() or path.stat().st_mtime <= written for path in sources):
            return str(counted), read_lengths(counted)
    check_replaced(counted, f"the lengths of {file}", "lengths")
    print(f"counting the lengths of {file}'s sequences into {counted}", file=sys.stderr)
    lengths = _count(config)
    write_lengths(counted, lengths)
    return str(counted), lengths


def _count(config: RunConfig) -> Lengths:
    from furlong.cli.lengths import count_run

    with redirect_stdout(sys.stderr):
        return count_run(config)


def _check_count(count: int, source: str) -> None:
    if count > MAX_BATCH:
        raise refusal(
            f"{count:,} sequences of {source} in one step", f"at most {MAX_BATCH:,}",
            "say how many a step takes with --sequences N",
            "the batch to plan: all sequences of a file of lengths, else train.sequences_per_step",
        )  # fmt: skip

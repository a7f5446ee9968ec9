"""Pairs of answers for a tiny run, and the flags that train on them."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.tiny_runs import TEXTS, TinyRun


def write_pairs(file: Path, num_asked: int = 3) -> Path:
    """Write eight pairs: the words of a text after the prompt, and the same words backwards."""
    records = []
    for text in TEXTS:
        words = text.split()
        chosen = words[num_asked:]
        rejected = chosen[::-1]
        records.append(
            {
                "prompt": " ".join(words[:num_asked]),
                "chosen": " " + " ".join(chosen),
                "rejected": " " + " ".join(rejected[: 2 + len(rejected) // 2]),
            }
        )
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def pair_flags(tiny: TinyRun, folder: Path, num_asked: int = 3) -> tuple[str, ...]:
    """Return flags for `TinyRun.arguments`; pairs and cache are in `folder`."""
    pairs = write_pairs(folder / "pairs.jsonl", num_asked)
    return (
        "--train.loss=dpo", f"--data.train={pairs}", f"--data.cache_dir={folder / 'cache'}",
        "--data.max_seq_len=512",
    )  # fmt: skip

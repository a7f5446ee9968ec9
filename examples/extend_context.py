"""Extends the context of a small model and shows its loss by position before and after.

python examples/extend_context.py

A model is trained at 256 positions on the standard library's source files, and evaluated on
held-out pieces of 1,024 tokens (data.eval with a max_seq_len of its own). `furlong rope` tries YaRN
on them, untrained; then a few steps at the new length follow (recipes/extend-context.yaml).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import quickstart

SHORT, LONG = 256, 1024
HOME = Path("runs/extend_context")
YAML = Path(__file__).parents[1] / "recipes" / "extend-context.yaml"
# With few different tokens a small model soon learns to look back: where, its positions say.
SHAPE = {"hidden_size": 96, "intermediate_size": 288, "max_position_embeddings": SHORT}
VOCAB_SIZE = 512


def main() -> int:
    from furlong.cli.main import main as furlong

    run = HOME / time.strftime("%Y%m%d-%H%M%S")
    prepare(run)
    short, long = run / "short" / "model", run / "long" / "model"
    held_out = f"--data.eval=[{{path: {run}/data/eval.jsonl, max_seq_len: {LONG}, limit: 24}}]"
    of_short = ["--model.rope=null", f"--data.max_seq_len={SHORT}", held_out]
    first = [f"--model.name={run}/start", "--model.init=random", f"--out={run}/short"]
    first += [f"--data.train={run}/data/short.jsonl", "--train.eval_every_steps=0"]
    first += ["--train.steps=450", "--train.sequences_per_step=16", "--train.lr=4e-3"]
    if furlong(["train", str(YAML), *of_short, *first]) or not short.is_dir():
        return 1
    tried = [f"--model.name={short}", "--factors", "2", "4", f"--picture={run}/factors.png"]
    if furlong(["rope", str(YAML), *of_short, *tried]):
        return 1
    then = [f"--model.name={short}", f"--data.train={run}/data/long.jsonl", held_out]
    if furlong(["train", str(YAML), *then, f"--out={run}/long"]) or not long.is_dir():
        return 1
    return 0


def prepare(run: Path) -> None:
    """The quickstart's corpus in other tokens, cut into pieces of both lengths, and a config."""
    from transformers import AutoConfig

    if not (quickstart.HOME / "model").is_dir():
        quickstart.prepare()
    texts = list(read_texts("train"))
    tokenizer = quickstart.train_tokenizer(texts, VOCAB_SIZE)
    quickstart.write_model_folder(run / "start", tokenizer)
    AutoConfig.from_pretrained(run / "start", **SHAPE).save_pretrained(run / "start")
    (run / "data").mkdir()
    for name, documents, length in (
        ("short", texts, SHORT),
        ("long", texts, LONG),
        ("eval", list(read_texts("eval")), LONG),
    ):
        encoded = [tokenizer.encode(text).ids for text in documents]
        pieces = (ids[i : i + length] for ids in encoded for i in range(0, len(ids), length))
        lines = (json.dumps({"input_ids": ids}) + "\n" for ids in pieces if len(ids) == length)
        (run / "data" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def read_texts(split: str) -> Iterator[str]:
    for record in read_lines(quickstart.HOME / "data" / f"{split}.jsonl"):
        yield record["text"]


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


if __name__ == "__main__":
    sys.exit(main())

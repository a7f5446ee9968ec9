"""Extends the context of a small model and shows its loss by position before and after.

python examples/extend_context.py

A model is trained at 256 positions on the standard library's source files. Then its loss on
held-out pieces of 1,024 tokens is measured: as it is, with YaRN, and after a few steps with YaRN at
the new length (recipes/extend-context.yaml).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import quickstart

SHORT, LONG = 256, 1024
EDGES = (0, SHORT, 2 * SHORT, LONG)
HOME = Path("runs/extend_context")
YAML = Path(__file__).parents[1] / "recipes" / "extend-context.yaml"
YARN = {"rope_type": "yarn", "factor": LONG / SHORT}
# With few different tokens a small model soon learns to look back: where, its positions say.
SHAPE = {"hidden_size": 96, "intermediate_size": 288, "max_position_embeddings": SHORT}
VOCAB_SIZE = 512
NUM_EVAL_SEQUENCES = 24


def main() -> int:
    from furlong.cli.main import main as furlong

    run = HOME / time.strftime("%Y%m%d-%H%M%S")
    prepare(run)
    short, long = run / "short" / "model", run / "long" / "model"
    first = [f"--model.name={run}/start", "--model.init=random", "--model.rope=null"]
    first += [f"--data.train={run}/data/short.jsonl", f"--data.max_seq_len={SHORT}"]
    first += ["--train.steps=450", "--train.sequences_per_step=16", "--train.lr=4e-3"]
    then = [f"--model.name={short}", f"--data.train={run}/data/long.jsonl"]
    if furlong(["train", str(YAML), *first, f"--out={run}/short"]) or not short.is_dir():
        return 1
    rows = {
        f"trained at {SHORT} positions": losses_by_position(run, short),
        "the same with YaRN": losses_by_position(run, short, YARN),
    }
    if furlong(["train", str(YAML), *then, f"--out={run}/long"]) or not long.is_dir():
        return 1
    rows[f"and 40 steps at {LONG:,}"] = losses_by_position(run, long)
    show(rows)
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


def losses_by_position(run: Path, folder: Path, rope: dict[str, Any] | None = None) -> list[float]:
    """Mean held-out loss of the tokens between two `EDGES`, in nats, through the same engine."""
    import torch

    import furlong
    from furlong.models.build import build_model

    model = build_model(str(folder), rope=rope).eval()
    records = list(read_lines(run / "data" / "eval.jsonl"))[:NUM_EVAL_SEQUENCES]
    ids = [torch.tensor(record["input_ids"]) for record in records]
    # positions that it has never seen are what is measured: furlong refuses them otherwise
    model.config.max_position_embeddings = max(LONG, model.config.max_position_embeddings)
    result = furlong.forward_backward(
        model,
        [{"input_ids": tokens, "labels": tokens} for tokens in ids],
        furlong.ChunkOptions(size=SHORT),
        backward=False,
    )
    # Entry t is the loss of token t + 1; the last one has none.
    losses = torch.stack(result.token_losses)[:, :-1].mean(0)
    return [float(losses[max(0, start - 1) : stop - 1].mean()) for start, stop in pairwise(EDGES)]


def show(rows: dict[str, list[float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="held-out loss by position, nats")
    table.add_column("model")
    for start, stop in pairwise(EDGES):
        table.add_column(f"{start:,} to {stop - 1:,}", justify="right")
    for name, losses in rows.items():
        table.add_row(name, *(f"{loss:.3f}" for loss in losses))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())

"""Teaches a small model to prefer documented functions, by pairs of answers, in two minutes.

python examples/preference.py

A pair is real text of Python's standard library: the module up to a function's head is the prompt,
the body is the chosen answer, and the body without its docstring the rejected one. `furlong train
recipes/preference.yaml` runs DPO then, and a table shows held-out pairs before and after; exit
code 1 unless their margin rose and most of them are the right way round.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import quickstart

HOME = Path("runs/preference")
YAML = Path(__file__).parents[1] / "recipes" / "preference.yaml"
NUM_TRAIN, NUM_EVAL = 64, 16
PER_FILE = 4
PROMPT_CHARS, ANSWER_CHARS = 2500, 1500
VOCAB_SIZE = 1024
REQUIRED_ACCURACY = 0.8


def main() -> int:
    from furlong.cli.main import main as furlong

    run = HOME / time.strftime("%Y%m%d-%H%M%S")
    prepare()
    if furlong(["train", str(YAML), f"--out={run}"]):
        return 1
    return show(run)


def prepare() -> None:
    """Writes pairs of training files and of held-out files, the tokenizer and config.json."""
    print("making pairs of Python's standard library, and a tokenizer ...", flush=True)
    files = sorted(quickstart.standard_library(), key=lambda file: hash_of(file[0]))
    pairs: list[dict[str, str]] = []
    for _, text in files:
        with suppress(SyntaxError):  # tests of other versions' grammar
            pairs += islice(pairs_of(text), PER_FILE)
        if len(pairs) >= NUM_EVAL + NUM_TRAIN:
            break
    held_out, train = pairs[:NUM_EVAL], pairs[NUM_EVAL : NUM_EVAL + NUM_TRAIN]
    for name, own in (("train", train), ("eval", held_out)):
        file = HOME / "data" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(pair) + "\n" for pair in own), encoding="utf-8")
    texts = [pair["prompt"] + pair["chosen"] for pair in train]
    tokenizer = quickstart.train_tokenizer(texts, VOCAB_SIZE)
    quickstart.write_model_folder(HOME / "model", tokenizer)
    print(f"{len(train)} pairs, {len(held_out)} held out")


def hash_of(path: str) -> str:
    """A file's place, the same wherever Python is installed."""
    return hashlib.sha256(path.encode()).hexdigest()


def pairs_of(text: str) -> Iterator[dict[str, str]]:
    """A pair of each function with a docstring and a body beside it."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node):
            continue
        if len(node.body) < 2 or node.end_lineno is None:
            continue
        first, second = node.body[0].lineno - 1, node.body[1].lineno - 1
        chosen, rejected = (lines[start : node.end_lineno] for start in (first, second))
        if len("".join(chosen)) <= ANSWER_CHARS and first < second:
            prompt = "".join(lines[:first])[-PROMPT_CHARS:]
            yield {"prompt": prompt, "chosen": "".join(chosen), "rejected": "".join(rejected)}


def show(run: Path) -> int:
    """Prints the table of a finished run."""
    from rich.console import Console
    from rich.table import Table

    with (run / "metrics.jsonl").open(encoding="utf-8") as file:
        evaluations = [record for line in file if "eval_loss" in (record := json.loads(line))]
    before, after = evaluations[0], evaluations[-1]
    table = Table("held-out pairs", "before", "after", title="preference")
    for name in ("loss", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"):
        table.add_row(name, *(f"{one[f'eval_{name}']:.3f}" for one in (before, after)))
    Console().print(table)
    margin, accuracy = after["eval_rewards/margins"], after["eval_rewards/accuracies"]
    if margin <= before["eval_rewards/margins"] or accuracy < REQUIRED_ACCURACY:
        print("held-out pairs are not preferred as they should be", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

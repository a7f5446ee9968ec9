"""Every causal language model of the installed transformers, built small, through furlong.

Writes docs/models.md. Promises:
  - no family's gradients are wrong: the relative L2 error of every parameter's gradient and of the
    loss is at most 1e-12, or 2e-6 where transformers rounds to float32 inside a float64 model, or
    1e-9 with that rounding taken out of its modeling file;
  - what furlong does not take it refuses with a UserError; it never crashes;
  - a family that the committed docs/models.md calls exact or rounded has not fallen from it, nor
    has its cut: the same with its layers run one after the other (order: layer-first).
Exits 1 on a miss.

Takes a few minutes on two cores. Every model has a process and a time limit of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from harness import console, each_alone
from model_gradients import CHUNK_SIZE, CUT_KEEPS, KEEPS, LENS, OUTCOMES, Row, measure
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
RIGHT = ("widened", "rounded", "exact")
"""Outcomes that must not be lost, the better one last."""
_PRELOADED = ["torch", "transformers.modeling_utils", "furlong.api", "model_gradients"]

INTRODUCTION = """\
# Every causal language model of transformers

Which families train exactly, and what becomes of the others. Written by `python
benchmarks/families.py` with transformers {transformers} and torch {torch}: every model type of
`AutoModelForCausalLM`, small, with random weights, in train mode and float64 on the CPU; dropout,
router noise and router losses are off. Three sequences of {lens} tokens go through
`furlong.forward_backward` in chunks of {size} with `keep` {keeps}. The loss and every parameter's
gradient are compared with those of the model's own unchunked forward. For each model sequences that
are cut with nothing handed on must give other gradients.

*Layer-first* is the same with `order: layer-first`, each layer a stage of its own, and `keep`
{cut_keeps}. Where it is refused a family trains with `order: chunk-first` on one stage. *Error* is
the largest relative L2 error of a gradient in the row.

A family that is right here can be refused in another configuration: the [start-up
check](exactness.md#the-start-up-check) looks at the model that it is given.

Types with vision are here as `AutoModelForCausalLM` opens them, tower and all; `furlong train`
opens [their text](checkpoints.md#checkpoints-with-vision).
"""


def measure_all(
    model_types: Sequence[str],
    *,
    jobs: int,
    limit_s: float,
    tell: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """A Row per model type, each from its own process, which is ended after `limit_s` seconds."""
    rows = each_alone(
        measure, model_types, _not_run, preload=_PRELOADED, jobs=jobs, limit_s=limit_s, tell=tell
    )
    return sorted(rows, key=lambda row: (list(OUTCOMES).index(row.outcome), row.model_type))


def _not_run(model_type: str, reason: str) -> Row:
    return Row(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type], "not run", reason)


def document(rows: Sequence[Row]) -> str:
    """docs/models.md."""
    counts = Counter(row.outcome for row in rows)
    text = INTRODUCTION.format(
        transformers=transformers.__version__, torch=torch.__version__.partition("+")[0],
        lens=", ".join(map(str, LENS)), size=CHUNK_SIZE, keeps=", ".join(KEEPS),
        cut_keeps=", ".join(CUT_KEEPS),
    )  # fmt: skip
    text += f"\n{len(rows)} model types:\n\n"
    text += "".join(
        f"- {counts[outcome]} {outcome}: {meaning}\n"
        for outcome, meaning in OUTCOMES.items()
        if counts[outcome]
    )
    text += "\n| outcome | layer-first | error | model types |\n| --- | --- | --- | --- |\n"
    right = [row for row in rows if row.outcome in RIGHT]
    for (outcome, cut), group in _grouped(right, lambda row: (row.outcome, row.cut)).items():
        error = max(map(float, re.findall(r"\d[.\d]*e[+-]\d+", " ".join(r.detail for r in group))))
        text += f"| {outcome} | {cut} | {error:.1e} | {_names(group)} |\n"
    others = [row for row in rows if row.outcome not in RIGHT]
    text += "\n| outcome | why | model types |\n| --- | --- | --- |\n"
    for (outcome, why), group in _grouped(others, lambda r: (r.outcome, _why(r, r.detail))).items():
        text += f"| {outcome} | {why} | {_names(group)} |\n"
    uncut = [row for row in right if row.cut == "refused"]
    if not uncut:
        return text
    text += "\nRefused with `order: layer-first` alone:\n\n| why | model types |\n| --- | --- |\n"
    whys = _grouped(uncut, lambda row: _why(row, row.detail.split("refused (", 1)[1]))
    return text + "".join(f"| {why} | {_names(group)} |\n" for why, group in whys.items())


def _grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(row.model_type for row in rows)


def _why(row: Row, reason: str) -> str:
    """A reason without the class and without figures in brackets, to be shared by families."""
    words = reason.removesuffix(" layer by layer").removesuffix(")").removeprefix(row.class_name)
    return re.sub(r" \([^()]*\)?", "", words).lstrip(", ").removeprefix("which ")


def outcomes_of(text: str) -> dict[str, tuple[str, str]]:
    """Model type -> outcome and cut of a document that `document` wrote."""
    cells = [line.split(" | ") for line in text.splitlines()]
    return {
        name: (row[0].removeprefix("| "), row[1] if len(row) == 4 else "-")
        for row in cells
        if row[0].removeprefix("| ") in OUTCOMES
        for name in row[-1].removesuffix(" |").split(", ")
    }


def misses(rows: Sequence[Row], before: Mapping[str, tuple[str, str]]) -> list[str]:
    """What breaks a promise, by the outcomes that were committed before."""
    found = []
    for row in rows:
        was, was_cut = before.get(row.model_type, ("", "-"))
        if row.outcome in ("wrong", "crash"):
            found.append(f"{row.model_type} ({row.class_name}) {row.outcome}: {row.detail}")
        elif was in RIGHT and row.outcome not in RIGHT[RIGHT.index(was) :]:
            found.append(
                f"{row.model_type} ({row.class_name}) was {was}, is {row.outcome}: {row.detail}"
            )
        elif was_cut in RIGHT and row.cut not in RIGHT[RIGHT.index(was_cut) :]:
            found.append(
                f"{row.model_type} ({row.class_name}) cut was {was_cut}, is {row.cut}: {row.detail}"
            )
    return found


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parse(words)
    names = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if arguments.only:
        names = [
            name for name in names
            if {name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]} & set(arguments.only)
        ]  # fmt: skip
        if not names:
            console.print(f"no model type or class is called {' or '.join(arguments.only)}")
            return 2
    start_s = time.monotonic()
    rows = measure_all(names, jobs=arguments.jobs, limit_s=arguments.limit_s, tell=_tell)
    before = outcomes_of(DOCUMENT.read_text("utf-8")) if DOCUMENT.is_file() else {}
    missed = misses(rows, before)
    counts = Counter(row.outcome for row in rows)
    console.print(
        ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
        + f" in {time.monotonic() - start_s:.0f} s"
    )
    if not arguments.only and not arguments.check:
        DOCUMENT.write_text(document(rows), encoding="utf-8")
        console.print(f"written: {DOCUMENT.relative_to(DOCUMENT.parents[1])}")
    for miss in missed:
        console.print(f"MISSED: {miss}", style="bold red", markup=False, soft_wrap=True)
    return int(bool(missed))


def _tell(row: Row) -> None:
    console.print(
        f"{row.model_type} ({row.class_name}): {row.outcome}, cut {row.cut}: {row.detail}",
        style="bold red" if row.outcome in ("wrong", "crash") else None, markup=False,
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="model types or classes; writes nothing"
    )
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit-s", type=float, default=300, help="seconds for one model")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())

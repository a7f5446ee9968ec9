"""How exact the gradients are, against the model's own unchunked forward.

Promises:
  float64   the relative L2 error of every parameter's gradient, per family, over a sample of all
            combinations of batch, chunk size, order, stage height, num_retained, keep, layers that
            are recomputed, offload, tiles of the loss and tied or untied head: at most 1e-12, or
            2e-6 where transformers itself rounds to float32 inside a float64 model.
  float32   per family: at most 2e-5 of the norm over all parameters, and for no parameter more than
            3x the error of transformers' own float32 backward.
  bfloat16  float32 weights that compute in bfloat16: the error over all parameters is at most 1.1x
            that of transformers' unchunked bfloat16 backward, at 1, 16 and 64 chunks.
The truth of float32 and bfloat16 is the float64 gradient of the same weights; errors are pooled
over seeds. Exits 1 on a miss.

Takes about fifteen minutes on two cores; `--quick` replaces the sample by an array of cases that
covers every pair of settings and takes about a minute.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from harness import console, machine, write_json
from helpers.batches import batch
from helpers.cases import Case, covering_array, sample
from helpers.tiny_families import FAMILIES, bound, build
from rich.table import Column, Table
from torch import Tensor, nn

import furlong
from furlong.testing import (
    Batch,
    reference_loss,
    take_grads,
    total_relative_error,
    worst_relative_error,
)

_NUM_PER_FAMILY = 320
_FLOAT32_BOUND = 2e-5
_FLOAT32_PER_PARAMETER_BOUND = 3.0
_FLOAT32_LENS = (300, 17, 120, 40)
_FLOAT32_SIZES = (64, 512)
_BFLOAT16_BOUND = 1.1
_NUM_CHUNKS = (1, 16, 64)
_BFLOAT16_SHAPE = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "vocab_size": 1024, "max_position_embeddings": 4096,
}  # fmt: skip

Grads = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report: the worst of what was tried, and its bound."""

    what: str
    tried: str
    worst: float
    bound: float
    where: str

    @property
    def met(self) -> bool:
        return self.worst <= self.bound


def float64_finding(family: str, cases: Sequence[Case]) -> Finding:
    """The worst gradient error of one family's cases in float64."""
    torch.set_num_threads(1)
    groups: dict[tuple[bool, str], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.tied, case.batch_name].append(case)
    worst = (-1.0, "")
    for (tied, _), group in groups.items():
        model = build(family, tie_word_embeddings=tied)
        sequences = group[0].sequences()
        loss = reference_loss(model, sequences)
        truth = take_grads(model)
        for case in group:
            with case.small_sizes():
                given = furlong.forward_backward(model, sequences, case.options).loss
            errors = (worst_relative_error(take_grads(model), truth), abs(given - loss) / loss)
            worst = max(worst, (max(errors), str(case)), key=_nan_is_worst)
    return Finding(family, f"{len(cases)} cases", worst[0], bound(family), worst[1])


def float32_findings(family: str, num_seeds: int) -> tuple[Finding, Finding]:
    """Errors in float32: over all parameters, and per parameter by transformers' own."""
    torch.set_num_threads(1)
    total = (-1.0, "")
    own: dict[str, float] = defaultdict(float)
    ours: dict[tuple[int, str], float] = defaultdict(float)
    for seed in range(num_seeds):
        positions = {"max_position_embeddings": max(_FLOAT32_LENS)}
        model = build(family, torch.float32, seed=seed, **positions)
        wide = build(family, seed=seed, **positions)
        sequences = batch(_FLOAT32_LENS, seed=seed)
        truth = _reference(wide, sequences)
        floor = torch.finfo(torch.float32).eps
        for name, error in _squared_errors(_reference(model, sequences), truth).items():
            own[name] += max(error, (floor * float(truth[name].norm())) ** 2)
        for size in _FLOAT32_SIZES:
            furlong.forward_backward(model, sequences, furlong.ChunkOptions(size=size))
            given = take_grads(model)
            where = f"chunks of {size}, seed {seed}"
            total = max(total, (total_relative_error(given, truth), where), key=_nan_is_worst)
            for name, error in _squared_errors(given, truth).items():
                ours[size, name] += error
    ratio = max(
        ((math.sqrt(error / own[name]), f"{name}, chunks of {size}")
         for (size, name), error in ours.items()),
        key=_nan_is_worst,
    )  # fmt: skip
    tried = f"{num_seeds} seeds, chunks of {' and '.join(map(str, _FLOAT32_SIZES))}"
    return (
        Finding(family, tried, total[0], _FLOAT32_BOUND, total[1]),
        Finding(family, tried, ratio[0], _FLOAT32_PER_PARAMETER_BOUND, ratio[1]),
    )


def bfloat16_findings(num_tokens: int, num_seeds: int) -> list[Finding]:
    """Errors with compute_dtype bfloat16, by those of a bfloat16 model's unchunked backward."""
    own, ours = 0.0, dict.fromkeys(_NUM_CHUNKS, 0.0)
    for seed in range(num_seeds):
        sequences = batch([num_tokens], vocab_size=_BFLOAT16_SHAPE["vocab_size"], seed=seed)
        truth = _reference(_rounded(torch.float64, seed), sequences)
        own += _total_squared_error(_reference(_rounded(torch.bfloat16, seed), sequences), truth)
        model = _rounded(torch.float32, seed)
        for num_chunks in _NUM_CHUNKS:
            options = furlong.ChunkOptions(size=-(-num_tokens // num_chunks))
            furlong.forward_backward(model, sequences, options, compute_dtype=torch.bfloat16)
            ours[num_chunks] += _total_squared_error(take_grads(model), truth)
    tried = f"{num_seeds} seeds, {num_tokens:,} tokens"
    findings = []
    for num_chunks, squared in ours.items():
        errors = f"{math.sqrt(squared / num_seeds):.2e} / {math.sqrt(own / num_seeds):.2e}"
        ratio = math.sqrt(squared / own)
        findings.append(Finding(f"in {num_chunks}", tried, ratio, _BFLOAT16_BOUND, errors))
    return findings


def _rounded(dtype: torch.dtype, seed: int) -> nn.Module:
    """A model whose weights all three dtypes can hold, so that no error is the weights' own.

    Only parameters are cast: as in a model that was loaded in bfloat16, and unlike after
    `model.to(bfloat16)`, the rotary frequencies stay float32.
    """
    model = build("qwen2", torch.float32, seed=seed, **_BFLOAT16_SHAPE)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().to(dtype)
    return model


def _reference(model: nn.Module, sequences: Batch) -> Grads:
    reference_loss(model, sequences)
    return take_grads(model)


def _squared_errors(given: Grads, truth: Grads) -> dict[str, float]:
    return {name: float((given[name] - truth[name]).norm()) ** 2 for name in truth}


def _total_squared_error(given: Grads, truth: Grads) -> float:
    return total_relative_error(given, truth) ** 2


def _nan_is_worst(found: tuple[float, str]) -> float:
    return math.inf if math.isnan(found[0]) else found[0]


def show(title: str, findings: Sequence[Finding], figure: str) -> None:
    where = Column("where", overflow="fold")
    table = Table("", "tried", figure, "bound", "verdict", where, title=title)
    table.title_justify = "left"
    for finding in findings:
        table.add_row(
            finding.what, finding.tried, f"{finding.worst:.3g}", f"<= {finding.bound:g}",
            "met" if finding.met else "MISSED", finding.where,
            style=None if finding.met else "bold red",
        )  # fmt: skip
    console.print(table)


def main() -> int:
    arguments = _parse()
    cases: dict[str, list[Case]] = defaultdict(list)
    few, pairs, _ = covering_array()
    for case in few + pairs if arguments.quick else sample(_NUM_PER_FAMILY):
        cases[case.family].append(case)
    families = [f for f in FAMILIES if arguments.family in (None, f)]
    found: dict[str, list[Finding]] = {}
    workers = min(len(families), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        wide = [pool.submit(float64_finding, f, cases[f]) for f in families]
        narrow = [pool.submit(float32_findings, f, arguments.seeds) for f in families]
        found["float64"] = [job.result() for job in wide]
        show("float64", found["float64"], "worst relative error")
        pairs = [job.result() for job in narrow]
    found["float32"] = [total for total, _ in pairs]
    show("float32, over all parameters", found["float32"], "worst relative error")
    found["float32 per parameter"] = [ratio for _, ratio in pairs]
    show("float32, the worst parameter", found["float32 per parameter"], "error / HF's own error")
    found["bfloat16"] = bfloat16_findings(arguments.tokens, arguments.seeds)
    show("bfloat16, Qwen2 of 4 layers, chunks", found["bfloat16"], "error / HF's own error")
    facts = machine()
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if arguments.json is not None:
        rows: dict[str, Any] = {
            part: [asdict(f) | {"met": f.met} for f in group] for part, group in found.items()
        }
        write_json(
            arguments.json, title="exactness", settings=vars(arguments), machine=facts, **rows
        )
    return int(not all(f.met for group in found.values() for f in group))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the covering array only")
    parser.add_argument("--family", choices=FAMILIES, default=None, help="this family alone")
    parser.add_argument("--seeds", type=int, default=5, help="for float32 and bfloat16")
    parser.add_argument("--tokens", type=int, default=2048, help="of the bfloat16 sequence")
    parser.add_argument("--json", default=None, metavar="PATH", help="write the results there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

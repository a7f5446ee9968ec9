"""Families with recurrent layers are exact in chunks, against float64 twins of their own code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.hybrid_cases import Case
from helpers.hybrids import HYBRIDS
from transformers import CONFIG_MAPPING

TESTS = Path(__file__).parents[1]
BOUND = 1e-9
BUILDABLE = [family for family in HYBRIDS if family in CONFIG_MAPPING]
NUM_PROCESSES = 7
"""Processes that share the families of the matrix: one takes seconds to begin."""
UNCUT = ("zamba", "zamba2", "recurrent_gemma")
ADAPTED = (
    "qwen3_next", "kimi_linear", "lfm2", "bamba", "nemotron_h", "jamba", "mamba2", "zamba2",
)  # fmt: skip
SAMPLED = ("nemotron_h", "lfm2")
FAST = [
    Case("lfm2", 7), Case("lfm2", 16, "attention", 1),
    Case("lfm2", 16, "kv", 0, stage_layers=1), Case("lfm2", 32, "input", 3),
    Case("nemotron_h", 7, "attention", 1), Case("nemotron_h", 1),
    Case("nemotron_h", 16, "input", 0, stage_layers=1),
    Case("jamba", 7, "attention", 3), Case("minimax", 16, "input"),
    Case("qwen3_next", 16, "attention", 1, tier="host"),
    Case("nemotron_h", 16, kind="lora"), Case("lfm2", 16, "attention", kind="hidden states"),
]  # fmt: skip


def errors_of(cases: Sequence[Case]) -> dict[str, list[float] | str]:
    """By case: the errors of loss and gradients, or what was raised."""
    known = os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "helpers.hybrid_cases"],
        input="\n".join(map(str, cases)), capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), known)))},
    )  # fmt: skip
    return dict(json.loads(line) for line in done.stdout.splitlines())


def require_exact(cases: Sequence[Case]) -> None:
    found = errors_of(cases)
    assert found.keys() == {str(case) for case in cases}
    wrong = {case: e for case, e in found.items() if isinstance(e, str) or not max(e) <= BOUND}
    assert not wrong, wrong


def matrix(family: str) -> list[Case]:
    cases = [
        Case(family, 1), Case(family, 7, "attention", 1, tier="disk"), Case(family, 16, "input", 3),
        Case(family, 64, "all", hybrid=False, tier="host"),
    ]  # fmt: skip
    if family not in UNCUT:
        cases += [
            Case(family, 7, "input", 0, stage_layers=2),
            Case(family, 16, "attention", 0, stage_layers=1, recompute_layers=1),
        ]
    if family in ADAPTED:
        cases.append(Case(family, 16, kind="lora"))
    if family in SAMPLED:
        cases.append(Case(family, 7, "attention", hybrid=False, kind="sampled"))
    return [*cases, Case(family, 16, "attention", 0, kind="hidden states")]


def test_a_few_cases():
    require_exact(FAST)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(NUM_PROCESSES))
def test_matrix(first):
    families = BUILDABLE[first::NUM_PROCESSES]
    require_exact([case for family in families for case in matrix(family)])

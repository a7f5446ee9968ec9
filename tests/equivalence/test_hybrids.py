"""Families with recurrent layers are exact in chunks, against float64 twins of their own code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from helpers.hybrid_cases import Case, measured
from helpers.hybrids import HYBRIDS
from transformers import CONFIG_MAPPING

BOUND = 1e-9
BUILDABLE = [family for family in HYBRIDS if family in CONFIG_MAPPING]
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


def require_exact(cases: Sequence[Case]) -> None:
    known: dict[str, Any] = {}
    found = {case: measured(case, known) for case in cases}
    wrong = {case: errors for case, errors in found.items() if not max(errors) <= BOUND}
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
@pytest.mark.parametrize("family", BUILDABLE)
def test_matrix(family):
    require_exact(matrix(family))

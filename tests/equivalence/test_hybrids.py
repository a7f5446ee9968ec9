"""Families with recurrent layers are exact in chunks, against float64 twins of their own code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from helpers.covering import Design
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


def design(families: Sequence[str]) -> Design:
    return Design(
        {
            "family": families,
            "size": (16, 7, 1),
            "keep": ("kv", "input", "attention", "all"),
            "num_retained": (0, 1, 3),
            "hybrid": (True, False),
            "stage_layers": (0, 1, 2),
            "recompute_layers": (0, 1),
            "tier": ("device", "host", "disk"),
            "kind": ("gradients", "hidden states"),
        },
        {
            "num_retained": lambda c: c["keep"] != "all",
            "stage_layers": lambda c: c["family"] not in UNCUT,
            "kind": lambda c: c["keep"] != "all" and not c["stage_layers"],
        },
        steering=("family", "keep", "stage_layers"),
        loose=["family"],
    )


FEW = design(["lfm2", "nemotron_h", "jamba", "minimax", "qwen3_next"]).array(2)
TRIPLES = design(BUILDABLE).array(3, FEW)
"""Every triple of dials, and every pair of a family and a value of one."""
OTHERS = [
    *(Case(family, 16, kind="lora") for family in ADAPTED),
    *(Case(family, 7, "attention", hybrid=False, kind="sampled") for family in SAMPLED),
]


def require_exact(cases: Sequence[Case]) -> None:
    known: dict[str, Any] = {}
    found = {case: measured(case, known) for case in cases}
    wrong = {case: errors for case, errors in found.items() if not max(errors) <= BOUND}
    assert not wrong, wrong


def test_a_few_cases():
    few = [Case(**row) for row in FEW]
    require_exact([*sorted(few, key=str), Case("nemotron_h", 16, kind="lora")])


@pytest.mark.slow
@pytest.mark.parametrize("family", BUILDABLE)
def test_matrix(family):
    cases = [Case(**row) for row in TRIPLES] + OTHERS
    require_exact(sorted((case for case in cases if case.family == family), key=str))

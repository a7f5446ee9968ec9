"""Thirty random steps of many layouts: the gradients are those of one process that cuts nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import prod

import pytest
from distributed.layout_cases import BOUND, worst_error
from distributed.random_layouts import LAYOUTS, MODELS, Drawn, drawn_layouts
from distributed.random_planners import PLANNERS
from distributed.random_steps import features, run_drawn
from helpers.ranks import run_ranks

LIMIT_S = 120
"""Seconds for each step."""
NAMED = {
    "dp 2", "dp 4", "sp 2", "sp 4", "pp 2", "pp 3", "pp 4", *PLANNERS, *MODELS,
    "cpu", "disk", "keep input", "keep kv", "keep attention", "keep all", "recomputed layers",
    "packed chunk", "split chunk", "hybrid chunk", "masked labels", "window",
    "places of several sizes in a chunk", "local and sharded in a chunk",
    "fewer tokens than processes", "fewer K,V heads than processes", "three times the chunks",
    "a process without a label", "a process without a token", "a replica without work",
    "LFM2 without work",
    "weights gathered with every pass", "stages without a backward", "several stages on a rank",
    "whole model on each stage", "gradients of two steps", "each is given what it reads",
}  # fmt: skip


def check(drawn: list[Drawn]) -> None:
    by_size: dict[int, list[Drawn]] = defaultdict(list)
    for one in drawn:
        by_size[prod(one.sizes)].append(one)
    wrong = []
    for num_ranks, own in by_size.items():
        answers = run_ranks(run_drawn, own, num_ranks=num_ranks, limit_s=LIMIT_S * len(own))
        for index, one in enumerate(own):
            error = worst_error(one.case, [found[index] for found in answers])
            print(f"{one}: {error:.1e}")
            wrong += [(str(one), error)] if not error <= BOUND else []
    assert not wrong


@pytest.mark.slow
def test_three_random_steps():
    """The first of each layout of two processes."""
    first: dict[object, Drawn] = {}
    for one in drawn_layouts():
        if prod(one.sizes) == 2:
            first.setdefault(one.sizes, one)
    assert len(first) == 3
    check(list(first.values()))


@pytest.mark.nightly
def test_thirty_random_steps_have_everything_in_them():
    drawn = drawn_layouts()
    check(drawn)
    assert len(drawn) == len(LAYOUTS) == 30
    counts = Counter(feature for one in drawn for feature in features(one))
    print(dict(sorted(counts.items())))
    assert sorted(NAMED - counts.keys()) == []

"""Thirty random steps of many layouts: the gradients are those of one process that cuts nothing."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import count
from math import prod
from pathlib import Path
from threading import Event
from unittest.mock import patch

import pytest
from distributed.layout_cases import Found, worst_error
from distributed.random_layouts import LAYOUTS, MODELS, Drawn, drawn_layouts
from distributed.random_planners import PLANNERS
from distributed.random_steps import features, run_drawn
from helpers.positions import STANDS_STILL, Position, run_watched
from helpers.ranks import RankError

BOUND = 1e-10
LIMIT_S = 120
"""Seconds for which a process may stand still."""
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


def check(drawn: list[Drawn], folder: Path) -> None:
    by_size: dict[int, list[Drawn]] = defaultdict(list)
    for one in drawn:
        by_size[prod(one.sizes)].append(one)
    wrong = []
    for num_ranks, own in by_size.items():
        answers = run_watched(
            run_drawn, folder, own, LIMIT_S, num_ranks=num_ranks, limit_s=LIMIT_S * len(own)
        )
        for index, one in enumerate(own):
            error = worst_error(one.case, [found[index] for found in answers])
            print(f"{one}: {error:.1e}")
            wrong += [(str(one), error)] if not error <= BOUND else []
    assert not wrong


def of_two_processes() -> list[Drawn]:
    """The first step of each layout."""
    first: dict[object, Drawn] = {}
    for one in drawn_layouts():
        if prod(one.sizes) == 2:
            first.setdefault(one.sizes, one)
    return list(first.values())


@pytest.mark.slow
def test_three_random_steps(tmp_path):
    drawn = of_two_processes()
    assert len(drawn) == 3
    check(drawn, tmp_path)


@pytest.mark.nightly
def test_thirty_random_steps(tmp_path):
    check(drawn_layouts(), tmp_path)


def test_thirty_random_steps_have_everything_in_them():
    drawn = drawn_layouts()
    assert len(drawn) == len(LAYOUTS) == 30
    counts = Counter(feature for one in drawn for feature in features(one))
    print(dict(sorted(counts.items())))
    assert sorted(NAMED - counts.keys()) == []


def stops(rank: int, folder: str, drawn: list[Drawn], limit_s: float) -> list[Found]:
    """As `run_drawn`, but the second process stands still behind its second action."""
    calls = count()

    def note(self: Position, text: str) -> None:
        plain(self, text)
        if rank and " actions done" in text and next(calls) == 2:
            Event().wait()

    plain = Position.note
    with patch.object(Position, "note", note):
        return run_drawn(rank, folder, drawn, limit_s)


@pytest.mark.slow
def test_a_hang_shows_where_the_ranks_are(tmp_path):
    drawn = [one for one in of_two_processes() if one.sizes == (1, 1, 2)]
    with pytest.raises(RankError) as caught:
        run_watched(stops, tmp_path, drawn, 20, num_ranks=2, limit_s=LIMIT_S)
    told = str(caught.value)
    assert f"exit code {STANDS_STILL}" in told
    assert re.search(r"rank 0: 2: 1 x 1 x 2, .* actions done", told)
    assert re.search(r"rank 1: 2: 1 x 1 x 2, .*'.*', 2 of \d+ actions done", told)

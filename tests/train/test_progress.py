"""When a run saves, evaluates and ends, by numbers alone."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from furlong.config.schema import TrainConfig
from furlong.train.progress import Cadence, HeldOut, Progress


def cadence(num_steps: int, steps_per_epoch: int, **settings: Any) -> Cadence:
    return Cadence.of(TrainConfig(steps=num_steps, **settings), num_steps, steps_per_epoch)


@pytest.mark.parametrize(
    ("settings", "steps_per_epoch", "saved"),
    [
        ({"save_every_steps": 0}, 4, []),
        ({"save_every_steps": 4}, 4, [4, 8, 10]),
        ({"save_every_steps": 99}, 4, [10]),
        ({"saves_per_epoch": 1}, 4, [4, 8, 10]),
        ({"saves_per_epoch": 0.5}, 3, [6, 10]),
        ({"saves_per_epoch": 4}, 10, [3, 5, 8, 10]),
        ({"saves_per_epoch": 0.1}, 1, [10]),
        ({"saves_per_epoch": 3}, 10, [4, 7, 10]),
        ({"saves_per_epoch": 7}, 2, list(range(1, 11))),
    ],
)
def test_checkpoints_are_due_by_steps_or_by_epochs(
    settings: dict[str, Any], steps_per_epoch: int, saved: list[int]
) -> None:
    found = cadence(10, steps_per_epoch, **settings)
    assert [step for step in range(1, 11) if found.saves(step)] == saved
    assert found.num_saves == len(saved)


def test_evaluations_are_also_before_the_first_and_after_the_last_step() -> None:
    for settings, due in (
        ({"eval_every_steps": 0}, [0, 5]),
        ({"eval_every_steps": 2}, [0, 2, 4, 5]),
        ({"evals_per_epoch": 1}, [0, 3, 5]),
        ({"evals_per_epoch": 0.25}, [0, 5]),
    ):
        found = cadence(5, 3, **settings)
        assert [step for step in range(6) if found.evaluates(step)] == due


def test_the_lowest_loss_is_found_and_a_run_ends_without_one() -> None:
    ending = cadence(100, 1, early_stopping=2)
    progress, ends = Progress(), []
    for step, loss in enumerate([1.0, 3.0, 2.0, math.nan, 1.5, 1.5, 1.6]):
        progress = Progress(step, held_out=progress.held_out).evaluated(loss)
        assert progress.evaluated(0.0).held_out == progress.held_out or step == 0, "repeated"
        ends.append(ending.ends(progress))
    # the loss before the first step does not count, and one that is no number is not lower
    assert progress.held_out == HeldOut(6, 4, 1.5, 2)
    assert ends == [False] * 6 + [True]
    assert not cadence(100, 1).ends(progress) and cadence(6, 1).ends(progress)
    assert Progress(3).evaluated(None).held_out == HeldOut()
    stored = json.dumps(asdict(progress))
    assert json.dumps(asdict(Progress.from_dict(json.loads(stored)))) == stored

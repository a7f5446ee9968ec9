"""research/sampled_learning.py: its curves, what they are compared by, and that it goes on."""

from __future__ import annotations

import math
from dataclasses import replace

import learning_runs
import pytest
from learning_curve import Curve, Learned, learn
from sampled_learning import computed

pytestmark = pytest.mark.nightly

NUM_UPDATES = 100
LRS = dict.fromkeys(learning_runs.CONFIGS, 3e-3)


def learned(curve: Curve, loss: float, update_s: float = 1.0) -> Learned:
    return Learned(curve, curve.num_updates * update_s, loss, curve.rate, 60.0)


def runs() -> list[Learned]:
    """Exact ends at 4, 3 and 2 (by its updates); sampled at 2.5, an update in `rate` seconds."""
    exact = {30: 4.0, 60: 3.0, 100: 2.0}
    return [
        learned(curve, exact[curve.num_updates])
        if curve.rule == "exact"
        else learned(curve, 2.5, curve.rate)
        for curve in learning_runs.finals(NUM_UPDATES, LRS)
    ]


def test_draws_of_a_curve_depend_on_seed_and_update():
    curve = Curve("unbiased", 0.25, 1e-3, 1, 10)
    sampling = curve.options(3).sampling
    assert sampling is not None and sampling.label_rate == sampling.rate == 0.25
    seeds = {replace(curve, seed=s).options(n).sampling.seed for s in (0, 1) for n in (3, 4)}
    assert len(seeds) == 4
    assert replace(curve, rule="fixed").options(3).sampling.label_rate is None
    assert replace(curve, rule="exact").options(3).sampling is None


def test_the_lowest_loss_chooses_the_learning_rate_and_nan_never():
    curves = learning_runs.candidates(NUM_UPDATES)
    losses = {1e-3: 3.0, 3e-3: 2.9, 1e-2: math.nan}
    chosen = learning_runs.best_lrs([learned(curve, losses[curve.lr]) for curve in curves])
    assert chosen == dict.fromkeys(learning_runs.CONFIGS, 3e-3)


def test_sampling_is_compared_at_equal_updates_and_at_equal_seconds():
    found = runs()
    seconds = learning_runs.update_seconds(found)
    rows = {row.config: row for row in learning_runs.summarize(found, seconds, NUM_UPDATES)}
    half, eighth = rows["fixed", 0.5], rows["fixed", 0.125]
    assert half.update_ratio == 0.5 and half.losses == (2.5, 2.5, 2.5)
    assert half.exact_losses == (2.0, 2.0, 2.0)
    expected = 4 - math.log(50 / 30) / math.log(60 / 30)
    assert half.timely_losses == pytest.approx((expected,) * 3)
    assert eighth.timely_losses == (4.0, 4.0, 4.0)
    remarks = learning_runs.remarks([*rows.values()])
    assert any("better: unbiased 1/2" in text and "fixed 1/8" in text for text in remarks)
    assert not any("is the last" in text for text in remarks)
    kept = [p.verdict for p in learning_runs.promises([*rows.values()], found)]
    assert kept == ["met", "met"]


def test_finished_curves_are_read_and_not_computed(tmp_path):
    given = runs()
    for curve in given:
        curve.write(tmp_path)
    # there are no windows in the folder: computing any of them would fail
    assert computed([curve.curve for curve in given], tmp_path) == given


@pytest.mark.nightly
def test_a_sampled_curve_learns_and_is_the_same_again():
    windows = [[(7 * i + n) % 50 for i in range(256)] for n in range(4)]
    curve = Curve("fixed", 0.5, 1e-2, 0, 12)
    first, again = (learn(curve, windows, windows[:1]) for _ in range(2))
    assert first.loss == again.loss < math.log(1024)
    assert first.drawn_share == 0.5

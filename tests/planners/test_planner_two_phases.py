"""Plans of two phases: every forward runs to its end, and first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from furlong.errors import ConfigError, PlanError
from furlong.plan.check import check
from furlong.plan.passes import passes
from furlong.plan.plan import Forward
from furlong.plan.text import format_action, load_plan, save_plan
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_two_phases


def written(options, lens=(12, 3)):
    plan = plan_two_phases(lens, options, num_layers=2)
    return " ".join(format_action(action) for action in plan.actions[0])


def test_the_group_that_was_forwarded_last_goes_back_first():
    assert written(ChunkOptions(size=4, keep="kv", hybrid=False)) == (
        "F0.0 kv F1.0 kv F2.0 kv F3.0 kv R3.0 B3.0 R2.0 B2.0 R1.0 B1.0 R0.0 B0.0 reduce 0"
    )


def test_what_was_not_kept_is_rebuilt():
    text = written(ChunkOptions(size=4, keep="input"), (12,))
    assert [word for word in text.split() if word.startswith("K")] == ["K0.0", "K1.0"]


@pytest.mark.parametrize("keep", ["input", "kv", "attention"])
def test_every_forward_runs_to_its_end(keep):
    plan = plan_two_phases([12, 3, 7], ChunkOptions(size=4, keep=keep), num_layers=2)
    for action, what in zip(plan.actions[0], passes(plan, 0), strict=True):
        if isinstance(action, Forward):
            assert what.computes == "values" and what.loss
            assert what.remembers == (2 if keep == "attention" else 0)
    assert load_plan(save_plan(plan)) == plan


def test_a_forward_behind_the_first_phase_is_refused():
    plan = plan_two_phases([3, 7], ChunkOptions(size=8, keep="kv"), num_layers=2)
    f0, f1, r1, b1, r0, b0, reduce = plan.actions[0]
    check(replace(plan, actions=((f0, r0, b0, f1, r1, b1, reduce),), two_phases=False))
    with pytest.raises(PlanError, match="all Forwards in the first"):
        check(replace(plan, actions=((f0, r0, b0, f1, r1, b1, reduce),)))
    retained = replace(f1, keep="all")
    with pytest.raises(PlanError, match="all Forwards in the first"):
        check(replace(plan, actions=((f0, retained, b1, r0, b0, reduce),)))


@pytest.mark.parametrize(
    "options", [{"keep": "all"}, {"order": "layer-first"}, {"sample": {"chunks": 1}}]
)
def test_options_that_two_phases_have_not_are_refused(options):
    with pytest.raises(ConfigError, match="token_values"):
        plan_two_phases([3], ChunkOptions(**options), num_layers=2)

"""Figures of a timeline: seconds of a rank add up, and the bubble ratio is ChunkFlow's."""

import json

import pytest
from helpers.plan_texts import plan_of
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.chunkflow_plan import plan_chunkflow
from papers.unit_costs import UnitCosts

from furlong.plan.text import parse_action
from furlong.planners.options import ChunkOptions
from furlong.simulate.clock import RankSeconds, SimulatedStep, measure, simulate
from furlong.timeline import Record, Timeline


def timeline(*records):
    return Timeline(
        tuple(
            Record(rank, lane, parse_action(text), start, stop, 10 * i, i)
            for i, (rank, lane, text, start, stop) in enumerate(records)
        )
    )


def test_every_second_of_a_rank_has_one_reason():
    figures = measure(
        timeline(
            (0, "link", "unshard 0", 0.0, 1.0),
            (0, "compute", "F0.0 kv", 1.0, 3.0),
            (0, "copy", "F0.0 kv", 1.0, 4.0),
            (0, "link", "send activation 0.0 to 1", 3.0, 8.0),
            (0, "link", "recv gradient 0.1 from 1", 6.0, 7.0),
            (0, "compute", "R0.0", 7.0, 8.0),
            (0, "compute", "K0.0", 8.0, 8.5),
            (0, "compute", "B0.0", 8.5, 12.0),
            (0, "link", "reduce 0", 11.0, 14.0),
            (1, "compute", "F0.1 all", 4.0, 5.0),
        )
    )
    assert figures.duration_s == 14
    assert figures.ranks[0] == RankSeconds(
        forward_s=2, backward_s=3.5, recompute_s=1.5, copies_s=1, messages_s=1, collectives_s=3,
        waiting_s=2,
    )  # fmt: skip
    assert figures.ranks[1] == RankSeconds(forward_s=1, waiting_s=13)
    assert figures.bubble_ratio == pytest.approx(1 - 6.5 / 28)
    assert figures.idle_ratio == pytest.approx(1 - 8 / 28)
    assert figures.shares()["collectives"] == pytest.approx(3 / 28)
    assert figures.peak_device_bytes == (80, 90)
    assert figures.peak_offloaded_bytes == (8, 9)


def test_overlapping_reasons_count_once_and_a_measured_reduce_is_a_collective():
    figures = measure(
        timeline(
            (0, "compute", "F0.0 all", 0.0, 1.0),
            (0, "copy", "F0.0 all", 0.0, 3.0),
            (0, "link", "recv gradient 0.1 from 1", 2.0, 4.0),
            (0, "link", "recv gradient 1.1 from 1", 2.5, 3.5),
            (0, "compute", "B0.0", 5.0, 6.0),
            (0, "compute", "reduce 0", 6.0, 8.0),
        )
    )
    assert figures.ranks[0] == RankSeconds(
        forward_s=1, backward_s=1, copies_s=2, messages_s=1, collectives_s=2, waiting_s=1
    )


def test_a_recompute_is_a_first_forward_where_the_forward_computed_nothing():
    actions = "F0.0 kv", "F1.0 kv", "R1.0", "B1.0", "R0.0", "B0.0"
    plan = plan_of("0:0-4; 0:4-8", ", ".join(actions))
    times = [0.0, 2.0, 2.5, 4.5, 8.5, 10.5, 14.5]
    ran = timeline(
        *((0, "compute", text, times[i], times[i + 1]) for i, text in enumerate(actions))
    )
    # F1.0 takes half a second to do nothing
    assert measure(ran, plan).ranks[0] == RankSeconds(forward_s=4, backward_s=8, recompute_s=2.5)
    assert measure(ran).ranks[0] == RankSeconds(forward_s=2.5, backward_s=8, recompute_s=4)


def test_no_share_is_negative():
    """However sums round: 0.1 + 0.2 is more than 0.3."""
    figures = SimulatedStep(0.3, (RankSeconds(forward_s=0.1, backward_s=0.2),), (0,), (0,))
    assert figures.bubble_ratio == figures.idle_ratio == 0


def test_an_empty_timeline():
    figures = measure(Timeline(()))
    assert (figures.duration_s, figures.bubble_ratio, figures.ranks) == (0, 0, ())
    assert set(figures.shares().values()) == {0.0}


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(1, 20),
    st.integers(1, 4),
    st.floats(0, 3),
)
def test_shares_add_up_to_one(seq_lens, size, num_stages, transfer_s):
    plan = plan_chunkflow(seq_lens, ChunkOptions(size=size), stages=(1,) * num_stages)
    costs = UnitCosts(plan)
    costs.transfer_s = lambda action, rank: transfer_s
    figures = measure(simulate(plan, costs))
    assert sum(figures.shares().values()) == pytest.approx(1)
    assert all(share > -1e-12 for share in figures.shares().values())
    num_tokens = sum(seq_lens)
    useful = 3 * num_tokens * num_stages / (figures.duration_s * num_stages)
    assert figures.bubble_ratio == pytest.approx(1 - useful)
    assert json.loads(json.dumps(figures.to_json()))["bubble_ratio"] == figures.bubble_ratio

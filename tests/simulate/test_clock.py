"""The clock: lanes, messages, collectives and copies by hand, and deadlocks."""

import dataclasses

import pytest
from helpers.plan_texts import plan_of
from papers.unit_costs import UnitCosts

from furlong.errors import PlanError
from furlong.plan.plan import Backward, Send, Unshard
from furlong.plan.text import format_action
from furlong.simulate.clock import simulate, time_actions


class Costs:
    """Seconds from a table of action texts (the longest beginning counts), else 0."""

    def __init__(self, **seconds):
        self.seconds = seconds

    def _of(self, action):
        kind = format_action(action).split(" ")[0].rstrip("0123456789.")
        return self.seconds.get(kind, 0.0)

    def compute_s(self, action, rank):
        return self._of(action)

    def transfer_s(self, action, rank):
        return self.seconds.get(action.payload, 0.0)

    def link_s(self, action, rank):
        return self.seconds.get("link", self._of(action))

    def blocking_s(self, action, rank):
        is_first = isinstance(action, Unshard) and action.stage == 0
        return self.seconds.get("blocking", 0.0) if is_first else 0.0

    def head_s(self, action, rank):
        return self.seconds.get("head", 0.0)

    def copy_s(self, action, rank):
        return self.seconds.get("copy", 0.0) if isinstance(action, Backward) else 0.0


def spans(timeline, rank, lane="compute"):
    return [
        (record.text, record.start_s, record.stop_s)
        for record in timeline.records
        if record.rank == rank and record.lane == lane
    ]


TWO_STAGES = (
    "F0.0 all, send activation 0.0 to 1, F1.0 all, send activation 1.0 to 1, "
    "recv gradient 0.1 from 1, B0.0, recv gradient 1.1 from 1, B1.0, reduce 0",
    "recv activation 0.0 from 0, F0.1 all, B0.1, send gradient 0.1 to 0, "
    "recv activation 1.0 from 0, F1.1 all, B1.1, send gradient 1.1 to 0, reduce 1",
)


def two_stages():
    return plan_of("0:0-4; 1:0-4", *TWO_STAGES, stages=(1, 1))


def test_messages_take_the_link_and_leave_the_compute_lane_free():
    timeline = simulate(two_stages(), Costs(F=1.0, B=2.0, activation=3.0, gradient=0.5))
    assert spans(timeline, 0) == [
        ("F0.0 all", 0, 1), ("F1.0 all", 1, 2), ("B0.0", 7.5, 9.5), ("B1.0", 10.5, 12.5),
    ]  # fmt: skip
    # the second message waits for the channel, not for the first one's arrival at its reader
    assert spans(timeline, 0, "link")[:2] == [
        ("send activation 0.0 to 1", 1, 4),
        ("send activation 1.0 to 1", 4, 7),
    ]
    # a Recv is recorded from where its message is on its way: the wait before is no communication
    assert spans(timeline, 1, "link")[0] == ("recv activation 0.0 from 0", 1, 4)
    assert spans(timeline, 1) == [
        ("F0.1 all", 4, 5), ("B0.1", 5, 7), ("F1.1 all", 7, 8), ("B1.1", 8, 10),
    ]  # fmt: skip
    assert ("recv activation 1.0 from 0", 7, 7) in spans(timeline, 1, "link")
    assert timeline.duration_s == 12.5


def test_a_broken_plan_stalls():
    actions = list(two_stages().actions)
    actions[0] = tuple(a for a in actions[0] if not isinstance(a, Send))
    stalled = dataclasses.replace(two_stages(), actions=tuple(actions))
    with pytest.raises(PlanError, match="wait for each other"):
        simulate(stalled, Costs())


def test_collectives_start_with_the_last_rank_and_are_waited_for_by_the_next_cell():
    plan = plan_of(
        "0:0-4; 1:0-4; 2:0-1",
        "unshard 0, F0.0 all, B0.0, F1.0 all, B1.0, reduce 0",
        "unshard 0, F2.0 all, B2.0, reduce 0",
        stages=(1,),
    )
    timeline = simulate(plan, Costs(unshard=2.0, F=1.0, B=2.0, reduce=4.0))
    assert spans(timeline, 0)[0] == ("F0.0 all", 2, 3)
    # rank 1 waits for rank 0: its last Backward adds gradients up
    assert spans(timeline, 1)[:2] == [("F2.0 all", 2, 3), ("B2.0", 6, 8)]
    assert spans(timeline, 1, "link")[-1] == ("reduce 0", 8, 12)
    assert timeline.duration_s == 12


@pytest.mark.parametrize(
    ("layers", "starts_s"),
    [
        # a pass of 3 s: its layers are there at 3, 5 and 7 s; a longer one waits for the first only
        ((3,), {"F0.0 all": 5, "F1.0 all": 8}),
        ((3, 1), {"F0.0 all": 5, "F1.0 all": 8, "F0.1 all": 14, "F1.1 all": 17}),
        ((1, 3), {"F0.0 all": 7, "F1.0 all": 10, "F0.1 all": 13, "F1.1 all": 16}),
    ],
)
def test_a_first_pass_runs_each_layer_when_it_has_come(layers, starts_s):
    order = [f"F{i}.{stage} all" for stage in range(len(layers)) for i in (0, 1)]
    back = [f"B{i}.{stage}" for stage in reversed(range(len(layers))) for i in (1, 0)]
    gathers = [f"unshard {stage}" for stage in range(len(layers))]
    plan = plan_of("0:0-1; 1:0-1", ", ".join(gathers + order + back), stages=layers)
    timeline = simulate(plan, Costs(unshard=7.0, blocking=1.0, F=3.0, B=1.0))
    starts = {record.text: record.start_s for record in timeline.records}
    assert {text: starts[text] for text in starts_s} == pytest.approx(starts_s)


def test_a_reduce_runs_beside_the_cells_of_another_stage():
    plan = plan_of(
        "0:0-4",
        "F0.0 all, F0.1 all, B0.1, reduce 1, B0.0, reduce 0",
        stages=(1, 1),
    )
    timeline = simulate(plan, Costs(F=1.0, B=2.0, reduce=5.0))
    assert spans(timeline, 0)[-1] == ("B0.0", 4, 6)
    assert spans(timeline, 0, "link") == [("reduce 1", 4, 9), ("reduce 0", 9, 14)]


def test_a_reduce_has_the_link_beside_its_last_backward_if_it_is_free():
    plan = plan_of("0:0-4", "F0.0 all, F0.1 all, B0.1, reduce 1, B0.0, reduce 0", stages=(1, 1))
    timeline = simulate(plan, Costs(F=1.0, B=3.0, reduce=1.0, link=4.0))
    # 4 s of link each: the last one of the first reduce, and 2 of the second, pass behind Backwards
    assert spans(timeline, 0)[-1] == ("B0.0", 5, 8)
    assert spans(timeline, 0, "link") == [("reduce 1", 5, 6), ("reduce 0", 8, 10)]


def test_copies_run_beside_their_cell_and_hold_the_next_one_up():
    plan = plan_of("0:0-4; 0:4-5", "F0.0 kv, F1.0 all, B1.0, R0.0, B0.0")
    costs = Costs(F=1.0, R=1.0, B=2.0, copy=3.0)
    timeline = simulate(plan, costs, copies=costs)
    assert spans(timeline, 0)[2:] == [("B1.0", 2, 4), ("R0.0", 5, 6), ("B0.0", 6, 8)]
    assert spans(timeline, 0, "copy") == [("copy B1.0", 2, 5), ("copy B0.0", 6, 9)]
    assert timeline.duration_s == time_actions(plan, costs, copies=costs).duration_s == 9


def test_every_record_has_its_memory_and_they_are_in_the_order_in_which_they_ended():
    in_use = [[1000 * rank + i for i in range(9)] for rank in (0, 1)]
    timeline = simulate(two_stages(), Costs(F=1.0), device_bytes=in_use, offloaded_bytes=in_use)
    by_action = {(r.rank, r.text): (r.device_bytes, r.offloaded_bytes) for r in timeline.records}
    assert by_action[0, "F1.0 all"] == (2, 2) and by_action[1, "B1.1"] == (1006, 1006)
    assert timeline.peak_device_bytes == 1008
    stops = [record.stop_s for record in timeline.records]
    assert stops == sorted(stops) and len(stops) == sum(map(len, two_stages().actions))


def test_an_empty_rank_leaves_no_record():
    idle = plan_of("0:0-4", "F0.0 input", "")
    assert simulate(idle, UnitCosts(idle)).duration_s == 4

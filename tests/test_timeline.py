"""Timelines as plain values."""

import json

import pytest

from furlong.errors import UserError
from furlong.plan.text import parse_action
from furlong.timeline import Record, Timeline

RECV = parse_action("recv activation 0.0 from 0")
TIMELINE = Timeline((Record(0, "compute", parse_action("F0.0 kv"), 0.0, 1.5, 10, 0),
                     Record(1, "link", RECV, 1.5, 2.0, 0, 7),
                     Record(1, "copy", parse_action("B0.0"), 2.0, 5.0, 0, 7)))  # fmt: skip


def test_copies_have_a_kind_of_their_own():
    assert TIMELINE.seconds_by_kind() == {"F": 1.5, "recv": 0.5, "copy": 3.0}
    assert [record.text for record in TIMELINE.records] == [
        "F0.0 kv", "recv activation 0.0 from 0", "copy B0.0",
    ]  # fmt: skip


def test_a_timeline_comes_back_from_json():
    assert Timeline.from_json(json.loads(json.dumps(TIMELINE.to_json()))) == TIMELINE


@pytest.mark.parametrize(
    "rows",
    [
        {"records": []},
        [[0, "compute", "F0.0 kv", 0.0, 1.5, 10]],
        [[0, "elsewhere", "F0.0 kv", 0.0, 1.5, 10, 0]],
        [[-1, "compute", "F0.0 kv", 0.0, 1.5, 10, 0]],
        [[0, "compute", "F0.0 kv", 2.0, 1.5, 10, 0]],
        [[0, "compute", 3, 0.0, 1.5, 10, 0]],
        [[0, "compute", "G0.0", 0.0, 1.5, 10, 0]],
    ],
)
def test_what_is_no_timeline_is_refused(rows):
    with pytest.raises((ValueError, UserError)):
        Timeline.from_json(rows)

"""Timelines as plain values."""

import json

import pytest

from furlong.timeline import Record, Timeline

TIMELINE = Timeline((Record(0, "compute", "F0.0 kv", 0.0, 1.5, 10, 0),
                     Record(1, "link", "recv activation 0.0 from 0", 1.5, 2.0, 0, 7)))  # fmt: skip


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
    ],
)
def test_what_is_no_timeline_is_refused(rows):
    with pytest.raises(ValueError):
        Timeline.from_json(rows)

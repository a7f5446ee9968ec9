"""The schedule of one group, by hand."""

import pytest

from furlong.plan.text import format_action
from furlong.planners.orders import schedule_group


def schedule(chunks, **options):
    actions = schedule_group(chunks, **options)
    return " ".join(format_action(action).replace(" ", ":") for action in actions)


@pytest.mark.parametrize(
    ("num_chunks", "num_retained", "keep", "expected"),
    [
        (3, 1, "kv", "F0.0:kv F1.0:kv F2.0:all B2.0 R1.0 B1.0 R0.0 B0.0"),
        (3, 2, "kv", "F0.0:kv F1.0:all F2.0:all B2.0 B1.0 R0.0 B0.0"),
        (2, 0, "attention", "F0.0:attention F1.0:attention R1.0 B1.0 R0.0 B0.0"),
        (2, 5, "kv", "F0.0:all F1.0:all B1.0 B0.0"),
        (2, 0, "all", "F0.0:all F1.0:all B1.0 B0.0"),
        (1, 1, "kv", "F0.0:all B0.0"),
        (1, 0, "input", "F0.0:input R0.0 B0.0"),
        (2, 0, "input", "F0.0:input F1.0:input K0.0 R1.0 B1.0 R0.0 B0.0"),
        (3, 1, "input", "F0.0:input F1.0:input F2.0:all K0.0 K1.0 B2.0 R1.0 B1.0 R0.0 B0.0"),
    ],
)
def test_schedule_of_a_group(num_chunks, num_retained, keep, expected):
    assert schedule(range(num_chunks), num_retained=num_retained, keep=keep) == expected


def test_number_of_forwards_run_twice():
    # ChunkFlow, Fig. 5: four dependent chunks run 3 forwards twice with K = 1, and 2 with K = 2
    for num_retained, expected in ((1, 3), (2, 2)):
        texts = schedule(range(4), num_retained=num_retained, keep="kv").split()
        assert sum(text.startswith("R") for text in texts) == expected


def test_names_chunks_and_stage_and_evaluation_only_forwards():
    found = schedule([7, 9], num_retained=1, keep="kv", stage=2)
    assert found == "F7.2:kv F9.2:all B9.2 R7.2 B7.2"
    found = schedule([7, 9], num_retained=1, keep="kv", stage=2, backward=False)
    assert found == "F7.2:input F9.2:input"

"""benchmarks/limited.py: links of a limited rate, or a line that says why there are none."""

from __future__ import annotations

import shutil

import limited
import pytest
from limited import Asked, run_limited, why_not


def test_a_tool_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    assert (why_not() or "").startswith("tc not found")


@pytest.mark.nightly
def test_all_to_alls_have_the_rate_of_the_links():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    answered = run_limited(Asked(num_sequences=8, longest_tokens=256, rounds=1))
    assert [one.name for one in answered.contenders] == ["Ulysses", "FlexSP", "places"]
    assert [len(answer) for answer in answered.answers] == [3] * limited.NUM_PROCESSES
    links = answered.contenders[0].model.hardware.links
    # bursts of 128 KB pass without a limit, so the line through few points may be too steep
    measured = links.link("all_to_all", False).bytes_per_s * 8 / 1e6
    assert 0 < measured <= 2 * limited.RATE_MBIT

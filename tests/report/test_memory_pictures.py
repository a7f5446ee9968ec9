"""Memory over time of several steps: what the picture says; how it looks is for eyes."""

import re
import struct
from xml.etree import ElementTree

import pytest

from furlong.cost.devices.hardware import hardware
from furlong.cost.memory.training import Lora, Training
from furlong.cost.model import CostModel
from furlong.cost.shapes.known_models import model_shape
from furlong.plan.values import Tiers
from furlong.planners.methods.chunkflow import plan_chunkflow
from furlong.planners.methods.fpdt import plan_fpdt
from furlong.planners.options import ChunkOptions
from furlong.report.pictures.memory import save_memory_picture
from furlong.report.plan_report import report_plan
from furlong.simulate.clock import simulate
from furlong.simulate.unit_costs import UnitCosts
from furlong.units import format_bytes

MODEL = CostModel(model_shape("Qwen2.5-7B"), hardware("H100"), Training(lora=Lora(8)))
LENGTH = 131_072


def timelines(counts=(2, 4, 8, 16), **tiers):
    """The same sequence in so many chunks, layer by layer."""
    return {
        f"{count} chunks": report_plan(
            plan_fpdt(
                [LENGTH], num_layers=28, chunk_size=LENGTH // count, tiers=Tiers(**tiers)
            ),
            MODEL,
        ).timeline
        for count in counts
    }  # fmt: skip


def test_a_row_per_timeline_with_its_peak(tmp_path):
    drawn = timelines(inputs="host", kv="host")
    file = tmp_path / "memory.svg"
    save_memory_picture(drawn, file, title="Qwen2.5-7B $x$, 128K tokens")
    ElementTree.fromstring(file.read_text())
    words = re.findall(r"<!-- (.*?) -->", file.read_text())
    assert "Qwen2.5-7B $x$, 128K tokens" in words
    rows = [word for word in words if "peak" in word]
    assert [row.split("   ·   ")[0] for row in rows] == list(drawn)
    assert all("host and disk" in row for row in rows)
    for word in ("forward", "recompute", "rebuild K,V", "backward", "device memory", "time (s)"):
        assert word in words
    # the more chunks, the lower the spikes; and the picture tells the same as the timelines
    floor = min(r.device_bytes for t in drawn.values() for r in t.records if r.lane == "compute")
    peaks = [timeline.peak_device_bytes - floor for timeline in drawn.values()]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 4 * peaks[3]
    told = [re.search(r"peak ([\d.]+ \w+)", row)[1] for row in rows]
    assert told == [format_bytes(peak) for peak in peaks]
    assert f"above the {format_bytes(floor)} that are there all through" in words


def test_png_grows_with_its_rows_and_names_no_empty_tier(tmp_path):
    plan = plan_chunkflow([9000], ChunkOptions(size=1024), stages=(28,))
    timeline = simulate(plan, MODEL.costs(plan), memory=MODEL.memory())
    heights = []
    for count in (1, 4):
        file = tmp_path / "a.png"
        save_memory_picture({f"row {i}": timeline for i in range(count)}, file)
        heights.append(struct.unpack(">II", file.read_bytes()[16:24])[1])
    assert 1.5 < heights[1] / heights[0] < 3.5
    file = tmp_path / "a.svg"
    save_memory_picture({"one": timeline}, file)
    assert "host and disk" not in file.read_text() and "rebuild K,V" not in file.read_text()


def test_a_timeline_without_memory_is_refused(tmp_path):
    plan = plan_chunkflow([9], ChunkOptions(size=4), stages=(2,))
    with pytest.raises(ValueError, match="'bare' has no memory of rank 0"):
        save_memory_picture({"bare": simulate(plan, UnitCosts(plan))}, tmp_path / "a.svg")

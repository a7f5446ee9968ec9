"""A rank's memory by its parts: what is drawn is what the cost model counts, action by action."""

import re

import numpy as np
import pytest
from papers.chunkflow_plan import plan_chunkflow
from papers.fpdt_plan import plan_fpdt

from furlong.cost.machine import hardware
from furlong.cost.memory import PARTS, MemoryCurve
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.plan.plan import Tiers
from furlong.plan.text import parse_action
from furlong.planners.options import ChunkOptions
from furlong.report.report import report_plan
from furlong.report.scene import Panel, legend, make_scenes, memory_steps
from furlong.report.timelines import save_timelines
from furlong.timeline import Record, Timeline
from furlong.units import format_bytes

MODEL = CostModel(model_shape("Qwen2.5-7B"), hardware("H100"), Training(lora=Lora(8)))
OPTIONS = ChunkOptions(size=4096, keep="attention")
PLANS = {
    "one device": plan_chunkflow([20_000, 900, 800], OPTIONS, stages=(28,)),
    "pipeline": plan_chunkflow([20_000, 900, 5_000], OPTIONS, stages=(14, 14)),
    "layer-first": plan_fpdt([30_000], num_layers=28, chunk_size=8192),
    "tiers": plan_fpdt(
        [30_000], num_layers=28, chunk_size=8192, tiers=Tiers(inputs="host", kv="disk")
    ),
}


def at(steps, time):
    """The bytes by part at a time."""
    place = max(i for i, start in enumerate(steps.times) if start <= time)
    return {part: values[place] for part, values in steps.parts.items()}


@pytest.mark.parametrize("name", PLANS)
def test_the_parts_add_up_to_the_bytes_in_use_whenever_a_cell_runs(name):
    report = report_plan(PLANS[name], MODEL)
    (scene,) = make_scenes([report.panel(name)])
    for rank in scene.ranks:
        cells = [bar.record for bar in rank.on("compute")]
        assert len(cells) > 10
        for record in cells:
            if record.stop_s > record.start_s:
                assert sum(at(rank.device, record.start_s).values()) == record.device_bytes
                if rank.lower.parts:
                    assert sum(at(rank.lower, record.start_s).values()) == record.host_bytes
                else:
                    assert record.host_bytes == 0
        assert rank.device.times[0] == 0 and list(rank.device.times) == sorted(rank.device.times)


def test_equal_actions_and_records_in_any_order_get_the_bytes_of_their_own_place():
    actions = [parse_action(text) for text in ("F0.0 all", "reshard 0", "B0.0", "reshard 0")]
    device = np.zeros((4, len(PARTS)), dtype=np.int64)
    device[:, PARTS.index("weights")] = [40, 10, 30, 20]
    curve = MemoryCurve(device, host=np.array([0, 5, 6, 7]), disk=np.zeros(4, dtype=np.int64))
    records = [
        Record(0, "compute", action, float(time), time + 1.0, 0, 0)
        for time, action in enumerate(actions)
    ]
    on_device, lower = memory_steps(records[::-1], actions, "host", curve)
    assert on_device.times == lower.times == (0.0, 1.0, 2.0, 3.0)
    assert on_device.parts == {"weights": (40, 10, 30, 20)}
    assert lower.parts == {"host": (0, 5, 6, 7)}


def test_a_rank_that_waits_has_no_more_than_before_and_after():
    actions = [parse_action(text) for text in ("F0.0 all", "B0.0", "reduce 0")]
    device = np.zeros((3, len(PARTS)), dtype=np.int64)
    device[:, PARTS.index("weights")] = 10
    device[:, PARTS.index("activations")] = [40, 40, 0]
    device[:, PARTS.index("logits")] = [0, 30, 0]
    none = np.zeros(3, dtype=np.int64)
    spans = ((0.0, 1.0), (2.0, 3.0), (5.0, 6.0))
    records = [
        Record(0, "compute", action, *span, 0, 0)
        for action, span in zip(actions, spans, strict=True)
    ]
    on_device, _ = memory_steps(records, actions, "host", MemoryCurve(device, none, none))
    assert at(on_device, 1.5) == {"weights": 10, "activations": 40, "logits": 0}
    assert at(on_device, 2.5) == {"weights": 10, "activations": 40, "logits": 30}
    assert at(on_device, 4.0) == {"weights": 10, "activations": 0, "logits": 0}


@pytest.mark.parametrize("name", PLANS)
def test_the_parts_at_the_peak_are_those_of_the_table(name):
    report = report_plan(PLANS[name], MODEL)
    (scene,) = make_scenes([report.panel(name)])
    for rank, memory in zip(scene.ranks, report.memory, strict=True):
        assert rank.device.peak == memory.device_bytes
        rows = [dict(zip(rank.device.parts, row, strict=True))
                for row in zip(*rank.device.parts.values(), strict=True)]  # fmt: skip
        assert {part: used for part, used in memory.parts.items() if used} in [
            {part: used for part, used in row.items() if used} for row in rows
        ]
        for tier, used in (("host", memory.host_bytes), ("disk", memory.disk_bytes)):
            assert max(rank.lower.parts.get(tier, (0,))) == used


def test_the_picture_names_the_parts_and_both_tiers(tmp_path):
    report = report_plan(PLANS["tiers"], MODEL)
    save_timelines([report.panel("tiers")], tmp_path / "a.svg")
    words = re.findall(r"<!-- (.*?) -->", (tmp_path / "a.svg").read_text())
    for part in ("weights", "activations", "K,V", "dK,dV", "logits", "buffers", "host memory",
                 "disk", "limit of device memory"):  # fmt: skip
        assert words.count(part) == 1, part
    (own,) = report.memory
    assert f"peak {format_bytes(own.device_bytes)}" in words
    assert f"host {format_bytes(own.host_bytes)}" in words
    assert f"disk {format_bytes(own.disk_bytes)}" in words
    assert not any("predictions" in word for word in words)


def test_without_a_cost_model_memory_is_a_total_and_the_legend_says_so():
    records = (
        Record(0, "compute", parse_action("F0.0 all"), 2.0, 3.0, 10, 0),
        Record(0, "link", parse_action("send activation 0.0 to 1"), 3.0, 9.0, 10, 0),
        Record(0, "compute", parse_action("B0.0"), 4.0, 5.0, 30, 7),
        Record(0, "compute", parse_action("reduce 0"), 5.0, 6.0, 20, 0),
    )
    plan = plan_chunkflow([3], ChunkOptions(size=4), stages=(2,))
    (scene,) = make_scenes([Panel(Timeline(records), plan)])
    (rank,) = scene.ranks
    # from the start of the step on; a message that is still under way says nothing
    assert rank.device.times == (0.0, 4.0, 5.0)
    assert rank.device.parts == {"in use": (10, 30, 20)}
    assert rank.lower.parts == {"host": (0, 7, 0)}
    _, _, memory = legend([scene])
    assert [entry.text for entry in memory] == [
        "device memory: only predictions know its parts", "host memory",
    ]  # fmt: skip


def test_bytes_beyond_the_limit_are_told(tmp_path):
    for budget, is_over in ((2**30, True), (2**40, False)):
        report = report_plan(PLANS["one device"], MODEL, budget)
        save_timelines([report.panel("a")], tmp_path / "a.svg")
        text = (tmp_path / "a.svg").read_text()
        assert f"limit {format_bytes(budget)}" in text
        # the red area above the limit is the only thing that one can look through
        assert ("opacity: 0.6" in text) == is_over

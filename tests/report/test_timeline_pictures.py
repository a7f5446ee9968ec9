"""Pictures and traces: what they say and hold; how they look is for eyes."""

import html
import json
import re
import struct
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from papers.chunkflow_plan import plan_chunkflow
from papers.fpdt_plan import plan_fpdt

from furlong.cost.machine import hardware
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.errors import ConfigError
from furlong.plan.plan import Chunk, ChunkPlan, Forward, Slice, Tiers
from furlong.planners.options import ChunkOptions
from furlong.report.report import report_plan
from furlong.report.scene import Panel, make_scenes
from furlong.report.timelines import save_timelines
from furlong.simulate.clock import simulate
from furlong.simulate.unit_costs import UnitCosts


class Linked(UnitCosts):
    def transfer_s(self, action, rank):
        return 0.5


def bytes_in_use(plan):
    return [[(1 << 30) * (1 + i % 5) for i in range(len(own))] for own in plan.actions]


def pipeline(num_stages=2, **dials):
    options = ChunkOptions(size=4, keep="kv", **dials)
    return plan_chunkflow((9, 1, 2, 3, 1), options, stages=(1,) * num_stages)


def panel(plan, **fields):
    timeline = simulate(
        plan, Linked(plan), device_bytes=bytes_in_use(plan), host_bytes=bytes_in_use(plan)
    )
    limits = (6 << 30,) * len(plan.actions)
    return Panel(timeline, plan, "a plan", limits, **fields)


def words_of(svg):
    """All text of an SVG whose letters are drawn as glyphs; matplotlib leaves it as comments."""
    return re.findall(r"<!-- (.*?) -->", svg)


def test_svg_says_what_a_stranger_needs(tmp_path):
    path = tmp_path / "a.svg"
    save_timelines([panel(pipeline(), time_unit="units")], path)
    svg = path.read_text()
    ElementTree.fromstring(svg)
    words = words_of(svg)
    joined = "\n".join(words)
    assert re.search(
        r"a plan   ·   bubble \d+\.\d%   ·   step [\d.]+ units   ·   peak 5 GiB", joined
    )
    assert "5 sequences, 16 tokens, 4 chunks, 2 stages, 2 ranks" in joined
    for word in ("forward", "recompute", "backward", "activation message", "idle", "F0", "B0",
                 "limit 6 GiB", "peak 5 GiB", "host 5 GiB", "time (units)", "rank 1", "stage 1",
                 "sequence 0, 9 tokens", "whole sequences", "limit of device memory"):  # fmt: skip
        assert any(word in found for found in words), word


def test_png_grows_with_its_panels(tmp_path):
    sizes = []
    for panels in ([panel(pipeline())], [panel(pipeline())] * 2, [panel(pipeline())] * 5):
        path = tmp_path / "a.png"
        save_timelines(panels, path)
        width, height = struct.unpack(">II", path.read_bytes()[16:24])
        sizes.append((width, height))
    assert sizes[0][0] == sizes[1][0] == sizes[2][0] >= 1500
    # several are drawn lower, with one legend
    assert 1.3 < sizes[1][1] / sizes[0][1] < 1.8
    assert sizes[2][1] < 5 * 0.75 * sizes[0][1]


def test_a_long_line_under_the_title_is_broken(tmp_path):
    path, words = tmp_path / "a.svg", [f"word{number}" for number in range(40)]
    save_timelines([panel(pipeline(), note=" ".join(words))], path)
    lines = [line for line in words_of(path.read_text()) if line.startswith("word")]
    assert len(lines) == 3 and max(map(len, lines)) <= 128
    assert " ".join(lines).split() == words


def test_a_cell_that_is_computed_late_is_drawn_as_the_forward_that_it_is():
    """Nobody reads the output of the last chunk: its forward waits for the backward."""
    plan = plan_chunkflow((9000,), ChunkOptions(size=4096, num_retained=0, keep="kv"), stages=(24,))
    model = CostModel(model_shape("Qwen2.5-0.5B"), hardware("H100"))
    (rank,) = make_scenes([report_plan(plan, model).panel("a plan")])[0].ranks
    bars = [(bar.label, bar.kind) for bar in rank.on("compute") if bar.seconds > 0]
    assert bars.count(("F2", "forward")) == 1 and ("R2", "recompute") not in bars
    assert ("R0", "recompute") in bars


def test_several_panels_have_one_legend(tmp_path):
    path = tmp_path / "a.svg"
    other = plan_chunkflow((9, 1, 2, 12, 1), ChunkOptions(size=4, keep="kv"), stages=(1, 1))
    save_timelines([panel(pipeline(num_retained=1)), panel(other)], path)
    words = words_of(path.read_text())
    for word in ("forward", "backward", "idle", "limit of device memory", "host memory",
                 "whole sequences (two shades, to tell neighbouring chunks apart)"):  # fmt: skip
        assert words.count(word) == 1, word
    # the longest first, whichever plan cuts it
    cut = [word for word in words if re.match(r"sequence \d+, ", word)]
    assert cut == ["sequence 3, 12 tokens", "sequence 0, 9 tokens"]


@pytest.mark.parametrize(
    "name", ["Ep", "ep", r"$\frac{", "a$b$c", "$x^{$", "R<script>", "<!--", "a&b"]
)
def test_a_title_is_the_name_as_it_was_written(tmp_path, name):
    path = tmp_path / "a.svg"
    plan = pipeline()
    save_timelines([Panel(simulate(plan, Linked(plan)), plan, name, note=name)] * 2, path)
    ElementTree.fromstring(path.read_text())
    written = name.replace("--", "- -")  # matplotlib leaves words as comments, which have no --
    words = [html.unescape(word) for word in words_of(path.read_text())]
    assert sum(word.startswith(f"{written}   ·   bubble") for word in words) == 2
    assert words.count(written) == 2


def test_most_ranks_of_a_cluster_are_left_out_and_counted(tmp_path):
    num_ranks = 40
    plan = ChunkPlan(
        seq_lens=(4,) * num_ranks,
        chunks=tuple(Chunk((Slice(i, 0, 4),)) for i in range(num_ranks)),
        stages=(1,),
        actions=tuple((Forward(i, 0, "input"),) for i in range(num_ranks)),
    )
    path = tmp_path / "a.svg"
    save_timelines([Panel(simulate(plan, UnitCosts(plan)), plan)], path)
    words = words_of(path.read_text())
    assert sum(word.startswith("rank ") for word in words) == 16
    assert "shown: 16 of 40 ranks, of the 16 replicas of 40 that end last" in words


def test_without_memory_the_picture_says_nothing_of_it(tmp_path):
    plan = plan_chunkflow([9, 2], ChunkOptions(size=4), stages=(2,))
    save_timelines([Panel(simulate(plan, UnitCosts(plan)), plan)], tmp_path / "a.svg")
    words = words_of((tmp_path / "a.svg").read_text())
    assert not re.search(r"peak|memory|weights", " ".join(words))
    assert "F0" in words  # one stage is no part of a label


def test_a_rank_with_several_stages_has_them_in_its_labels(tmp_path):
    plan = plan_fpdt([8], num_layers=2, chunk_size=4)
    save_timelines([Panel(simulate(plan, UnitCosts(plan)), plan)], tmp_path / "a.svg")
    assert {"F0.0", "F1.1"} <= set(words_of((tmp_path / "a.svg").read_text()))


@pytest.mark.parametrize("ending", ["svg", "json"])
def test_a_rank_that_does_nothing_has_an_empty_row(tmp_path, ending):
    plan = plan_fpdt([9000], num_layers=24, chunk_size=4096, tiers=Tiers(kv="host"))
    plan = replace(plan, actions=((), *plan.actions))
    model = CostModel(model_shape("Qwen2.5-0.5B"), hardware("H100"), Training())
    path = tmp_path / f"a.{ending}"
    save_timelines([report_plan(plan, model).panel("idle")], path)
    assert "rank 1" in path.read_text()
    if ending == "svg":
        words = words_of(path.read_text())
        assert [word for word in words if word.startswith("rank")] == ["rank 0", "rank 1"]
        assert words.count("peak 0 B") == 1 and sum(w.startswith("host ") for w in words) == 2


def test_a_rank_of_several_devices_says_so(tmp_path):
    for sp_size, said in ((1, 0), (4, 1)):
        plan = replace(plan_chunkflow([9, 2], ChunkOptions(size=4), stages=(2,)), sp_size=sp_size)
        save_timelines([panel(plan)], tmp_path / "a.svg")
        words = words_of((tmp_path / "a.svg").read_text())
        assert sum("4 devices" in word for word in words) == said
        assert ("a rank's memory is that of the device that needs most" in words) == said


def test_trace_has_a_process_per_rank_and_arrows_between_them(tmp_path):
    plan = pipeline()
    path = tmp_path / "a.json"
    save_timelines([panel(plan)], path)
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(map(len, plan.actions))
    forward = next(event for event in slices if event["name"] == "F1.0 kv")
    assert (forward["ts"], forward["dur"], forward["pid"]) == (4e6, 4e6, 0)
    assert forward["args"]["slices"] == "0:4-8"
    assert forward["args"]["device_bytes"] > 0
    names = {e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert {"rank 0, stage 0", "rank 1, stage 1", "compute", "to rank 1", "from rank 1"} <= names
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert all(starts[key]["pid"] != ends[key]["pid"] for key in starts)
    assert all(starts[key]["ts"] <= ends[key]["ts"] for key in starts)
    assert {event["name"] for event in events if event["ph"] == "C"} == {
        "device memory (bytes)", "host memory (bytes)",
    }  # fmt: skip


def test_slices_of_a_thread_do_not_overlap(tmp_path):
    path = tmp_path / "a.json"
    save_timelines([panel(pipeline(3))], path)
    by_thread = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in by_thread.values():
        events.sort(key=lambda event: event["ts"])
        for one, other in pairwise(events):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6


@pytest.mark.parametrize(("name", "count"), [("a.gif", 1), ("a", 1), ("a.json", 2)])
def test_other_endings_are_refused(name, count, tmp_path):
    with pytest.raises(ConfigError, match="ends in"):
        save_timelines([panel(pipeline())] * count, tmp_path / name)

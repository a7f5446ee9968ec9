"""Pictures and traces: colours that differ, the bytes that a cost model counts, words."""

import colorsys
import html
import json
import re
import struct
from dataclasses import replace
from itertools import combinations, pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from papers.chunkflow_plan import plan_chunkflow
from papers.fpdt_plan import plan_fpdt
from papers.unit_costs import UnitCosts

from furlong.cost.machine import Machine
from furlong.cost.memory import PARTS, MemoryCurve
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.plan.plan import Chunk, ChunkPlan, Forward, Offload, Slice
from furlong.plan.text import parse_action
from furlong.planners.options import ChunkOptions
from furlong.report.picture import MOST_SEQUENCES, legend, save_picture
from furlong.report.report import report_plan
from furlong.report.scene import (
    PACKED_COLOURS,
    PART_COLOURS,
    SEQUENCE_COLOURS,
    Panel,
    fill,
    ink_on,
    make_scenes,
    memory_steps,
    save_trace,
    tint,
)
from furlong.simulate.clock import simulate
from furlong.timeline import Record, Timeline
from furlong.units import format_bytes

MODEL = CostModel(model_shape("Qwen2.5-7B"), Machine.named("H100"), Training(lora=Lora(8)))
SMALL = CostModel(model_shape("Qwen2.5-0.5B"), Machine.named("H100"), Training())
OPTIONS = ChunkOptions(size=4096, keep="attention")
PLANS = {
    "one device": plan_chunkflow([20_000, 900, 800], OPTIONS, stages=(28,)),
    "pipeline": plan_chunkflow([20_000, 900, 5_000], OPTIONS, stages=(14, 14)),
    "layer-first": plan_fpdt([30_000], num_layers=28, chunk_size=8192),
    "offload": plan_fpdt(
        [30_000], num_layers=28, chunk_size=8192, offload=Offload(inputs="cpu", kv="disk")
    ),
}


class Linked(UnitCosts):
    def transfer_s(self, action, rank):
        return 0.5


def pipeline(num_stages=2, lens=(9, 1, 2, 3, 1), **dials):
    options = ChunkOptions(size=4, keep="kv", **dials)
    return plan_chunkflow(lens, options, stages=(1,) * num_stages)


def panel(plan):
    used = [[(1 << 30) * (1 + i % 5) for i in range(len(own))] for own in plan.actions]
    timeline = simulate(plan, Linked(plan), device_bytes=used, offloaded_bytes=used)
    return Panel(timeline, plan, "a plan", limit_bytes=6 << 30)


def bare(plan, *words):
    return Panel(simulate(plan, UnitCosts(plan)), plan, *words)


def scene_of(plan):
    return make_scenes([bare(plan)])[0]


def words_of(panels, path):
    """All text of an SVG whose letters are drawn as glyphs; matplotlib leaves it as comments."""
    save_picture(panels, path)
    ElementTree.fromstring(path.read_text())
    return [html.unescape(word) for word in re.findall(r"<!-- (.*?) -->", path.read_text())]


# How the three kinds of dichromats see linear RGB (Machado, Oliveira, Fernandes 2009, severity 1).
EYES = {
    "any": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deutan": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritan": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
TO_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))


def parts_of(colour):
    return np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])


def lab(colour, eye="any"):
    """CIE L*a*b* of a colour as an eye sees it; a difference of 2.3 is just noticeable."""
    rgb = parts_of(colour)
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.array(TO_XYZ) @ np.clip(np.array(EYES[eye]) @ linear, 0, 1) / (0.9505, 1.0, 1.089)
    x, y, z = np.where(seen > 0.008856, np.cbrt(seen), 7.787 * seen + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize(
    "colours", [PACKED_COLOURS, SEQUENCE_COLOURS, list(PART_COLOURS.values())[:9]]
)
def test_any_two_colours_of_a_group_differ_for_every_eye(colours, eye):
    for one, other in combinations(colours, 2):
        assert np.linalg.norm(lab(one, eye) - lab(other, eye)) > 12
        assert np.linalg.norm(lab(tint(one, 0.5), eye) - lab(tint(other, 0.5), eye)) > 6


def test_letters_on_every_fill_can_be_read_and_shades_of_kinds_differ():
    for colour in (*PACKED_COLOURS, *SEQUENCE_COLOURS):
        assert len({fill(colour, kind) for kind in ("forward", "backward", "recompute")}) == 3
        for own in (colour, tint(colour, -0.35)):
            for face in (fill(own, "forward"), fill(own, "backward")):
                assert abs(lab(face)[0] - lab(ink_on(face))[0]) > 40
    assert tint("#204060", 1.0) == "#ffffff" and tint("#204060", -1.0) == "#000000"


def of_whole_sequences(lists, num_chunks):
    chunks = tuple(Chunk((Slice(i, 0, 4),)) for i in range(num_chunks))
    lists = tuple(tuple(Forward(i, s, "all") for i, s in own) for own in lists)
    return ChunkPlan((4,) * num_chunks, chunks, (1, 1), lists)


PACKED = {
    "equal": pipeline(1, (3,) * 23),
    "pipeline": pipeline(4, (9, 1, 2, 3, 1, 4, 4, 2, 2, 4, 3, 11, 4, 4, 4)),
    # with a colour by a chunk's number each of four ranks would have one colour
    "replicas in turn": of_whole_sequences(
        [[(i, 0) for i in range(rank, 16, 4)] for rank in range(4)], 16
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_chunks_that_run_one_after_the_other_differ(name):
    scene = scene_of(PACKED[name])
    for rank in scene.ranks:
        for kind in ("forward", "backward"):
            looks = [scene.chunks[bar.chunk] for bar in rank.on("compute") if bar.kind == kind]
            run = [look.colour for look in looks if look.sequence is None]
            assert all(one != other for one, other in pairwise(run))
            assert kind == "backward" or len(set(run)) > 3


def test_a_cut_sequence_keeps_its_hue_and_goes_from_dark_to_light():
    plan = pipeline(1, (17, 1, 2, 9, 1))
    scene = scene_of(plan)
    hues = {}
    for seq_id, group in plan.groups.items():
        hsv = [colorsys.rgb_to_hsv(*parts_of(scene.chunks[chunk].colour)) for chunk in group]
        assert [scene.chunks[chunk].sequence for chunk in group] == [seq_id] * len(group)
        assert [value for _, _, value in hsv] == sorted({value for _, _, value in hsv})
        assert max(hue for hue, _, _ in hsv) - min(hue for hue, _, _ in hsv) < 0.01
        hues[seq_id] = hsv[-1][0]
    assert hues.keys() == {0, 3} and abs(hues[0] - hues[3]) > 0.1


def test_a_sequence_that_another_plan_cuts_has_its_hue_where_it_is_whole():
    options = [ChunkOptions(size=size) for size in (4, 20)]
    panels = [bare(plan_chunkflow((17, 20, 2), one, stages=(1,))) for one in options]
    cut, whole = make_scenes(panels)
    assert list(cut.cut) == list(whole.cut) == [1, 0]
    assert not panels[1].plan.groups
    last = panels[0].plan.groups[1][-1]
    alone = next(i for i, c in enumerate(panels[1].plan.chunks) if c.slices == (Slice(1, 0, 20),))
    assert cut.chunks[last].colour == whole.chunks[alone].colour
    # but alone in a picture it is one packed chunk of several
    assert make_scenes(panels[1:])[0].chunks[alone].sequence is None


@pytest.mark.parametrize("lens", [(3,) * 64, (9,) * 64, (3,) * 32 + (9,) * 32])
def test_the_legend_of_many_sequences_stays_short(lens):
    scene = scene_of(pipeline(1, lens))
    _, chunks, _ = legend([scene])
    assert len(chunks) <= MOST_SEQUENCES + 2
    texts, kinds = " ".join(words for words, _ in chunks), map(scene.panel.plan.kind, range(64))
    assert ("whole sequences" in texts) == ("packed" in kinds)
    num_cut = sum(seq_len > 4 for seq_len in lens)
    assert (f"{num_cut - MOST_SEQUENCES} shorter ones" in texts) == (num_cut > 0)


def at(steps, time):
    """The bytes by part at a time."""
    place = max(i for i, start in enumerate(steps.times) if start <= time)
    return {part: values[place] for part, values in steps.parts.items()}


@pytest.mark.parametrize("name", PLANS)
def test_what_is_drawn_is_what_the_cost_model_counts(name):
    report = report_plan(PLANS[name], MODEL)
    (scene,) = make_scenes([report.panel(name)])
    for rank, memory in zip(scene.ranks, report.memory, strict=True):
        cells = [bar.record for bar in rank.on("compute") if bar.span[1] > 0]
        assert len(cells) > 10
        for record in cells:
            assert sum(at(rank.device, record.start_s).values()) == record.device_bytes
            lower = at(rank.lower, record.start_s) if rank.lower.parts else {}
            assert sum(lower.values()) == record.offloaded_bytes
        assert rank.device.times[0] == 0 and list(rank.device.times) == sorted(rank.device.times)
        # the parts at the peak are those of the table
        assert rank.device.peak == memory.peak_bytes
        peak = {part: used for part, used in memory.peak.items() if used}
        columns = zip(*rank.device.parts.values(), strict=True)
        rows = [dict(zip(rank.device.parts, row, strict=True)) for row in columns]
        assert peak in [{part: used for part, used in row.items() if used} for row in rows]
        for target, used in (("cpu", memory.cpu.max()), ("disk", memory.disk.max())):
            assert max(rank.lower.parts.get(target, (0,))) == used


def test_idle_ranks_hold_what_they_had_before_and_have_after():
    actions = [parse_action(text) for text in ("F0.0 all", "B0.0", "reduce 0")]
    device = np.zeros((3, len(PARTS)), dtype=np.int64)
    for part, used in {"weights": 10, "activations": (40, 40, 0), "logits": (0, 30, 0)}.items():
        device[:, PARTS.index(part)] = used
    below = np.zeros(3, dtype=np.int64)
    spans = zip(actions, ((0.0, 1.0), (2.0, 3.0), (5.0, 6.0)), strict=True)
    ran = [Record(0, "compute", action, *span, 0, 0) for action, span in spans]
    on_device, _ = memory_steps(ran[::-1], actions, "cpu", MemoryCurve(device, below, below, None))
    assert at(on_device, 1.5) == {"weights": 10, "activations": 40, "logits": 0}
    assert at(on_device, 2.5) == {"weights": 10, "activations": 40, "logits": 30}
    assert at(on_device, 4.0) == {"weights": 10, "activations": 0, "logits": 0}


def test_without_a_cost_model_memory_is_a_total_and_the_legend_says_so():
    ran = (
        Record(0, "compute", parse_action("F0.0 all"), 2.0, 3.0, 10, 0),
        Record(0, "link", parse_action("send activation 0.0 to 1"), 3.0, 9.0, 10, 0),
        Record(0, "compute", parse_action("B0.0"), 4.0, 5.0, 30, 7),
        Record(0, "compute", parse_action("reduce 0"), 7.0, 8.0, 20, 0),
    )
    (scene,) = make_scenes([Panel(Timeline(ran), pipeline(1, [3]))])
    (rank,) = scene.ranks
    # from the start of the step on; a message that is still under way says nothing
    assert rank.device.times == rank.lower.times == (0.0, 3.0, 4.0, 5.0, 7.0)
    assert rank.device.parts == {"in use": (10, 10, 30, 20, 20)}  # idle with what it has then
    assert rank.lower.parts == {"cpu": (0, 0, 7, 0, 0)}
    _, _, memory = legend([scene])
    assert [words for words, _ in memory] == [
        "device memory: only predictions know its parts", "CPU memory",
    ]  # fmt: skip


def idle():
    plan = plan_fpdt([9000], num_layers=24, chunk_size=4096, offload=Offload(kv="cpu"))
    return report_plan(replace(plan, actions=((), *plan.actions)), SMALL).panel("idle")


def offload():
    return report_plan(PLANS["offload"], MODEL).panel("offload")


def cluster():
    return bare(ChunkPlan(
        seq_lens=(4,) * 40, chunks=tuple(Chunk((Slice(i, 0, 4),)) for i in range(40)),
        stages=(1,), actions=tuple((Forward(i, 0, "input"),) for i in range(40)),
    ))  # fmt: skip


_POOL = "a rank's memory is that of the device that needs most"
SAID = {
    "pipeline": (
        lambda: [panel(pipeline())],
        ["forward", "recompute", "backward", "activation message", "idle", "F0", "B0",
         "limit 6 GiB", "peak 5 GiB", "cpu 5 GiB", "0 ms", "rank 1", "stage 1",
         "5 sequences, 16 tokens, 4 chunks, 2 stages, 2 ranks", "sequence 0, 9 tokens",
         "limit of device memory"],
        [_POOL],
    ),
    "one legend": (
        lambda: [panel(pipeline(num_retained=1)), panel(pipeline(lens=(9, 1, 2, 12, 1)))],
        ["whole sequences (four shades, to tell neighbouring chunks apart)", "CPU memory"], [],
    ),
    "offload": (
        lambda: [offload()], ["weights", "activations", "K,V", "dK,dV", "logits", "disk"],
        ["device memory: only predictions know its parts"],
    ),
    "no bytes": (lambda: [bare(pipeline(1, [9, 2]))], ["F0"], ["weights", "CPU memory"]),
    "stages in labels": (
        lambda: [bare(plan_fpdt([8], num_layers=2, chunk_size=4))], ["F0.0", "F1.1"], [],
    ),
    "idle rank": (lambda: [idle()], ["rank 0", "rank 1", "peak 0 B"], []),
    "pool": (
        lambda: [panel(replace(pipeline(), sp_size=4))], ["4 devices", _POOL], [],
    ),
    "cluster": (
        lambda: [cluster()], ["shown: 16 of 40 ranks, of 16 of 40 replicas: what ends last"], [],
    ),
}  # fmt: skip
"""Panels, words of their picture, and words that it does not have."""


@pytest.mark.parametrize("name", SAID)
def test_a_picture_says_what_a_stranger_needs(name, tmp_path):
    panels, said, unsaid = SAID[name]
    words = words_of(panels(), tmp_path / "a.svg")
    assert set(said) <= set(words) and not set(unsaid) & set(words)
    in_legend = {"forward", "whole sequences", "limit of device memory", "weights", "disk"}
    assert all(words.count(word) == 1 for word in in_legend & set(said))
    if name == "one legend":  # the longest first, whichever plan cuts it
        cut = [word for word in words if re.match(r"sequence \d+, ", word)]
        assert cut == ["sequence 3, 12 tokens", "sequence 0, 9 tokens"]
    if name == "offload":
        (own,) = report_plan(PLANS["offload"], MODEL).memory
        used = {"peak": own.peak_bytes, "cpu": own.cpu.max(), "disk": own.disk.max()}
        assert {f"{word} {format_bytes(count)}" for word, count in used.items()} <= set(words)


def test_titles_are_the_names_as_they_were_written_and_long_lines_are_broken(tmp_path):
    titles = ["Ep", r"$\frac{", "a$b$c", "R<script>", "<!--", "a&b"]
    note = [f"word{number}" for number in range(40)]
    plan = pipeline(1, [3])
    panels = [bare(plan, title, title) for title in titles]
    words = words_of([*panels, bare(plan, "long", " ".join(note))], tmp_path / "a.svg")
    for title in titles:
        written = title.replace("--", "- -")  # matplotlib leaves words as comments: no -- in them
        assert words.count(written) == 1
        assert any(re.match(rf"{re.escape(written)}   ·   step [\d.]+ s$", word) for word in words)
    lines = [line for line in words if line.startswith("word")]
    assert len(lines) == 3 and max(map(len, lines)) <= 128
    assert " ".join(lines).split() == note


def test_bytes_beyond_the_limit_are_told(tmp_path):
    for budget, is_over in ((2**30, True), (2**40, False)):
        report = report_plan(PLANS["one device"], MODEL, budget)
        assert f"limit {format_bytes(budget)}" in words_of([report.panel("a")], tmp_path / "a.svg")
        # the red area above the limit is the only thing that one can look through
        assert ("opacity: 0.6" in (tmp_path / "a.svg").read_text()) == is_over


def test_several_panels_are_drawn_lower_with_one_legend(tmp_path):
    sizes = []
    for count in (1, 3):
        save_picture([panel(pipeline())] * count, tmp_path / "a.png")
        sizes.append(struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24]))
    (width, height), (same, several) = sizes
    assert width == same >= 1500 and 1.2 < several / height < 3 * 0.8


def test_a_cell_that_is_computed_late_is_drawn_as_the_forward_that_it_is():
    """Nobody reads the output of the last chunk: its forward waits for the backward."""
    plan = plan_chunkflow((9000,), ChunkOptions(size=4096, num_retained=0, keep="kv"), stages=(24,))
    (rank,) = make_scenes([report_plan(plan, SMALL).panel("a plan")])[0].ranks
    bars = [(bar.label, bar.kind) for bar in rank.on("compute") if bar.span[1] > 0]
    assert bars.count(("F2", "forward")) == 1 and ("R2", "recompute") not in bars
    assert ("R0", "recompute") in bars


def events_of(one, path):
    save_trace(one, path)
    return json.loads(path.read_text())["traceEvents"]


def test_trace_has_a_process_per_rank_and_arrows_between_them(tmp_path):
    plan = pipeline(3)
    events = events_of(panel(plan), tmp_path / "a.json")
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(map(len, plan.actions))
    forward = next(event for event in slices if event["name"] == "F1.0 kv")
    assert (forward["ts"], forward["dur"], forward["pid"]) == (4e6, 4e6, 0)
    assert forward["args"]["slices"] == "0:4-8"
    assert forward["args"]["device_bytes"] > 0
    names = {e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert {"rank 0, stage 0", "rank 1, stage 1", "compute", "to rank 1", "from rank 1"} <= names
    starts, ends = ({e["id"]: e for e in events if e["ph"] == end} for end in "sf")
    assert starts and starts.keys() == ends.keys()
    assert all(starts[key]["pid"] != ends[key]["pid"] for key in starts)
    assert all(starts[key]["ts"] <= ends[key]["ts"] for key in starts)
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"device memory (bytes)", "CPU memory (bytes)"}
    for thread in {(event["pid"], event["tid"]) for event in slices}:  # its slices only nest
        own = [event for event in slices if (event["pid"], event["tid"]) == thread]
        own.sort(key=lambda event: event["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(own))
    idle_names = {event["args"].get("name") for event in events_of(idle(), tmp_path / "a.json")}
    assert any("rank 1" in str(name) for name in idle_names)

"""Pictures and traces: colours that differ, the bytes that a cost model counts, words."""

import html
import json
import re
from dataclasses import replace
from itertools import combinations, pairwise, product
from xml.etree import ElementTree

import numpy as np
import pytest
from papers.chunkflow_plan import plan_chunkflow
from papers.fpdt_plan import plan_fpdt
from papers.unit_costs import UnitCosts

from furlong.cost.machine import Machine
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
    chunk_colours,
    cut_sequences,
    fill,
    ink_on,
    make_scene,
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


def words_of(panels, path):
    """All text of an SVG whose letters are drawn as glyphs; matplotlib leaves it as comments."""
    save_picture(panels, path)
    ElementTree.fromstring(path.read_text())
    return [html.unescape(word) for word in re.findall(r"<!-- (.*?) -->", path.read_text())]


def parts_of(colour):
    return np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])


# How the three kinds of dichromats see linear RGB (Machado, Oliveira, Fernandes 2009, severity 1).
EYES = {
    "any": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deutan": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritan": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
TO_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))


def lab(colour, eye="any"):
    """CIE L*a*b* of a colour as an eye sees it; a difference of 2.3 is just noticeable."""
    rgb = parts_of(colour)
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.array(TO_XYZ) @ np.clip(np.array(EYES[eye]) @ linear, 0, 1) / (0.9505, 1.0, 1.089)
    x, y, z = np.where(seen > 0.008856, np.cbrt(seen), 7.787 * seen + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", EYES)
def test_any_two_colours_of_a_group_differ_for_every_eye_and_letters_can_be_read(eye):
    for group in (PACKED_COLOURS, SEQUENCE_COLOURS, list(PART_COLOURS.values())[:9]):
        for one, other in combinations(group, 2):
            assert np.linalg.norm(lab(one, eye) - lab(other, eye)) > 12
            assert np.linalg.norm(lab(tint(one, 0.5), eye) - lab(tint(other, 0.5), eye)) > 6
    shades = [tint(own, share) for own in SEQUENCE_COLOURS for share in (0, -0.35, 0.5)]
    for part, shade in product(list(PART_COLOURS.values())[4:10], shades):
        assert np.linalg.norm(lab(part) - lab(shade)) > 12  # memory is nobody's sequence
    for colour in (*PACKED_COLOURS, *SEQUENCE_COLOURS):
        for own in (colour, tint(colour, -0.35)):
            for face in (fill(own, "forward"), fill(own, "backward")):
                assert abs(lab(face)[0] - lab(ink_on(face))[0]) > 40


def test_neighbours_differ_and_a_cut_sequence_goes_from_dark_to_light():
    for lens in ((3,) * 23, (9, 1, 2, 3, 1, 4, 4, 2, 2, 4, 3, 11, 4, 4, 4)):
        plan = pipeline(3, lens)
        colours = chunk_colours(plan)
        for group in plan.groups.values():
            values = [parts_of(colours[chunk]).max() for chunk in group]
            assert values == sorted(set(values))
        whole = [colours[i] for i, links in enumerate(plan.links) if not links]
        assert all(one != other for one, other in pairwise(whole))
        words = [words for words, _ in legend([make_scene(bare(plan))])]
        assert "whole sequences, in four shades" in words
        assert sum(word.startswith("sequence ") for word in words) == len(plan.groups)
    words = [words for words, _ in legend([make_scene(bare(pipeline(1, (9,) * 64)))])]
    assert sum(word.startswith("sequence ") for word in words) == MOST_SEQUENCES


@pytest.mark.parametrize(
    ("seconds", "unit"), [(0.02, "ms"), (3.5, "s"), (100, "s"), (700, "min"), (9000, "h")]
)
def test_an_axis_has_one_unit_and_few_round_ticks(seconds, unit, tmp_path):
    plan = pipeline(1, (9,) * 4)
    timeline = simulate(plan, UnitCosts(plan))
    scale = seconds / timeline.duration_s
    records = tuple(
        replace(r, start_s=r.start_s * scale, stop_s=r.stop_s * scale) for r in timeline.records
    )
    words = words_of([Panel(Timeline(records), plan)], tmp_path / "a.svg")
    ticks = [word.split() for word in words if re.fullmatch(r"[\d.]+ (ms|s|min|h)", word)]
    assert 4 <= len(ticks) <= 16 and {own for _, own in ticks} == {unit}
    assert all(len(number) <= 4 for number, _ in ticks)


def test_a_sequence_keeps_its_colour_in_another_plan_of_its_batch():
    lens = (9, 5, 13)
    few, many = (cut_sequences(plan_chunkflow(lens, ChunkOptions(size=s, keep="kv"), stages=(1,)))
                 for s in (8, 4))  # fmt: skip
    assert few.keys() < many.keys() and all(many[seq] == few[seq] for seq in few)
    assert len(set(many.values())) == 3


def at(times, parts, time):
    """The bytes by part at a time."""
    place = max(i for i, start in enumerate(times) if start <= time)
    return {part: values[place] for part, values in parts.items()}


@pytest.mark.parametrize("name", PLANS)
def test_what_is_drawn_is_what_the_cost_model_counts(name):
    report = report_plan(PLANS[name], MODEL)
    for rank, memory in zip(make_scene(report.panel(name)).ranks, report.memory, strict=True):
        cells = [bar.record for bar in rank.on("compute") if bar.span[1] > 0]
        assert len(cells) > 10
        for record in cells:
            assert sum(at(rank.times, rank.device, record.start_s).values()) == record.device_bytes
            assert (
                sum(at(rank.times, rank.lower, record.start_s).values()) == record.offloaded_bytes
            )
        assert rank.times[0] == 0 and list(rank.times) == sorted(rank.times)
        # the parts at the peak are those of the table
        peak = {part: used for part, used in memory.peak.items() if used}
        columns = zip(*rank.device.values(), strict=True)
        rows = [dict(zip(rank.device, row, strict=True)) for row in columns]
        assert peak in [{part: used for part, used in row.items() if used} for row in rows]
        for tier, used in (("cpu", memory.cpu.max()), ("disk", memory.disk.max())):
            assert max(rank.lower.get(tier, (0,))) == used


def test_without_a_cost_model_memory_is_a_total_and_the_legend_says_so():
    ran = (
        Record(0, "compute", parse_action("F0.0 all"), 2.0, 3.0, 10, 0),
        Record(0, "link", parse_action("send activation 0.0 to 1"), 3.0, 9.0, 10, 0),
        Record(0, "compute", parse_action("B0.0"), 4.0, 5.0, 30, 7),
        Record(0, "compute", parse_action("reduce 0"), 7.0, 8.0, 20, 0),
    )
    scene = make_scene(Panel(Timeline(ran), pipeline(1, [3])))
    (rank,) = scene.ranks
    # from the start of the step on; a message that is still under way says nothing
    assert rank.times == (0.0, 2.0, 4.0, 7.0)
    assert rank.device == {"in use": (10, 10, 30, 20)}
    assert rank.lower == {"cpu and disk": (0, 0, 7, 0)}
    words = [words for words, _ in legend([scene])]
    assert "device memory: only predictions know its parts" in words and "weights" not in words


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
         "limit 6 GiB", "peak 5 GiB", "cpu and disk 5 GiB", "0", "rank 1", "stage 1",
         "5 sequences, 16 tokens, 4 chunks, 2 stages, 2 ranks", "sequence 0, 9 tokens",
         "limit of device memory"],
        [_POOL],
    ),
    "one legend": (
        lambda: [panel(pipeline(num_retained=1)), panel(pipeline(lens=(9, 1, 2, 12, 1)))],
        ["whole sequences, in four shades", "sequence 3, 12 tokens", "sequence 0, 9 tokens"], [],
    ),
    "offload": (
        lambda: [offload()], ["weights", "activations", "K,V", "dK,dV", "logits"],
        ["device memory: only predictions know its parts"],
    ),
    "no bytes": (lambda: [bare(pipeline(1, [9, 2]))], ["F0"], ["weights", "peak 5 GiB"]),
    "stages in labels": (
        lambda: [bare(plan_fpdt([8], num_layers=2, chunk_size=4))], ["F0.0", "F1.1"], [],
    ),
    "idle rank": (lambda: [idle()], ["rank 0", "rank 1"], []),
    "pool": (
        lambda: [panel(replace(pipeline(), sp_size=4))], ["4 devices", _POOL], [],
    ),
    "cluster": (
        lambda: [cluster()], ["shown: 16 of 40 ranks, of 16 of 40 replicas: what ends last"], [],
    ),
}  # fmt: skip
"""Panels, words of their picture, and words that it does not have."""


@pytest.mark.parametrize("name", SAID)
@pytest.mark.few(3)
def test_a_picture_says_what_a_stranger_needs(name, tmp_path):
    panels, said, unsaid = SAID[name]
    words = words_of(panels(), tmp_path / "a.svg")
    assert set(said) <= set(words) and not set(unsaid) & set(words)
    in_legend = {"forward", "limit of device memory", "weights"}
    assert all(words.count(word) == 1 for word in in_legend & set(said))
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


def test_a_cell_that_is_computed_late_is_drawn_as_the_forward_that_it_is():
    """Nobody reads the output of the last chunk: its forward waits for the backward."""
    plan = plan_chunkflow((9000,), ChunkOptions(size=4096, num_retained=0, keep="kv"), stages=(24,))
    (rank,) = make_scene(report_plan(plan, SMALL).panel("a plan")).ranks
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

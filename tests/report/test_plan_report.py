"""What a plan amounts to: the breakdown of its time, its memory, the ranks that are shown."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers.shapes import with_windows

from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.errors import PlanError
from furlong.plan.plan import Backward, ChunkPlan, Forward, Offload
from furlong.plan.text import format_action, parse_action, parse_chunk
from furlong.planners.chunks import group_chunks, shard_all
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas, plan_1f1b, plan_on_device
from furlong.report.picture import legend
from furlong.report.report import report_plan
from furlong.report.scene import choose_ranks, make_scene, ranks_per_replica
from furlong.report.text import (
    MethodRow,
    comparison_json,
    format_comparison,
    format_report,
)
from furlong.runtime.distributed.comms import require_layout
from furlong.units import format_bytes

SHAPE = model_shape("Qwen2.5-0.5B")
LENS = (5000, 900, 300, 2500)


def build(lens=LENS, *, size=1024, sp=1, pp=2, keep="kv", offload="none", retained=1):
    groups = shard_all(group_chunks(lens, ChunkOptions(size=size, hybrid=False)), sp)
    stages = (24 // pp,) * pp
    return plan_1f1b(
        lens,
        groups,
        stages=stages,
        num_retained=retained,
        keep=keep,
        offload=Offload(kv=offload),
        sp_size=sp,
    )


def model(**training):
    return CostModel(SHAPE, Machine.named("RTX4090"), Training(**training))


def words_of(report):
    """The page without its lines and columns."""
    return " ".join(format_report(report).split())


@pytest.mark.parametrize(
    ("dials", "training", "waits"),
    [
        ({}, {}, {"idle_and_p2p"}),
        ({"sp": 2}, {"zero_stage": 1}, {"idle_and_p2p", "all_to_all", "collectives"}),
        ({"sp": 2}, {"zero_stage": 3}, {"idle_and_p2p", "all_to_all", "collectives"}),
        ({"offload": "cpu", "size": 16, "lens": (900, 200)}, {}, {"idle_and_p2p", "copies"}),
    ],
)
def test_the_breakdown_names_every_wait_and_adds_up(dials, training, waits):
    report = report_plan(build(**dials), model(**training))
    found = report.breakdown
    assert sum(found.values()) == pytest.approx(1)
    assert {name for name, share in found.items() if share > 1e-9} == waits | {"compute"}
    assert min(found.values()) > -1e-9


def test_zero_3_waits_for_weights_inside_its_passes():
    plan = build(sp=2, size=256)
    sharded, whole = (report_plan(plan, model(zero_stage=stage)) for stage in (3, 1))
    assert sharded.breakdown["collectives"] > whole.breakdown["collectives"] + 0.1
    saved = sharded.breakdown["compute"] * sharded.step_s
    assert saved == pytest.approx(whole.breakdown["compute"] * whole.step_s, rel=1e-6)


def test_memory_is_that_of_the_cost_model():
    plan, costs = build(), model()
    report = report_plan(plan, costs)
    for rank, own in enumerate(report.memory):
        assert own.peak_bytes == max(costs.memory().peak_bytes_of_actions(plan, rank))
        assert own.peak == costs.memory().curve(plan, rank).peak
    assert report.peak_bytes == max(report.figures.peak_device_bytes)


def test_each_memory_has_its_bytes_and_what_is_moved_is_told():
    plan = replace(build(pp=1), offload=Offload(kv="cpu", attention="disk", inputs="disk"))
    texts = [replace(a, keep="attention") if isinstance(a, Forward) and a.keep == "kv" else a
             for a in plan.actions[0]]  # fmt: skip
    report = report_plan(replace(plan, actions=(tuple(texts),)), model())
    (own,) = report.memory
    traffic, cpu_bytes, disk_bytes = own.traffic, own.cpu.max(), own.disk.max()
    assert cpu_bytes > 0 < disk_bytes
    # the records' are those of both offload at one time
    assert report.figures.peak_offloaded_bytes[0] <= cpu_bytes + disk_bytes
    assert report.figures.peak_offloaded_bytes[0] > max(cpu_bytes, disk_bytes)
    page = words_of(report)
    assert "K,V on the CPU; stage inputs, attention on the disk; graphs on the device" in page
    written = format_bytes(int(traffic.written[:, traffic.of("disk")].sum()))
    assert f"attention, disk: {written} written, {written} read" in page
    assert re.search(r"weights [\d.]+, .* device [\d.]+, cpu [\d.]+, disk [\d.]+", page)
    limited = replace(report, disk_budget_bytes=int(disk_bytes))
    assert limited.lacks == [] == report.lacks
    (lacking,) = replace(limited, disk_budget_bytes=int(disk_bytes) - 1).lacks
    assert "on a disk" in lacking
    moved = json.loads(json.dumps(report.to_json()))["memory"][0]["moved"]
    assert moved.keys() == {"kv", "attention"} and moved["attention"]["offload"] == "disk"
    assert moved["attention"]["read_bytes"] == int(traffic.read[:, traffic.of("disk")].sum()) > 0
    on_device = format_report(report_plan(build(), model()))
    assert "all memory on the device" in on_device and "moved" not in on_device


def pool_of(chunks, num_processes):
    """A plan of one pool whose chunks keep their graphs."""
    pieces = tuple(parse_chunk(text, sp_size=num_processes) for text in chunks)
    lens = {piece.seq_id: piece.stop for chunk in pieces for piece in chunk.slices}
    walk = tuple(a for i in range(len(pieces)) for a in (Forward(i, 0, "all"), Backward(i, 0)))
    return ChunkPlan(
        tuple(lens[i] for i in sorted(lens)), pieces, (24,), (walk,), sp_size=num_processes
    )


@pytest.mark.parametrize(
    ("chunks", "num_processes", "ratio"),
    [
        (["0:0-4096"], 1, 0),
        (["0:0-4096@*"], 4, 0),
        (["0:0-72@*"], 3, 0),  # the mean of three equal floats is above them
        (["0:0-4096@0 1:0-4096@1 2:0-4096@2 3:0-4096@3"], 4, 0),
        # one of four computes, and three of four
        (["0:0-4096@2"], 4, 3 / 4),
        (["0:0-4096@0 1:0-4096@1 2:0-4096@3"], 4, 1 / 4),
        # as much in each of two chunks, whoever does it
        (["0:0-4096@0", "1:0-4096@1"], 2, 1 / 2),
        (["0:0-4096@0-1", "1:0-4096@0"], 2, None),
    ],
)
def test_processes_that_wait_for_the_slowest_of_their_pool_are_idle(chunks, num_processes, ratio):
    report = report_plan(pool_of(chunks, num_processes), model())
    assert report.figures.bubble_ratio == pytest.approx(0)
    if ratio is None:  # the second chunk is local and takes longer than half of a sharded one
        assert 1 / 4 < report.pool_idle_ratio < 1 / 2
    else:
        assert report.pool_idle_ratio == pytest.approx(ratio)
    assert report.pool_idle_ratio >= 0
    assert report.to_json()["pool_idle_ratio"] == report.pool_idle_ratio
    page = format_report(report)
    share = f"pool       {report.pool_idle_ratio:.1%} of the processes' time in passes is idle"
    assert (share in page) == (num_processes > 1)


def test_a_pool_that_shards_no_sequence_is_no_sequence_parallelism():
    local = report_plan(pool_of(["0:0-90@0 1:0-90@1"], 2), model())
    assert "dp 2 x sp 1 x pp 1 = 2 devices, in pools of 2 that shard" in format_report(local)
    assert local.missing.startswith("2 processes that run it by furlong.Engine.run")
    mixed = report_plan(pool_of(["0:0-90@0-1 1:0-90@2"], 4), model())
    assert "sp 4 x pp 1 = 4 devices, sequences on 1 or 2 of a pool's 4" in format_report(mixed)
    assert mixed.missing.startswith("4 processes that run it")


def test_the_first_computation_of_a_cell_is_no_second_one():
    """SeCO on one device: the last chunk's Forward computes nothing, and its Recompute all."""
    plan = build((600, 300), pp=1, size=256, retained=0)
    report = report_plan(plan, model())
    texts = {format_action(action): seconds for action, seconds in (
        (record.action, record.stop_s - record.start_s) for record in report.timeline.records
    )}  # fmt: skip
    nothing = [text for text, seconds in texts.items() if text[0] == "F" and seconds == 0]
    assert len(nothing) == 2  # the last chunk of each sequence
    again = sum(seconds for text, seconds in texts.items() if text[0] == "R")
    first = sum(texts[f"R{text[1:].split()[0]}"] for text in nothing)
    shares = report.figures.shares()
    assert shares["recompute"] == pytest.approx((again - first) / report.step_s)


def test_dummies_are_neither_chunks_of_the_batch_nor_kept_cells():
    chunks = tuple(map(parse_chunk, ("0:0-900", "1:0-300", "2:0-300", "dummy")))
    walks = tuple(
        tuple(a for i in own for a in (Forward(i, 0, "all"), Backward(i, 0)))
        for own in ((1, 2), (0, 3))
    )
    plan = ChunkPlan((900, 300, 300), chunks, (24,), walks, regathers=True)
    page = words_of(report_plan(plan, model(zero_stage=3)))
    assert "of 300 to 900 tokens, mean 500; besides 1 dummy chunk, to run in lockstep" in page
    scene = make_scene(report_plan(plan, model(zero_stage=3)).panel("a"))
    assert "3 chunks and 1 dummy chunk" in scene.lines[0]


def test_one_device_has_no_words_of_many_and_branches_are_told():
    forks = {0: [(6000, 5000), (7000, 5000)]}
    plan = plan_on_device([8000], ChunkOptions(size=1024), num_layers=24, forks=forks)
    assert "2 branches of 1 sequence" in words_of(report_plan(plan, model()))
    plan = plan_on_device((300, 200), ChunkOptions(size=128, keep="kv"), num_layers=24)
    report = report_plan(plan, model())
    page = words_of(report)
    scene = make_scene(report.panel("furlong"))
    shown = [page, scene.title, *scene.lines, scene.ranks[0].name]
    shown += [words for words, _ in legend([scene])]
    for word in ("dp 1", "rank", "collectives", "per device"):
        assert not any(word in text for text in shown), word
    assert "layout one device; 1 stage, layers per stage: 24" in page
    assert "bubble" not in scene.title


def test_equal_ranks_share_a_line_of_the_memory_table():
    own = "F0.0 all, B0.0, reduce 0", "F1.0 all, B1.0, reduce 0", "F2.0 all, B2.0, reduce 0"
    walks = tuple(tuple(map(parse_action, texts.split(", "))) for texts in own)
    chunks = tuple(map(parse_chunk, ("0:0-300", "1:0-300", "2:0-90")))
    page = format_report(report_plan(ChunkPlan((300, 300, 90), chunks, (24,), walks), model()))
    table = page[page.index("  rank ") :].splitlines()
    assert table[0].split() == ["rank", "0-1", "2"]
    assert all(len(row.split()) == 3 for row in table)


def test_the_page_and_the_json_tell_the_same():
    report = report_plan(build(), model())
    assert report.tokens_per_s == pytest.approx(sum(LENS) / report.step_s)
    page = format_report(report)
    assert "dp 1 x sp 1 x pp 2 = 2 devices; 2 stages, layers per stage: 2 x 12" in page
    values = json.loads(json.dumps(report.to_json()))
    assert values["step_s"] == report.step_s
    assert values["memory"][1]["parts"]["weights"] == report.memory[1].peak["weights"]
    assert sum(values["breakdown"].values()) == pytest.approx(1)


def test_what_is_lost_has_parts_and_model_flops_do_not_count_it():
    keeps = [report_plan(build(pp=1, keep=keep, retained=0), model()) for keep in ("kv", "input")]
    for report in keeps:
        assert sum(report.lost.values()) == pytest.approx(report.figures.bubble_ratio)
        lost = f"lost {report.figures.bubble_ratio:.1%}: recompute {report.lost['recompute']:.1%}"
        assert lost in make_scene(report.panel("a")).title
        assert lost in words_of(report)
    least, most = keeps
    ratio = least.mfu() / most.mfu()
    assert ratio == pytest.approx(most.whole_step_s / least.whole_step_s) and ratio > 1.05
    # PaLM, appendix B: 6 N + 12 L H Q T for each token, N without the embedding
    matrices = SHAPE.token_flops / 2
    palm = sum(n * (6 * matrices + 12 * 24 * 14 * 64 * n) for n in LENS)
    peak = Machine.named("RTX4090").peak_flops_per_s
    assert least.mfu(masked=False) == pytest.approx(palm / (least.whole_step_s * peak))
    windowed = model()
    windowed = replace(windowed, shape=with_windows(windowed.shape, [512] * 24))
    few = report_plan(build(pp=1, retained=0), windowed)
    keys = sum(n * (6 * matrices + 12 * 24 * 14 * 64 * min(n, 512)) for n in LENS)
    assert few.mfu(masked=False) == pytest.approx(keys / (few.whole_step_s * peak))
    values = least.to_json()
    assert 0 < values["mfu"] < values["mfu_unmasked"] < 1
    low, high = values["whole_step_s_between"]
    assert low * 1.5 == pytest.approx(least.whole_step_s) == pytest.approx(high / 1.5)


def replicas(num_replicas, pp=2):
    lens = [(600 + 100 * replica,) for replica in range(num_replicas)]
    plans = [build(own, pp=pp) for own in lens]
    ids = [[replica] for replica in range(num_replicas)]
    return join_replicas(plans, ids, [own[0] for own in lens])


@pytest.mark.parametrize(
    ("plan", "pp", "num_processes"),
    [
        (build(pp=1), 1, 1),
        (build(pp=2), 2, 2),
        (build(pp=1, sp=4), 1, 4),
        (replicas(2, pp=1), 1, 2),
        (build(pp=2, sp=2), 2, 4),
        (replicas(2), 2, 4),
    ],
)
def test_a_plan_runs_on_its_own_processes_and_none_gathers_weights_with_every_pass(
    plan, pp, num_processes
):
    report = report_plan(plan, model(), num_processes=num_processes)
    assert report.missing == ""
    many = replace(report, num_processes=16).missing
    assert many == f"{num_processes} processes that run it by furlong.Engine.run"
    plan = replace(plan, regathers=True)
    words = "weights that are gathered with every pass (ZeRO-3)"
    assert replace(report, plan=plan).missing == words
    ranks = SimpleNamespace(dp=num_processes // pp // plan.sp_size, sp=plan.sp_size, pp=pp)
    with pytest.raises(PlanError):
        require_layout(plan, ranks)


def test_few_ranks_are_all_shown_and_many_are_those_of_the_slowest_replica():
    plan = replicas(4)
    report = report_plan(plan, model())
    assert ranks_per_replica(plan) == 2
    assert choose_ranks(plan, report.timeline, 8)[1] == ""
    shown, note = choose_ranks(plan, report.timeline, 5)
    assert shown == (4, 5, 6, 7)
    assert note == "shown: 4 of 8 ranks, of 2 of 4 replicas: what ends last"
    shown, note = choose_ranks(plan, report.timeline, 3)
    assert shown == (6, 7)
    assert note == "shown: 2 of 8 ranks, of 1 of 4 replicas: what ends last"
    of_one = build(pp=12)  # its first and its last stage, and some between
    ranks = choose_ranks(of_one, report_plan(of_one, model()).timeline, 4)
    assert ranks == ((0, 4, 7, 11), "shown: 4 of 12 ranks")
    panel = report.panel("a title")
    scene = make_scene(replace(panel, note="some"), most_ranks=3)
    assert [rank.name for rank in scene.ranks] == ["rank 6\nstage 0", "rank 7\nstage 1"]
    assert scene.lines[0] == f"some; {note}" and scene.shown == note
    assert scene.duration_s == report.step_s


def test_a_comparison_is_sorted_and_keeps_refusals():
    fast, slow = report_plan(build(), model()), report_plan(build(size=256), model())
    rows = [
        MethodRow("slow", "size 256", slow),
        MethodRow("none", refusal="rank 0 lacks 3 GiB"),
        MethodRow("another", refusal="rank 0 lacks 3 GiB"),
        MethodRow("fast", "size 1024", fast),
    ]
    lines = format_comparison(rows).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["fast", "slow"]
    assert "1 x 1 x 2" in lines[1] and "1.00x" in lines[1]
    assert lines[-1].strip() == "no plan for none, another: rank 0 lacks 3 GiB"
    assert max(map(len, lines)) <= 80 and lines[-2].strip() == "size 256"
    fast = replace(fast, num_processes=2)
    for report in (fast, replace(fast, refused="too long")):
        only = [MethodRow("fast", "", report)]
        assert (" no " in format_comparison(only).splitlines()[1]) != report.runs_here
        assert comparison_json(only)[0]["runs_here"] == (not report.refused)
    values = comparison_json(rows)
    assert [value["method"] for value in values] == ["fast", "slow", "none", "another"]
    assert values[1]["relative"] == pytest.approx(slow.step_s / fast.step_s)
    assert values[2] == {"method": "none", "refusal": "rank 0 lacks 3 GiB"}

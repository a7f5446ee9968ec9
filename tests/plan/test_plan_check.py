"""The checker passes legal plans; of each broken one it names the rule, at the guilty place. What
it lets through of random damage must still give the same gradient.
"""

import random
from dataclasses import replace

import pytest
from helpers.counted_work import LINEAR, lines_run
from helpers.nightly import SEED
from helpers.plan_texts import plan_of, refusal
from helpers.toy_model import StuckError, gradient, obey
from papers.chunkflow_plan import plan_chunkflow
from papers.fpdt_plan import plan_fpdt
from papers.seq1f1b_plan import plan_seq1f1b

from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.errors import PlanError
from furlong.plan.check import check
from furlong.plan.plan import Backward, Chunk, ChunkPlan, Forward, Slice
from furlong.plan.text import format_action, parse_action
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_kept, join_replicas, plan_on_device
from furlong.planners.spaco import Factors, sample_backwards

ONE = plan_chunkflow([9, 2], ChunkOptions(size=3, hybrid=False), stages=(2,))
"""One device: chunks 0-2 of sequence 0 keep K,V and attention, packed chunk 3."""
INPUTS = plan_chunkflow([9], ChunkOptions(size=3, keep="input"), stages=(2,))
PIPELINE = plan_chunkflow([6, 2], ChunkOptions(size=3), stages=(1, 1, 1))
"""Three ranks: chunks 0 (dropped) and 1 of sequence 0, packed chunk 2."""
GRAPHS = plan_seq1f1b(
    [4, 2], [[Chunk((Slice(0, 0, 2),)), Chunk((Slice(0, 2, 4),))], [Chunk((Slice(1, 0, 2),))]],
    stages=(2, 2), recompute_layers=[[1, 0, 0], [0, 1, 2]],
)  # fmt: skip
LAYERS = plan_fpdt([9], num_layers=2, chunk_size=3)
"""Two stages on one rank, layer-first."""
ATTENTION = plan_fpdt([9], num_layers=2, chunk_size=3, keep="attention")
SP = plan_fpdt([8, 2], num_layers=1, chunk_size=4, sp_size=2)
"""An sp group: sharded chunks 0 and 1 of sequence 0, sharded packed chunk 2."""
SAMPLED = sample_backwards(
    plan_chunkflow([12], ChunkOptions(size=3, keep="kv", num_retained=0), stages=(2,)),
    {1: Factors(2, 3), 3: Factors(2, 3)},
)
SAMPLED_LAYERS = sample_backwards(
    plan_fpdt([9], num_layers=2, chunk_size=3),
    {0: Factors(3, 3), 1: Factors(3, 3)},
    report_loss=True,
)
SAMPLED_PIPELINE = sample_backwards(PIPELINE, {0: Factors(2, 2), 2: Factors()}, report_loss=True)
LEFT_OUT = sample_backwards(
    plan_chunkflow([15, 2], ChunkOptions(size=3, keep="kv", hybrid=False), stages=(2,)),
    {1: Factors(2, 3), 3: Factors(2, 3)},
)
"""Chunk 4 of sequence 0 and packed chunk 5 have no Forward."""


SHARDED = plan_of(
    "0:0-3; 0:3-6; 1:0-3; 1:3-5",
    "unshard 0, F0.0 kv, F1.0 all, B1.0, R0.0, B0.0, reduce 0",
    "unshard 0, F2.0 kv, F3.0 all, B3.0, R2.0, B2.0, reduce 0",
)
"""Two data-parallel ranks whose stage is unsharded while they compute."""
RESHARDED = join_kept(
    [
        plan_on_device(
            lens, ChunkOptions(size=3, order="layer-first", reshard=True), num_layers=3
        )
        for lens in ((6,), (5, 2))
    ],
    [[0], [1, 2]], (6, 5, 2), 3,
)  # fmt: skip
"""Three replicas, one of them idle, that gather each stage once on each way through them."""
IN_STEP = plan_of(
    "0:0-3; 0:3-6; 1:0-2; 2:0-3; dummy; dummy; 3:0-1",
    "F0.0 kv, F1.0 all, B1.0, R0.0, B0.0, F2.0 all, B2.0, reduce 0",
    "F4.0 input, F3.0 all, B3.0, F5.0 all, B5.0, F6.0 kv, R6.0, B6.0, reduce 0",
    regathers=True,
)
"""Two replicas: a cut sequence meets a dummy that only runs forward and one that runs both ways."""
STAGES_IN_STEP = plan_of(
    "0:0-3; 1:0-3; 2:0-3; 3:0-2",
    "F0.0 all, F1.0 all, F0.1 all, F1.1 all, B1.1, B0.1, B1.0, B0.0, reduce 1, reduce 0",
    "F2.0 all, F3.0 all, F2.1 all, F3.1 all, B3.1, B2.1, B3.0, B2.0, reduce 1, reduce 0",
    stages=(1, 1),
    regathers=True,
)
PIPELINES_IN_STEP = replace(
    join_replicas(
        [plan_chunkflow(lens, ChunkOptions(size=3), stages=(1, 1)) for lens in ([6, 2], [5, 3])],
        [[0, 1], [2, 3]],
        [6, 2, 5, 3],
    ),
    regathers=True,
)

BASES = {
    "one device": ONE,
    "inputs": INPUTS,
    "pipeline": PIPELINE,
    "graphs": GRAPHS,
    "layer-first": LAYERS,
    "attention": ATTENTION,
    "sp": SP,
    "sampled": SAMPLED,
    "sampled layer-first": SAMPLED_LAYERS,
    "sampled pipeline": SAMPLED_PIPELINE,
    "losses left out": LEFT_OUT,
    "sharded": SHARDED,
    "resharded": RESHARDED,
    "in step": IN_STEP,
    "stages in step": STAGES_IN_STEP,
    "pipelines in step": PIPELINES_IN_STEP,
}


def edited(plan, rank, edit):
    """`plan` with one rank's list of texts changed by `edit`, which works in place."""
    texts = [format_action(action) for action in plan.actions[rank]]
    edit(texts)
    actions = list(plan.actions)
    actions[rank] = tuple(map(parse_action, texts))
    return replace(plan, actions=tuple(actions))


def drop(*wanted, rank=0):
    return lambda plan: edited(plan, rank, lambda texts: [texts.remove(text) for text in wanted])


def insert(text, before, rank=0):
    """`text` to right before another (None: to the end)."""

    def edit(texts):
        texts.insert(len(texts) if before is None else texts.index(before), text)

    return lambda plan: edited(plan, rank, edit)


def move(text, before, rank=0):
    return both(drop(text, rank=rank), insert(text, before, rank))


def change(old, new, rank=0):
    return lambda plan: edited(plan, rank, lambda own: own.__setitem__(own.index(old), new))


def both(first, second):
    return lambda plan: second(first(plan))


def unsampled(plan):
    return replace(plan, sampled=False, report_loss=True)


def apart(plan):
    return replace(plan, regathers=False)


def handed_over(*texts, to):
    """Passes of one of two ranks to the end of the other's list, before its Reduce."""

    def edit(plan):
        moved = edited(plan, 1 - to, lambda own: [own.remove(text) for text in texts])
        return edited(moved, to, lambda own: own.__setitem__(slice(-1, -1), texts))

    return edit


def losses_reported(plan):
    return replace(plan, report_loss=True)


CELL = "every action names a cell of the grid"
COVERED = "every token is in exactly one slice"
FACTORS = "a Backward has factors other than 1 only in a sampled plan, equal ones at all stages"
PLACED = "a chunk holds at most one piece with a prefix per place, and a sequence keeps its place"
FOLLOW = "forwards ascend, and every cell follows its neighbours"
THERE = "the K,V of earlier chunks are there when they are read"
COMPLETE = "the dK,dV of a chunk are complete before its Backward"
GRAPH = "every Backward has one graph, and every Recompute an input to start from"
ONCE = "every cell has one Forward and one Backward, on one rank"
ENDS = "a Backward ends its cell, and no graph is left over"
BUDGET = "memory stays within the budget"
PAIRED = "every message that is sent is received, in the same order"
SAME = (
    "ranks that share stages issue their collectives, and passes that gather weights, in one "
    "order over all of these"
)
USED = "parameters are unsharded while they are used"
REDUCED = "a Reduce follows the last Backward of its stage on its rank, once"
PHASES = "a plan of two phases has all Forwards in the first"
STALL = "no rank waits for ever"

# valid plan, what breaks it, the complaint, where its arrow points
# fmt: off
BROKEN = [
    (SAMPLED, unsampled, ONCE, "0:0-3"),
    (ONE, change("B0.0", "B0.0 a2"), FACTORS, "B0.0 a2"),
    (SAMPLED, change("B1.0 a2 c3", "B1.0 a-2 c3"), FACTORS, "B1.0 a-2 c3"),
    (SAMPLED_PIPELINE, change("B0.1 a2 c2", "B0.1 a2 c3", rank=1), FACTORS, "B0.1 a2 c3"),
    (PIPELINE, move("recv activation 1.0 from 0", "B2.1", rank=1), FOLLOW, "F1.1 all"),
    (PIPELINE, drop("recv gradient 0.1 from 1"), FOLLOW, "B0.0"),
    (LAYERS, move("F0.1 kv", "F0.0 input"), FOLLOW, "F0.1 kv"),
    (LAYERS, both(move("R2.0", "R2.1"), move("B2.0", "R2.1")), FOLLOW, "B2.0"),
    (SAMPLED, move("F3.0 kv", "F2.0 kv"), FOLLOW, "F3.0 kv"),
    (SP, move("F1.0 kv", "F0.0 kv"), FOLLOW, "F1.0 kv"),
    (LEFT_OUT, drop("F2.0 kv"), FOLLOW, "F3.0 all"),
    (LAYERS, drop("K0.0"), THERE, "K1.0"),
    (LAYERS, insert("K0.1", "R2.1"), THERE, "K0.1"),
    (ATTENTION, move("K1.0", "R1.0"), THERE, "R2.0"),
    (INPUTS, change("F1.0 input", "F1.0 kv"), THERE, "K1.0"),
    (PIPELINE, move("B1.0", "reduce 0"), COMPLETE, "B0.0"),
    (SAMPLED, both(move("R1.0", "R3.0"), move("B1.0 a2 c3", "R3.0")), COMPLETE, "B1.0 a2 c3"),
    (SHARDED, both(move("R2.0", "B3.0", 1), move("B2.0", "B3.0", 1)), COMPLETE, "B2.0"),
    (PIPELINE, drop("R0.1", rank=1), GRAPH, "B0.1"),
    (PIPELINE, insert("R1.2", "B1.2", rank=2), GRAPH, "R1.2"),
    (GRAPHS, change("F0.0 all l1", "F0.0 all l3"), GRAPH, "F0.0 all l3"),
    (SAMPLED, drop("R1.0"), GRAPH, "B1.0 a2 c3"),
    (SP, move("R0.0", "F0.0 kv"), GRAPH, "R0.0"),
    (PIPELINE, drop("R0.1", "B0.1", rank=1), ONCE, "0:0-3"),
    (PIPELINE, insert("F1.1 all", "reduce 2", rank=2), ONCE, "F1.1 all"),
    (LEFT_OUT, losses_reported, ONCE, "0:12-15"),
    (LEFT_OUT, drop("F1.0 kv"), ONCE, "0:3-6"),
    (SAMPLED, insert("B3.0 a2 c3", "R1.0"), ONCE, "B3.0 a2 c3"),
    (PIPELINE, insert("R0.0", "reduce 0"), ENDS, "R0.0"),
    (LAYERS, insert("K1.0", "R0.0"), ENDS, "K1.0"),
    (SAMPLED, insert("R2.0", "R1.0"), ENDS, "R2.0"),
    (SAMPLED, change("F2.0 kv", "F2.0 all"), ENDS, "F2.0 all"),
    (PIPELINE, drop("send activation 1.0 to 1"), PAIRED, "recv activation 1.0 from 0"),
    (PIPELINE, insert("send gradient 1.1 to 0", None, rank=1),
     PAIRED, "send gradient 1.1 to 0"),
    (PIPELINE, move("send gradient 1.2 to 1", "B1.2", rank=2),
     PAIRED, "send gradient 1.2 to 1"),
    (PIPELINE, change("send activation 0.0 to 1", "send activation 0.0 to 2"),
     PAIRED, "send activation 0.0 to 2"),
    (PIPELINE, change("send activation 2.1 to 2", "send gradient 2.1 to 2", 1),
     PAIRED, "send gradient 2.1 to 2"),
    (PIPELINE, insert("send activation 0.2 to 1", "reduce 2", rank=2),
     PAIRED, "send activation 0.2 to 1"),
    (PIPELINE, insert("reduce 1", None), REDUCED, "reduce 1"),
    (SHARDED, both(insert("unshard 0", "F0.0 kv"), insert("unshard 0", "F2.0 kv", 1)),
     USED, "unshard 0"),
    (SHARDED, drop("unshard 0", rank=1), SAME, "reduce 0"),
    (SHARDED, both(move("unshard 0", "F3.0 all", 1), move("unshard 0", "F1.0 all")),
     USED, "F0.0 kv"),
    (SHARDED, drop("reduce 0", rank=1), REDUCED, "B2.0"),
    (LAYERS, move("reduce 1", "B0.1"), REDUCED, "reduce 1"),
    (IN_STEP, apart, COVERED, "dummy"),
    (IN_STEP, drop("F4.0 input", rank=1), ONCE, "dummy"),
    # a pass less, one more, two swapped; the first difference is shown on the second rank
    (IN_STEP, both(change("F0.0 kv", "F0.0 all"), drop("R0.0")), SAME, "F5.0 all"),
    (IN_STEP, move("B5.0", "reduce 0", rank=1), SAME, "R6.0"),
    (IN_STEP, handed_over("F5.0 all", "B5.0", to=0), SAME, "reduce 0"),
    (RESHARDED, drop("reshard 0"), USED, "unshard 0"),
    (RESHARDED, move("reshard 0", "F0.0 attention"), USED, "F0.0 attention"),
    (RESHARDED, move("reshard 2", "reduce 2"), USED, "reduce 2"),
    # all that either rank computes finds its weights, but not those that the other one sends
    (RESHARDED, both(drop("unshard 1", rank=2), insert("unshard 1", "unshard 0", rank=2)),
     SAME, "unshard 1"),
    (IN_STEP, both(insert("unshard 0", "F0.0 kv"),
     insert("unshard 0", "F4.0 input", rank=1)), SAME, "unshard 0"),
    (PIPELINES_IN_STEP, move("R0.0", "recv gradient 1.1 from 1"), SAME, "B4.0"),
    (STAGES_IN_STEP, move("F2.1 all", "F3.0 all", rank=1), SAME, "F2.1 all"),
    (PIPELINE, move("recv gradient 1.1 from 1", "send activation 1.0 to 1"),
     STALL, "recv gradient 1.1 from 1"),
    (SAMPLED_PIPELINE, move("recv gradient 0.1 from 1", "send activation 1.0 to 1"),
     STALL, "recv gradient 0.1 from 1"),
    (PIPELINE, change("R0.0", "R0.1"), ONCE, "R0.1"),
    (ONE, change("B0.0", "B9.0"), CELL, "B9.0"),
    (ONE, change("B0.0", "B0.1"), CELL, "B0.1"),
    (ONE, change("reduce 0", "reduce 1"), CELL, "reduce 1"),
    (ONE, change("reduce 0", "send activation 0.0 to 1"), CELL, "send activation 0.0 to 1"),
    (ONE, both(drop("B0.0"), insert("B0.0", "F0.0 attention")), FOLLOW, "B0.0"),
    (INPUTS, insert("K0.0", "F0.0 input"), THERE, "K0.0"),
    (INPUTS, insert("K1.0", "R1.0"), COMPLETE, "K1.0"),
    (ONE, insert("reduce 0", None), REDUCED, "reduce 0"),
    # both ends agree on what is sent, not on the order
    (PIPELINE, both(drop("send activation 0.0 to 1"),
     insert("send activation 0.0 to 1", "F2.0 all")),
     PAIRED, "recv activation 0.0 from 0"),
]
# fmt: on


THREE = "0:0-4; 0:4-8; 0:8-9 1:0-2"
NESTED = (
    "0:0-4@* 1:0-4@4-7 2:0-3@6-7 3:0-2@6; 0:4-9@* 4:0-1@0-3 1:4-5@4-7 2:3-4@6-7 3:2-3@6 5:0-1@6"
)


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(THREE, "F0.0 input, F1.0 input, F2.0 input"),
        # recomputed before the last forward, while the K,V of chunk 0 still live
        plan_of(
            THREE, "F0.0 input, F1.0 input, R1.0, F2.0 all, K0.0, K1.0, B2.0, B1.0, R0.0, B0.0"
        ),
        # rebuilt twice before anything sends dK,dV
        plan_of(
            THREE,
            "F0.0 input, F1.0 input, F2.0 all, K0.0, K0.0, K1.0, B2.0, R1.0, B1.0, R0.0, B0.0",
        ),
        # no group before another is finished: two sequences interleaved
        plan_of(
            "0:0-4; 1:0-4; 0:4-5; 1:4-5",
            "F0.0 kv, F1.0 kv, F2.0 all, F3.0 all, B3.0, B2.0, R0.0, B0.0, R1.0, B1.0",
        ),
        # nested places of a pool, most of them with a prefix
        plan_of(NESTED, "F0.0 kv, F1.0 all, B1.0, R0.0, B0.0", sp_size=12),
    ],
)
def test_legal_plans_pass(plan):
    check(plan)


@pytest.mark.parametrize(
    ("chunks", "fields", "rule", "guilty"),
    [
        ("0:0-4; 0:5-8; 0:8-9", {}, COVERED, "0:5-8"),
        ("0:0-4; 0:3-8; 0:8-9", {}, COVERED, "0:3-8"),
        ("0:0-4; 0:4-4; 0:4-9", {}, COVERED, "0:4-4"),
        ("0:0-4; 0:4-8; 0:8-9", {"seq_lens": (10,)}, COVERED, "0:8-9"),
        ("0:0-4; 0:4-8; 1:0-9", {"seq_lens": (8,)}, COVERED, "1:0-9"),
        ("0:0-4; 0:4-8; 0:8-9", {"seq_lens": (9, 1)}, COVERED, "0:0-4"),
        ("0:0-4; 1:0-4; 1:4-5 0:4-5", {}, PLACED, "1:4-5 0:4-5"),
        ("0:0-4; 1:0-1 0:4-5; 2:0-1", {}, PLACED, "1:0-1 0:4-5"),
        ("0:0-4; 1:0-1 1:1-2; 0:4-5", {}, PLACED, "1:0-1 1:1-2"),
        ("0:0-4; 0:4-8@1; 0:8-9", {}, PLACED, "0:4-8@1"),
        ("0:0-4; 0:4-8@1; 0:8-9", {"sp_size": 2}, PLACED, "0:4-8@1"),
        ("0:0-4@1; 1:0-4@1; 0:4-5@1 1:4-5@1", {"sp_size": 2}, PLACED, "0:4-5@1 1:4-5@1"),
        ("0:0-4@0-4; 0:4-8@0-4; 0:8-9@0-4", {"sp_size": 12}, PLACED, "0:0-4@0-4"),
        ("0:0-4@2-5; 0:4-8@2-5; 0:8-9@2-5", {"sp_size": 12}, PLACED, "0:0-4@2-5"),
        ("0:0-4@12-15; 0:4-8@12-15; 0:8-9@12-15", {"sp_size": 12}, PLACED, "0:0-4@12-15"),
        ("0:0-4@0-3; 0:4-8@4-7; 0:8-9@0-3", {"sp_size": 12}, PLACED, "0:4-8@4-7"),
        ("0:0-4@2; 1:0-4@2 2:0-4@0-3; 0:4-5@2", {"sp_size": 4}, PLACED, "1:0-4@2 2:0-4@*"),
        ("0:0-4@2; 1:0-4@2 2:0-4@1; 0:4-5@2", {"sp_size": 4}, PLACED, "1:0-4@2 2:0-4@1"),
    ],
)
def test_odd_chunks(chunks, fields, rule, guilty):
    assert refusal(plan_of(chunks, "F0.0 kv, F1.0 kv, F2.0 kv", **fields)) == (rule, guilty)


def crossed(first, second, chunk):
    return (
        f"unshard {first}, unshard {second}, F{chunk}.0 all, F{chunk}.1 all, "
        f"B{chunk}.1, B{chunk}.0, reduce 0, reduce 1"
    )


@pytest.mark.parametrize(
    ("plan", "rule", "guilty"),
    [
        (plan_of("0:0-4", "F0.0 all"), ENDS, "F0.0 all"),
        (plan_of("0:0-4", "F0.0 kv, R0.0"), ENDS, "R0.0"),
        # chunk 2 has no Backward to wait for, but it reads the K,V of chunk 1
        (plan_of(THREE, "F0.0 kv, F1.0 all, B1.0 a2, F2.0 kv", sampled=True), ENDS, "F2.0 kv"),
        (plan_of("0:0-4; 0:4-5", "F0.0 kv", "F1.0 kv"), FOLLOW, "F1.0 kv"),
        # a rank without work, where another one reduces
        (
            plan_of("0:0-4; 1:0-4", "F0.0 all, B0.0, F1.0 all, B1.0, reduce 0", ""),
            REDUCED, "reduce 0",
        ),
        (
            plan_of("0:0-4; 1:0-4", crossed(0, 1, 0), crossed(1, 0, 1), stages=(1, 1)),
            SAME, "unshard 1",
        ),
        (
            plan_of(
                "0:0-4", "F0.0 kv, F0.1 all, B0.1, R0.0, B0.0", stages=(1, 1), frozen_stages=1
            ),
            ONCE, "B0.0",
        ),
        (plan_of("0:0-4", "F0.0 all, B0.0", two_phases=True), PHASES, "F0.0 all"),
        (
            plan_of("0:0-4; 1:0-4", "F0.0 kv, R0.0, B0.0, F1.0 kv, R1.0, B1.0", two_phases=True),
            PHASES, "F1.0 kv",
        ),
    ],
)  # fmt: skip
def test_odd_actions(plan, rule, guilty):
    assert refusal(plan) == (rule, guilty)


def test_a_deadlock_names_everyone_who_waits():
    # rank 0 sends chunk 1 only after it has its gradient
    ranks = (
        "F0.0 kv, send activation 0.0 to 1, F1.0 all, recv gradient 1.1 from 1, "
        "send activation 1.0 to 1, B1.0, R0.0, recv gradient 0.1 from 1, B0.0, reduce 0",
        "recv activation 0.0 from 0, F0.1 kv, recv activation 1.0 from 0, F1.1 all, "
        "B1.1, send gradient 1.1 to 0, R0.1, B0.1, send gradient 0.1 to 0, reduce 1",
    )
    with pytest.raises(PlanError, match=r"rank 1 at 'recv activation 1.0 from 0'"):
        check(plan_of("0:0-4; 0:4-5", *ranks, stages=(2, 2)))


def test_long_plans_show_the_neighbourhood_only():
    plan = plan_chunkflow([400], ChunkOptions(size=4, keep="kv"), stages=(2,))
    broken = list(plan.actions[0])
    del broken[151]
    with pytest.raises(PlanError) as error:
        check(replace(plan, actions=(tuple(broken),)))
    lines = str(error.value).splitlines()
    assert len(lines) == 3 + 9
    assert lines[7].startswith("   151  B") and lines[7].endswith("<-- here")


def test_plans_without_a_place_to_point_at():
    for stages in ((), (0, 2), (-1, 3)):
        with pytest.raises(PlanError, match="stages of at least one layer"):
            check(plan_of("0:0-4", "F0.0 kv", stages=stages))
    with pytest.raises(PlanError, match="a pool has at least one process"):
        check(replace(ONE, sp_size=0))
    with pytest.raises(PlanError, match="are frozen: the last one has the loss"):
        check(replace(ONE, frozen_stages=1))
    with pytest.raises(PlanError, match="only a sampled plan leaves losses out"):
        check(replace(ONE, report_loss=False))


@pytest.mark.parametrize(
    "lens", [lambda n: [200 * n], lambda n: [24] * 7 * n + [2] * 5 * n, lambda n: [600] * (n // 3)]
)
def test_the_work_grows_like_the_number_of_actions(lens):
    work = []
    for size in (6, 12):
        plan = plan_chunkflow(lens(size), ChunkOptions(size=6, keep="input"), stages=(2,))
        again = ChunkPlan(plan.seq_lens, plan.chunks, plan.stages, plan.actions)
        assert len(plan.actions[0]) > 50 * size
        work.append(lines_run(lambda again=again: check(again)))
    assert work[1] < LINEAR * work[0]


@pytest.mark.parametrize("plan", BASES.values(), ids=BASES)
def test_the_plans_are_valid_before_they_are_broken(plan):
    check(plan)
    assert obey(plan) == pytest.approx(gradient(plan), rel=1e-12)


@pytest.mark.parametrize(
    ("plan", "edit", "rule", "guilty"),
    BROKEN,
    ids=[f"{row[3]}-{index}" for index, row in enumerate(BROKEN)],
)
def test_a_broken_plan_is_refused_at_the_right_place(plan, edit, rule, guilty):
    assert refusal(edit(plan)) == (rule, guilty)


@pytest.mark.parametrize("name", BASES)
def test_one_byte_less_than_needed_is_refused_where_most_is_needed(name):
    plan = BASES[name]
    memory = CostModel(model_shape("Qwen2.5-0.5B"), Machine.named("A100-80")).memory
    curves = [memory().peak_bytes_of_actions(plan, rank) for rank in range(len(plan.actions))]
    peak = max(map(max, curves))
    check(plan, memory(peak))
    rank = next(rank for rank, curve in enumerate(curves) if max(curve) == peak)
    most = format_action(plan.actions[rank][list(curves[rank]).index(peak)])
    assert refusal(plan, memory(peak - 1)) == (BUDGET, most)


DAMAGES = ("lose", "double", "move", "swap", "neighbours", "chunk", "stage", "keep", "factor")


def damage(rng, plan):
    """`plan` with one or two actions lost, doubled, moved, swapped or changed."""
    actions = [list(rank) for rank in plan.actions]
    for _ in range(rng.randint(1, 2)):
        own = rng.choice([rank for rank in actions if rank])
        at, other = rng.randrange(len(own)), rng.randrange(len(own))
        match rng.choice(DAMAGES):
            case "lose":
                del own[at]
            case "double":
                own.insert(other, own[at])
            case "move":
                own.insert(other, own.pop(at))
            case "swap":
                own[at], own[other] = own[other], own[at]
            case "neighbours" if at:
                own[at - 1 : at + 1] = reversed(own[at - 1 : at + 1])
            case "chunk" if hasattr(own[at], "chunk"):
                own[at] = replace(own[at], chunk=rng.randrange(len(plan.chunks)))
            case "stage":
                own[at] = replace(own[at], stage=rng.randrange(len(plan.stages)))
            case "keep" if isinstance(own[at], Forward):
                own[at] = replace(own[at], keep=rng.choice(("input", "kv", "attention", "all")))
            case "factor" if isinstance(own[at], Backward):
                name = rng.choice(("loss_factor", "relay_factor"))
                own[at] = replace(own[at], **{name: rng.choice((0.5, 2.0))})
    return replace(plan, actions=tuple(map(tuple, actions)))


def survivors(name, count, seed):
    """How many of `count` damaged plans pass the checker; each of them gives the gradient."""
    plan, rng = BASES[name], random.Random(f"{name} {seed}")
    expected, passed = gradient(plan), 0
    # a sampled plan that loses a whole backward, or has other factors, is that of another draw
    for _ in range(count):
        damaged = damage(rng, plan)
        try:
            check(damaged)
        except PlanError as error:
            assert "<-- here" in str(error)
            continue
        passed += 1
        try:
            wanted = gradient(damaged) if plan.sampled else expected
            assert obey(damaged) == pytest.approx(wanted, rel=1e-12)
        except (StuckError, AssertionError) as error:
            for rank in damaged.actions:
                error.add_note(", ".join(map(format_action, rank)))
            raise
    return passed


@pytest.mark.parametrize(
    ("count", "seed"),
    [
        (500, 0),
        pytest.param(2_000, SEED + 1, marks=pytest.mark.slow),
        pytest.param(20_000, SEED + 1, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("name", BASES)
@pytest.mark.few(6)
def test_damage_that_passes_does_no_harm(name, count, seed):
    assert 0 < survivors(name, count, seed) < count / 2

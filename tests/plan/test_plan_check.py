"""The checker passes legal plans and names the broken rule at the guilty action of illegal ones."""

import dataclasses
import re

import pytest
from helpers.counted_work import LINEAR, lines_run
from papers.chunkflow_plan import plan_chunkflow

from furlong.errors import PlanError
from furlong.plan.check import check
from furlong.plan.plan import ChunkPlan
from furlong.plan.text import parse_action, parse_chunk
from furlong.planners.options import ChunkOptions


def plan_of(chunks, *ranks, stages=(2,), **fields):
    """A plan from texts: chunks parted by "; ", each rank's actions by ", "."""
    sp_size = fields.get("sp_size", 1)
    pieces = tuple(parse_chunk(text, sp_size=sp_size) for text in chunks.split("; "))
    seq_lens = {}
    for chunk in pieces:
        for piece in chunk.slices:
            seq_lens[piece.seq_id] = max(piece.stop, seq_lens.get(piece.seq_id, 0))
    return ChunkPlan(
        seq_lens=fields.pop("seq_lens", tuple(seq_lens[i] for i in sorted(seq_lens))),
        chunks=pieces,
        stages=stages,
        actions=tuple(tuple(map(parse_action, texts.split(", "))) for texts in ranks),
        **fields,
    )


def refusal(plan, memory=None):
    """(rule, guilty line without its number) of a plan that must not pass."""
    with pytest.raises(PlanError) as error:
        check(plan, memory)
    text = str(error.value)
    (guilty,) = re.findall(r"^ *\d+  (.*)    <-- here$", text, flags=re.MULTILINE)
    return text.splitlines()[0].removeprefix("broken rule: "), guilty


THREE = "0:0-4; 0:4-8; 0:8-9 1:0-2"
KEEPS_KV = "F0.0 kv, F1.0 attention, F2.0 all l1, B2.0, R1.0 l2, B1.0, R0.0, B0.0, reduce 0"
KEEPS_INPUT = "F0.0 input, F1.0 input, F2.0 all, K0.0, K1.0, B2.0, R1.0, B1.0, R0.0, B0.0, reduce 0"
LEGAL = [
    plan_of(THREE, KEEPS_KV),
    plan_of(THREE, KEEPS_INPUT),
    plan_of(THREE, "F0.0 input, F1.0 input, F2.0 input"),
    # recomputed before the last forward, while the K,V of chunk 0 still live
    plan_of(THREE, "F0.0 input, F1.0 input, R1.0, F2.0 all, K0.0, K1.0, B2.0, B1.0, R0.0, B0.0"),
    # rebuilt twice before anything sends dK,dV
    plan_of(THREE, KEEPS_INPUT.replace("K1.0, B2.0", "K0.0, K1.0, B2.0")),
    # SpaCO: two drawn chunks, nobody waits for the others
    plan_of(THREE, "F0.0 kv, F1.0 kv, F2.0 kv, R1.0, B1.0 a3 c2", sampled=True),
    plan_of(THREE, "F0.0 kv, F1.0 kv, F2.0 all, B2.0 a1.5 c2, R0.0, B0.0 a1.5 c2", sampled=True),
    # no group before another is finished: two sequences interleaved
    plan_of(
        "0:0-4; 1:0-4; 0:4-5; 1:4-5",
        "F0.0 kv, F1.0 kv, F2.0 all, F3.0 all, B3.0, B2.0, R0.0, B0.0, R1.0, B1.0",
    ),
    # layer-first on one rank
    plan_of(
        "0:0-4; 0:4-5",
        "F0.0 input, F1.0 input, F0.1 input, F1.1 input, K0.1, R1.1, B1.1, R0.1, B0.1, reduce 1, "
        "K0.0, R1.0, B1.0, R0.0, B0.0, reduce 0",
        stages=(1, 1),
    ),
    # two data-parallel ranks with sharded parameters and unequal work
    plan_of(
        "0:0-4; 0:4-5; 1:0-1",
        "unshard 0, F0.0 kv, F1.0 all, B1.0, R0.0, B0.0, reshard 0, reduce 0",
        "unshard 0, F2.0 all, B2.0, reshard 0, reduce 0",
    ),
    # nested places in a pool of 12, most of them with a prefix
    plan_of(
        "0:0-4@* 1:0-4@4-7 2:0-3@6-7 3:0-2@6; "
        "0:4-9@* 4:0-1@0-3 1:4-5@4-7 2:3-4@6-7 3:2-3@6 5:0-1@6",
        "F0.0 kv, F1.0 all, B1.0, R0.0, B0.0",
        sp_size=12,
    ),
    # a pool of four: a sharded piece and local pieces, each with a prefix
    plan_of(
        "0:0-4@* 1:0-3@2 2:0-3@3 3:0-1@3; 0:4-9@* 1:3-5@2 2:3-4@3",
        "F0.0 kv, F1.0 all, B1.0, R0.0, B0.0",
        sp_size=4,
    ),
]


@pytest.mark.parametrize("plan", LEGAL)
def test_legal_plans_pass(plan):
    check(plan)


def replaced(texts, old, new):
    assert old in texts
    return texts.replace(old, new, 1)


COVERED = "every token is in exactly one slice"
PLACED = "a chunk holds at most one piece with a prefix per place, and a sequence keeps its place"


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
        ("0:0-4@*; 1:0-4@*; 0:4-5@* 1:4-5@*", {"sp_size": 2}, PLACED, "0:4-5@* 1:4-5@*"),
        ("0:0-4@0-2; 0:4-8@0-2; 0:8-9@0-2", {"sp_size": 12}, PLACED, "0:0-4@0-2"),
        ("0:0-4@0-7; 0:4-8@0-7; 0:8-9@0-7", {"sp_size": 12}, PLACED, "0:0-4@0-7"),
        ("0:0-4@2-5; 0:4-8@2-5; 0:8-9@2-5", {"sp_size": 12}, PLACED, "0:0-4@2-5"),
        ("0:0-4@12-15; 0:4-8@12-15; 0:8-9@12-15", {"sp_size": 12}, PLACED, "0:0-4@12-15"),
        ("0:0-4@0-3; 0:4-8@4-7; 0:8-9@0-3", {"sp_size": 12}, PLACED, "0:4-8@4-7"),
        ("0:0-4@2; 1:0-4@2 2:0-4@0-3; 0:4-5@2", {"sp_size": 4}, PLACED, "1:0-4@2 2:0-4@*"),
        ("0:0-4@2; 1:0-4@2 2:0-4@1; 0:4-5@2", {"sp_size": 4}, PLACED, "1:0-4@2 2:0-4@1"),
        ("0:0-4@2; 1:0-4@2 0:4-5@2; 2:0-4@2", {"sp_size": 4}, PLACED, "1:0-4@2 0:4-5@2"),
    ],
)
def test_odd_chunks(chunks, fields, rule, guilty):
    assert refusal(plan_of(chunks, "F0.0 kv, F1.0 kv, F2.0 kv", **fields)) == (rule, guilty)


CELL = "every action names a cell of the grid"
ONCE = "every cell has one Forward and one Backward, on one rank"
FOLLOW = "forwards ascend, and every cell follows its neighbours"
THERE = "the K,V of earlier chunks are there when they are read"
COMPLETE = "the dK,dV of a chunk are complete before its Backward"
GRAPH = "every Backward has one graph, and every Recompute an input to start from"
ENDS = "a Backward ends its cell, and no graph is left over"
REDUCED = "a Reduce follows the last Backward of its stage on its rank, once"


@pytest.mark.parametrize(
    ("legal", "old", "new", "rule", "guilty"),
    [
        (KEEPS_KV, "B0.0", "B3.0", CELL, "B3.0"),
        (KEEPS_KV, "B0.0", "B0.1", CELL, "B0.1"),
        (KEEPS_KV, "reduce 0", "reduce 1", CELL, "reduce 1"),
        (KEEPS_KV, "reduce 0", "send activation 0.0 to 1", CELL, "send activation 0.0 to 1"),
        (KEEPS_KV, "F1.0 attention, ", "", ONCE, "0:4-8"),
        (KEEPS_KV, "R0.0, B0.0, ", "", ONCE, "0:0-4"),
        (KEEPS_KV, "F2.0", "F1.0 kv, F2.0", ONCE, "F1.0 kv"),
        (KEEPS_KV, "B0.0", "B0.0, B0.0", ONCE, "B0.0"),
        (KEEPS_KV, "F0.0 kv, F1.0 attention", "F1.0 attention, F0.0 kv", FOLLOW, "F1.0 attention"),
        (KEEPS_KV, "F2.0 all l1, B2.0", "B2.0, F2.0 all", FOLLOW, "B2.0"),
        (KEEPS_INPUT, "K1.0, ", "", THERE, "B2.0"),
        (KEEPS_INPUT, "K0.0, ", "", THERE, "K1.0"),
        (KEEPS_INPUT, "K0.0, K1.0", "K1.0, K0.0", THERE, "K1.0"),
        (KEEPS_INPUT, "K1.0, B2.0", "B2.0, K1.0", THERE, "B2.0"),
        (KEEPS_INPUT, "F0.0 input", "K0.0, F0.0 input", THERE, "K0.0"),
        (KEEPS_INPUT, "K1.0", "K1.0, K2.0", THERE, "K2.0"),
        (KEEPS_KV, "B2.0", "B2.0, K0.0", THERE, "K0.0"),
        (KEEPS_KV, "B2.0, R1.0 l2, B1.0", "R1.0 l2, B1.0, B2.0", COMPLETE, "B1.0"),
        (KEEPS_KV, "R1.0 l2, B1.0, R0.0, B0.0", "R0.0, B0.0, R1.0, B1.0", COMPLETE, "B0.0"),
        (KEEPS_INPUT, "R1.0", "K1.0, R1.0", COMPLETE, "K1.0"),
        (KEEPS_INPUT, "R1.0, B1.0", "R1.0, B1.0, K0.0", COMPLETE, "K0.0"),
        (KEEPS_KV, "R1.0 l2, ", "", GRAPH, "B1.0"),
        (KEEPS_KV, "R1.0 l2", "R1.0 l3", GRAPH, "R1.0 l3"),
        (KEEPS_KV, "all l1", "all l3", GRAPH, "F2.0 all l3"),
        (KEEPS_KV, "R0.0", "R0.0, R0.0", GRAPH, "R0.0"),
        (KEEPS_KV, "B2.0", "R2.0, B2.0", GRAPH, "R2.0"),
        (KEEPS_KV, "F2.0 all l1", "F2.0 kv", GRAPH, "B2.0"),
        (KEEPS_KV, "F0.0", "R0.0, F0.0", GRAPH, "R0.0"),
        (KEEPS_KV, "reduce 0", "R0.0", ENDS, "R0.0"),
        (KEEPS_INPUT, "reduce 0", "K0.0", ENDS, "K0.0"),
        (KEEPS_KV, "reduce 0", "reduce 0, reduce 0", REDUCED, "reduce 0"),
        (KEEPS_KV, "B0.0, reduce 0", "reduce 0, B0.0", REDUCED, "reduce 0"),
        (KEEPS_KV, "F0.0", "reduce 0, F0.0", REDUCED, "reduce 0"),
    ],
)
def test_mutations_of_legal_plans(legal, old, new, rule, guilty):
    assert refusal(plan_of(THREE, replaced(legal, old, new))) == (rule, guilty)


def test_graphs_that_no_backward_consumes():
    assert refusal(plan_of("0:0-4", "F0.0 all")) == (ENDS, "F0.0 all")
    assert refusal(plan_of("0:0-4", "F0.0 kv, R0.0")) == (ENDS, "R0.0")
    sampled = plan_of(THREE, "F0.0 kv, F1.0 kv, F2.0 all, R1.0, B1.0 a3", sampled=True)
    assert refusal(sampled) == (ENDS, "F2.0 all")


def test_kv_that_a_backward_has_freed():
    # chunk 2 has no Backward to wait for, but it reads the K,V of chunk 1
    plan = plan_of(THREE, "F0.0 kv, F1.0 all, B1.0 a2, F2.0 kv", sampled=True)
    assert refusal(plan) == (ENDS, "F2.0 kv")


def test_missing_backwards_must_be_meant():
    texts = "F0.0 kv, F1.0 kv, F2.0 kv, R1.0, B1.0 a3"
    assert refusal(plan_of(THREE, texts)) == (ONCE, "0:0-4")


PIPELINE = (
    "F0.0 kv, send activation 0.0 to 1, F1.0 all, send activation 1.0 to 1, "
    "recv gradient 1.1 from 1, B1.0, R0.0, recv gradient 0.1 from 1, B0.0, reduce 0",
    "recv activation 0.0 from 0, F0.1 kv, recv activation 1.0 from 0, F1.1 all, "
    "B1.1, send gradient 1.1 to 0, R0.1, B0.1, send gradient 0.1 to 0, reduce 1",
)
STALL = "no rank waits for ever"


def pipeline(*changes):
    ranks = list(PIPELINE)
    for rank, old, new in changes:
        ranks[rank] = replaced(ranks[rank], old, new)
    return plan_of("0:0-4; 0:4-5", *ranks, stages=(2, 2))


def test_a_deadlock_names_everyone_who_waits():
    plan = pipeline(
        (0, "send activation 1.0 to 1, recv gradient 1.1 from 1", "recv gradient 1.1 from 1"),
        (0, "B1.0", "send activation 1.0 to 1, B1.0"),
    )
    with pytest.raises(PlanError, match=r"rank 1 at 'recv activation 1.0 from 0'"):
        check(plan)


def test_a_sequence_stays_on_one_rank_of_a_stage():
    plan = plan_of("0:0-4; 0:4-5", "F0.0 kv", "F1.0 kv")
    assert refusal(plan) == (FOLLOW, "F1.0 kv")


def test_a_rank_without_work_is_refused_where_others_reduce():
    plan = plan_of("0:0-4; 1:0-4", "F0.0 all, B0.0, F1.0 all, B1.0, reduce 0")
    idle = dataclasses.replace(plan, actions=(*plan.actions, ()))
    assert refusal(idle) == (REDUCED, "reduce 0")


def test_collectives_of_two_stages_in_crossed_order_stall():
    def rank(first, second, chunk):
        return (
            f"unshard {first}, unshard {second}, F{chunk}.0 all, F{chunk}.1 all, "
            f"B{chunk}.1, B{chunk}.0, reduce 0, reduce 1"
        )

    crossed = plan_of("0:0-4; 1:0-4", rank(0, 1, 0), rank(1, 0, 1), stages=(1, 1))
    assert refusal(crossed) == (STALL, "unshard 0")
    check(plan_of("0:0-4; 1:0-4", rank(0, 1, 0), rank(0, 1, 1), stages=(1, 1)))


class Constant:
    """A memory whose every action needs as many bytes as its index."""

    def __init__(self, budget):
        self.budget = budget

    def budget_bytes(self, rank):
        return self.budget

    def peak_bytes_of_actions(self, plan, rank):
        return range(len(plan.actions[rank]))


def test_memory_over_its_budget():
    check(plan_of(THREE, KEEPS_KV), Constant(8))
    over = refusal(plan_of(THREE, KEEPS_KV), Constant(5))
    assert over == ("memory stays within the budget", "R0.0")


def test_long_plans_show_the_neighbourhood_only():
    plan = plan_chunkflow([400], ChunkOptions(size=4, keep="kv"), stages=(2,))
    broken = list(plan.actions[0])
    del broken[151]
    with pytest.raises(PlanError) as error:
        check(dataclasses.replace(plan, actions=(tuple(broken),)))
    lines = str(error.value).splitlines()
    assert len(lines) == 3 + 9
    assert lines[7].startswith("   151  B") and lines[7].endswith("<-- here")


def test_plans_without_a_place_to_point_at():
    with pytest.raises(PlanError, match="stages"):
        check(plan_of("0:0-4", "F0.0 kv", stages=()))
    for stages in ((0, 2), (-1, 3)):
        with pytest.raises(PlanError, match="stages of at least one layer"):
            check(plan_of("0:0-4", "F0.0 kv", stages=stages))
    with pytest.raises(PlanError, match="sequence 0"):
        check(ChunkPlan(seq_lens=(1,), chunks=(), stages=(1,), actions=((),)))


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


@pytest.mark.slow
@pytest.mark.parametrize("seq_lens", [[200_000], [24] * 7_000 + [2] * 5_000, [3_000] * 67])
def test_hundred_thousand_actions_are_checked(seq_lens):
    plan = plan_chunkflow(seq_lens, ChunkOptions(size=6, keep="input"), stages=(2,))
    assert len(plan.actions[0]) > 90_000
    check(ChunkPlan(plan.seq_lens, plan.chunks, plan.stages, plan.actions))

"""Eleven invariants, each broken in valid plans of every sort: the right complaint, at the right
place. Then random damage: what the checker lets through must still give the same gradient.
"""

import random
import re
from dataclasses import replace

import pytest
from helpers.nightly import SEED
from helpers.toy_model import StuckError, gradient, obey
from papers.chunkflow_plan import plan_chunkflow
from papers.fpdt_plan import plan_fpdt

from furlong.cost.machine import hardware
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.errors import PlanError
from furlong.plan.check import check
from furlong.plan.plan import Backward, Chunk, ChunkPlan, Forward, Slice
from furlong.plan.text import format_action, parse_action, parse_chunk
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas, plan_seq1f1b
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


def sharded_parameters():
    """Two data-parallel ranks whose stage is unsharded while they compute."""
    ranks = [
        f"unshard 0, F{c}.0 kv, F{c + 1}.0 all, B{c + 1}.0, R{c}.0, B{c}.0, reshard 0, reduce 0"
        for c in (0, 2)
    ]
    chunks = tuple(map(parse_chunk, ("0:0-3", "0:3-6", "1:0-3", "1:3-5")))
    actions = tuple(tuple(map(parse_action, rank.split(", "))) for rank in ranks)
    return ChunkPlan((6, 5), chunks, (2,), actions)


SHARDED = sharded_parameters()


def in_step(chunks, stages, *ranks):
    """Ranks that gather weights with every pass."""
    pieces = tuple(map(parse_chunk, chunks.split("; ")))
    ends = {s.seq_id: s.stop for chunk in pieces for s in chunk.slices}
    actions = tuple(tuple(map(parse_action, rank.split(", "))) for rank in ranks)
    return ChunkPlan(tuple(ends.values()), pieces, stages, actions, regathers=True)


IN_STEP = in_step(
    "0:0-3; 0:3-6; 1:0-2; 2:0-3; dummy; dummy; 3:0-1",
    (2,),
    "F0.0 kv, F1.0 all, B1.0, R0.0, B0.0, F2.0 all, B2.0, reduce 0",
    "F4.0 input, F3.0 all, B3.0, F5.0 all, B5.0, F6.0 kv, R6.0, B6.0, reduce 0",
)
"""Two replicas: a cut sequence meets a dummy that only runs forward and one that runs both ways."""
STAGES_IN_STEP = in_step(
    "0:0-3; 1:0-3; 2:0-3; 3:0-2",
    (1, 1),
    "F0.0 all, F1.0 all, F0.1 all, F1.1 all, B1.1, B0.1, B1.0, B0.0, reduce 1, reduce 0",
    "F2.0 all, F3.0 all, F2.1 all, F3.1 all, B3.1, B2.1, B3.0, B2.0, reduce 1, reduce 0",
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
    def edit(texts):
        for text in wanted:
            texts.remove(text)

    return lambda plan: edited(plan, rank, edit)


def move(text, before, rank=0):
    """`text` to right before another (None: to the end)."""

    def edit(texts):
        texts.remove(text)
        texts.insert(len(texts) if before is None else texts.index(before), text)

    return lambda plan: edited(plan, rank, edit)


def insert(text, before, rank=0):
    def edit(texts):
        texts.insert(len(texts) if before is None else texts.index(before), text)

    return lambda plan: edited(plan, rank, edit)


def change(old, new, rank=0):
    def edit(texts):
        texts[texts.index(old)] = new

    return lambda plan: edited(plan, rank, edit)


def both(first, second):
    return lambda plan: second(first(plan))


def chunk(index, text):
    def edit(plan):
        chunks = list(plan.chunks)
        chunks[index] = parse_chunk(text, sp_size=plan.sp_size)
        return replace(plan, chunks=tuple(chunks))

    return edit


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
SAME = "the ranks of a stage issue its collectives in the same order"
USED = "parameters are unsharded while they are used"
REDUCED = "a Reduce follows the last Backward of its stage on its rank, once"
MEET = "ranks that gather weights with every pass run the same passes of a stage"
STALL = "no rank waits for ever"

# invariant, valid plan, what breaks it, the complaint, where its arrow points
# fmt: off
BROKEN = [
    ("I1", PIPELINE, chunk(1, "0:4-6"), COVERED, "0:4-6"),
    ("I1", PIPELINE, chunk(2, "1:0-2 0:0-1"), COVERED, "0:0-3"),
    ("I1", SP, chunk(1, "0:4-7@*"), COVERED, "0:4-7@*"),
    ("I1", SHARDED, chunk(2, "1:0-2"), COVERED, "1:3-5"),
    ("I1", SAMPLED, chunk(2, "0:6-8"), COVERED, "0:9-12"),
    ("I1", SAMPLED, unsampled, ONCE, "0:0-3"),
    ("I1", ONE, change("B0.0", "B0.0 a2"), FACTORS, "B0.0 a2"),
    ("I1", PIPELINE, change("B1.1", "B1.1 c0.5", rank=1), FACTORS, "B1.1 c0.5"),
    ("I1", SAMPLED_PIPELINE, change("B0.1 a2 c2", "B0.1 a2 c3", rank=1), FACTORS, "B0.1 a2 c3"),
    ("I1", SAMPLED_LAYERS, change("B1.0 a3 c3", "B1.0 c3"), FACTORS, "B1.0 c3"),
    ("I2", SP, chunk(1, "0:4-8@0"), PLACED, "0:4-8"),
    ("I2", SP, chunk(2, "1:0-2@2"), PLACED, "1:0-2@2"),
    ("I2", SP, chunk(2, "1:0-2@1-2"), PLACED, "1:0-2@1-2"),
    ("I2", ONE, chunk(2, "0:6-9@1"), PLACED, "0:6-9@1"),
    ("I3", PIPELINE, move("recv activation 1.0 from 0", "B2.1", rank=1), FOLLOW, "F1.1 all"),
    ("I3", PIPELINE, drop("recv gradient 0.1 from 1"), FOLLOW, "B0.0"),
    ("I3", LAYERS, move("F0.1 kv", "F0.0 input"), FOLLOW, "F0.1 kv"),
    ("I3", LAYERS, both(move("R2.0", "R2.1"), move("B2.0", "R2.1")), FOLLOW, "B2.0"),
    ("I3", SAMPLED, move("F3.0 kv", "F2.0 kv"), FOLLOW, "F3.0 kv"),
    ("I3", SAMPLED_LAYERS, move("F2.1 kv", "F1.1 kv"), FOLLOW, "F2.1 kv"),
    ("I3", SP, move("F1.0 kv", "F0.0 kv"), FOLLOW, "F1.0 kv"),
    ("I3", LEFT_OUT, drop("F2.0 kv"), FOLLOW, "F3.0 all"),
    ("I4", LAYERS, drop("K0.0"), THERE, "K1.0"),
    ("I4", LAYERS, move("K1.0", "R1.0"), THERE, "R2.0"),
    ("I4", LAYERS, move("K1.0", "K0.0"), THERE, "K1.0"),
    ("I4", LAYERS, insert("K0.1", "R2.1"), THERE, "K0.1"),
    ("I4", ATTENTION, insert("K2.0", "R2.0"), THERE, "K2.0"),
    ("I4", ATTENTION, move("K1.0", "R1.0"), THERE, "R2.0"),
    ("I4", SAMPLED_LAYERS, drop("K0.0"), THERE, "R1.0"),
    ("I4", INPUTS, change("F1.0 input", "F1.0 kv"), THERE, "K1.0"),
    ("I5", PIPELINE, move("B1.0", "reduce 0"), COMPLETE, "B0.0"),
    ("I5", LAYERS, both(move("R0.1", "R2.1"), move("B0.1", "R2.1")), COMPLETE, "B0.1"),
    ("I5", SAMPLED, both(move("R1.0", "R3.0"), move("B1.0 a2 c3", "R3.0")), COMPLETE, "B1.0 a2 c3"),
    ("I5", SP, both(move("R0.0", "R1.0"), move("B0.0", "R1.0")), COMPLETE, "B0.0"),
    ("I5", SHARDED, both(move("R2.0", "B3.0", 1), move("B2.0", "B3.0", 1)), COMPLETE, "B2.0"),
    ("I6", PIPELINE, drop("R0.1", rank=1), GRAPH, "B0.1"),
    ("I6", PIPELINE, insert("R1.2", "B1.2", rank=2), GRAPH, "R1.2"),
    ("I6", GRAPHS, change("F0.0 all l1", "F0.0 all l3"), GRAPH, "F0.0 all l3"),
    ("I6", LAYERS, insert("R1.0", "B1.0"), GRAPH, "R1.0"),
    ("I6", LAYERS, change("R2.1", "R2.1 l2"), GRAPH, "R2.1 l2"),
    ("I6", SAMPLED, drop("R1.0"), GRAPH, "B1.0 a2 c3"),
    ("I6", SHARDED, change("F3.0 all", "F3.0 kv", rank=1), GRAPH, "B3.0"),
    ("I6", SP, move("R0.0", "F0.0 kv"), GRAPH, "R0.0"),
    ("I7", PIPELINE, drop("R0.1", "B0.1", rank=1), ONCE, "0:0-3"),
    ("I7", PIPELINE, insert("F1.1 all", "reduce 2", rank=2), ONCE, "F1.1 all"),
    ("I7", PIPELINE, move("R0.0", None), GRAPH, "B0.0"),
    ("I7", LAYERS, insert("F1.0 input", "F2.0 input"), ONCE, "F1.0 input"),
    ("I7", LAYERS, insert("B2.1", "R1.1"), ONCE, "B2.1"),
    ("I7", SAMPLED_LAYERS, drop("R0.0", "B0.0 a3 c3"), ONCE, "0:0-3"),
    ("I7", LEFT_OUT, losses_reported, ONCE, "0:12-15"),
    ("I7", LEFT_OUT, drop("F1.0 kv"), ONCE, "0:3-6"),
    ("I7", SAMPLED, insert("B3.0 a2 c3", "R1.0"), ONCE, "B3.0 a2 c3"),
    ("I7", SHARDED, insert("F3.0 all", "reshard 0"), ONCE, "F3.0 all"),
    ("I7", SP, drop("F2.0 kv"), ONCE, "1:0-2@*"),
    ("I8", PIPELINE, insert("R0.0", "reduce 0"), ENDS, "R0.0"),
    ("I8", LAYERS, insert("K1.0", "R0.0"), ENDS, "K1.0"),
    ("I8", LAYERS, insert("R0.1", "reduce 0"), ENDS, "R0.1"),
    ("I8", SAMPLED, insert("R2.0", "R1.0"), ENDS, "R2.0"),
    ("I8", SAMPLED, change("F2.0 kv", "F2.0 all"), ENDS, "F2.0 all"),
    ("I8", SAMPLED_PIPELINE, change("F1.2 kv", "F1.2 all", rank=2), ENDS, "F1.2 all"),
    ("I8", SHARDED, insert("R2.0", "reshard 0", rank=1), ENDS, "R2.0"),
    ("I10", PIPELINE, drop("send activation 1.0 to 1"), PAIRED, "recv activation 1.0 from 0"),
    ("I10", PIPELINE, insert("send gradient 1.1 to 0", None, rank=1),
     PAIRED, "send gradient 1.1 to 0"),
    ("I10", PIPELINE, move("send gradient 1.2 to 1", "B1.2", rank=2),
     PAIRED, "send gradient 1.2 to 1"),
    ("I10", PIPELINE, change("send activation 0.0 to 1", "send activation 0.0 to 2"),
     PAIRED, "send activation 0.0 to 2"),
    ("I10", PIPELINE, change("send activation 2.1 to 2", "send gradient 2.1 to 2", 1),
     PAIRED, "send gradient 2.1 to 2"),
    ("I10", SAMPLED_PIPELINE, insert("send gradient 1.1 to 0", None, rank=1),
     PAIRED, "send gradient 1.1 to 0"),
    ("I10", SAMPLED_PIPELINE, insert("recv gradient 1.1 from 1", "reduce 0"),
     PAIRED, "recv gradient 1.1 from 1"),
    ("I10", SHARDED, drop("reshard 0", rank=1), SAME, "reduce 0"),
    ("I10", SHARDED, insert("unshard 0", None), SAME, "unshard 0"),
    ("I10", SHARDED, both(move("reshard 0", "B2.0", 1), move("reshard 0", "B0.0")), USED, "B0.0"),
    ("I10", SHARDED, drop("reduce 0", rank=1), REDUCED, "B2.0"),
    ("I10", LAYERS, move("reduce 1", "B0.1"), REDUCED, "reduce 1"),
    ("I10", SAMPLED_LAYERS, drop("reduce 1"), REDUCED, "B0.1 a3 c3"),
    ("I10", PIPELINE, insert("send activation 0.0 to 1", "F1.0 all"),
     PAIRED, "send activation 0.0 to 1"),
    ("I1", IN_STEP, apart, COVERED, "dummy"),
    ("I7", IN_STEP, drop("F4.0 input", rank=1), ONCE, "dummy"),
    # a pass less, one more, two swapped; the first difference is shown on the second rank
    ("I10", IN_STEP, both(change("F0.0 kv", "F0.0 all"), drop("R0.0")), MEET, "F5.0 all"),
    ("I10", IN_STEP, both(change("F0.0 kv", "F0.0 input"), insert("K0.0", "B1.0")), MEET, "B3.0"),
    ("I10", IN_STEP, move("F5.0 all", "B3.0", rank=1), MEET, "F5.0 all"),
    ("I10", IN_STEP, move("B5.0", "reduce 0", rank=1), MEET, "R6.0"),
    ("I10", IN_STEP, handed_over("F5.0 all", "B5.0", to=0), MEET, "F2.0 all"),
    ("I10", IN_STEP, handed_over("F2.0 all", "B2.0", to=1), MEET, "R6.0"),
    ("I10", IN_STEP, both(insert("unshard 0", "F0.0 kv"),
     insert("unshard 0", "F4.0 input", rank=1)), MEET, "unshard 0"),
    ("I10", STAGES_IN_STEP, move("B2.1", "F3.1 all", rank=1), MEET, "B2.1"),
    ("I10", PIPELINES_IN_STEP, move("R0.0", "recv gradient 1.1 from 1"), MEET, "B4.0"),
    ("I11", STAGES_IN_STEP, move("F2.1 all", "F3.0 all", rank=1), STALL, "F1.0 all"),
    ("I11", PIPELINE, move("recv gradient 1.1 from 1", "send activation 1.0 to 1"),
     STALL, "recv gradient 1.1 from 1"),
    ("I11", PIPELINE, move("recv gradient 1.2 from 2", "send activation 1.1 to 2", rank=1),
     STALL, "recv gradient 1.1 from 1"),
    ("I11", GRAPHS, move("recv gradient 1.1 from 1", "send activation 1.0 to 1"),
     STALL, "recv gradient 1.1 from 1"),
    ("I11", SAMPLED_PIPELINE, move("recv gradient 0.1 from 1", "send activation 1.0 to 1"),
     STALL, "recv gradient 0.1 from 1"),
    ("I7", PIPELINE, change("R0.0", "R0.1"), ONCE, "R0.1"),
    ("I10", PIPELINE, drop("reduce 1", rank=1), REDUCED, "B2.1"),
    # both ends agree on what is sent, not on the order
    ("I10", PIPELINE, both(drop("send activation 0.0 to 1"),
     insert("send activation 0.0 to 1", "F2.0 all")),
     PAIRED, "recv activation 0.0 from 0"),
    ("I10", SHARDED, both(insert("reshard 0", "F0.0 kv"), insert("reshard 0", "F2.0 kv", 1)),
     USED, "F0.0 kv"),
]
# fmt: on


NUM_INVARIANTS = 11


def refusal(plan, memory=None):
    """(rule, guilty line without its number) of a plan that must not pass."""
    with pytest.raises(PlanError) as error:
        check(plan, memory)
    text = str(error.value)
    (guilty,) = re.findall(r"^ *\d+  (.*)    <-- here$", text, flags=re.MULTILINE)
    return text.splitlines()[0].removeprefix("broken rule: "), guilty


@pytest.mark.parametrize("plan", BASES.values(), ids=BASES)
def test_the_plans_are_valid_before_they_are_broken(plan):
    check(plan)
    assert obey(plan) == pytest.approx(gradient(plan), rel=1e-12)


@pytest.mark.parametrize(
    ("plan", "edit", "rule", "guilty"),
    [row[1:] for row in BROKEN],
    ids=[f"{row[0]}-{row[4]}" for row in BROKEN],
)
def test_a_broken_plan_is_refused_at_the_right_place(plan, edit, rule, guilty):
    assert refusal(edit(plan)) == (rule, guilty)


@pytest.mark.parametrize("name", BASES)
def test_one_byte_less_than_needed_is_refused_where_most_is_needed(name):
    plan = BASES[name]
    memory = CostModel(model_shape("Qwen2.5-0.5B"), hardware("A100-80")).memory
    curves = [memory().peak_bytes_of_actions(plan, rank) for rank in range(len(plan.actions))]
    peak = max(map(max, curves))
    check(plan, memory(peak))
    rank = next(rank for rank, curve in enumerate(curves) if max(curve) == peak)
    most = format_action(plan.actions[rank][list(curves[rank]).index(peak)])
    assert refusal(plan, memory(peak - 1)) == (BUDGET, most)


def test_every_invariant_is_broken():
    found = {row[0] for row in BROKEN} | {"I9"}
    assert found == {f"I{n}" for n in range(1, NUM_INVARIANTS + 1)}


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


def survivors(name, count, seed=0):
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


@pytest.mark.parametrize("name", BASES)
def test_damage_that_passes_does_no_harm(name):
    assert 0 < survivors(name, 500) < 250


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(2_000, marks=pytest.mark.slow),
        pytest.param(20_000, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("name", BASES)
def test_much_damage_that_passes_does_no_harm(name, count):
    assert 0 < survivors(name, count, SEED + 1) < count / 2

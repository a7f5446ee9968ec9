"""Sequences that branch: their text, the rules that hold them, and how long their K,V live."""

import random
from dataclasses import replace

import pytest
from helpers.plan_texts import plan_of

from furlong.errors import PlanError
from furlong.plan.check import check
from furlong.plan.passes import kv_frees
from furlong.plan.plan import Slice, Tree
from furlong.plan.segments import StoredTokens
from furlong.plan.text import format_chunk
from furlong.planners.chunks import branch_chunks

CHUNKS = "0:0-4; 0:4-7; 0:7-9 0:9-12<7; 0:12-17<7; 0:17-18; 0:18-20<4"
"""A prompt of 7 tokens, two short branches in one chunk, a long one, and one of half the prompt."""
FORWARDS = "F0.0 kv, F1.0 kv, F2.0 kv, F3.0 kv, F4.0 kv, F5.0 all, "
BACKWARDS = "B5.0, R4.0, B4.0, R3.0, B3.0, R2.0, B2.0, R1.0, B1.0, R0.0, B0.0"


def test_positions_go_on_along_the_path():
    plan = plan_of(CHUNKS, FORWARDS + BACKWARDS)
    check(plan)
    assert plan.trees[0] == Tree((-1, 0, 1, 1, 3, 0))
    slices = [piece for chunk in plan.chunks for piece in chunk.slices]
    assert [plan.position(piece) for piece in slices] == [0, 4, 7, 7, 7, 12, 4]
    # the second branch of a chunk, from its second token on
    assert [plan.token_position(2, 0, token) for token in (8, 9, 11)] == [8, 7, 9]
    assert plan.continues == (True, True, False, True, False, False)
    assert plan.trees[0].path(4) == [0, 1, 3] and plan.trees[0].path(5) == [0]


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        ("0:0-4; 0:4-7; 0:7-9<3", "no piece of the path ends at token 3"),
        ("0:0-4; 0:4-7; 0:7-9<7", "or it is the last"),
        ("0:0-4; 0:4-7; 0:7-9<9", "no piece of the path ends at token 9"),
        # behind a branch of the first piece nothing goes on from the second
        ("0:0-4; 0:4-7; 0:7-9<4; 0:9-12<7", "no piece of the path ends at token 7"),
        ("0:0-4; 0:4-7; 0:7-9 0:9-12<4", "they are no branches of one piece"),
        ("0:0-4; 0:4-7 0:7-9<4; 0:9-12<7", "a piece goes on from token 7, in a chunk of branches"),
        ("0:0-4; 0:4-7 0:7-9<4; 0:9-12", "a piece goes on from token 9, in a chunk of branches"),
    ],
)
def test_branches_go_on_from_their_path(chunks, why):
    actions = ", ".join(f"F{i}.0 kv" for i in range(len(chunks.split("; "))))
    with pytest.raises(PlanError, match=why):
        check(plan_of(chunks, actions))


def test_trees_are_for_whole_plans():
    plan = plan_of(CHUNKS, FORWARDS + BACKWARDS)
    with pytest.raises(PlanError, match="sequence 0 branches, and the plan is sampled"):
        check(replace(plan, sampled=True))


@pytest.mark.parametrize(
    ("moved", "before", "rule"),
    [
        ("B0.0", "B1.0", "dK,dV of a chunk are complete"),
        ("B1.0", "R3.0", "dK,dV of a chunk are complete"),
        ("F4.0 kv", "F3.0 kv", "forwards ascend"),
    ],
)
def test_every_branch_comes_before_what_it_goes_on_from(moved, before, rule):
    actions = (FORWARDS + BACKWARDS).split(", ")
    actions.remove(moved)
    actions.insert(actions.index(before), moved)
    if moved.startswith("B"):  # with its graph
        actions.remove(f"R{moved[1:]}")
        actions.insert(actions.index(moved), f"R{moved[1:]}")
    with pytest.raises(PlanError, match=rule):
        check(plan_of(CHUNKS, ", ".join(actions)))


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        # depth-first through and through
        (
            "F0.0 kv, F1.0 kv, F2.0 all, B2.0, F3.0 kv, F4.0 all, B4.0, R3.0, B3.0, R1.0, B1.0, "
            "F5.0 all, B5.0, R0.0, B0.0",
            {"B3.0": {(3, 0)}, "B1.0": {(1, 0)}, "B0.0": {(0, 0)}},
        ),
        (
            "F0.0 kv, F1.0 kv, F2.0 kv, F3.0 kv, F4.0 kv, F5.0 kv",
            {"F4.0 kv": {(1, 0), (3, 0)}, "F5.0 kv": {(0, 0)}},
        ),
    ],
)
def test_kv_live_until_the_last_branch_that_sees_them_and_no_longer(actions, expected):
    plan = plan_of(CHUNKS, actions)
    check(plan)
    frees = zip(actions.split(", "), kv_frees(plan, 0), strict=True)
    assert {text: set(cells) for text, cells in frees if cells} == expected


def test_what_was_dropped_is_rebuilt_along_the_path():
    actions = (FORWARDS + BACKWARDS).replace(" kv", " input")
    whole = actions.replace("B5.0", "K0.0, K1.0, K3.0, B5.0")
    check(plan_of(CHUNKS, whole))
    for missing in ("K0.0, ", "K1.0, ", "K3.0, "):
        with pytest.raises(PlanError, match="has dropped its K,V, and no RebuildKV"):
            check(plan_of(CHUNKS, whole.replace(missing, "")))
    with pytest.raises(PlanError, match="are read by later chunks"):
        check(plan_of(CHUNKS, whole.replace("K3.0", "K3.0, K2.0")))
    # those that go on from the second piece have sent it gradients, which another K1 would lose
    again = whole.replace("R2.0, B2.0, R1.0", "R2.0, B2.0, K1.0, R1.0")
    with pytest.raises(PlanError, match=r"has sent dK,dV to 1\.0, which this would lose"):
        check(plan_of(CHUNKS, again))
    # the last piece goes on from the first one, and reads nothing of the second
    check(plan_of(CHUNKS, whole.replace("K1.0, K3.0, B5.0", "B5.0, K1.0, K3.0")))


@pytest.mark.parametrize("window", [None, 1, 3, 6, 9, 40])
def test_a_piece_sees_the_end_of_its_path(window):
    lens, tree = (4, 3, 5, 5, 1, 2), Tree((-1, 0, 1, 1, 3, 0))
    stored = StoredTokens.of(lens, window, 4, tree)
    for piece in range(len(lens)):
        tokens = [(p, t) for p in tree.path(piece) for t in range(lens[p])]
        seen = tokens if window is None else tokens[max(0, len(tokens) - window + 1) :]
        found = []
        for run in stored.seen_from(piece, window):
            for token in run:
                (owner,) = stored.pieces(range(token, token + 1))
                first = lens[owner] - len(stored.of_piece(owner))
                found.append((owner, token - stored.of_piece(owner).start + first))
        assert found == seen
    assert [len(stored.of_piece(p)) for p in (2, 4, 5)] == [0, 0, 0], "nobody reads them"


def test_short_branches_of_one_token_share_chunks():
    forks = [(12, 10), (15, 10), (17, 10), (30, 28), (33, 28)]
    chunks = branch_chunks(0, 40, forks, 8)
    assert [format_chunk(chunk) for chunk in chunks] == [
        "0:0-8", "0:8-10", "0:10-12 0:12-15<10 0:15-17<10", "0:17-25<10", "0:25-28",
        "0:28-30 0:30-33<28", "0:33-40<28",
    ]  # fmt: skip


def test_every_token_is_in_one_chunk():
    rng = random.Random(0)
    for _ in range(50):
        prompt, answers = rng.randint(1, 30), [rng.randint(1, 20) for _ in range(rng.randint(2, 6))]
        starts = [prompt + sum(answers[:i]) for i in range(1, len(answers))]
        chunks = branch_chunks(0, prompt + sum(answers), [(s, prompt) for s in starts], 8)
        slices: list[Slice] = [piece for chunk in chunks for piece in chunk.slices]
        covered = [t for piece in slices for t in range(piece.start, piece.stop)]
        assert sorted(covered) == list(range(prompt + sum(answers)))
        assert max(chunk.num_tokens for chunk in chunks) <= 8

"""What each action computes of its cell, written out by hand for every kind of action."""

from itertools import product

import pytest
from helpers.plan_texts import plan_of

from furlong.plan.passes import NOTHING, Pass, passes

HEIGHT = 3


def passes_of(texts, *, chunks="0:0-4; 0:4-8", stages=(HEIGHT,) * 3):
    """By default of one sequence of two chunks, so that chunk 0 continues and chunk 1 does not."""
    return dict(
        zip(texts, passes(plan_of(chunks, ", ".join(texts), stages=stages), 0), strict=True)
    )


VALUES, GRAPH = Pass("values"), Pass("graph")
TO_LAST = Pass("to last kv", writes_kv=True)
LAST = HEIGHT - 1
FORWARDS = {
    # keep, stage, continues, trained: what the Forward computes
    (keep, stage, continues, True): what
    for keep, found in {
        "kv": [Pass("values", writes_kv=True)] * 2 + [TO_LAST] + [VALUES] * 2 + [NOTHING],
        # the last layer's attention is behind the last K,V: it does not run, nothing to remember
        "attention": [
            *[Pass("values", writes_kv=True, remembers=HEIGHT)] * 2,
            Pass("to last kv", writes_kv=True, remembers=LAST),
            *[Pass("values", remembers=HEIGHT)] * 2,
            NOTHING,
        ],
        "all": [Pass("graph", writes_kv=True)] * 3 + [GRAPH] * 3,
    }.items()
    for (continues, stage), what in zip(product((True, False), range(3)), found, strict=True)
    for keep in (("input", "kv") if keep == "kv" else (keep,))
} | {
    # what gets no backward keeps nothing, and the last stage tells its loss
    (keep, stage, continues, False): Pass("values", writes_kv=continues, loss=stage == 2)
    for keep in ("input", "kv", "attention", "all")
    for stage in range(3)
    for continues in (True, False)
}


@pytest.mark.parametrize(("case", "expected"), FORWARDS.items(), ids=str)
def test_forwards(case, expected):
    keep, stage, continues, trained = case
    chunk = 0 if continues else 1
    forward = f"F{chunk}.{stage} {keep}"
    behind = [] if keep == "all" else [f"R{chunk}.{stage}"]
    texts = [forward, *behind, f"B{chunk}.{stage}"] if trained else [forward]
    assert passes_of(texts)[forward] == expected


REMEMBERED = {  # of a Recompute: as much as the Forward has put away
    ("kv", 0, 0): 0, ("kv", 2, 0): 0, ("input", 1, 0): 0,
    ("attention", 0, 0): HEIGHT, ("attention", 1, 1): HEIGHT,
    ("attention", 2, 0): LAST, ("attention", 2, 1): 0,
}  # fmt: skip


@pytest.mark.parametrize(("case", "remembered"), REMEMBERED.items(), ids=str)
@pytest.mark.parametrize("layers", [0, 1, HEIGHT])
def test_recomputes_and_backwards(case, remembered, layers):
    keep, stage, chunk = case
    again = f" l{layers}" if layers else ""
    texts = [f"F{chunk}.{stage} {keep}", f"R{chunk}.{stage}{again}", f"B{chunk}.{stage}"]
    found = passes_of(texts)
    assert found[texts[1]] == Pass("graph", remembered=remembered, recompute_layers=layers)
    # what is checkpointed runs again in the backward, with what is remembered of its attention
    assert found[texts[2]] == Pass(
        "backward", remembered=min(remembered, layers), recompute_layers=layers, loss=stage == 2
    )


def test_a_backward_of_a_kept_graph():
    found = passes_of(["F0.1 all l2", "B0.1 a2 c3", "F1.2 all", "B1.2"])
    assert found["F0.1 all l2"] == Pass("graph", writes_kv=True, recompute_layers=2)
    assert found["B0.1 a2 c3"] == Pass("backward", recompute_layers=2)
    assert found["B1.2"] == Pass("backward", loss=True)


@pytest.mark.parametrize(
    ("keep", "height", "remembered"),
    [("input", 3, 0), ("attention", 3, 2), ("attention", 1, 0), ("input", 1, 0)],
)
def test_a_rebuild_runs_no_attention_that_is_remembered(keep, height, remembered):
    texts = [f"F0.0 {keep}", "K0.0", "R0.0", "B0.0"]
    found = passes_of(texts, stages=(height, height))
    assert found["K0.0"] == Pass("to last kv", writes_kv=True, remembered=remembered)
    # peeked at, not taken: the recompute finds all of it
    assert found["R0.0"].remembered == (height if keep == "attention" else 0)


def test_packed_and_hybrid_chunks():
    texts = ["F0.0 kv", "F1.0 kv", "R1.0", "B1.0", "R0.0", "B0.0"]
    packed = passes_of(texts, stages=(2,), chunks="0:0-4 1:0-3; 2:0-5")
    assert packed["F0.0 kv"] is NOTHING and packed["F1.0 kv"] is NOTHING
    hybrid = passes_of(texts, stages=(2,), chunks="0:0-4; 0:4-6 1:0-3")
    assert hybrid["F0.0 kv"] == TO_LAST and hybrid["F1.0 kv"] is NOTHING
    assert hybrid["R1.0"] == GRAPH


def test_frozen_stages_and_undrawn_chunks_are_evaluated():
    found = passes_of(["F0.0 input", "F0.1 all", "B0.1"], stages=(1, 1))
    assert found["F0.0 input"] == Pass("values", writes_kv=True)
    found = passes_of(["F0.0 kv", "F1.0 kv", "R1.0", "B1.0 a2"], stages=(2,))
    # a chunk that was not drawn tells its loss, but gets no gradient of it
    assert found["F0.0 kv"] == Pass("values", writes_kv=True, loss=True)


def test_actions_without_a_cell_compute_nothing():
    texts = ["unshard 0", "recv activation 0.0 from 1", "F0.1 all", "B0.1",
             "send gradient 0.1 to 1", "reduce 0"]  # fmt: skip
    found = passes_of(texts, stages=(1, 1))
    assert [text for text in texts if found[text] is NOTHING] == [
        text for text in texts if text[0].islower()
    ]

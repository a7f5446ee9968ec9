"""Plans survive their text forms, and text that is no plan is refused in four parts."""

import json
from dataclasses import asdict
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.errors import UserError
from furlong.plan.plan import (
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Offload,
    OffloadTarget,
    Place,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Reshard,
    Send,
    Slice,
    Unshard,
)
from furlong.plan.text import (
    format_action,
    format_chunk,
    format_plan,
    load_plan,
    parse_action,
    parse_chunk,
    save_plan,
)

FORMS = [
    (Forward(3, 0, "kv"), "F3.0 kv"),
    (Forward(3, 0, "all", recompute_layers=2), "F3.0 all l2"),
    (Recompute(3, 0), "R3.0"),
    (Recompute(12, 7, recompute_layers=2), "R12.7 l2"),
    (Backward(3, 0), "B3.0"),
    (Backward(3, 0, loss_factor=16.0, relay_factor=8.5), "B3.0 a16 c8.5"),
    (Backward(3, 0, relay_factor=0.0), "B3.0 c0"),
    (RebuildKV(3, 0), "K3.0"),
    (Send("activation", 3, 0, peer=1), "send activation 3.0 to 1"),
    (Recv("gradient", 3, 0, peer=1), "recv gradient 3.0 from 1"),
    (Unshard(2), "unshard 2"),
    (Reshard(1), "reshard 1"),
    (Reduce(2), "reduce 2"),
]
PLAN = ChunkPlan(
    seq_lens=(5, 2),
    chunks=(Chunk((Slice(0, 0, 4),)), Chunk((Slice(0, 4, 5), Slice(1, 0, 2)))),
    stages=(2,),
    actions=((Forward(0, 0, "kv"), Forward(1, 0, "kv")),),
    offload=Offload(attention="cpu", kv="disk"),
)

small = st.integers(0, 10**6)
target = st.sampled_from(get_args(OffloadTarget))
factors = st.floats(allow_nan=False, allow_infinity=False)
keeps = st.sampled_from(("input", "kv", "attention", "all"))
payloads = st.sampled_from(("activation", "gradient"))
actions: st.SearchStrategy[Action] = st.one_of(
    st.builds(Forward, small, small, keeps, small),
    st.builds(Recompute, small, small, small),
    st.builds(Backward, small, small, factors, factors),
    st.builds(RebuildKV, small, small),
    st.builds(Send, payloads, small, small, small),
    st.builds(Recv, payloads, small, small, small),
    st.builds(Unshard, small),
    st.builds(Reduce, small),
)
places = st.builds(Place, st.integers(0, 9), st.integers(1, 9))
slices = st.builds(Slice, small, small, small, places)
chunks = st.builds(Chunk, st.lists(slices, max_size=4).map(tuple))


@pytest.mark.parametrize(("action", "text"), FORMS)
def test_short_forms(action, text):
    assert format_action(action) == text
    assert parse_action(text) == action


def test_chunk_forms():
    places = (Place(0, 8), Place(4, 4), Place(2, 1), Place(0, 1))
    chunk = Chunk(tuple(Slice(i, 0, 4096, place) for i, place in enumerate(places)))
    text = format_chunk(chunk, sp_size=8)
    assert text == "0:0-4096@* 1:0-4096@4-7 2:0-4096@2 3:0-4096"
    assert parse_chunk(text, sp_size=8) == chunk
    assert format_chunk(chunk, sp_size=16) == text.replace("*", "0-7")
    assert parse_chunk("0:0-4096@0-7 1:0-4096@4-7 2:0-4096@2 3:0-4096@0") == chunk
    assert format_chunk(Chunk(())) == "dummy"


@settings(max_examples=40)
@given(st.lists(chunks, max_size=3), st.lists(st.lists(actions, max_size=4), max_size=3), st.data())
def test_plans_round_trip(chunk_list, action_lists, data):
    plan = ChunkPlan(
        seq_lens=tuple(data.draw(st.lists(small, max_size=3))),
        chunks=tuple(chunk_list),
        stages=tuple(data.draw(st.lists(small, max_size=3))),
        actions=tuple(map(tuple, action_lists)),
        offload=data.draw(st.builds(Offload, target, target, target, target)),
        frozen_stages=data.draw(small),
        sp_size=data.draw(st.integers(1, 8)),
        sampled=data.draw(st.booleans()),
        two_phases=data.draw(st.booleans()),
        regathers=data.draw(st.booleans()),
    )
    assert load_plan(save_plan(plan)) == plan


def test_a_saved_plan_has_one_short_text_per_line_and_names_where_each_kind_is_offloaded():
    lines = save_plan(PLAN).splitlines()
    assert ' "F0.0 kv",' in lines and ' "0:4-5 1:0-2"' in lines
    offload = {"kv": "disk", "inputs": "none", "attention": "cpu", "graphs": "none"}
    saved = json.loads(save_plan(PLAN))
    assert (saved["version"], saved["offload"]) == (7, offload)


ODD = [
    *((parse_action, text) for text in ("", "F3", "F3.0 most", "F3.0 kv l", "B3.0 c", "B3.0 aten")),
    *((parse_action, text) for text in ("R-1.0", "send 3.0 to 1")),
    *((parse_chunk, text) for text in ("", "0:1", "0:0-4@-1", "0:0-4@3-2", "0:0-4@1-")),
    *((parse_chunk, text) for text in ("0:0-4  1:0-2", "0:0-4,1:0-2")),
]


@pytest.mark.parametrize(("parse", "text"), ODD)
def test_odd_actions_and_chunks_are_refused(parse, text):
    with pytest.raises(UserError) as error:
        parse(text, source="rank 0, action 4")
    assert (error.value.given, error.value.source) == (repr(text), "rank 0, action 4")


TARGETS = asdict(PLAN.offload)


def change(field, value):
    return json.dumps(json.loads(save_plan(PLAN)) | {field: value})


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("{", "Invalid JSON"),
        ("[]", "[]"),
        ("{}", "no version"),
        (change("version", 1), "version = 1"),
        (change("extra", 1), "extra"),
        (change("offload", "cpu"), "offload = 'cpu'"),
        (change("offload", TARGETS | {"kv": "tape"}), "offload.kv = 'tape'"),
        (change("offload", {"kv": "cpu"}), "offload = {'kv': 'cpu'}"),
        (change("frozen_stages", True), "frozen_stages"),
        (change("sampled", 1), "sampled"),
        (change("seq_lens", [5, True]), "seq_lens"),
        (change("stages", "2"), "stages"),
        (change("sp_size", 1.5), "sp_size"),
        (change("chunks", [7]), "chunks"),
        (change("actions", ["F0.0 kv"]), "actions"),
        (change("actions", [[3]]), "actions.0.0"),
        (change("actions", [["X0.0"]]), "X0.0"),
    ],
)
def test_text_that_is_no_plan_is_refused_in_four_parts(text, given):
    with pytest.raises(UserError) as error:
        load_plan(text)
    assert given in error.value.given
    assert error.value.required and error.value.source
    assert "make the plan again" in error.value.change


def test_page_for_a_person():
    page = format_plan(PLAN)
    assert "stage inputs, graphs on the device; attention on the CPU" in page
    assert "chunk 0: split, 4 tokens, 0:0-4" in page
    assert "chunk 1: hybrid, 3 tokens, 0:4-5 1:0-2" in page
    assert "rank 0\n  F0.0 kv, F1.0 kv\n" in page

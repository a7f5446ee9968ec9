"""Plans of one device: legal in every order, K,V and inputs that live as long as needed, stages
that only run forward, and two phases with the loss between them."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.errors import ConfigError, PlanError
from furlong.plan.check import check
from furlong.plan.passes import input_frees, kv_frees, passes
from furlong.plan.plan import (
    Backward,
    Forward,
    Keep,
    Offload,
    OffloadTarget,
    RebuildKV,
    Recompute,
    Reduce,
)
from furlong.plan.text import format_action, load_plan, save_plan
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import (
    even_heights,
    plan_on_device,
    plan_two_phases,
    schedule_group,
    stage_heights,
)

target = st.sampled_from(get_args(OffloadTarget))
offload = st.one_of(target, st.builds(Offload, target, target, target, target))
chunk_first = st.just({"order": "chunk-first"})
layer_first = st.integers(1, 7).map(lambda n: {"order": "layer-first", "stage_layers": n})


@st.composite
def options(draw):
    return ChunkOptions(
        size=draw(st.integers(1, 40)),
        num_retained=draw(st.integers(0, 4)),
        keep=draw(st.sampled_from(get_args(Keep))),
        hybrid=draw(st.booleans()),
        recompute_layers=draw(st.integers(0, 4)),
        offload=draw(offload),
        **draw(st.one_of(chunk_first, layer_first)),
    )


def text(plan):
    return ", ".join(format_action(action) for action in plan.actions[0])


def plan(seq_lens, num_layers=2, **dials):
    backward, frozen = dials.pop("backward", True), dials.pop("frozen_layers", 0)
    return plan_on_device(
        seq_lens,
        ChunkOptions(**dials),
        num_layers=num_layers,
        backward=backward,
        frozen_layers=frozen,
    )


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=9),
    options(),
    st.integers(1, 6),
    st.integers(0, 7),
    st.booleans(),
)
def test_any_lengths_and_options_give_a_legal_plan(seq_lens, options, num_layers, frozen, backward):
    plan = plan_on_device(
        seq_lens, options, num_layers=num_layers, backward=backward, frozen_layers=frozen
    )
    assert plan.offload == options.offloading
    assert sum(plan.stages) == num_layers
    assert max(plan.stages) <= (options.stage_layers or num_layers)
    assert all(chunk.num_tokens <= options.size for chunk in plan.chunks)
    assert sum(what.loss for what in passes(plan, 0)) == len(plan.chunks)
    ends = [sum(plan.stages[: s + 1]) for s in range(len(plan.stages) - 1)]
    frozen_stages = sum(end <= frozen for end in ends) if backward else 0
    assert plan.frozen_stages == frozen_stages
    trained = {a.stage for a in plan.actions[0] if isinstance(a, (Backward, Recompute, Reduce))}
    assert trained == (set(range(frozen_stages, len(plan.stages))) if backward else set())
    for action in plan.actions[0]:
        if isinstance(action, Recompute) or (isinstance(action, Forward) and action.keep == "all"):
            wanted = min(options.recompute_layers, plan.stages[action.stage])
            assert action.recompute_layers == wanted


@pytest.mark.parametrize("keep", ["kv", "attention", "all"])
@pytest.mark.parametrize("num_retained", [0, 1, 2, 9])
def test_one_stage_of_all_layers_is_chunk_first(keep, num_retained):
    """Only keep=input differs: layer-first turns around with the K,V that are still there."""
    dials = {"size": 3, "keep": keep, "num_retained": num_retained, "num_layers": 5}
    whole = plan([10, 7, 2, 2], order="layer-first", stage_layers=5, **dials)
    assert whole == plan([10, 7, 2, 2], **dials)


@pytest.mark.parametrize(
    ("seq_lens", "dials", "expected"),
    [
        # layer by layer and back, the last stage on the spot; the next group when the first is over
        ([5, 2], {"num_retained": 0, "keep": "input", "hybrid": False},
         "F0.0 input, F1.0 input, F2.0 input, F0.1 kv, F1.1 kv, F2.1 kv, "
         "R2.1, B2.1, R1.1, B1.1, R0.1, B0.1, K0.0, K1.0, R2.0, B2.0, R1.0, B1.0, R0.0, B0.0, "
         "F3.0 input, F3.1 kv, R3.1, B3.1, reduce 1, R3.0, B3.0, reduce 0"),
        # a hybrid chunk, and one that is retained at the last stage
        ([5, 1], {"keep": "kv"},
         "F0.0 kv, F1.0 kv, F2.0 kv, F0.1 kv, F1.1 kv, F2.1 all, B2.1, R1.1, B1.1, R0.1, B0.1, "
         "reduce 1, R2.0, B2.0, R1.0, B1.0, R0.0, B0.0, reduce 0"),
        # attention is kept without K,V
        ([4], {"keep": "attention", "num_layers": 3, "frozen_layers": 1},
         "F0.0 input, F1.0 input, F0.1 attention, F1.1 attention, F0.2 attention, F1.2 all, B1.2, "
         "R0.2, B0.2, reduce 2, K0.1, R1.1, B1.1, R0.1, B0.1, reduce 1"),
    ],
)  # fmt: skip
def test_layer_first_by_hand(seq_lens, dials, expected):
    assert text(plan(seq_lens, size=2, order="layer-first", **dials)) == expected


def test_stages_of_even_height():
    assert stage_heights(32, 1) == (1,) * 32
    assert stage_heights(32, 32) == stage_heights(32, 99) == (32,)
    assert stage_heights(32, 5) == (5, 5, 5, 5, 4, 4, 4)
    assert even_heights(9, 4) == (3, 2, 2, 2), "not three of three"


@pytest.mark.parametrize(("keep", "most"), [("input", 1), ("attention", 1), ("kv", 3)])
def test_kv_live_for_one_stage_of_one_sequence_at_a_time(keep, most):
    """Layer-first; where K,V are kept, at all three stages of one sequence."""
    made = plan(
        [23, 9, 4], 6, size=3, keep=keep, order="layer-first", stage_layers=2, num_retained=0
    )
    alive, seen = set(), []
    for action, frees in zip(made.actions[0], kv_frees(made, 0), strict=True):
        if isinstance(action, (Forward, RebuildKV)) and made.continues[action.chunk]:
            alive.add((action.chunk, action.stage))
        seen.append(len({(made.links[chunk][0][0], stage) for chunk, stage in alive}))
        alive -= set(frees)
    assert max(seen) == most and not alive


def test_keep_all_takes_the_inputs_gradient_into_a_buffer_of_its_own():
    made = plan([2], 2, size=2, keep="all", order="layer-first")
    dead = dict(zip(text(made).split(", "), input_frees(made, 0), strict=True))
    assert dead["F0.1 all"] == ((0, 1),)


def with_frozen_backward(actions):
    return [*actions[:-1], Recompute(0, 0), Backward(0, 0), actions[-1]]


def without_stage_1(actions):
    return [a for a in actions if a not in (Recompute(0, 1), Backward(0, 1), Reduce(1))]


@pytest.mark.parametrize(
    ("frozen", "edit"), [(1, with_frozen_backward), (1, without_stage_1), (0, list), (2, list),
                         (3, list), (-1, list)],
)  # fmt: skip
def test_the_checker_takes_frozen_stages_and_nothing_else(frozen, edit):
    made = plan([2], 3, size=2, keep="kv", order="layer-first", frozen_layers=1)
    check(made)
    broken = replace(made, frozen_stages=frozen, actions=(tuple(edit(made.actions[0])),))
    with pytest.raises(PlanError, match="every cell has one Forward and one Backward"):
        check(broken)


@pytest.mark.parametrize(
    ("options", "lens", "expected"),
    [
        # the group that was forwarded last goes back first
        ({"keep": "kv", "hybrid": False}, (12, 3),
         "F0.0 kv, F1.0 kv, F2.0 kv, F3.0 kv, R3.0, B3.0, R2.0, B2.0, R1.0, B1.0, R0.0, B0.0, "
         "reduce 0"),
        ({"keep": "input"}, (12,),
         "F0.0 input, F1.0 input, F2.0 input, K0.0, K1.0, R2.0, B2.0, R1.0, B1.0, R0.0, B0.0, "
         "reduce 0"),
    ],
)  # fmt: skip
def test_two_phases_by_hand(options, lens, expected):
    assert text(plan_two_phases(lens, ChunkOptions(size=4, **options), num_layers=2)) == expected


@pytest.mark.parametrize("keep", ["input", "kv", "attention"])
def test_every_forward_of_two_phases_runs_to_its_end(keep):
    made = plan_two_phases([12, 3, 7], ChunkOptions(size=4, keep=keep), num_layers=2)
    for action, what in zip(made.actions[0], passes(made, 0), strict=True):
        if isinstance(action, Forward):
            assert what.computes == "values" and what.loss
            assert what.remembers == (2 if keep == "attention" else 0)
    assert load_plan(save_plan(made)) == made


def test_a_forward_behind_the_first_phase_is_refused():
    made = plan_two_phases([3, 7], ChunkOptions(size=8, keep="kv"), num_layers=2)
    f0, f1, r1, b1, r0, b0, reduce = made.actions[0]
    check(replace(made, actions=((f0, r0, b0, f1, r1, b1, reduce),), two_phases=False))
    retained = replace(f1, keep="all")
    for actions in ((f0, r0, b0, f1, r1, b1, reduce), (f0, retained, b1, r0, b0, reduce)):
        with pytest.raises(PlanError, match="all Forwards in the first"):
            check(replace(made, actions=(actions,)))


@pytest.mark.parametrize(
    "options", [{"keep": "all"}, {"order": "layer-first"}, {"sample": {"chunks": 1}}]
)
def test_options_that_two_phases_have_not_are_refused(options):
    with pytest.raises(ConfigError, match="token_values"):
        plan_two_phases([3], ChunkOptions(**options), num_layers=2)


def schedule(chunks, **options):
    actions = schedule_group(chunks, **options)
    return " ".join(format_action(action).replace(" ", ":") for action in actions)


@pytest.mark.parametrize(
    ("num_chunks", "num_retained", "keep", "expected"),
    [
        (3, 1, "kv", "F0.0:kv F1.0:kv F2.0:all B2.0 R1.0 B1.0 R0.0 B0.0"),
        (3, 2, "kv", "F0.0:kv F1.0:all F2.0:all B2.0 B1.0 R0.0 B0.0"),
        (2, 0, "attention", "F0.0:attention F1.0:attention R1.0 B1.0 R0.0 B0.0"),
        (2, 5, "kv", "F0.0:all F1.0:all B1.0 B0.0"),
        (2, 0, "all", "F0.0:all F1.0:all B1.0 B0.0"),
        (1, 1, "kv", "F0.0:all B0.0"),
        (1, 0, "input", "F0.0:input R0.0 B0.0"),
        (2, 0, "input", "F0.0:input F1.0:input K0.0 R1.0 B1.0 R0.0 B0.0"),
        (3, 1, "input", "F0.0:input F1.0:input F2.0:all K0.0 K1.0 B2.0 R1.0 B1.0 R0.0 B0.0"),
    ],
)
def test_schedule_of_a_group(num_chunks, num_retained, keep, expected):
    assert schedule(range(num_chunks), num_retained=num_retained, keep=keep) == expected


def test_names_chunks_and_stage_and_evaluation_only_forwards():
    found = schedule([7, 9], num_retained=1, keep="kv", stage=2)
    assert found == "F7.2:kv F9.2:all B9.2 R7.2 B7.2"
    found = schedule([7, 9], num_retained=1, keep="kv", stage=2, backward=False)
    assert found == "F7.2:input F9.2:input"

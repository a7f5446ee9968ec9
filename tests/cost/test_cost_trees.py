"""The cost of sequences that branch: of the prompt once, and of each answer as behind it."""

import pytest

from furlong.cost.devices.hardware import hardware
from furlong.cost.memory.levels import PARTS
from furlong.cost.model import CostModel
from furlong.cost.seconds.chunks import chunk_table
from furlong.cost.seconds.flops import attended_keys
from furlong.cost.shapes.known_models import model_shape
from furlong.planners.options import ChunkOptions
from furlong.planners.orders.one_device import plan_on_device
from furlong.planners.orders.two_phases import plan_two_phases
from furlong.planners.predict import predict

MODEL = CostModel(model_shape("Qwen2.5-7B"), hardware("H100"))
PROMPT, ANSWER, ANSWERS = 16_384, 1024, 8
FORKS = {0: [(PROMPT + ANSWER * i, PROMPT) for i in range(1, ANSWERS)]}
OPTIONS = ChunkOptions(size=4096, keep="kv", num_retained=0)


def shared(make):
    return make([PROMPT + ANSWERS * ANSWER], OPTIONS, num_layers=28, forks=FORKS)


def alone(make):
    return make([PROMPT + ANSWER] * ANSWERS, OPTIONS, num_layers=28)


def test_attended_keys_are_those_along_the_path():
    plan = shared(plan_on_device)
    table = chunk_table(plan.chunks, MODEL.shape, 1, position=plan.position)
    behind = attended_keys(PROMPT, PROMPT + ANSWER)
    assert table.local_keys[None].sum() == attended_keys(0, PROMPT) + ANSWERS * behind
    assert table.tokens.sum() == PROMPT + ANSWERS * ANSWER
    # four answers share a chunk and read the prompt once for all
    assert [chunk.num_tokens for chunk in plan.chunks] == [4096] * 6
    assert table.prefix_tokens[None][0].tolist() == [0, 4096, 8192, 12_288, PROMPT, PROMPT]


def test_a_group_of_answers_costs_a_fifth():
    """FLOPs 0.187x, K,V between the phases 1.3 for 7.4 GiB: counted by hand for a 7B shape."""
    own, joined = predict(MODEL, alone(plan_two_phases)), predict(MODEL, shared(plan_two_phases))
    assert joined.step_s / own.step_s == pytest.approx(0.187, abs=0.01)
    kv = [
        MODEL.memory().curve(plan, 0).device[:, PARTS.index("kv")]
        for plan in (alone(plan_two_phases), shared(plan_two_phases))
    ]
    token_bytes = 28 * 2 * 4 * 128 * 2
    assert kv[0].max() == ANSWERS * PROMPT * token_bytes  # last pieces are not stored
    assert kv[1].max() == PROMPT * token_bytes


def test_the_prompt_lives_until_the_backward_of_its_last_branch():
    plan = shared(plan_two_phases)
    kv = MODEL.memory().curve(plan, 0).device[:, PARTS.index("kv")]
    branches = [i for i, a in enumerate(plan.actions[0]) if getattr(a, "chunk", -1) >= 4]
    assert kv[branches[-1]] == kv.max() > kv[branches[-1] + 3]  # behind R3, B3

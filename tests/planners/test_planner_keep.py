"""A keep of auto: the least work for which memory has room between two phases."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from helpers.shapes import shape_of_values

from furlong.cost.memory import PlanMemory
from furlong.cost.training import Training
from furlong.errors import ConfigError
from furlong.planners.candidates import KEEPS
from furlong.planners.decide import needs_beside_state, with_keep
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device, plan_two_phases
from furlong.planners.question import Limits

OPTIONS = ChunkOptions(size=1024, keep="auto")
PAIR = (16_384, 15_000)


@cache
def memory():
    shape = shape_of_values({
        "model_type": "llama", "hidden_size": 512, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_hidden_layers": 8, "intermediate_size": 1024,
        "vocab_size": 1000,
    })  # fmt: skip
    return PlanMemory(shape, Training(), 0)


def needs(keep, lens=PAIR, options=OPTIONS):
    plan = plan_two_phases(lens, replace(options, keep=keep), num_layers=8)
    return needs_beside_state(plan, memory())


def chosen(room_bytes, lens=PAIR, options=OPTIONS, **budgets):
    return with_keep(lens, options, memory(), Limits(room_bytes, margin=0, **budgets)).keep


def test_what_is_kept_falls_with_the_room():
    bytes_of = {keep: needs(keep).device_bytes for keep in KEEPS}
    assert bytes_of["attention"] > bytes_of["kv"] > bytes_of["input"]
    for keep, less in zip(KEEPS, [*KEEPS[1:], "input"], strict=True):
        assert chosen(bytes_of[keep]) == keep
        assert chosen(bytes_of[keep] - 1) == less
    assert chosen(0) == "input"


def test_between_the_phases_the_chunks_of_all_sequences_live():
    shape = memory().shape
    kv_per_token = 2 * shape.kv_size * 2 * shape.num_layers
    hidden_per_token = 2 * shape.hidden_size * 2
    one, four = (needs("kv", (16_384,) * n).device_bytes for n in (1, 4))
    kept = 3 * 15_360 * kv_per_token  # but of each one's last chunk
    assert four - one == pytest.approx(kept + 3 * 16_384 * hidden_per_token, rel=0.02)
    room_bytes = needs("attention", (16_384,)).device_bytes
    assert chosen(room_bytes, (16_384,)) == "attention"
    assert chosen(room_bytes, (16_384,) * 4) != "attention"


def test_cpu_and_disk_have_budgets_too():
    options = replace(OPTIONS, offload={"attention": "cpu"})
    room_bytes, on_cpu = needs("attention", options=options)[:2]
    assert on_cpu > 0 and room_bytes < needs("attention").device_bytes
    assert chosen(room_bytes, options=options, cpu_bytes=on_cpu) == "attention"
    assert chosen(room_bytes, options=options, cpu_bytes=on_cpu - 1) == "kv"


def test_weights_are_no_part_of_the_room():
    heavy = replace(memory(), training=replace(Training(), optimizer_bytes=1000))
    plan = plan_two_phases(PAIR, replace(OPTIONS, keep="kv"), num_layers=8)
    assert needs_beside_state(plan, heavy) == needs_beside_state(plan, memory())


def test_elsewhere_a_keep_must_be_named():
    with pytest.raises(ConfigError, match="auto") as error:
        plan_on_device([2000], OPTIONS, num_layers=8)
    assert "token_values" in error.value.required and error.value.change

"""State of processes that gather weights from shards for each step, and what passes them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training

SHAPE = model_shape("Qwen2.5-0.5B")
WHOLE = (SHAPE.num_layers,)
HELD = frozenset({0})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("group", [2, 8])
def test_shards_lie_beside_what_is_whole(dtype: str, group: int) -> None:
    """Fully sharded weights: float32 shards, whole weights in the compute dtype, whole gradients in
    float32, which become shards one after the other, two moments for each shard."""
    training = replace(Training.in_dtype(dtype), zero_stage=1, gathers=True)
    count = training.held_parameters(SHAPE, WHOLE, HELD)
    state = training.state_bytes(SHAPE, WHOLE, HELD, group)
    element = 2 if dtype == "bfloat16" else 4
    assert state.weights == pytest.approx(count * (element + 4 / group))
    assert state.gradients == pytest.approx(count * 4)
    assert state.optimizer == pytest.approx(count * 8 / group)
    assert training.collective_bytes(SHAPE, WHOLE, HELD, group) == SHAPE.layer_parameters(0) * 4
    alone = training.state_bytes(SHAPE, WHOLE, HELD, 1)
    assert alone == replace(training, gathers=False).state_bytes(SHAPE, WHOLE, HELD, 1)
    assert not training.collective_bytes(SHAPE, WHOLE, HELD, 1)


def test_a_frozen_base_has_shards_too() -> None:
    training = replace(Training(), lora=Lora(8), zero_stage=1, gathers=True)
    base = training.held_parameters(SHAPE, WHOLE, HELD)
    adapters = training.trained_parameters(SHAPE, WHOLE, HELD)
    state = training.state_bytes(SHAPE, WHOLE, HELD, 4)
    assert state.weights == pytest.approx(2 * (base + adapters) + 2 * base / 4 + adapters)

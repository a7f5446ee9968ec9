"""A keep of auto, on the engine and behind the door: what fits, and the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches import batch
from helpers.tiny_families import build
from torch import Tensor

import furlong
from furlong.cost.memory import PlanMemory
from furlong.cost.training import Training
from furlong.errors import ConfigError
from furlong.models.describe import describe
from furlong.planners.candidates import KEEPS
from furlong.planners.decide import needs_beside_state
from furlong.planners.orders import plan_two_phases
from furlong.runtime import step, two_phase
from furlong.testing import take_grads, worst_relative_error

AUTO = furlong.ChunkOptions(size=8, keep="auto")
LENS = [40, 33, 9]
SEQUENCES = batch(LENS)


def taken_bytes(engine: furlong.Engine) -> int:
    return engine._session.state.opened.arena.taken_bytes


def between_the_phases(engine: furlong.Engine, options: furlong.ChunkOptions) -> int:
    """Bytes that live before the backward of a call, which then runs."""
    loss = torch.cat(engine.token_values(SEQUENCES, options)).pow(2).sum()
    found = taken_bytes(engine)
    loss.backward()
    assert taken_bytes(engine) == 0
    return found


@pytest.mark.slow
def test_as_much_is_kept_as_the_budget_allows() -> None:
    model = build("llama")
    shape = describe(model.config)
    memory = PlanMemory(shape, Training.in_dtype("float64"), 0, device_type="cpu")
    middle = plan_two_phases(LENS, furlong.ChunkOptions(size=8, keep="kv"), num_layers=3)
    room_of_kv = 1 + needs_beside_state(middle, memory).device_bytes * 10 // 9  # a tenth stays free
    found, grads = [], []
    for keep, room_bytes in zip(KEEPS, (10**9, room_of_kv, 0), strict=True):
        engine = furlong.Engine(model, storage=furlong.Storage(device_bytes=room_bytes))
        found.append(between_the_phases(engine, AUTO))
        grads.append(take_grads(model))
        named = furlong.ChunkOptions(size=8, keep=keep)
        assert between_the_phases(engine, named) == found[-1] <= room_bytes, keep
        model.zero_grad()
    assert found[0] > found[1] > found[2] == 0
    assert worst_relative_error(grads[0], grads[1]) <= 1e-12
    assert worst_relative_error(grads[2], grads[1]) <= 1e-12


def test_room_is_measured_at_the_first_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal calls have equal plans, whatever else the machine does in between."""
    model, free = build("llama"), [10**9, 0]
    trained = 3 * sum(p.nbytes for p in model.parameters())
    monkeypatch.setattr(two_phase, "free_ram_budget_bytes", lambda: free.pop(0) + trained)
    engine = furlong.Engine(model)
    with torch.no_grad():
        engine.token_values(SEQUENCES, AUTO)
    assert len(free) == 2, "what has no backward keeps nothing"
    first, again = (between_the_phases(engine, AUTO) for _ in range(2))
    assert first == again > 0 and len(free) == 1
    other = furlong.Engine(build("llama"))
    assert between_the_phases(other, AUTO) == 0


@pytest.mark.parametrize("options", [None, AUTO])
def test_the_door_decides_too(options: Any) -> None:
    model = furlong.chunked(build("llama"), options, storage=furlong.Storage(device_bytes=0))
    ids = SEQUENCES[0]["input_ids"][None]

    def loss() -> Tensor:
        return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]

    value, arena = loss(), furlong.Engine(model)._session.state.opened.arena
    assert arena.taken_bytes == 0, "nothing lives between the phases"
    value.backward()
    found = take_grads(model)
    furlong.unchunked(model)
    loss().backward()
    assert worst_relative_error(found, take_grads(model)) <= 2e-6  # the loss is float32


def test_a_model_that_cannot_be_counted_keeps_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Any) -> Any:
        raise ConfigError(given="a config", required="sizes", source="a test", change="nothing")

    monkeypatch.setattr(step, "describe", refuse)
    engine = furlong.Engine(build("llama"))
    kv = between_the_phases(engine, furlong.ChunkOptions(size=8, keep="kv"))
    assert between_the_phases(engine, AUTO) == kv > 0


def test_one_phase_refuses_auto() -> None:
    engine = furlong.Engine(build("llama"))
    with pytest.raises(ConfigError, match=r"chunks.keep = 'auto'"):
        engine.forward_backward(SEQUENCES, AUTO)
    with pytest.raises(ConfigError, match="device_bytes"):
        furlong.Storage(device_bytes=-1)

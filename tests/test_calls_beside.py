"""Calls that meet a step of the same model, or of one beside it: refused by name, or right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import thread as futures_thread
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from helpers.batches import batch
from helpers.tiny_families import build

import furlong
from furlong.errors import ConfigError
from furlong.kv.pools import ThreadLane
from furlong.runtime import two_phase
from furlong.runtime.session import ModelState
from furlong.testing import reference_loss, take_grads, worst_relative_error

SEQUENCES = batch([20, 9])
IDS = batch([6])[0]["input_ids"][None]
TOLD = "while a step of its model, or of one that shares its config, runs"


def in_thread(call: Callable[[], object], limit_s: float = 60) -> BaseException | None:
    """The error of a call in a thread of its own."""
    found: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert not thread.is_alive()
    return found[0] if found else None


@contextmanager
def paused(model: Any) -> Iterator[None]:
    """Within it another thread is in the middle of a step of the model."""
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if threading.current_thread() is thread:
            inside.set()
            assert go_on.wait(60)

    options = furlong.ChunkOptions(size=6)
    engine = furlong.Engine(model)
    thread = threading.Thread(target=engine.forward_backward, args=(SEQUENCES, options))
    handle = model.base_model.layers[0].register_forward_hook(wait)
    engine.forward_backward(SEQUENCES, options)  # checked, with the hook
    thread.start()
    try:
        assert inside.wait(60)
        yield
    finally:
        go_on.set()
        thread.join(60)
        handle.remove()


@pytest.mark.parametrize(
    ("keep", "order"),
    [("kv", "chunk-first"), ("all", "chunk-first"), ("input", "layer-first")],
)
def test_a_plain_call_while_a_step_runs_is_refused_wherever_it_comes(keep: Any, order: Any) -> None:
    """Beside every part of the start-up check and of a step, in a thread and in the step's own;
    the step is right all the same."""
    model = build("llama")
    reference_loss(model, SEQUENCES)
    truth, main = take_grads(model), threading.current_thread()
    calls: list[Callable[..., object]] = [model]
    told: list[BaseException | None] = []

    @torch.no_grad()
    def call(*_: Any) -> None:
        if threading.current_thread() is main:
            for plain in calls:
                own = partial(plain, input_ids=IDS, use_cache=False)
                told.append(in_thread(own))
                with pytest.raises(ConfigError, match=TOLD):
                    own()

    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(call)
    options = furlong.ChunkOptions(size=6, keep=keep, order=order)
    engine = furlong.Engine(model)
    engine.forward_backward(SEQUENCES, options)
    take_grads(model)
    calls.append(model.model)
    found = engine.forward_backward(SEQUENCES, options)
    assert worst_relative_error(take_grads(model), truth) < 1e-9
    assert len(told) > 2 * 3 * len(found.plan.chunks)
    assert all(isinstance(error, ConfigError) and TOLD in str(error) for error in told)


@pytest.mark.parametrize("where", ["watch", "function"])
def test_a_plain_call_by_the_callers_own_code_within_a_step_is_refused(where: str) -> None:
    model = build("llama")
    engine, options = furlong.Engine(model), furlong.ChunkOptions(size=6)

    def function(logits: Any, labels: Any, extras: Any) -> Any:
        model(input_ids=IDS)

    with pytest.raises(ConfigError, match=TOLD):
        if where == "watch":
            engine.forward_backward(SEQUENCES, options, watch=lambda: model(input_ids=IDS) and None)
        else:
            engine.token_values(SEQUENCES, options, function)
    model(input_ids=IDS)
    assert engine.forward_backward(SEQUENCES, options).loss > 0


def test_a_backward_waits_for_a_backward_of_another_thread() -> None:
    """The parameters are not those of its forward while that one runs."""
    model = build("llama")
    engine, options = furlong.Engine(model), furlong.ChunkOptions(size=6, num_retained=0)
    inside, go_on = threading.Event(), threading.Event()
    errors: list[BaseException | None] = []

    def wait(*_: Any) -> None:
        if torch.is_grad_enabled() and threading.current_thread() is first:
            inside.set()
            assert go_on.wait(60)

    model.model.layers[0].register_forward_hook(wait)
    first = threading.current_thread()  # both forwards pass without a stop
    go_on.set()
    one, other = (engine.token_values(SEQUENCES, options)[0].sum() for _ in range(2))
    go_on.clear()
    inside.clear()
    first = threading.Thread(target=lambda: one.backward())
    second = threading.Thread(target=lambda: errors.append(in_thread(other.backward)))
    first.start()
    assert inside.wait(60)
    second.start()
    second.join(0.3)
    assert second.is_alive()
    go_on.set()
    first.join(60)
    second.join(60)
    assert errors == [None]


@pytest.mark.parametrize("call", ["engine", "door"])
def test_values_that_another_thread_drops_are_waited_for(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = furlong.ChunkOptions(size=6, keep="attention", offload="disk")
    model = furlong.chunked(build("llama"), options)
    rows: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda _, x: rows.append(x[0].shape[1]))
    model(input_ids=IDS)  # with a hook it is checked anew
    engine = furlong.Engine(model)
    inside, go_on, end = threading.Event(), threading.Event(), two_phase._end

    def slow_end(*args: Any) -> None:
        inside.set()
        assert go_on.wait(60)
        end(*args)

    monkeypatch.setattr(two_phase, "_end", slow_end)
    held = [engine.token_values(SEQUENCES, options)]
    dropping = threading.Thread(target=held.clear)
    dropping.start()
    assert inside.wait(60)
    later = threading.Timer(0.2, go_on.set)
    later.start()
    if call == "engine":
        assert engine.forward_backward(SEQUENCES, options).loss > 0
    else:
        rows.clear()
        model(input_ids=SEQUENCES[0]["input_ids"][None])
        assert rows == [6, 6, 6, 2]
    dropping.join(60)
    later.join(60)


def test_values_that_a_pools_own_thread_drops_wait_for_others() -> None:
    """It would wait for itself to be through."""
    kept, ended = ModelState(), []
    lane = ThreadLane("out")
    lane.submit(lambda: kept.drop(lambda: ended.append(None)), ()).block()
    lane.close()
    assert not ended
    kept.sweep()
    assert ended == [None]


def test_the_collector_may_drop_values_in_the_middle_of_what_a_pools_thread_is_given() -> None:
    """In a call on another model, or in an executor of the caller's own."""
    options = furlong.ChunkOptions(size=6, keep="attention", offload="cpu")
    engine = furlong.Engine(build("llama"))
    state = engine._session.state

    def drop_within_submit() -> None:
        values: list[Any] = [engine.token_values(SEQUENCES, options)]
        with futures_thread._global_shutdown_lock:  # held by every executor's submit
            values.clear()
        assert not state.dropped and not state.opened.lower_bytes

    assert in_thread(drop_within_submit, limit_s=20) is None


@pytest.mark.parametrize("own", [True, False])
def test_a_call_of_another_thread_waits(own: bool) -> None:
    """Models may share a config, in which attention is furlong's for the length of a call, and all
    share the generators that it replays."""
    model = build("llama")
    twin = type(model)(model.config).double()  # transformers puts the config itself into the model
    options, found = furlong.ChunkOptions(size=6), []

    def step() -> None:
        found.append(furlong.forward_backward(model if own else twin, SEQUENCES, options))

    with paused(model):
        later = threading.Thread(target=step)
        later.start()
        later.join(0.2)
        assert later.is_alive() and not found
        with pytest.raises(ConfigError, match=TOLD):
            twin(input_ids=IDS)
    later.join(60)
    assert found[0].loss > 0

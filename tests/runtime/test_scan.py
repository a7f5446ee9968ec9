"""A call walks over the model's modules once: with adapters a model has thousands of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
from helpers.batches import batch
from helpers.tiny_families import build
from torch import nn

import furlong

SEQUENCES = batch([13, 5])
OPTIONS = furlong.ChunkOptions(size=6, keep="kv")


def adapted() -> Any:
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(build("llama"), config)


def steps(model: Any) -> Callable[[], object]:
    engine = furlong.Engine(model)
    return lambda: engine.forward_backward(SEQUENCES, OPTIONS)


def evaluations(model: Any) -> Callable[[], object]:
    engine = furlong.Engine(model.eval())
    return lambda: engine.forward_backward(SEQUENCES, OPTIONS, backward=False)


def values(model: Any) -> Callable[[], object]:
    engine = furlong.Engine(model)
    return lambda: engine.token_values(SEQUENCES, OPTIONS)[0].sum().backward()


def a_chunked_model(model: Any) -> Callable[[], object]:
    furlong.chunked(model, OPTIONS)
    ids = SEQUENCES[0]["input_ids"][None]
    return lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@pytest.mark.parametrize(
    ("calls_of", "num_walks"),
    [(steps, 1), (evaluations, 1), (values, 2), (a_chunked_model, 2)],  # forward and backward
)
def test_a_call_walks_over_the_modules_once(
    calls_of: Any, num_walks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = adapted(), nn.Module.named_modules  # that all other walks are made of
    visited: list[nn.Module] = []

    def noted(self: nn.Module, *given: Any, **named: Any) -> Iterator[tuple[str, nn.Module]]:
        visited.append(self)
        yield from plain(self, *given, **named)

    call, num_modules = calls_of(model), len(list(model.modules()))
    call()  # checked
    monkeypatch.setattr(nn.Module, "named_modules", noted)
    call()
    assert num_modules > 200
    assert num_walks <= len(visited) / num_modules < num_walks + 0.25

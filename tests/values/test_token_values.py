"""Losses of values that went through chunks: as exact as those of whole logits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from naive_losses import FUNCTION, LOSSES, answers, given_columns, shared, whole_columns
from torch import Tensor
from torch.nn.functional import logsigmoid

import furlong
from furlong.errors import ConfigError, DataError, UserError
from furlong.testing import take_grads, worst_relative_error

BOUND = 1e-12
FAMILIES = ["llama", "mixtral", "qwen2 tied"]
SEQUENCES = answers()
OPTIONS = [
    furlong.ChunkOptions(size=size, keep=keep, offload=target, recompute_layers=layers)
    for size, keep, target, layers in (
        (8, "attention", "none", 0), (5, "kv", "cpu", 0), (16, "input", "none", 2),
        (64, "attention", "disk", 0), (25, "attention", {"attention": "cpu"}, 3),
        (200, "kv", "none", 0), (7, "input", "cpu", 0), (1, "kv", "none", 0),
    )
]  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest) -> tuple[Any, furlong.Engine]:
    return shared(request.param)


def taken_bytes(engine: furlong.Engine) -> int:
    return engine._session.state.opened.arena.taken_bytes


@pytest.mark.parametrize(("loss", "options"), zip(itertools.cycle(LOSSES), OPTIONS))
@pytest.mark.few(6)
def test_losses_of_values_have_the_models_own_gradients(
    subject: Any, loss: str, options: furlong.ChunkOptions
) -> None:
    model, engine = subject
    expected = LOSSES[loss](whole_columns(model, SEQUENCES), SEQUENCES)
    expected.backward()
    truth = take_grads(model)
    values = engine.token_values(SEQUENCES, options, FUNCTION)
    found = LOSSES[loss](given_columns(values), SEQUENCES)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=BOUND)
    assert worst_relative_error(take_grads(model), truth) <= BOUND
    assert taken_bytes(engine) == 0


@pytest.mark.parametrize("options", OPTIONS[:3])
@pytest.mark.few(3)
def test_a_head_of_ones_own_on_hidden_states(subject: Any, options: furlong.ChunkOptions) -> None:
    """A reward of the last token, chosen against rejected, and its gradient by the new head."""
    model, engine = subject
    head = torch.nn.Linear(32, 1).double()

    def rewards(states: list[Tensor]) -> Tensor:
        r = torch.cat([head(own[-1]) for own in states])
        return -(logsigmoid(r[0] - r[1]) + logsigmoid(r[2] - r[3]))

    whole = [model.model(input_ids=s["input_ids"][None]).last_hidden_state[0] for s in SEQUENCES]
    expected = rewards(whole)
    expected.backward()
    own = head.weight.grad.clone()
    head.zero_grad()
    truth = take_grads(model)
    states = engine.hidden_states([{"input_ids": s["input_ids"]} for s in SEQUENCES], options)
    assert [x.shape for x in states] == [(37, 32), (30, 32), (9, 32), (6, 32)]
    found = rewards(states)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=BOUND)
    assert worst_relative_error(take_grads(model), truth) <= BOUND
    torch.testing.assert_close(head.weight.grad, own, rtol=BOUND, atol=BOUND)
    assert taken_bytes(engine) == 0


def test_values_are_about_their_own_token() -> None:
    _, engine = shared()
    values = engine.token_values(SEQUENCES, OPTIONS[0])
    for own, sequence in zip(values, SEQUENCES, strict=True):
        assert own.shape == sequence["labels"].shape and own.dtype == torch.float64
        unlabelled = sequence["labels"] == -100
        unlabelled[0] = True
        assert torch.equal(own == 0, unlabelled)
    plain = engine.forward_backward(
        [{k: s[k] for k in ("input_ids", "labels")} for s in SEQUENCES], OPTIONS[0], backward=False
    )
    assert -sum(own.sum().item() for own in values) == pytest.approx(plain.loss_sum, rel=BOUND)


def test_added_gradients_are_the_returned_ones() -> None:
    model, engine = shared()
    grads = []
    for gradients in ("returned", "added"):
        model.zero_grad()
        for _ in range(2):
            values = engine.token_values(SEQUENCES, OPTIONS[0], gradients=gradients)  # type: ignore[arg-type]
            torch.cat(values).pow(2).sum().backward()
        grads.append(take_grads(model))
    assert worst_relative_error(*grads) <= BOUND


def a(**changes: Any) -> dict[str, Tensor]:
    return {"input_ids": torch.arange(3, 9), **changes}


Bad = tuple[Any, dict[str, Any], str, str]
BAD: dict[str, Bad] = {
    "labels of another length": (
        [a(labels=torch.arange(5))], {}, "6 input_ids and 5 labels", "the label -100",
    ),
    "labels of a batch": (
        [a(labels=torch.arange(6)[None])], {}, "labels int64 (1, 6)", "without a batch axis",
    ),
    "no ids": ([{"ids": torch.arange(6)}], {}, "input_ids of type NoneType", "add input_ids"),
    "extras of another length": (
        [a(old=torch.zeros(5))], {}, "6 tokens with old float32 (5,)", "pad old with zeros",
    ),
    "an extra that is no tensor": ([a(old=[0.0] * 6)], {}, "old of type list", "torch.tensor"),
    "extras of one sequence alone": (
        [a(), a(old=torch.zeros(6))], {}, "same extras", "each sequence every extra",
    ),
    "extras of other shapes": (
        [a(best=torch.zeros(6, 2)), a(best=torch.zeros(6, 3))], {},
        "best float32 (6, 3)", "pad best with zeros",
    ),
    "an extra with a graph": (
        [a(old=torch.zeros(6, requires_grad=True))], {}, "old, which requires a gradient",
        "pass old.detach()",
    ),
    "an empty answer": (
        [a(labels=torch.full((6,), -100))], {}, "no token with a label", "leave such sequences out",
    ),
    "only a first token": (
        [{"input_ids": torch.tensor([4])}], {}, "which nothing predicts", "leave such sequences out"
    ),
    "no sequence": ([], {}, "no sequences", "leave the call out"),
    "no list": (a(), {}, "sequences of type dict", "one dict per sequence"),
    "a function of another shape": (
        [a()], {"fn": lambda logits, labels, extras: logits.mean()}, "fn returned () for 5 tokens",
        "reduce over the vocabulary alone",
    ),
    "a function of three axes": (
        [a()], {"fn": lambda logits, labels, extras: logits[:, None]}, "fn returned (5, 1, 96)",
        "reduce over the vocabulary alone",
    ),
    "a function of labels": (
        [a()], {"fn": lambda logits, labels, extras: labels}, "fn returned int64 (5,)",
        "reduce over the vocabulary alone",
    ),
    "no teacher": (
        [a()], {"fn": furlong.values.top_k_kl()}, "these extras: none", 'add "teacher_ids"',
    ),
    "graphs between the phases": (
        [a()], {"options": furlong.ChunkOptions(keep="all")}, "chunks.keep = 'all'",
        "leave keep out",
    ),
    "layer-first": (
        [a()], {"options": furlong.ChunkOptions(order="layer-first")}, "'layer-first'",
        "leave order out",
    ),
    "a sample": (
        [a()], {"options": furlong.ChunkOptions(sample={"chunks": 2})}, "chunks.sample",
        "leave sample out",
    ),
    "other gradients": ([a()], {"gradients": "summed"}, "gradients='summed'", "added adds"),
    "no options": ([a()], {"options": None}, "None, of type NoneType", "ChunkOptions("),
    "an id without an embedding": (
        [{"input_ids": torch.tensor([4, 96])}], {}, "token id 96", "resize_token_embeddings",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_four_parts(case: str) -> None:
    _, engine = shared()
    sequences, changes, told, mended = BAD[case]
    arguments = {"options": OPTIONS[0], **changes}
    with pytest.raises(UserError) as error:
        engine.token_values(sequences, **arguments)
    parts = error.value.given, error.value.required, error.value.source, error.value.change
    assert all(parts) and told in f"{parts[0]} {parts[1]}" and mended in parts[3]
    assert "forward_backward" not in str(error.value) or "token_values" in str(error.value)
    assert isinstance(error.value, DataError | ConfigError)
    assert taken_bytes(engine) == 0


@pytest.mark.parametrize("temperature", [0, -1.0, float("inf"), "hot"])
def test_a_temperature_is_above_0(temperature: Any) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        furlong.values.log_prob(temperature)


def test_a_loss_that_is_no_scalar_is_autograds_own_error() -> None:
    _, engine = shared()
    values = engine.token_values(SEQUENCES, OPTIONS[0])
    with pytest.raises(RuntimeError, match="scalar outputs"):
        values[0].backward()
    del values
    assert taken_bytes(engine) == 0

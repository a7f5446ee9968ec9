"""Losses of values that went through chunks: as exact as those of whole logits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.gradients import batch, take_grads, worst_relative_error
from helpers.nightly import SEED
from helpers.tiny_families import build
from helpers.wide_norms import widen_norms
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_losses import FUNCTION, LOSSES, answers, given_columns, whole_columns
from torch import Tensor
from torch.nn.functional import logsigmoid

import furlong
from furlong.errors import ConfigError, DataError, UserError

BOUND = 1e-12
SEQUENCES = answers()
MODELS = {
    "llama": lambda: build("llama"),
    "mixtral": lambda: build("mixtral"),
    "qwen2 tied": lambda: build("qwen2", tie_word_embeddings=True),
}
OPTIONS = [
    furlong.ChunkOptions(size=size, keep=keep, tier=tier, recompute_layers=layers)
    for size, keep, tier, layers in (
        (8, "attention", "device", 0), (5, "kv", "host", 0), (16, "input", "device", 2),
        (64, "attention", "disk", 0), (25, "attention", {"attention": "host"}, 3),
        (200, "kv", "device", 0), (7, "input", "host", 0), (1, "kv", "device", 0),
    )
]  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest) -> tuple[Any, furlong.Engine]:
    model = widen_norms(MODELS[request.param]())
    return model, furlong.Engine(model)


def taken_bytes(engine: furlong.Engine) -> int:
    return engine._followed.kept.opened.arena.taken_bytes


@pytest.mark.parametrize(("loss", "options"), zip(LOSSES, itertools.cycle(OPTIONS)))
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


TIERS: list[Any] = ["device", "host", {"attention": "host"}, "disk"]
POLYNOMIALS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=3),
        st.floats(-2, 2),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


CALLS = st.tuples(
    st.lists(st.integers(2, 40), min_size=3, max_size=3), st.integers(3, 50),
    st.sampled_from(["kv", "attention", "input"]), st.sampled_from(TIERS), POLYNOMIALS,
    st.sampled_from(sorted(MODELS)),
)  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(CALLS)
def test_any_polynomial_of_log_probs(drawn: tuple[Any, ...]) -> None:
    check_polynomial(*drawn)


@pytest.mark.slow
@settings(max_examples=100 if SEED else 40, deadline=None)
@given(CALLS)
def test_many_polynomials_of_log_probs(drawn: tuple[Any, ...]) -> None:
    check_polynomial(*drawn)


def check_polynomial(
    lens: list[int], size: int, keep: Any, tier: Any,
    terms: list[tuple[list[tuple[int, int]], float]], family: str,
) -> None:  # fmt: skip
    """Terms: log-probabilities of (sequence, token) multiplied, times a factor."""
    model, engine = _shared(family)
    sequences = batch(lens)

    def loss(values: list[Tensor]) -> Tensor:
        total = sum(0 * own.sum() for own in values)
        for tokens, factor in terms:
            product = torch.tensor(factor, dtype=torch.float64)
            for seq_id, token in tokens:
                product = product * values[seq_id][1 + token % (lens[seq_id] - 1)] / 5
            total = total + product
        return total  # type: ignore[return-value]

    whole = []
    for sequence in sequences:
        ids = sequence["input_ids"]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        own = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        whole.append(torch.cat([own.new_zeros(1), own]))
    loss(whole).backward()
    truth = take_grads(model)
    options = furlong.ChunkOptions(size=size, keep=keep, tier=tier)
    loss(engine.token_values(sequences, options)).backward()
    found = take_grads(model)
    scale = max(float(x.abs().max()) for x in truth.values())
    for name, x in truth.items():
        assert float((found[name] - x).abs().max()) <= BOUND * max(scale, 1e-3), name


_SHARED: dict[str, Any] = {}


def _shared(family: str = "llama") -> Any:
    """One model of a family for all examples."""
    if family not in _SHARED:
        model = widen_norms(MODELS[family]())
        _SHARED[family] = model, furlong.Engine(model)
    return _SHARED[family]


def test_values_are_about_their_own_token() -> None:
    _, engine = _shared()
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
    model, engine = _shared()
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
        [a(labels=torch.arange(5))], {}, "labels int64 (5,)", "give each token a label",
    ),
    "labels of a batch": (
        [a(labels=torch.arange(6)[None])], {}, "labels int64 (1, 6)", "without a batch axis",
    ),
    "no ids": ([{"ids": torch.arange(6)}], {}, "without input_ids, with ids", "one dict"),
    "extras of another length": (
        [a(old=torch.zeros(5))], {}, "6 tokens with old (5,)", "pad old with zeros",
    ),
    "an extra that is no tensor": ([a(old=[0.0] * 6)], {}, "old list", "torch.tensor(old)"),
    "extras of one sequence alone": (
        [a(), a(old=torch.zeros(6))], {}, "same extras", "each sequence every extra",
    ),
    "extras of other shapes": (
        [a(best=torch.zeros(6, 2)), a(best=torch.zeros(6, 3))], {},
        "best (6, 3), where sequence 0 has (2,)", "pad best to one shape",
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
    "other gradients": ([a()], {"gradients": "summed"}, "gradients 'summed'", "added adds"),
    "no options": ([a()], {"options": None}, "options of type NoneType", "ChunkOptions(size="),
    "an id without an embedding": (
        [{"input_ids": torch.tensor([4, 96])}], {}, "token id 96", "resize_token_embeddings",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_four_parts(case: str) -> None:
    _, engine = _shared()
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


def test_a_stack_needs_a_function() -> None:
    with pytest.raises(ConfigError, match="at least one function"):
        furlong.values.stack()


def test_a_loss_that_is_no_scalar_is_autograds_own_error() -> None:
    _, engine = _shared()
    values = engine.token_values(SEQUENCES, OPTIONS[0])
    with pytest.raises(RuntimeError, match="scalar outputs"):
        values[0].backward()
    del values
    assert taken_bytes(engine) == 0

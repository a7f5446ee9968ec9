"""Sequences of one call that begin alike: computed once, and as exact as each by itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.attention_families import twin_of
from helpers.batches import batch
from helpers.forked import FOUR, NESTED, PAIR, Forked
from helpers.tiny_families import build
from helpers.wide_norms import widen_norms
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_losses import whole_values
from torch import Tensor

import furlong
from furlong.plan.lengths import Call
from furlong.runtime.batch import join_prompts, shift_labels
from furlong.testing import TokenSequences, take_grads, worst_relative_error

OTHERS = batch([11, 50], seed=5)


@pytest.fixture(scope="module")
def model() -> Any:
    return widen_norms(build("llama"))


def loss_of(values: list[Tensor]) -> Tensor:
    """A loss that couples all sequences."""
    sums = torch.stack([own.sum() for own in values])
    return sums.softmax(0)[0] * 50 + sums.pow(2).sum() / 1000


@contextmanager
def counted(model: Any, first: Callable[[], object] = lambda: None) -> Any:
    """Tokens that the first layer has been given since `first`: a model with a hook more is checked
    anew."""
    seen: list[int] = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda _, args: seen.append(args[0].shape[1])
    )
    first()
    seen.clear()
    yield seen
    hook.remove()


def errors(
    model: Any,
    sequences: TokenSequences,
    loss: Callable[[list[Tensor]], Tensor] = loss_of,
    **dials: Any,
) -> tuple[float, float]:
    """Of the values and of the gradients."""
    truth = whole_values(model, sequences)
    loss(truth).backward()
    gradients = take_grads(model)
    engine = furlong.Engine(model)
    values = engine.token_values(sequences, furlong.ChunkOptions(**dials))
    loss(values).backward()
    assert engine._session.state.opened.arena.taken_bytes == 0
    moved = max(float((a - b).detach().abs().max()) for a, b in zip(values, truth, strict=True))
    return moved, worst_relative_error(take_grads(model), gradients)


@pytest.mark.parametrize(
    ("tree", "size", "keep"),
    [
        (PAIR, 16, "kv"), (PAIR, 25, "input"), (PAIR, 16, "attention"),
        (FOUR, 25, "kv"), (FOUR, 16, "input"), (FOUR, 16, "attention"),
        (NESTED, 16, "kv"), (NESTED, 16, "input"), (NESTED, 25, "attention"),
    ],
)  # fmt: skip
@pytest.mark.few(3)
def test_answers_to_one_prompt_are_exact(model: Any, tree: Forked, size: int, keep: str) -> None:
    sequences = [OTHERS[0], *tree.answers(), OTHERS[1]]
    assert max(errors(model, sequences, size=size, keep=keep)) <= 1e-12


FAMILIES: dict[str, Callable[[], Any]] = {
    "granitemoe": lambda: widen_norms(build("granitemoe")),
    "mixtral": lambda: widen_norms(build("mixtral")),
    "gpt2 tied": lambda: build("gpt2", tie_word_embeddings=True, n_positions=256),
    "gemma3 windows": lambda: widen_norms(build("gemma3_text")),
    "llama4 blocks": lambda: twin_of("llama4"),
    "deepseek latents": lambda: twin_of("deepseek_v3"),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(2)
def test_families_are_exact(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtures of experts, tied embeddings with learned positions, windows in some layers, and
    latents; attention blocks, which begin at positions and not at tokens of a tree.

    Routers of transformers round to float32, before which gradients of answers are added up: an
    error of 6e-8. Here they stay in float64, in the model's own forward too.
    """
    rounded = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else rounded(x))
    assert max(errors(FAMILIES[family](), NESTED.answers(), size=16, keep="kv")) <= 1e-12


def test_the_prompt_is_computed_once(model: Any) -> None:
    engine, options = furlong.Engine(model), furlong.ChunkOptions(size=16, keep="kv")
    sequences = FOUR.answers()
    bare = [{"input_ids": s["input_ids"]} for s in sequences]
    alone, shared = sum(len(s["input_ids"]) for s in sequences), sum(FOUR.lens)
    with counted(model, lambda: engine.token_values(sequences, options)) as seen:
        for switch, expected in ((True, shared), (False, alone)):
            values = engine.token_values(sequences, options, share_prompts=switch)
            assert sum(seen) == expected
            loss_of(values).backward()
            assert sum(seen) == 2 * expected
            with torch.no_grad():
                engine.hidden_states(bare, options, share_prompts=switch)
            assert sum(seen) == 3 * expected
            seen.clear()
    model.zero_grad()


def with_labelled_prompts() -> TokenSequences:
    return [{"input_ids": s["input_ids"], "labels": s["input_ids"]} for s in NESTED.answers()]


def one_ends_where_others_go_on() -> TokenSequences:
    first = FOUR.answers()[0]
    ended = {name: x[:75] for name, x in first.items()}
    labelled = {"input_ids": ended["input_ids"], "labels": ended["input_ids"].clone()}
    return [*FOUR.answers(), labelled]


def equal_sequences() -> TokenSequences:
    return [PAIR.answers()[0]] * 3 + [OTHERS[0]]


def equal_but_for_the_last_token() -> TokenSequences:
    one = PAIR.answers()[0]
    other = {name: x.clone() for name, x in one.items()}
    other["input_ids"][-1] = other["labels"][-1] = (one["input_ids"][-1] + 1) % 90
    return [one, other]


@pytest.mark.parametrize(
    "make",
    [with_labelled_prompts, one_ends_where_others_go_on, equal_sequences,
     equal_but_for_the_last_token],
)  # fmt: skip
def test_odd_batches_are_exact(model: Any, make: Callable[[], TokenSequences]) -> None:
    assert max(errors(model, make(), size=16, keep="kv")) <= 1e-12


@pytest.mark.parametrize(("used", "keep"), [(0, "kv"), (1, "input"), (3, "kv"), (3, "input")])
def test_branches_that_nobody_uses_do_not_run(model: Any, used: int, keep: str) -> None:
    sequences = [*NESTED.answers(), OTHERS[1]]
    assert max(errors(model, sequences, lambda v: v[used].pow(2).sum(), size=16, keep=keep)) < 1e-12
    engine, options = furlong.Engine(model), furlong.ChunkOptions(size=16, keep="kv")
    with counted(model, lambda: engine.token_values(sequences, options)) as seen:
        values = engine.token_values(sequences, options)
        seen.clear()
        values[used].sum().backward()
    model.zero_grad()
    assert sum(seen) < sum(NESTED.lens), "other branches ran too"


def test_extras_stay_with_their_sequence(model: Any) -> None:
    sequences = with_labelled_prompts()
    for number, sequence in enumerate(sequences):
        sequence["weight"] = torch.arange(len(sequence["input_ids"])) / 10.0 + number
    log_prob = furlong.values.log_prob()
    values = furlong.Engine(model).token_values(
        sequences, furlong.ChunkOptions(size=16, keep="kv"),
        lambda logits, labels, extras: extras["weight"] * log_prob(logits, labels, extras),
    )  # fmt: skip
    for found, truth, sequence in zip(
        values, whole_values(model, sequences), sequences, strict=True
    ):
        torch.testing.assert_close(found, truth * sequence["weight"], rtol=1e-11, atol=1e-12)


def test_hidden_states_are_exact(model: Any) -> None:
    sequences = [{"input_ids": s["input_ids"]} for s in (*NESTED.answers(), *OTHERS)]
    weights = [torch.randn(len(s["input_ids"]), 32, dtype=torch.float64) for s in sequences]

    def loss(states: list[Tensor]) -> Tensor:
        return sum((w * x).sum() for w, x in zip(weights, states, strict=True)).pow(2) / 100  # type: ignore[union-attr]

    loss([model.model(s["input_ids"][None]).last_hidden_state[0] for s in sequences]).backward()
    truth = take_grads(model)
    found = furlong.Engine(model).hidden_states(
        sequences, furlong.ChunkOptions(size=16, keep="attention")
    )
    loss(found).backward()
    assert worst_relative_error(take_grads(model), truth) <= 1e-12


def test_a_caller_s_autocast_is_no_further_from_the_truth_than_without_sharing() -> None:
    """Scaled to 16 bits, over several models: that of one moves by a fifth either way."""
    sequences = PAIR.answers()
    options = furlong.ChunkOptions(size=16, keep="kv")
    squares = {True: 0.0, False: 0.0}
    for seed in range(2):
        model = build("llama", torch.float32, seed=seed)
        loss_of(whole_values(model, sequences)).backward()
        truth = take_grads(model)
        engine = furlong.Engine(model)
        for is_shared in squares:
            with torch.autocast("cpu", torch.bfloat16):
                values = engine.token_values(sequences, options, share_prompts=is_shared)
            loss_of([own.float() for own in values]).backward()
            found = take_grads(model)
            squares[is_shared] += sum(float((found[n] - x).norm() ** 2) for n, x in truth.items())
    assert 0 < squares[True] <= 1.2 * squares[False]


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_door_finds_prompts(side: str) -> None:
    """Padded rows, as TRL makes them; on the left positions count from the padding."""
    model: Any = widen_norms(build("llama"))
    rows = [s["input_ids"] for s in FOUR.answers()]
    longest = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.int64)
    for index, row in enumerate(rows):
        own = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[index, own], mask[index, own] = row, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def loss() -> Tensor:
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        logits = model(**given, use_cache=False).logits
        own = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        answers = (mask[:, 1:] * mask[:, :-1] * (positions[:, 1:] >= 75)).bool()
        return loss_of([x[m] for x, m in zip(own, answers, strict=True)])

    loss().backward()
    truth = take_grads(model)
    for switch, expected in ((True, sum(FOUR.lens)), (False, sum(map(len, rows)))):
        furlong.chunked(model, furlong.ChunkOptions(size=16, keep="kv"), share_prompts=switch)
        with counted(model, loss) as seen:
            value = loss()
            assert sum(seen) == expected
        value.backward()
        assert worst_relative_error(take_grads(model), truth) <= 1e-12


def test_only_prompts_of_a_chunk_or_more_are_shared() -> None:
    shifted = shift_labels(NESTED.answers())
    assert [len(s.input_ids) for s in join_prompts(shifted, 16).planned] == [sum(NESTED.lens)]
    # the fork behind 23 tokens falls away
    assert [len(s.input_ids) for s in join_prompts(shifted, 30).planned] == [
        40 + 23 + 9 + 23 + 31 + 17 + 6
    ]
    assert len(join_prompts(shifted, 41).planned) == 2
    assert len(join_prompts(shifted, 64).planned) == 3


@settings(max_examples=60)
@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 50))
def test_lengths_say_how_a_pair_is_joined(shared: int, one: int, other: int, size: int) -> None:
    """By which `furlong plan` and a run's decision plan what a call does."""
    rows = [[*range(shared), 100 + i, *range(n - 1)] for i, n in enumerate((one, other))]
    rows[0] = rows[0][: max(1, len(rows[0]) - other % 3)]  # may end where the other goes on
    ids = [torch.tensor(row) for row in rows]
    joined = join_prompts(shift_labels([{"input_ids": x, "labels": x} for x in ids]), size)
    lens = tuple(map(len, ids))
    common = min(shared, *lens)
    planned = [len(tree.input_ids) for tree in joined.planned]
    assert (planned, joined.forks) == Call(lens, common).planned(size)


def test_equal_tokens_at_other_positions_are_not_shared() -> None:
    one, other = shift_labels([PAIR.answers()[0]] * 2)
    moved = type(one)(other.input_ids, other.labels, first_position=1)
    assert len(join_prompts([one, moved], 16).planned) == 2

"""The check of a sampled gradient, against cosine and error computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from furlong.api import Engine
from furlong.data.loader import Batch, LoaderState
from furlong.data.tokenize import IGNORE_INDEX, Sequence
from furlong.planners.options import ChunkOptions
from furlong.planners.spaco import Sampling
from furlong.runtime.rng import RNGState
from furlong.train.batches import BatchEngine
from furlong.train.memory import OverBudgetError
from furlong.train.sample_check import check_sample

CPU = torch.device("cpu")
HALF = ChunkOptions(size=16, sample=Sampling(rate=0.5, label_rate=0.5, seed=5))
NOTHING = ChunkOptions(size=16, sample=Sampling(rate=1e-6, label_rate=1e-6, seed=5))
ALL = ChunkOptions(size=16, sample=Sampling(rate=1, seed=5))


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config).double().train()


def make_batch(*lens: int, unlabelled: int | None = None) -> Batch:
    draw = np.random.default_rng(0)
    sequences = []
    for number, length in enumerate(lens):
        ids = draw.integers(0, 48, size=length).astype(np.int32)
        labels = np.full_like(ids, IGNORE_INDEX) if number == unlabelled else ids.copy()
        sequences.append(Sequence(number, "drawn", ids, labels))
    return Batch(tuple(sequences), LoaderState(0, 1))


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return flat


def by_hand(model: Any, sequence: dict[str, torch.Tensor], options: ChunkOptions) -> Any:
    """The exact gradient of the unchunked model beside the sampled one."""
    logits = model(sequence["input_ids"][None]).logits[0]
    cross_entropy(logits[:-1], sequence["labels"][1:]).backward()
    exact = flat_gradient(model)
    Engine(model).forward_backward([sequence], options)
    return exact, flat_gradient(model)


def test_cosine_and_error_are_those_of_the_whole_gradients():
    model, batch = make_model(), make_batch(40, 100, 70)
    exact, drawn = by_hand(model, batch.tensors()[1], HALF)
    check = check_sample(BatchEngine(Engine(model)), batch, HALF)
    assert check is not None
    assert (check.num_tokens, check.num_chunks) == (100, 7)
    assert 0 < check.num_drawn < 7
    assert check.cosine == pytest.approx(float(cosine_similarity(exact, drawn, dim=0)), rel=1e-6)
    error = float((drawn - exact).norm() / exact.norm())
    assert check.relative_error == pytest.approx(error, rel=1e-6)
    assert 0 < check.cosine < 0.99 and error > 0.1


def test_the_longest_sequence_with_a_label_is_taken():
    model = make_model()
    check = check_sample(BatchEngine(Engine(model)), make_batch(40, 100, 70, unlabelled=1), HALF)
    assert check is not None and check.num_tokens == 70


def test_a_draw_of_everything_is_exact_and_of_nothing_is_zero():
    model, batch = make_model(), make_batch(100)
    everything = check_sample(BatchEngine(Engine(model)), batch, ALL)
    assert everything is not None and everything.relative_error is not None
    assert everything.num_drawn == 7 and everything.relative_error < 1e-12
    assert everything.cosine == pytest.approx(1, abs=1e-12)
    nothing = check_sample(BatchEngine(Engine(model)), batch, NOTHING)
    assert nothing is not None
    assert (nothing.num_drawn, nothing.cosine, nothing.relative_error) == (0, None, 1.0)


class Failing:
    """An engine that has no memory for the second gradient, and leaves a part of it."""

    def __init__(self, model: Any, error: Exception) -> None:
        self.engine, self.error = Engine(model), error
        self.model = self.engine.model
        self.ranks, self.counted_elsewhere = None, []

    def forward_backward(self, sequences: Any, options: ChunkOptions, *args: Any, **kw: Any) -> Any:
        assert not self.model.model.training
        torch.rand(3)
        result = self.engine.forward_backward(sequences, options, *args, **kw)
        if options.sample is not None:
            raise self.error
        return result


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("none"), RuntimeError("shapes")])
def test_nothing_is_left_behind(error: Exception | None):
    model, batch = make_model(), make_batch(40, 100)
    parameters = list(model.parameters())
    parameters[1].requires_grad_(False)
    for parameter in parameters[2:]:
        parameter.grad = torch.randn_like(parameter)
    before = [parameter.grad for parameter in parameters]
    values = [None if grad is None else grad.clone() for grad in before]
    weights = [parameter.detach().clone() for parameter in parameters]
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    random = RNGState.read(CPU)
    engine: Any = Engine(model) if error is None else Failing(model, error)
    if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(RuntimeError, match="shapes"):
            check_sample(BatchEngine(engine), batch, HALF)
    else:
        found = check_sample(BatchEngine(engine), batch, HALF)
        assert (found is None) == (error is not None)
    assert RNGState.read(CPU).equals(random)
    assert [module.training for module in model.modules()] == modes
    for parameter, grad, value, weight in zip(parameters, before, values, weights, strict=True):
        assert parameter.grad is grad
        assert grad is None or torch.equal(grad, value)
        assert torch.equal(parameter, weight)


@pytest.mark.parametrize("num_calls", [1, 25])
def test_a_watch_that_finds_too_much_memory_in_use_ends_the_check(num_calls: int):
    model, calls = make_model(), []

    def watch() -> None:
        calls.append(1)
        if len(calls) >= num_calls:
            raise OverBudgetError("too much")

    assert check_sample(BatchEngine(Engine(model)), make_batch(100), HALF, watch=watch) is None
    assert len(calls) == num_calls
    assert all(parameter.grad is None for parameter in model.parameters())
    assert check_sample(BatchEngine(Engine(model)), make_batch(100), HALF) is not None

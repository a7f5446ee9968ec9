"""SpaCO on the real executor: the mean over every draw of a sequence's chunks is its gradient."""

import itertools

import pytest
from helpers.gradients import (
    batch,
    reference_loss,
    take_grads,
    total_relative_error,
    worst_relative_error,
)
from helpers.tiny_families import build

import furlong
from furlong.planners.sample import Factors, adaptive_probability, sample_backwards
from furlong.planners.spaco import plan_seco

NUM_CHUNKS, CHUNK_SIZE, BUDGET = 4, 5, 2.0
SEQ_LENS = (NUM_CHUNKS * CHUNK_SIZE - 2, CHUNK_SIZE)
"""A sequence of four chunks, and one that is packed and always trained."""


def draws(lowest):
    """(probability, factors by chunk) of all draws; lowest 1: each chunk by itself."""
    for include in itertools.product((False, True), repeat=NUM_CHUNKS):
        probability, drawn = 1.0, {}
        for position in reversed(range(NUM_CHUNKS)):
            p = BUDGET / NUM_CHUNKS
            if lowest < 1:
                p = adaptive_probability(NUM_CHUNKS, BUDGET, position, len(drawn), lowest)
            probability *= p if include[position] else 1 - p
            if include[position]:
                drawn[position] = Factors(1 / p, 1 / p)
        if probability:
            yield probability, drawn


def mean_gradient(model, sequences, loss, found):
    engine = furlong.Engine(model)
    mean, total = {}, 0.0
    for probability, drawn in found:
        plan = plan_seco(SEQ_LENS, num_layers=2, chunk_size=CHUNK_SIZE)
        plan = sample_backwards(plan, drawn | {NUM_CHUNKS: Factors()})
        result = engine.run(plan, sequences)
        assert result.loss == pytest.approx(loss, rel=1e-6)  # factors leave the loss alone
        for name, grad in take_grads(model).items():
            mean[name] = mean.get(name, 0) + probability * grad
        total += probability
    assert total == pytest.approx(1)
    return mean


@pytest.mark.parametrize(
    ("family", "tolerance"),
    # LlamaRMSNorm rounds gradients to float32, and a mean of rounded ones is not the rounded mean
    [("gpt_neox", 1e-12), ("llama", 2e-6)],
)
@pytest.mark.parametrize("lowest", [1.0, 0.5])
def test_bernoulli_and_adaptive_draws_are_unbiased(family, tolerance, lowest):
    model, sequences = build(family, num_hidden_layers=2), batch(SEQ_LENS)
    loss = reference_loss(model, sequences)
    truth = take_grads(model)
    mean = mean_gradient(model, sequences, loss, list(draws(lowest)))
    assert worst_relative_error(mean, truth) <= tolerance


def test_draws_without_factors_are_biased():
    model, sequences = build("llama", num_hidden_layers=2), batch(SEQ_LENS)
    loss = reference_loss(model, sequences)
    truth = take_grads(model)
    plain = [(p, dict.fromkeys(drawn, Factors())) for p, drawn in draws(1.0)]
    mean = mean_gradient(model, sequences, loss, plain)
    assert total_relative_error(mean, truth) > 0.1

"""SpaCO on the real executor: the mean over every draw of chunks against the whole gradient.

LlamaRMSNorm rounds to float32 inside, so that a factor that is no power of two moves a gradient by
1e-7; gpt_neox has a LayerNorm, which does not.
"""

import itertools
import math

import pytest
import torch
from helpers.attention_families import twin_of
from helpers.batches import batch
from helpers.expected_weight import expected_weight
from helpers.tiny_families import FAMILIES, build

import furlong
from furlong.plan.plan import Backward
from furlong.planners.options import ChunkOptions
from furlong.planners.spaco import (
    EXACT,
    Factors,
    Sampling,
    fixed_factors,
    sample_backwards,
)
from furlong.testing import reference_loss, take_grads, worst_relative_error

CHUNKS, SIZE, LAYERS = 4, 4, 3
LENS = (CHUNKS * SIZE - 1, SIZE)
"""A sequence of four chunks, and one that is packed and always trained."""
WALKS = {
    "chunk-first": ChunkOptions(size=SIZE, keep="kv", num_retained=0, hybrid=False),
    "retained": ChunkOptions(size=SIZE, keep="attention", num_retained=2, hybrid=False),
    "keeps inputs": ChunkOptions(size=SIZE, keep="input", hybrid=False),
    "layer-first, offload": ChunkOptions(
        size=SIZE, order="layer-first", stage_layers=2, offload={"kv": "disk", "inputs": "cpu"},
        hybrid=False,
    ),
}  # fmt: skip


class Drawn:
    """Gradients of one batch under any draw of the chunks."""

    def __init__(self, family: str, options: ChunkOptions, label_chunks=None) -> None:
        make = build if family in FAMILIES else twin_of
        self.model = make(family, num_hidden_layers=LAYERS)
        self.sequences = batch(LENS)
        if label_chunks is not None:
            labels = self.sequences[0]["labels"]
            kept = [labels[c * SIZE : (c + 1) * SIZE].clone() for c in range(CHUNKS)]
            labels[:] = -100
            for c in label_chunks:  # shifted: token t is the label of t - 1
                labels[c * SIZE + 1 : (c + 1) * SIZE] = kept[c][1:]
        self.loss = reference_loss(self.model, self.sequences)
        self.truth = take_grads(self.model)
        self.engine = furlong.Engine(self.model)
        self.whole = self.engine.plan(LENS, options)

    def gradient(self, drawn: dict[int, Factors], *, report_loss: bool = False):
        plan = sample_backwards(self.whole, drawn | {CHUNKS: EXACT}, report_loss=report_loss)
        result = self.engine.run(plan, self.sequences)
        if report_loss:
            assert result.loss == pytest.approx(self.loss, rel=1e-6)  # factors leave it alone
        return take_grads(self.model)

    def mean(self, draws, **more):
        mean, total = {}, 0.0
        for probability, drawn in draws:
            total += probability
            for name, grad in self.gradient(drawn, **more).items():
                mean[name] = mean.get(name, 0) + probability * grad
        assert total == pytest.approx(1)
        return mean


def all_draws(chances):
    """(probability, factors by chunk) of every draw in which each chunk is drawn by itself."""
    for include in itertools.product((False, True), repeat=len(chances)):
        each = [p if is_in else 1 - p for p, is_in in zip(chances, include, strict=True)]
        if probability := math.prod(each):
            drawn = itertools.compress(enumerate(chances), include)
            yield probability, {i: Factors(1 / p, 1 / p) for i, p in drawn}


HALF = [0.5] * CHUNKS
UNEQUAL = [0.3, 1.0, 0.7, 0.45]


@pytest.mark.parametrize(
    ("walk", "chances", "label_chunks"),
    [
        *(
            pytest.param(walk, UNEQUAL, None, marks=[pytest.mark.slow] * (walk != "retained"))
            for walk in WALKS
        ),
        pytest.param("chunk-first", HALF, None, marks=pytest.mark.slow),
        ("retained", UNEQUAL, (1, 3)),
    ],
)
def test_unbiased_draws_give_the_gradient_on_average(walk, chances, label_chunks) -> None:
    drawn = Drawn("gpt_neox", WALKS[walk], label_chunks)
    assert worst_relative_error(drawn.mean(all_draws(chances)), drawn.truth) <= 1e-10


def test_latents_relay_with_the_factors_of_keys_and_values() -> None:
    drawn = Drawn("deepseek_v3", WALKS["chunk-first"])
    assert worst_relative_error(drawn.mean(all_draws(UNEQUAL)), drawn.truth) <= 1e-9


def test_a_family_whose_norm_rounds_is_unbiased_as_far_as_that_allows() -> None:
    drawn = Drawn("llama", WALKS["retained"])
    mean = drawn.mean(all_draws(UNEQUAL), report_loss=True)
    assert worst_relative_error(mean, drawn.truth) <= 2e-6


def by_hops(gradient_at, packed):
    """A gradient split by the number of earlier chunks that it goes through.

    With all relay factors multiplied by s it is the sum of s^h times the part of h hops, a
    polynomial of degree at most CHUNKS - 1: its values at as many s give the parts. `packed`, the
    packed chunk's own gradient, is none of them.
    """
    points = torch.arange(CHUNKS, dtype=torch.float64) / 2
    rows = [gradient_at(s) for s in points.tolist()]
    weights = torch.linalg.inv(torch.linalg.vander(points)).tolist()
    return [
        {
            name: sum(w * (row[name] - packed[name]) for w, row in zip(own, rows, strict=True))
            for name in packed
        }
        for own in weights
    ]


RULES = [
    Sampling(chunks=2, rule="fixed", cap=1.5),
    pytest.param(Sampling(chunks=3, rule="fixed"), marks=pytest.mark.slow),
    pytest.param(Sampling(chunks=3, rule="paper"), marks=pytest.mark.slow),
    pytest.param(Sampling(rate=0.4), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("sampling", RULES, ids=lambda s: f"{s.rule} {s.chunks or s.rate} {s.cap}")
def test_each_hop_has_the_weight_that_its_rule_predicts(sampling: Sampling) -> None:
    """The mean of a part over all subsets is the part times (loss factor)(hop factor)^h pi_h."""
    exact = Drawn("gpt_neox", WALKS["chunk-first"])
    packed = exact.gradient({0: Factors(0.0, 0.0)})
    parts = by_hops(lambda s: exact.gradient({i: Factors(1.0, s) for i in range(CHUNKS)}), packed)
    whole = {name: packed[name] + sum(part[name] for part in parts) for name in packed}
    assert worst_relative_error(whole, exact.truth) <= 1e-10
    if sampling.rule == "unbiased":
        draws = list(all_draws(sampling.probabilities([False] * CHUNKS)))
        weights = [1.0] * CHUNKS
    else:
        n, factors = sampling.num_drawn(CHUNKS), fixed_factors(sampling, CHUNKS)
        subsets = list(itertools.combinations(range(CHUNKS), n))
        draws = [(1 / len(subsets), dict.fromkeys(subset, factors)) for subset in subsets]
        weights = [expected_weight(CHUNKS, n, hops, factors) for hops in range(CHUNKS)]

    def mean_at(s):
        return exact.mean(
            (p, {i: Factors(f.loss_factor, f.relay_factor * s) for i, f in found.items()})
            for p, found in draws
        )

    means = by_hops(mean_at, packed)
    for name, grad in packed.items():
        scale = max(float(part[name].norm()) for part in (*parts, {name: grad}))
        for hops, (mean, part) in enumerate(zip(means, parts, strict=True)):
            error = float((mean[name] - weights[hops] * part[name]).norm())
            assert error <= 1e-10 * scale, (hops, name)


@pytest.mark.parametrize("walk", WALKS)
def test_the_loss_of_a_draw(walk) -> None:
    """Reported it is that of all chunks; else it is the mean of the drawn ones by their factors."""
    drawn = Drawn("llama", WALKS[walk])
    factors = {1: Factors(4.0, 4.0), 3: Factors(2.0, 2.0)}
    plan = sample_backwards(drawn.whole, factors | {CHUNKS: EXACT})
    found = drawn.engine.run(plan, drawn.sequences).loss
    take_grads(drawn.model)
    every = drawn.engine.forward_backward(drawn.sequences, WALKS[walk], backward=False)
    losses, packed = every.token_losses
    own = [losses[c * SIZE : (c + 1) * SIZE] for c in (1, 3)]
    total = 4 * own[0].sum() + 2 * own[1].sum() + packed.sum()
    count = 4 * (own[0] != 0).sum() + 2 * (own[1] != 0).sum() + (packed != 0).sum()
    assert found == pytest.approx(float(total / count), rel=1e-6)
    nothing = sample_backwards(drawn.whole, {0: Factors(0.0, 0.0)})
    assert math.isnan(drawn.engine.run(nothing, drawn.sequences).loss)


def test_the_engine_draws_anew_unless_it_is_given_a_seed() -> None:
    model, sequences = build("llama", num_hidden_layers=1), batch((64,))
    engine = furlong.Engine(model)

    def trained(**more):
        options = ChunkOptions(size=4, sample={"rate": 0.3, "label_rate": 0.3, **more})
        plan = engine.forward_backward(sequences, options).plan
        return sorted({a.chunk for a in plan.actions[0] if isinstance(a, Backward)})

    assert trained(seed=1) == trained(seed=1)
    torch.manual_seed(0)
    first, second = trained(), trained()
    torch.manual_seed(0)
    assert first != second and [first, second] == [trained(), trained()]


def test_where_no_label_is_drawn_every_gradient_is_zero_and_there() -> None:
    drawn = Drawn("llama", WALKS["retained"], label_chunks=(3,))
    drawn.sequences = drawn.sequences[:1]
    whole = drawn.engine.plan(LENS[:1], WALKS["retained"])
    plan = sample_backwards(whole, {1: Factors(6.0, 5.0)})
    assert math.isnan(drawn.engine.run(plan, drawn.sequences).loss)
    assert all(not p.grad.any() for p in drawn.model.parameters())

"""Any plan of a batch gives the same loss and the same gradients as the model's own forward."""

import functools
from dataclasses import asdict

import pytest
from helpers.cases import UNLIKE, Case, covering_array, design, sample
from helpers.nightly import SEED
from helpers.tiny_families import bound, build

import furlong
from furlong.kv.pools import Storage
from furlong.runtime.executor import Executor
from furlong.testing import reference_loss, take_grads, worst_relative_error

POISONED = Storage(poison=True)


@functools.lru_cache(maxsize=4)
def model_and_truth(family: str, batch_name: str, tied: bool, is_short: bool):
    model = build(family, tie_word_embeddings=tied)
    sequences = Case(family, batch_name, 1 if is_short else 8).sequences()
    loss = reference_loss(model, sequences)
    return model, sequences, loss, take_grads(model)


def subject(case: Case):
    return model_and_truth(case.family, case.batch_name, case.tied, case.is_short)


def check(case: Case, storage: Storage | None = None) -> None:
    model, sequences, loss, truth = subject(case)
    with case.small_sizes():
        result = furlong.forward_backward(model, sequences, case.options, storage=storage)
    assert abs(result.loss - loss) <= max(1e-12, bound(case.family)) * loss
    assert worst_relative_error(take_grads(model), truth) <= bound(case.family)


FEW, PAIRS, TRIPLES = covering_array()


@pytest.mark.parametrize("case", sorted(FEW, key=str), ids=str)
@pytest.mark.few(10)
def test_every_pair_of_dials(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(PAIRS, key=str), ids=str)
def test_every_pair_of_a_family(case):
    """With memory that turns to NaN when it is given back: a use after that is seen."""
    check(case, POISONED)


@pytest.mark.nightly
@pytest.mark.parametrize("case", sorted(TRIPLES + sample(60, SEED), key=str), ids=str)
def test_every_triple_and_a_sample_of_the_product(case):
    check(case, POISONED)


@pytest.mark.parametrize(
    ("cases", "strength", "whole"),
    [(FEW + PAIRS, 2, design()), (FEW + PAIRS + TRIPLES, 3, design(UNLIKE))],
)
def test_arrays_hold_every_tuple_once_in_few_cases(cases, strength, whole):
    rows = [asdict(case) for case in cases if case.family in whole.dials["family"]]
    held = set().union(*(whole.tuples_of(row, strength) for row in rows))
    assert held == whole.every_tuple(strength)
    assert len(set(cases)) == len(cases) < 350


LAYER_FIRST = Case("llama", "split", 8, stage_layers=1, keep="input")


def test_a_rebuild_that_is_left_out_is_an_error(monkeypatch):
    check(LAYER_FIRST)
    plain = Executor._compute

    def compute(self, action, what):
        if what.computes != "to last kv" or action.stage == 2:
            plain(self, action, what)

    monkeypatch.setattr(Executor, "_compute", compute)
    with pytest.raises((AssertionError, KeyError)):
        check(LAYER_FIRST)
    subject(LAYER_FIRST)[0].zero_grad(set_to_none=True)

"""Any plan of a batch gives the same loss and the same gradients as the model's own forward."""

import functools
from dataclasses import asdict, replace

import pytest
import torch
from helpers.cases import UNLIKE, Case, covering_array, design, sample
from helpers.nightly import SEED
from helpers.tiny_families import bound, build

import furlong
from furlong.kv.disk import NamelessFile
from furlong.kv.pools import Lease, StagedPool, Storage
from furlong.ops.loss import TiledHead
from furlong.runtime.cell import Cell
from furlong.runtime.executor import Executor
from furlong.runtime.saved_graphs import SavedGraph
from furlong.testing import reference_loss, take_grads, worst_relative_error

POISONED = Storage(poison=True)


@functools.lru_cache(maxsize=4)
def model_and_truth(family: str, batch_name: str, tied: bool):
    model = build(family, tie_word_embeddings=tied)
    sequences = Case(family, batch_name, 1).sequences()
    loss = reference_loss(model, sequences)
    return model, sequences, loss, take_grads(model)


def check(case: Case, storage: Storage | None = None) -> None:
    model, sequences, loss, truth = model_and_truth(case.family, case.batch_name, case.tied)
    with case.small_sizes():
        result = furlong.forward_backward(model, sequences, case.options, storage=storage)
    assert abs(result.loss - loss) <= max(1e-12, bound(case.family)) * loss
    assert worst_relative_error(take_grads(model), truth) <= bound(case.family)


FEW, PAIRS, TRIPLES = covering_array()


@pytest.mark.parametrize("case", sorted(FEW, key=str), ids=str)
def test_every_pair_of_dials(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(PAIRS + TRIPLES, key=str), ids=str)
def test_every_pair_of_a_family_and_every_triple(case):
    """With memory that turns to NaN when it is given back: a use after that is seen."""
    check(case, POISONED)


@pytest.mark.nightly
@pytest.mark.parametrize("case", sorted(sample(60, SEED), key=str), ids=str)
def test_sample_of_the_product(case):
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


PLAIN = Case("llama", "split", 8)
LAYER_FIRST = replace(PLAIN, stage_layers=1, keep="input")


def without_relay(monkeypatch):
    monkeypatch.setattr("furlong.runtime.cell.LayerView.later_grads", lambda *_: None)


def without_gradient_of_inputs(monkeypatch):
    plain = Executor._deliver_gradient
    monkeypatch.setattr(
        Executor,
        "_deliver_gradient",
        lambda self, cell, g: plain(self, cell, torch.zeros_like(g)),
    )


def with_rebuilds_of_other_inputs(monkeypatch):
    plain = Executor._run

    def run(self, cell, at, what):
        other = (0, at[1]) if what.computes == "to last kv" and at[1] == 1 else at
        return plain(self, cell, other, what)

    monkeypatch.setattr(Executor, "_run", run)


def with_attention_of_another_layer(monkeypatch):
    plain = Cell._recalled
    monkeypatch.setattr(
        Cell, "_recalled", lambda self, what, layer: plain(self, what, self.layers[0])
    )


def without_the_last_tile(monkeypatch):
    plain = TiledHead._tiles
    monkeypatch.setattr(TiledHead, "_tiles", lambda *given: list(plain(*given))[:-1])


def with_graphs_of_zeros(monkeypatch):
    plain = SavedGraph._unpack
    monkeypatch.setattr(
        SavedGraph, "_unpack", lambda self, packed: torch.zeros_like(plain(self, packed))
    )


def with_gradients_that_stay_behind(monkeypatch):
    """Those of segments in a lower tier are brought and changed, and never written back."""
    plain = StagedPool.get

    def get(self, h):
        lease = plain(self, h)
        return Lease(lease.tensor, lambda writes: lease.release())

    monkeypatch.setattr(StagedPool, "get", get)


def with_reads_of_what_was_never_written(monkeypatch):
    monkeypatch.setattr(NamelessFile, "write", lambda *_: None)


BROKEN = {
    "relay": (without_relay, PLAIN, True),
    "relay, layer-first": (without_relay, LAYER_FIRST, True),
    "gradient of inputs": (without_gradient_of_inputs, LAYER_FIRST, True),
    "rebuild": (with_rebuilds_of_other_inputs, LAYER_FIRST, True),
    "attention": (with_attention_of_another_layer, replace(PLAIN, keep="attention"), False),
    "attention, recomputed layers": (
        with_attention_of_another_layer,
        replace(LAYER_FIRST, stage_layers=3, keep="attention", recompute_layers=3),
        False,
    ),
    "tiles of the loss": (without_the_last_tile, replace(PLAIN, tile_tokens=3), False),
    "graphs": (with_graphs_of_zeros, replace(PLAIN, keep="all", graphs="host"), True),
    "gradients of keys and values": (
        with_gradients_that_stay_behind, replace(PLAIN, size=5, kv="host", segment_tokens=3), True,
    ),
    "disk": (
        with_reads_of_what_was_never_written, replace(LAYER_FIRST, inputs="disk"), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_matrix_sees_a_wrong_gradient(name, monkeypatch):
    """The check can fail, also where the loss is right."""
    break_it, case, is_loss_right = BROKEN[name]
    model, sequences, loss, truth = model_and_truth(case.family, case.batch_name, case.tied)
    check(case)  # runs the start-up check, which would refuse some of it
    break_it(monkeypatch)
    with case.small_sizes():
        given = furlong.forward_backward(model, sequences, case.options).loss
    assert worst_relative_error(take_grads(model), truth) > 1e-2
    assert (given == pytest.approx(loss, rel=1e-12)) is is_loss_right


def test_a_rebuild_that_is_left_out_is_an_error(monkeypatch):
    check(LAYER_FIRST)
    plain = Executor._compute

    def compute(self, action, what):
        if what.computes != "to last kv" or action.stage == 2:
            plain(self, action, what)

    monkeypatch.setattr(Executor, "_compute", compute)
    with pytest.raises((AssertionError, KeyError)):
        check(LAYER_FIRST)
    model = model_and_truth(LAYER_FIRST.family, LAYER_FIRST.batch_name, LAYER_FIRST.tied)[0]
    model.zero_grad(set_to_none=True)

"""Latent attention, chunked attention, and layers unlike each other: the gradients of float64 twins
of transformers' modeling files, in whatever chunks."""

import functools

import pytest
from helpers.attention_families import TWINS, VOCAB_SIZE, twin_of
from helpers.gradients import batch, reference_loss, take_grads, worst_relative_error
from torch.nn.functional import cross_entropy

import furlong
from furlong.errors import UnsupportedModelError
from furlong.kv.store import KVStore

BOUND = 1e-9
LENS = [70, 33, 9, 5]
OPTIONS = {
    "small chunks": furlong.ChunkOptions(size=16, keep="kv"),
    "odd chunks": furlong.ChunkOptions(size=7, num_retained=1, keep="attention"),
}
KEEPS = ("input", "kv", "attention", "all")
MATRIX = [
    (
        name,
        furlong.ChunkOptions(
            size=(1, 7, 16, 48)[j], keep=KEEPS[(i + j) % 4],
            num_retained=(0, 1, 3)[(i + 2 * j) % 3], hybrid=(i + j // 2) % 2 == 1,
        ),
    )
    for i, name in enumerate(TWINS)
    for j in range(4)
]  # fmt: skip
"""Every pair of values of a family, a size, a keep, a number retained and hybrid chunks or not."""


@functools.lru_cache(maxsize=2)
def model_and_truth(name: str):
    model = twin_of(name)
    sequences = batch(LENS, vocab_size=VOCAB_SIZE, masked=[range(10)])
    loss = reference_loss(model, sequences)
    return model, sequences, loss, take_grads(model)


def check(name: str, options: furlong.ChunkOptions) -> None:
    model, sequences, loss, truth = model_and_truth(name)
    given = furlong.forward_backward(model, sequences, options)
    assert abs(given.loss - loss) <= BOUND * loss
    assert worst_relative_error(take_grads(model), truth) <= BOUND


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("name", TWINS)
def test_gradients_are_those_of_the_whole_forward(name, how):
    check(name, OPTIONS[how])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), MATRIX, ids=str)
def test_the_matrix(name, options):
    check(name, options)


@pytest.mark.parametrize("name", ["deepseek_v2", "llama4"])
def test_layer_first(name):
    check(name, furlong.ChunkOptions(size=16, keep="input", order="layer-first", stage_layers=1))


def test_a_decoder_inside_a_model_that_calls_itself_its_decoder():
    """The trainer's own forward of Llama 4 goes through chunks."""
    model, sequences, _, truth = model_and_truth("llama4")
    divisor = sum(int((s["labels"][1:] != -100).sum()) for s in sequences)
    furlong.chunked(model, furlong.ChunkOptions(size=16))
    try:
        for sequence in sequences:
            logits = model(input_ids=sequence["input_ids"][None]).logits[0, :-1]
            loss = cross_entropy(logits, sequence["labels"][1:], reduction="sum")
            (loss / divisor).backward()
    finally:
        furlong.unchunked(model)
    assert worst_relative_error(take_grads(model), truth) <= BOUND


def test_keys_that_layers_share_are_stored_once(monkeypatch):
    """Layers 4 and 5 of 6 attend to the keys and values of layers 2 and 3."""
    written = set()
    plain = KVStore.write

    def write(store, seq_id, layer, *more):
        written.add(layer)
        plain(store, seq_id, layer, *more)

    monkeypatch.setattr(KVStore, "write", write)
    for options in (OPTIONS["odd chunks"], furlong.ChunkOptions(size=16, recompute_layers=6)):
        written.clear()
        check("gemma4 with shared keys", options)
        assert written == {0, 1, 2, 3}


def test_layers_that_share_keys_are_not_cut_into_stages():
    model, sequences, *_ = model_and_truth("gemma4 with shared keys")
    options = furlong.ChunkOptions(size=16, order="layer-first", stage_layers=3)
    with pytest.raises(UnsupportedModelError, match="cut between any two layers"):
        furlong.forward_backward(model, sequences, options)

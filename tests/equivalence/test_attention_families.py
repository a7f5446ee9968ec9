"""Latent attention, chunked attention, and layers unlike each other: the gradients of float64 twins
of transformers' modeling files, in whatever chunks."""

import functools
from collections.abc import Sequence

import pytest
from helpers.attention_families import TWINS, VOCAB_SIZE, twin_of
from helpers.batches import batch
from helpers.covering import Design, Row
from torch.nn.functional import cross_entropy

import furlong
from furlong.errors import UnsupportedModelError
from furlong.kv.store import KVStore
from furlong.testing import reference_loss, take_grads, worst_relative_error

BOUND = 1e-9
LENS = (70, 33, 9, 5)
SHORT_LENS = (27, 6, 2)
"""For chunks of a single token."""
SHARED = "gemma4 with shared keys"
DESIGN = Design(
    {
        "name": tuple(TWINS),
        "size": (16, 7, 1, 48),
        "keep": ("kv", "input", "attention", "all"),
        "num_retained": (0, 1, 3),
        "hybrid": (True, False),
        "stage_layers": (0, 1, 3),
        "recompute_layers": (0, 2, 4),
        "tier": ("device", "host", "disk"),
        "segment_tokens": (0, 8),
    },
    {
        "num_retained": lambda c: c["keep"] != "all",
        "stage_layers": lambda c: "gemma4" not in c["name"],  # which is not cut between layers
    },
    steering=("name", "keep"),
    loose=["name"],
)
FEW = DESIGN.array(2)
TRIPLES = DESIGN.array(3, FEW)
"""Every triple of dials, and every pair of a family and a value of one."""
_LONG_LAST = sorted(FEW, key=lambda row: (row["size"] > 1, str(row)))
ONE_EACH = [*{row["name"]: row for row in _LONG_LAST}.values()]
"""A row of each family, in chunks of several tokens where it has one."""


@functools.lru_cache(maxsize=2)
def model_and_truth(name: str, lens: Sequence[int] = LENS):
    model = twin_of(name)
    sequences = batch(lens, vocab_size=VOCAB_SIZE, masked=[range(10)])
    loss = reference_loss(model, sequences)
    return model, sequences, loss, take_grads(model)


def check(name: str, options: furlong.ChunkOptions) -> None:
    model, sequences, loss, truth = model_and_truth(name, SHORT_LENS if options.size == 1 else LENS)
    given = furlong.forward_backward(
        model, sequences, options, storage=furlong.Storage(poison=True)
    )
    assert abs(given.loss - loss) <= BOUND * loss
    assert worst_relative_error(take_grads(model), truth) <= BOUND


def check_row(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents are expanded a few tokens at a time, and kept in segments of a few."""
    dials = {dial: value for dial, value in row.items() if dial not in ("name", "segment_tokens")}
    if segment_tokens := row["segment_tokens"]:
        monkeypatch.setattr("furlong.kv.store.segment_tokens", lambda *_: segment_tokens)
        monkeypatch.setattr("furlong.ops.latent._MIN_TOKENS", 3)
    dials["order"] = "layer-first" if row["stage_layers"] else "chunk-first"
    check(
        row["name"], furlong.ChunkOptions(**dials | {"stage_layers": row["stage_layers"] or None})
    )


@pytest.mark.parametrize("row", sorted(ONE_EACH, key=str), ids=str)
def test_gradients_are_those_of_the_whole_forward(row, monkeypatch):
    check_row(row, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [row for row in sorted(FEW + TRIPLES, key=str) if row not in ONE_EACH], ids=str
)
def test_the_matrix(row, monkeypatch):
    check_row(row, monkeypatch)


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
    for options in (
        furlong.ChunkOptions(size=7, num_retained=1, keep="attention"),
        furlong.ChunkOptions(size=16, recompute_layers=6),
    ):
        written.clear()
        check(SHARED, options)
        assert written == {0, 1, 2, 3}


def test_layers_that_share_keys_are_not_cut_into_stages():
    model, sequences, *_ = model_and_truth(SHARED)
    options = furlong.ChunkOptions(size=16, order="layer-first", stage_layers=3)
    with pytest.raises(UnsupportedModelError, match="cut between any two layers"):
        furlong.forward_backward(model, sequences, options)

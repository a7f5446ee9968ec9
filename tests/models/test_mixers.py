"""Recurrent layers: found by watching, called slice by slice, and checked alone at the start."""

from __future__ import annotations

from functools import wraps
from itertools import accumulate

import pytest
import torch
from helpers.batches import batch
from helpers.forked import PAIR, forks_of
from helpers.hybrids import VOCAB_SIZE, build
from helpers.tiny_families import build as build_decoder
from torch import nn

import furlong
from furlong.errors import PlanError, UnsupportedModelError
from furlong.families import Family
from furlong.kv.store import StateStore
from furlong.models import mixers
from furlong.models.decoder import HFDecoder
from furlong.models.mixers import Current, SliceCache, SliceRows, in_batches, mixer_forward
from furlong.models.placeholders import PlaceholderLayer, hold, placeholders
from furlong.ops.backends.select import ProbedBackend
from furlong.planners.orders import plan_on_device
from furlong.runtime.check import _has_known_mixers, mixer_errors
from furlong.testing import reference_loss, take_grads, total_relative_error

CHECKED = ("lfm2", "qwen3_next", "nemotron_h", "jamba", "minimax")
"""A convolution alone, and states of each kind: given to the scan, added to it, of an own cache."""


def float32(model_type: str) -> HFDecoder:
    return HFDecoder(build(model_type, wide=False).float())


@pytest.fixture(scope="module")
def models():
    return {model_type: float32(model_type) for model_type in CHECKED}


@pytest.mark.parametrize(
    ("model_type", "events"),
    [
        ("lfm2", [("states", 0), ("attention", 1), ("states", 2), ("attention", 3)]),
        ("nemotron_h", [("states", 0), ("attention", 2), ("states", 4)]),
        ("falcon_h1", [(kind, i) for i in range(4) for kind in ("states", "attention")]),
        ("zamba2", [("states", 0), ("attention", 1), ("states", 1), ("states", 2),
                    ("attention", 3), ("states", 3)]),
    ],
)  # fmt: skip
def test_what_the_layers_do_is_seen(model_type, events):
    model = float32(model_type)
    assert list(model.events) == events
    assert len(model.probed.mixers) == sum(kind == "states" for kind, _ in events)


def test_a_model_of_attention_alone_has_no_mixers():
    model = HFDecoder(build_decoder("llama"))
    assert model.events is None and not model.probed.mixers


@pytest.mark.parametrize(
    ("model_type", "num_returned"), [("falcon_h1", 1), ("bamba", 2), ("minimax", 0)]
)
@pytest.mark.parametrize("layers", [range(2), range(2, 4), range(3, 4)], ids=str)
def test_stand_ins_return_what_layers_return_not_what_they_say(model_type, num_returned, layers):
    """The last stage may have attention alone."""
    model = build(model_type)
    hold(model, placeholders(model, layers))
    adapter = HFDecoder(model)
    assert {layer for _, layer in adapter.events or [("attention", 3)]} == set(layers)
    returned = [m.num_returned for m in model.modules() if isinstance(m, PlaceholderLayer)]
    assert {adapter.probed.num_returned, *returned} == {num_returned}


def without(kind):
    def break_it(monkeypatch):
        plain = SliceCache.__init__

        def init(self, before, num_tokens):
            plain(self, {k: x for k, x in before.items() if k[0] not in kind}, num_tokens)

        monkeypatch.setattr(SliceCache, "__init__", init)

    return break_it


def without_gradients_of_states(monkeypatch):
    monkeypatch.setattr(StateStore, "later_grads", lambda self, at, kinds, _: [None] * len(kinds))


def with_states_of_the_wrong_piece(monkeypatch):
    plain = StateStore.read
    monkeypatch.setattr(
        StateStore, "read",
        lambda self, at: plain(self, min(found for found in self._handles if found[:2] == at[:2])),
    )  # fmt: skip


FAULTS = {
    "convolution": (without(("conv",)), ("lfm2", "qwen3_next", "nemotron_h", "jamba")),
    "recurrent state": (
        without(("recurrent", "linear")), ("qwen3_next", "nemotron_h", "jamba", "minimax"),
    ),
    "gradient of the state": (without_gradients_of_states, CHECKED),
    "states of another piece": (with_states_of_the_wrong_piece, CHECKED),
}  # fmt: skip


def test_right_mixers_pass(models):
    for model in models.values():
        assert max(mixer_errors(model, ProbedBackend())) < 1e-5  # as docs/exactness.md says


@pytest.mark.parametrize("name", FAULTS)
def test_the_check_sees_a_fault_in_every_kind(name, models, monkeypatch):
    break_it, model_types = FAULTS[name]
    break_it(monkeypatch)
    for model_type in model_types:
        with pytest.raises(UnsupportedModelError, match="in slices than whole"):
            mixer_errors(models[model_type], ProbedBackend())


def test_mixers_that_no_test_has_run_are_checked(models, monkeypatch):
    """Kernels of a GPU are of whatever package is installed there; releases rename arguments."""
    model = models["qwen3_next"]
    assert _has_known_mixers(model)
    with monkeypatch.context() as changed:
        changed.setattr(model, "device", torch.device("cuda"))
        assert not _has_known_mixers(model)
    for version in ("5.20.2", "5.25.0.dev0", "6.0.0"):
        monkeypatch.setattr("importlib.metadata.version", lambda _, version=version: version)
        assert not _has_known_mixers(model)


def test_a_clamp_that_is_missing_for_one_token_is_seen(monkeypatch):
    """Nemotron-H's own decoding path lets one token have a time step below the floor."""
    model = HFDecoder(build("nemotron_h", wide=False, time_step_min=0.5).float())
    assert max(mixer_errors(model, ProbedBackend())) < 2e-4

    plain = mixers._scan_from

    def unclamped(scan, initial, current, hidden, *args, **kwargs):
        if hidden.shape[1] == 1:
            kwargs["dt_limit"] = (0.0, float("inf"))
        return plain(scan, initial, current, hidden, *args, **kwargs)

    monkeypatch.setattr(mixers, "_scan_from", unclamped)
    with pytest.raises(UnsupportedModelError, match="in slices than whole"):
        mixer_errors(model, ProbedBackend())


def test_16_bits_are_checked_in_float32():
    model = HFDecoder(build("bamba", wide=False).to(torch.bfloat16))
    assert max(mixer_errors(model, ProbedBackend())) < 1e-4
    assert next(model.base.parameters()).dtype == torch.bfloat16


def checkpointed(model):
    model.gradient_checkpointing_enable()


def compiled(model):
    for module in HFDecoder(model).probed.mixers:
        module.module.compile(backend="eager")


@pytest.mark.parametrize("change", [checkpointed, compiled])
@pytest.mark.parametrize("model_type", ["bamba", "jamba"])
def test_what_a_user_has_switched_on_is_off_in_the_check_too(model_type, change):
    """transformers drops the cache of a layer that it recomputes itself."""
    model = build(model_type)
    sequences = batch([20, 3], vocab_size=VOCAB_SIZE)
    loss = reference_loss(model, sequences)
    truth = take_grads(model)
    change(model)
    result = furlong.forward_backward(model, sequences, furlong.ChunkOptions(size=8))
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert total_relative_error(take_grads(model), truth) < 1e-6


def test_a_mixer_with_a_forward_of_its_own_is_refused():
    class Mixer(nn.Module):
        def forward(self, x):
            return x

    mixer = Mixer()
    mixer.forward = lambda x: x + 1
    with pytest.raises(UnsupportedModelError, match="put into this instance"):
        mixer_forward(mixer, Current())


def test_the_model_is_as_it_was_after_an_error(monkeypatch):
    model, sequences = build("lfm2"), batch([20, 3], vocab_size=VOCAB_SIZE)
    engine, options = furlong.Engine(model), furlong.ChunkOptions(size=8)
    loss = engine.forward_backward(sequences, options).loss
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(StateStore, "read", lambda *_: 1 / 0)
        engine.forward_backward(sequences, options)
    assert not any("forward" in vars(module) for module in model.modules())
    assert engine.forward_backward(sequences, options).loss == loss


def through_its_parent(plain):
    """Its own code calls no scan, so that no door stands in it."""

    def forward(self, *args, **kwargs):
        return plain(self, *args, **kwargs)

    return forward


def decorated(plain):
    """Its code is told from what surrounds it, which slices do not run."""

    @wraps(plain)
    def forward(self, *args, **kwargs):
        return 1.1 * plain(self, *args, **kwargs)

    return forward


@pytest.mark.parametrize("change", [through_its_parent, decorated])
def test_a_mixer_that_is_more_than_its_code_is_refused(change):
    model = build("bamba")
    mixer = HFDecoder(model).probed.mixers[-1].module
    plain = type(mixer)
    mixer.__class__ = type("Changed", (plain,), {"forward": change(plain.forward)})
    with pytest.raises(UnsupportedModelError, match=r"than whole|without the state"):
        furlong.forward_backward(model, batch([20, 3], vocab_size=VOCAB_SIZE))


def test_a_scan_begins_with_its_state_though_the_mixer_does_not_ask_for_it(monkeypatch):
    """To transformers 5.20 mixers look into the layers of the cache, where they find nothing."""
    model, sequences = build("falcon_h1"), batch([20, 3], vocab_size=VOCAB_SIZE)
    reference_loss(model, sequences)
    truth = take_grads(model)
    monkeypatch.setattr(SliceCache, "get_recurrent_state", lambda *_, **__: None)
    furlong.forward_backward(model, sequences, furlong.ChunkOptions(size=8))
    assert total_relative_error(take_grads(model), truth) < 1e-6


@pytest.mark.parametrize(
    ("model_type", "place", "name", "other"),
    [
        ("qwen3_next", mixers, "_INITIAL", ("start_state",)),
        ("minimax", SliceCache, "get_linear_cache", lambda *_: None),
    ],
)
def test_a_state_that_enters_is_used_or_refused(model_type, place, name, other, monkeypatch):
    """Other releases may call a scan's argument otherwise, or a method of the cache."""
    model = build(model_type, wide=False)
    monkeypatch.setattr(place, name, other)
    with pytest.raises(UnsupportedModelError) as refused:
        furlong.forward_backward(
            model, batch([17], vocab_size=VOCAB_SIZE), furlong.ChunkOptions(size=1)
        )
    assert "forward" in refused.value.source


def test_a_layer_that_moves_other_tokens_unseen_is_refused():
    model = build("nemotron_h")
    layer = model.model.layers[3]
    plain = layer.mixer.forward
    layer.mixer.forward = lambda x: plain(x).cumsum(1)
    with pytest.raises(UnsupportedModelError, match="other hidden states in chunks"):
        furlong.forward_backward(model, batch([20, 3], vocab_size=VOCAB_SIZE))


def test_whole_slices_of_similar_lengths_are_called_together():
    lens = (1, 5, 6, 7, 40, 63, 64, 100, 128, 190)
    parts = [
        SliceRows(i, slice(start, start + n), continues=i == 2, is_continued=i == 5)
        for i, (n, start) in enumerate(zip(lens, accumulate(lens, initial=0), strict=False))
    ]
    batches = in_batches(parts)
    assert sorted(part.index for batch in batches for part in batch) == list(range(len(lens)))
    for together in batches:
        own = [lens[part.index] for part in together]
        assert len(own) * max(own) < 2 * sum(own)
        assert len(together) == 1 or not any(p.continues or p.is_continued for p in together)
    assert [5, 7] in [[lens[part.index] for part in batch] for batch in batches]


@pytest.mark.parametrize("model_type", ["zamba", "zamba2"])
def test_a_decoder_that_reads_its_embeddings_late_is_refused_in_stages(model_type, monkeypatch):
    model = build(model_type)
    sequences = batch([9], vocab_size=VOCAB_SIZE)
    in_stages = furlong.ChunkOptions(size=8, order="layer-first", stage_layers=2)
    with pytest.raises(UnsupportedModelError, match="adds the original embeddings again"):
        furlong.forward_backward(model, sequences, in_stages)
    monkeypatch.setattr("furlong.models.decoder.family_of", lambda _: Family())
    with pytest.raises(UnsupportedModelError, match="cut between any two layers"):
        furlong.forward_backward(model.float(), sequences, in_stages)


def test_a_little_that_passes_by_the_layers_is_seen_at_cuts():
    model = build_decoder("llama", torch.float32)
    seen = {}

    def read(module, args, output):
        return output + 1e-4 * seen["x"] if seen["x"].shape == output.shape else output

    model.model.embed_tokens.register_forward_hook(lambda *given: seen.update(x=given[-1]))
    model.model.layers[2].register_forward_hook(read)
    sequences = batch([9])
    furlong.forward_backward(model, sequences, furlong.ChunkOptions(size=8))
    with pytest.raises(UnsupportedModelError, match="in stages"):
        options = furlong.ChunkOptions(size=8, order="layer-first", stage_layers=1)
        furlong.forward_backward(model, sequences, options)


def test_sequences_that_branch_are_refused():
    model = build("lfm2")
    plan = plan_on_device(
        [sum(PAIR.lens)], furlong.ChunkOptions(size=16), num_layers=4, forks=forks_of(PAIR)
    )
    with pytest.raises(PlanError, match="whose state goes on to one piece only"):
        furlong.Engine(model).run(plan, [PAIR.joined()])

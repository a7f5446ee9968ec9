"""`forward_backward` and `Engine`: what they keep, what they follow."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from helpers.batches import batch
from helpers.tiny_families import VOCAB_SIZE, build, build_other

import furlong
from furlong.errors import DataError, UnsupportedModelError
from furlong.kv.pools import Storage
from furlong.models.decoder import HFDecoder
from furlong.runtime import session
from furlong.testing import reference_loss, take_grads, worst_relative_error

OPTIONS = furlong.ChunkOptions(size=8)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The self-checks that run from here on."""
    checks: list[Any] = []
    plain = session.self_check
    monkeypatch.setattr(
        session, "self_check", lambda *given: (checks.append(given), plain(*given))[1]
    )
    return checks


def assert_right(engine: furlong.Engine, model: Any, vocab_size: int = VOCAB_SIZE) -> None:
    sequences = batch([29, 4], vocab_size=vocab_size)
    loss = reference_loss(model, sequences)
    truth = take_grads(model)
    assert engine.forward_backward(sequences, OPTIONS).loss == pytest.approx(loss, rel=1e-12)
    assert worst_relative_error(take_grads(model), truth) <= 1e-12


def test_calls_on_one_model_share_buffers_and_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = counted(monkeypatch)
    model = build("llama")
    for _ in range(3):
        furlong.forward_backward(model, batch([29]), OPTIONS)
    assert len(checks) == 1
    assert furlong.Engine(model)._session.state.pools is furlong.Engine(model)._session.state.pools


def test_a_forgotten_model_is_freed() -> None:
    model = build("llama")
    furlong.forward_backward(model, batch([29]), OPTIONS)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_copy_of_a_model_is_checked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = counted(monkeypatch)
    model = build("llama")
    furlong.Engine(model)
    twin = copy.deepcopy(model)
    furlong.Engine(twin)
    assert len(checks) == 2


def test_embeddings_resized_after_the_engine_was_made() -> None:
    model = build("llama")
    engine = furlong.Engine(model)
    assert_right(engine, model)
    model.resize_token_embeddings(VOCAB_SIZE + 8, mean_resizing=False)
    assert_right(engine, model, VOCAB_SIZE + 8)


def test_adapters_added_after_the_engine_was_made() -> None:
    model = build("llama")
    engine = furlong.Engine(model)
    assert_right(engine, model)
    config = peft.LoraConfig(r=4, target_modules=["lm_head", "q_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).double()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert_right(engine, model)


@pytest.mark.parametrize("change", ["a hook", "a forward", "a backward hook"])
def test_what_is_put_into_a_checked_model_is_checked(change: str) -> None:
    """Also in the place of another one that was checked."""
    model = build("llama")
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    if change == "a hook":
        handle = mlp.register_forward_hook(lambda module, inputs, out: 2 * out)
    elif change == "a forward":
        mlp.forward = lambda x: 2 * plain(x)
    engine = furlong.Engine(model)
    if change == "a hook":
        handle.remove()
        handle = mlp.register_forward_hook(lambda module, inputs, out: out + out.roll(1, dims=1))
    elif change == "a backward hook":
        handle = model.lm_head.register_full_backward_hook(lambda *_: None)
    else:
        mlp.forward = lambda x: plain(x) + plain(x).roll(1, dims=1)
    with pytest.raises(UnsupportedModelError, match=r"in chunks than whole|has a backward hook"):
        engine.forward_backward(batch([29]), OPTIONS)
    if change == "a forward":
        del mlp.forward
    else:
        handle.remove()
    assert_right(engine, model)


@pytest.mark.parametrize("change", ["config", "dtype", "module", "compute dtype"])
def test_what_the_check_depends_on_is_checked_again(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = counted(monkeypatch)
    model = build("llama", torch.float32)
    engine = furlong.Engine(model)
    engine.forward_backward(batch([29]), OPTIONS)
    assert len(checks) == 1
    match change:
        case "config":
            model.config.rms_norm_eps = 1e-3
        case "dtype":
            model.double()
        case "module":
            model.model.layers[1].mlp.act_fn = torch.nn.GELU()
        case "compute dtype":
            engine = furlong.Engine(model, compute_dtype=torch.bfloat16)
    engine.forward_backward(batch([29]), OPTIONS)
    assert len(checks) == 2


def test_a_config_that_became_inexact_is_refused() -> None:
    model = build_other("jetmoe")
    engine = furlong.Engine(model)
    model.config.output_router_logits = True
    with pytest.raises(UnsupportedModelError, match="router loss"):
        engine.forward_backward(batch([29]), OPTIONS)


def test_return_dict_false_changes_nothing() -> None:
    model = build("llama")
    truth = furlong.forward_backward(model, batch([29]), OPTIONS).loss
    model.config.return_dict = False
    assert furlong.forward_backward(model, batch([29]), OPTIONS).loss == truth
    assert model.config.return_dict is False


def test_the_default_device_of_torch_changes_nothing() -> None:
    model = build("llama")
    truth = furlong.forward_backward(model, batch([29, 4]), OPTIONS).loss
    sequences = batch([29, 4])
    fresh = build("llama")
    torch.set_default_device("meta")
    try:
        given = furlong.forward_backward(fresh, sequences, OPTIONS)
        evaluated = furlong.forward_backward(fresh, sequences, OPTIONS, backward=False)
        values = furlong.Engine(fresh).token_values(sequences, OPTIONS)
        values[0].sum().backward()
    finally:
        torch.set_default_device(None)
    assert given.loss == truth and evaluated.token_losses[0].device.type == "cpu"
    assert values[0].device.type == "cpu"


def test_a_sequence_beyond_max_seq_len_is_refused() -> None:
    """longrope would have chosen its factors for another length."""
    model = build("llama")
    with pytest.raises(DataError, match=r"sequence 1 of 61 tokens[\s\S]*at most 60"):
        furlong.forward_backward(model, batch([9, 61]), OPTIONS, max_seq_len=60)


def test_longrope_of_each_layer_type_is_pinned() -> None:
    longrope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 16, "factor": 4.0,
    }  # fmt: skip
    model = build(
        "gemma3_text", max_position_embeddings=64,
        rope_parameters={
            "full_attention": longrope,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )  # fmt: skip
    assert isinstance(model, transformers.PreTrainedModel)
    sequences = batch([40])
    loss = reference_loss(model, sequences)
    truth = take_grads(model)
    result = furlong.forward_backward(model, sequences, OPTIONS, max_seq_len=40)
    assert result.loss == pytest.approx(loss, rel=2e-6)
    assert worst_relative_error(take_grads(model), truth) <= 2e-6
    assert reference_loss(model, sequences, backward=False) == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_a_sampled_step_draws_the_chunks_that_have_labels(seed: int) -> None:
    """The engine finds them in the sequences: at this rate no other chunk is ever drawn."""
    (sequence,) = batch([61])
    sequence["labels"][:-5] = -100  # of the last chunk and of the token before it
    sampling = furlong.Sampling(rate=1e-6, seed=seed)
    options = furlong.ChunkOptions(size=16, sample=sampling)
    result = furlong.forward_backward(build("llama"), [sequence], options)
    assert result.plan is not None
    (chunk,) = result.plan.trained
    assert result.plan.chunks[chunk].slices[0].stop == 61
    assert result.loss > 0


def test_a_closed_engine_gives_back_and_takes_anew(tmp_path: Path) -> None:
    model, sequences = build("llama"), batch([29, 4])
    engine = furlong.Engine(model, storage=Storage(disk_dir=tmp_path))
    options = furlong.ChunkOptions(size=8, keep="attention", offload="disk")
    values = engine.token_values(sequences, options)
    expected = engine.forward_backward(sequences, options).loss
    truth = take_grads(model)
    kept = engine._session.state
    before = len(list(Path("/proc/self/fd").iterdir()))
    engine.close()
    assert not kept.opened.arena.pooled_bytes
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 1  # the file; values have another
    sum(own.sum() for own in values).backward()
    take_grads(model)
    assert engine.forward_backward(sequences, options).loss == expected
    assert worst_relative_error(take_grads(model), truth) == 0


def test_an_adapter_outlives_a_change_of_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make one is to search the model for recurrent layers, by a forward through all of it."""
    made: list[object] = []

    class Counted(HFDecoder):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(None)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(session, "HFDecoder", Counted)
    model = build("llama", attention_dropout=0.1).eval()
    engine, options = furlong.Engine(model), furlong.ChunkOptions(size=8)
    with pytest.raises(UnsupportedModelError, match="attention dropout"):
        model.train()
        engine.forward_backward(batch([9]), options)
    model.config.attention_dropout = 0.0
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    del made[:]
    for training in (True, False, True, False):
        model.train(training)
        engine.forward_backward(batch([9]), options)
    assert len(made) == 1


def test_a_kernel_that_is_not_installed_is_named_with_what_to_do() -> None:
    model = build("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match=r'set_attn_implementation\("sdpa"\)'):
        furlong.forward_backward(model, batch([9]), furlong.ChunkOptions(size=8))

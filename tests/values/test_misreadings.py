"""What looks like a use of token values or of the door, and would be computed as something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from helpers.batches import batch
from helpers.tiny_families import build
from torch import Tensor

import furlong
from furlong.errors import ConfigError, DataError, UnsupportedModelError, UserError
from furlong.testing import take_grads, worst_relative_error

OPTIONS = furlong.ChunkOptions(size=8, keep="kv")
IDS = torch.randint(3, 96, (2, 19), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 19, [1] * 12 + [0] * 7])


@pytest.fixture(scope="module")
def engine() -> furlong.Engine:
    return furlong.Engine(build("llama"))


def of(**extras: Tensor) -> list[dict[str, Tensor]]:
    return [{"input_ids": IDS[0], **extras}]


@pytest.mark.parametrize("name", ["attention_mask", "position_ids", "token_type_ids"])
def test_what_collators_make_is_no_extra(engine: furlong.Engine, name: str) -> None:
    with pytest.raises(DataError, match=name):
        engine.token_values(of(**{name: MASK[0]}), OPTIONS)


def test_weights_are_one_per_token(engine: furlong.Engine) -> None:
    with pytest.raises(DataError, match=r"token_weights float32 \(19, 1\)"):
        engine.forward_backward(of(labels=IDS[0], token_weights=torch.ones(19, 1)), OPTIONS)


@pytest.mark.parametrize("fn", [furlong.values.log_prob, furlong.values.top_k_kl, "log_prob"])
def test_a_function_that_was_not_called(engine: furlong.Engine, fn: Any) -> None:
    with pytest.raises(ConfigError, match="fn "):
        engine.token_values(of(), OPTIONS, fn)
    with pytest.raises(ConfigError, match="token_loss "):
        engine.forward_backward(of(), OPTIONS, token_loss=fn)


def test_values_that_are_no_numbers_are_no_changed_model(engine: furlong.Engine) -> None:
    """Their gradient is what the caller's loss makes of them."""
    log_prob, model = furlong.values.log_prob(), engine.model.model

    def filtered(logits: Tensor, labels: Tensor, extras: Any) -> Tensor:
        return log_prob(logits, labels, extras).masked_fill(labels % 3 == 0, -torch.inf)

    some = IDS[0].masked_fill(IDS[0] % 3 == 0, -100)
    engine.token_values(of(labels=some), OPTIONS)[0].sum().backward()
    truth = take_grads(model)
    (own,) = engine.token_values(of(), OPTIONS, filtered)
    own[own.isfinite()].sum().backward()
    assert worst_relative_error(take_grads(model), truth) <= 1e-12


def tail(dtype: torch.dtype, rest: float) -> tuple[Tensor, Tensor]:
    """The divergence of a model of which the best ids lack little of 1, and its gradient."""
    torch.manual_seed(0)
    logits = torch.randn(1, 1000, dtype=torch.float64)
    logits[:, :8] += 5 - torch.tensor(rest).log()
    logits = logits.to(dtype).requires_grad_()
    extras = {
        "teacher_ids": torch.arange(8)[None],
        "teacher_log_probs": torch.full((1, 8), 0.1249, dtype=dtype).log(),
    }
    value = furlong.values.top_k_kl()(logits, torch.zeros(1, dtype=torch.long), extras)
    (grad,) = torch.autograd.grad(value.sum(), logits)
    return value.detach(), grad


@pytest.mark.parametrize("rest", [1e-5, 1e-7, 1e-9])
def test_the_rest_of_a_confident_model_is_no_rounding(rest: float) -> None:
    value, grad = tail(torch.float32, rest)
    true, true_grad = tail(torch.float64, rest)
    assert value.item() == pytest.approx(true.item(), rel=1e-4)
    assert float((grad[:, 8:] - true_grad[:, 8:]).norm() / true_grad[:, 8:].norm()) <= 1e-4


def test_a_teacher_that_rules_ids_out_and_one_that_knows_all() -> None:
    kl, labels = furlong.values.top_k_kl(), torch.zeros(2, dtype=torch.long)
    logits = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    known = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    everything = {"teacher_ids": torch.arange(6).expand(2, -1), "teacher_log_probs": known}
    found = kl(logits, labels, everything)
    torch.testing.assert_close(found, (known.exp() * (known - logits.log_softmax(-1))).sum(-1))
    one = torch.tensor([[0.0, -torch.inf]] * 2, dtype=torch.float64)
    ruled_out = {"teacher_ids": torch.tensor([[3, 1]] * 2), "teacher_log_probs": one}
    likely = kl(logits, labels, ruled_out)
    torch.testing.assert_close(likely, -logits.log_softmax(-1)[:, 3])
    (grad,) = torch.autograd.grad((found + likely).sum(), logits)
    assert bool(grad.isfinite().all())


def merge(model: Any) -> Callable[[], None]:
    model.merge_adapter()
    return model.unmerge_adapter  # type: ignore[no-any-return]


def disable(model: Any) -> Callable[[], None]:
    model.base_model.disable_adapter_layers()
    return model.base_model.enable_adapter_layers  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", [merge, disable])
def test_adapters_that_change_no_value_yet(change: Callable[[Any], Callable[[], None]]) -> None:
    """New adapters are zeros: without them hidden states are the same, and gradients are none."""
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules="all-linear"))
    engine = furlong.Engine(model)
    loss = engine.token_values(batch([19]), OPTIONS)[0].sum()
    undo = change(model)
    with pytest.raises(ConfigError, match="adapters are others"):
        loss.backward()
    undo()


@pytest.fixture(scope="module")
def chunked() -> Any:
    return furlong.chunked(build("llama"), OPTIONS)


@pytest.mark.parametrize("way", ["backward", "backward of inputs", "autograd.grad", "no_grad"])
@pytest.mark.parametrize("mask", [MASK, MASK.flip(1)], ids=["behind", "in front"])
def test_a_loss_of_padding_is_refused(chunked: Any, mask: Tensor, way: str) -> None:
    weights = list(chunked.parameters())
    with (
        torch.set_grad_enabled(way != "no_grad"),
        pytest.raises(DataError, match="what tokens of padding predict"),
    ):
        loss = chunked(input_ids=IDS, attention_mask=mask, labels=IDS).loss
        if way == "autograd.grad":
            torch.autograd.grad(loss, weights)
        else:
            loss.backward(inputs=weights if way == "backward of inputs" else None)
    assert all(p.grad is None for n, p in chunked.named_parameters() if "layers" in n)
    chunked.zero_grad()
    labels = IDS.masked_fill(mask == 0, -100)
    labels[1, int(mask[1].nonzero()[0])] = -100
    chunked(input_ids=IDS, attention_mask=mask, labels=labels).loss.backward()
    chunked.zero_grad()


def test_labels_of_padding_without_chunks(chunked: Any) -> None:
    """What goes the old way has the model's own values at padding."""
    call = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}
    chunked.eval()
    with torch.no_grad():
        found = chunked(**call, use_cache=True).loss
        for unsaid in ({}, {"use_cache": False}):
            with pytest.raises(DataError, match="what tokens of padding predict"):
                chunked(**call, **unsaid)
        furlong.unchunked(chunked)
        assert found == chunked(**call).loss == chunked(**call, use_cache=False).loss
    furlong.chunked(chunked.train(), OPTIONS)


def test_a_head_that_trains_alone_reads_no_padding() -> None:
    model = furlong.chunked(build("llama").requires_grad_(False), OPTIONS)
    head = torch.nn.Linear(32, 1, bias=False).double()
    states = model.get_decoder()(input_ids=IDS, attention_mask=MASK, use_cache=False)[0]
    with pytest.raises(DataError, match="what tokens of padding predict"):
        head(states).sum().backward()


PROMPTS = {
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p": peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=8
    ),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_that_are_trained_later_are_refused(kind: str) -> None:
    """Of the model itself nothing requires a gradient."""
    model: Any = peft.get_peft_model(
        furlong.chunked(build("llama"), OPTIONS), PROMPTS[kind]
    ).train()
    with pytest.raises(ConfigError) as error:
        model(input_ids=IDS, labels=IDS)
    assert "gradient" in error.value.given and "unchunked(model)" in error.value.change
    furlong.unchunked(model)(input_ids=IDS, labels=IDS).loss.backward()


@pytest.mark.parametrize("where", ["decoder", "layer", "embeddings"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_vector_that_a_hook_adds(where: str, frozen: bool) -> None:
    """A hook on the decoder itself runs once on the whole batch, not once more on each chunk; a
    vector that alone is trained is no parameter of the model."""
    found = []
    for chunks in (False, True):
        model: Any = build("llama").requires_grad_(not frozen)
        vector = torch.full((32,), 0.1, dtype=torch.float64, requires_grad=True)

        def add(_: Any, __: Any, output: Any, vector: Tensor = vector) -> Any:
            if hasattr(output, "last_hidden_state"):
                output.last_hidden_state = output.last_hidden_state * 2 + vector
                return output
            return output * 2 + vector

        places = {"decoder": model.model, "layer": model.model.layers[0].mlp}
        places.get(where, model.get_input_embeddings()).register_forward_hook(add)
        if chunks:
            furlong.chunked(model, OPTIONS)
        model(input_ids=IDS, use_cache=False).logits.pow(2).sum().backward()
        assert vector.grad is not None
        found.append({"vector": vector.grad} | take_grads(model))
    assert worst_relative_error(found[1], found[0]) <= 1e-12


def test_gradients_of_gradients_are_refused(chunked: Any) -> None:
    loss = chunked(input_ids=IDS, labels=IDS).loss
    with pytest.raises(ConfigError, match="create_graph"):
        torch.autograd.grad(loss, list(chunked.parameters()), create_graph=True)
    weights = {name: p.detach() for name, p in chunked.named_parameters()}

    def of(weights: dict[str, Tensor]) -> Tensor:
        call = {"input_ids": IDS, "labels": IDS}
        return torch.func.functional_call(chunked, weights, (), call).loss  # type: ignore[no-any-return]

    with pytest.raises(ConfigError, match=r"torch\.func"):
        torch.func.grad(of)(weights)
    with pytest.raises(ConfigError, match=r"load_state_dict"):
        of({name: x.clone().requires_grad_() for name, x in weights.items()}).backward()


def test_noise_on_embeddings_is_refused(chunked: Any) -> None:
    embeddings = chunked.get_input_embeddings()
    embeddings.neftune_noise_alpha = 5.0
    with pytest.raises(UserError, match="neftune_noise_alpha"):
        chunked(input_ids=IDS)
    del embeddings.neftune_noise_alpha


@pytest.mark.parametrize("of_model", [furlong.chunked, furlong.unchunked])
def test_a_module_without_a_decoder_is_refused(of_model: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="no get_decoder"):
        of_model(torch.nn.Linear(2, 2))

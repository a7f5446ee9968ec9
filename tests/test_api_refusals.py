"""`forward_backward` and `Engine`: what they refuse, and what they note."""

from __future__ import annotations

from typing import Any

import numpy as np
import peft
import pytest
import torch
from helpers.batches import batch
from helpers.tiny_families import build

import furlong
from furlong.errors import ConfigError, DataError, UnsupportedModelError

OPTIONS = furlong.ChunkOptions(size=8)


@pytest.fixture(scope="module")
def whole() -> Any:
    """A model of which nothing is changed."""
    return build("llama")


def test_inference_mode_is_refused_and_leaves_nothing_behind() -> None:
    model = build("llama")
    with torch.inference_mode(), pytest.raises(ConfigError, match=r"use torch\.no_grad"):
        furlong.forward_backward(model, batch([29]), OPTIONS, backward=False)
    with torch.no_grad():
        furlong.forward_backward(model, batch([29]), OPTIONS, backward=False)
    assert furlong.forward_backward(model, batch([29]), OPTIONS).loss > 0


def test_autocast_to_another_dtype_says_what_to_pass() -> None:
    model = build("llama", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ConfigError, match=r"compute_dtype=torch\.bfloat16"):
            furlong.forward_backward(model, batch([29]), OPTIONS)
        inside = furlong.forward_backward(
            model, batch([29]), OPTIONS, compute_dtype=torch.bfloat16
        ).loss
        assert torch.is_autocast_enabled("cpu")
    outside = furlong.forward_backward(
        model, batch([29]), OPTIONS, compute_dtype=torch.bfloat16
    ).loss
    assert inside == outside


def test_a_model_without_trainable_parameters_is_refused() -> None:
    model = build("llama").requires_grad_(False)
    with pytest.raises(ConfigError, match="without a parameter that requires a gradient"):
        furlong.forward_backward(model, batch([29]), OPTIONS)
    assert furlong.forward_backward(model, batch([29]), OPTIONS, backward=False).loss > 0


@pytest.mark.parametrize(
    "given", [0, -3, 2.7, True, "28", float("nan"), float("inf"), 10**400,
              torch.tensor([28, 2]), torch.tensor(28.5)],
)  # fmt: skip
def test_a_divisor_that_is_no_count_is_named(whole: Any, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_valid_tokens .*[\s\S]*a whole number"):
        furlong.forward_backward(whole, batch([29]), OPTIONS, num_valid_tokens=given)
    assert all(parameter.grad is None for parameter in whole.parameters())


@pytest.mark.parametrize(
    ("name", "mend"),
    [("narrow ids", "input_ids.long()"), ("no labels", "add labels"), ("no tokens", "empty")],
)
def test_bad_sequences_are_mended_by_what_is_said(whole: Any, name: str, mend: str) -> None:
    with pytest.raises(DataError) as caught:
        furlong.forward_backward(whole, BAD[name][0], OPTIONS)
    assert mend in caught.value.change


@pytest.mark.parametrize("given", [28, torch.tensor(28), np.int64(28)])
def test_a_divisor_may_be_any_whole_number(whole: Any, given: Any) -> None:
    losses = [
        furlong.forward_backward(whole, batch([29]), OPTIONS, number, backward=False).loss
        for number in (None, given)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("given", [0, -1, 60.5, "60", True])
def test_a_max_seq_len_that_is_no_length_is_named(whole: Any, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_seq_len .*[\s\S]*a whole number"):
        furlong.Engine(whole, max_seq_len=given)


@pytest.mark.parametrize("given", [torch.int64, torch.bool, torch.complex64, "bfloat16", 16])
def test_a_compute_dtype_that_is_no_float_is_named(whole: Any, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"compute_dtype .*[\s\S]*torch\.bfloat16"):
        furlong.Engine(whole, compute_dtype=given)


@pytest.mark.parametrize("weights", [torch.float16, torch.float32])
def test_gradients_in_float16_are_refused_unless_the_caller_scales_them(weights: Any) -> None:
    model = build("llama", weights)
    narrow = None if weights == torch.float16 else torch.float16
    engine = furlong.Engine(model, compute_dtype=narrow)
    with pytest.raises(ConfigError, match="float16 needs loss scaling"):
        engine.forward_backward(batch([29]), OPTIONS)
    with pytest.raises(ConfigError, match="float16 needs loss scaling"):
        engine.run(engine.plan([29], OPTIONS), batch([29]))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert engine.forward_backward(batch([29]), OPTIONS, backward=False).loss > 0
    (values,) = engine.token_values(batch([29]), OPTIONS)
    (-1024 * values.sum()).backward()
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_a_call_from_within_a_call_is_named() -> None:
    model = build("llama")
    engine = furlong.Engine(model)
    model.model.layers[1].register_forward_hook(
        lambda *_: engine.forward_backward(batch([5]), OPTIONS) and None
    )
    with pytest.raises(ConfigError, match="a hook of the model"):
        engine.forward_backward(batch([29]), OPTIONS)


class Norm(torch.nn.BatchNorm1d):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.transpose(1, 2)).transpose(1, 2)


class Counting(torch.nn.Linear):
    """Puts another tensor into the place of its buffer."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, bias=False, dtype=torch.float64)
        self.register_buffer("num_calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_calls = self.num_calls + 1
        return super().forward(x)


@pytest.mark.parametrize("kind", ["spectral norm", "batch norm", "counter"])
def test_modules_that_a_forward_changes_are_refused(kind: str) -> None:
    """Each chunk would change them, and the next one would compute with another model."""
    model = build("llama")
    if kind == "batch norm":
        model.model.layers[1].post_attention_layernorm = Norm(32).double()
    elif kind == "counter":
        up = model.model.layers[1].mlp.up_proj
        model.model.layers[1].mlp.up_proj = Counting(up.in_features, up.out_features)
    else:
        torch.nn.utils.parametrizations.spectral_norm(model.model.layers[1].mlp.up_proj)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(UnsupportedModelError, match=r"changes model\.layers\.1"):
        furlong.forward_backward(model, batch([29]), OPTIONS)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert furlong.forward_backward(model.eval(), batch([29]), OPTIONS).loss > 0


def test_what_differs_in_train_mode_alone_is_refused() -> None:
    model = build("llama")
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x) + x.roll(1, dims=1) if mlp.training else plain(x)
    engine = furlong.Engine(model.eval())
    model.train()
    with pytest.raises(UnsupportedModelError, match="other hidden states in chunks"):
        engine.forward_backward(batch([29]), OPTIONS)
    model.eval()
    assert engine.forward_backward(batch([29]), OPTIONS).loss > 0


def test_buffers_of_nan_are_no_changed_ones() -> None:
    model = build("llama")
    model.register_buffer("statistics", torch.tensor([float("nan"), 1.0]))
    assert furlong.forward_backward(model, batch([29]), OPTIONS).loss > 0


@pytest.mark.parametrize("what", ["merged adapters", "a parameter of no module"])
def test_trained_parameters_that_no_forward_uses_are_refused(what: str) -> None:
    """Autograd raises for such a loss; without a word nothing would be trained."""
    model: Any = build("llama").requires_grad_(False)
    if what == "merged adapters":
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config).double()
        model.merge_adapter()
    else:
        model.register_parameter("unused", torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(ConfigError, match="depends on no parameter that requires"):
        furlong.forward_backward(model, batch([29]), OPTIONS)
    assert furlong.forward_backward(model, batch([29]), OPTIONS, backward=False).loss > 0


def test_a_head_without_one_weight_is_refused() -> None:
    model = build("llama")
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 96)).double()
    with pytest.raises(UnsupportedModelError, match="head without a weight of shape"):
        furlong.Engine(model)


IDS = torch.arange(10, 20)
BAD: dict[str, tuple[Any, str]] = {
    "a mask": (
        [{"input_ids": IDS, "labels": IDS, "attention_mask": IDS}],
        "sequence 0 with attention_mask",
    ),
    "an id beyond the vocabulary": (
        [{"input_ids": IDS + 90, "labels": IDS}], "token id 109",
    ),
    "a negative id": ([{"input_ids": IDS - 11, "labels": IDS}], "token id -1"),
    "a label beyond the vocabulary": (
        [{"input_ids": IDS, "labels": IDS + 5000}], "label 5011",
    ),
    "a negative label": ([{"input_ids": IDS, "labels": IDS - 15}], "label -4"),
    "a dict": ({"input_ids": IDS, "labels": IDS}, "sequences of type dict"),
    "a tensor": (IDS, "sequences of type Tensor"),
    "a list of tensors": ([IDS], "sequence 0 of type Tensor"),
    "no labels": ([{"input_ids": IDS}], "labels of type NoneType"),
    "fewer labels": ([{"input_ids": IDS, "labels": IDS[:4]}], "10 input_ids and 4 labels"),
    "narrow ids": ([{"input_ids": IDS.int(), "labels": IDS}], "int32"),
    "no tokens": ([{"input_ids": IDS[:0], "labels": IDS[:0]}], r"\(0,\)"),
    "a batch axis": ([{"input_ids": IDS[None], "labels": IDS[None]}], r"int64 \(1, 10\)"),
    "ids without values": ([{"input_ids": IDS.to("meta"), "labels": IDS}], "on meta"),
    "labels without values": ([{"input_ids": IDS, "labels": IDS.to("meta")}], "on meta"),
    "sparse ids": ([{"input_ids": IDS.to_sparse(), "labels": IDS}], "sparse_coo"),
    "more tokens than positions": (
        [{"input_ids": IDS.repeat(26), "labels": IDS.repeat(26)}], "260 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_sequences_are_named(whole: Any, name: str) -> None:
    sequences, told = BAD[name]
    with pytest.raises(DataError, match=told):
        furlong.forward_backward(whole, sequences, OPTIONS)
    assert all(parameter.grad is None for parameter in whole.parameters())


@pytest.mark.parametrize(
    ("name", "value"),
    [("cpu_bytes", "1GiB"), ("cpu_bytes", -1), ("disk_bytes", 2.5)],
)
def test_storage_that_is_none_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} = "):
        furlong.Storage(**{name: value})


def test_options_of_another_type_are_named(whole: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)of type dict.*ChunkOptions"):
        furlong.forward_backward(whole, batch([9]), {"size": 16})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"(?s)of type int.*Storage"):
        furlong.chunked(whole, OPTIONS, storage=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"(?s)of type str.*ProcessGroup"):
        furlong.Engine(whole, process_group="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"(?s)of type int.*RunConfig"):
        furlong.Trainer(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("hybrid", ["no", 0, None])
def test_hybrid_is_a_boolean(hybrid: Any) -> None:
    with pytest.raises(ConfigError, match=r"chunks\.hybrid"):
        furlong.ChunkOptions(hybrid=hybrid)

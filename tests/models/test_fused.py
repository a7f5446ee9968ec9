"""Modules with fewer kernels: those that compute the same, checked where they are put in."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from helpers.batches import batch
from helpers.tiny_families import build
from torch import nn

import furlong
from furlong.config.schema import ModelConfig
from furlong.models import fused
from furlong.models.decoder import HFDecoder
from furlong.testing import reference_loss, take_grads, worst_relative_error
from furlong.train.build import with_kernels as as_run

OPTIONS = furlong.ChunkOptions(size=8, keep="attention", num_retained=0)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))


def gradients(model: Any) -> tuple[Any, Any]:
    """In chunks, and of the model's own forward."""
    sequences = batch([29, 4])
    furlong.forward_backward(model, sequences, OPTIONS)
    given = take_grads(model)
    reference_loss(model, sequences)
    return given, take_grads(model)


@pytest.mark.parametrize(
    ("family", "num_norms"), [("qwen3", 13), ("gemma3_text", 19), ("gpt_neox", 0)]
)
@pytest.mark.few(2)
def test_norms_are_asked_and_taken(family: str, num_norms: int) -> None:
    """Also Gemma's, whose weight is 1 + weight; a layer norm is none."""
    model = build(family, torch.float32)
    assert len(HFDecoder(model).fused) == num_norms
    assert worst_relative_error(*gradients(model)) <= 1e-4
    assert not any("forward" in vars(m) for m in model.modules()), "as it was"


class Other(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight, self.eps, self.what = nn.Parameter(torch.ones(64)), 1e-6, what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "centred":
            x = x - x.mean(-1, keepdim=True)
        if self.what == "drawing" and self.training:
            x = nn.functional.dropout(x, 0.1)
        root = torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps * (self.what != "outside"))
        y = x / (root + self.eps * (self.what == "outside"))
        return y * (self.weight**2 if self.what == "squared" else self.weight)


@pytest.mark.parametrize(
    ("what", "taken"),
    [("", 2), ("centred", 0), ("squared", 0), ("drawing", 0), ("outside", 0), ("scaled", 0)],
)
def test_what_computes_something_else_is_left(what: str, taken: int) -> None:
    """Whatever its weights are: a square of ones is one."""
    modules = nn.ModuleList([Other(what), Other(what)])
    if what == "scaled":  # by what no kind can be told by
        for module in modules:
            module.scale = torch.tensor(1.0)  # type: ignore[assignment]
    assert len(fused.fused(modules, CPU, {})) == taken
    modules[0].forward = modules[0].forward  # type: ignore[method-assign]
    assert len(fused.fused(modules, CPU, {})) == taken // 2, "one of its own stays"


CPU = torch.device("cpu")
LORA = functools.partial(peft.LoraConfig, r=4, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("config", "products"),
    [(LORA(lora_alpha=7), 3), (LORA(use_dora=True), 0), (LORA(lora_bias=True), 0)],
)
def test_adapters_add_to_what_the_base_gives(
    config: Any, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variants of LoRA keep peft's forward. `products`: sums in place per chunk, layer, way."""
    model: Any = peft.get_peft_model(build("qwen2"), config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    called = []
    addmm = torch.Tensor.addmm_
    monkeypatch.setattr(
        torch.Tensor, "addmm_", lambda own, *a, **k: (called.append(1), addmm(own, *a, **k))[1]
    )
    assert worst_relative_error(*gradients(model)) <= 1e-12
    assert bool(called) == bool(products)


def test_a_check_that_fails_with_them_is_taken_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    norm: Any = model.model.layers[0].input_layernorm

    def wrong(base: nn.Module, *_: Any) -> list[Any]:
        return [(vars(norm), "forward", lambda x: type(norm).forward(norm, x) * 1.01)]

    monkeypatch.setattr("furlong.models.decoder.fused", wrong)
    with pytest.warns(UserWarning, match="keeps its own norms"):
        furlong.Engine(model)
    for _ in range(2):
        assert worst_relative_error(*gradients(model)) <= 1e-12, "from now on"
        model.eval()


@pytest.mark.parametrize(("kernels", "number"), [("auto", 7), ("none", 0)])
def test_a_run_may_keep_the_forward_of_its_modules(kernels: Any, number: int) -> None:
    model = build("llama", torch.float32)
    settings = ModelConfig(name="any", kernels=kernels)
    config: Any = SimpleNamespace(model=settings, data=SimpleNamespace(max_seq_len=8))
    assert as_run(config, model, CPU) is model
    assert len(HFDecoder(model).fused) == number

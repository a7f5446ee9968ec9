"""Kernels of other libraries in a run's model: obeyed by name, compared, or refused by name."""

from __future__ import annotations

import sys
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.batches import batch
from helpers.tiny_families import build
from transformers.models.llama import modeling_llama

import furlong
from furlong.config.schema import ModelConfig
from furlong.errors import ConfigError
from furlong.models.decoder import HFDecoder
from furlong.models.support import compiled_in_place
from furlong.testing import reference_loss, take_grads, worst_relative_error
from furlong.train.build import with_kernels
from furlong.train.kernels import put_kernels


def liger(monkeypatch: pytest.MonkeyPatch, factor: float | None) -> list[dict[str, Any]]:
    """A stand-in for the package, whose SwiGLU is times `factor`; None: it knows no model.

    Returns the arguments of its calls.
    """
    called: list[dict[str, Any]] = []

    def apply(model: Any, **named: Any) -> None:
        def swiglu(self: Any, x: Any) -> Any:
            return factor * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

        called.append(named)
        modeling_llama.LlamaMLP = swiglu
        for layer in model.model.layers if factor else ():
            layer.mlp.forward = MethodType(swiglu, layer.mlp)

    module = ModuleType("liger_kernel.transformers")
    module._apply_liger_kernel_to_instance = apply
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    return called


def test_kernels_that_agree_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    called = liger(monkeypatch, 1.0)
    model, sequences, written = build("llama"), batch([29, 4]), modeling_llama.LlamaMLP
    reference_loss(model, sequences)
    truth = take_grads(model)
    put_kernels(HFDecoder(model), "liger", torch.float64)
    assert model.training
    assert "forward" in vars(model.model.layers[0].mlp)
    assert modeling_llama.LlamaMLP is written, "later models are as they were"
    assert called == [dict.fromkeys(("rope", "cross_entropy", "fused_linear_cross_entropy"), False)]
    furlong.forward_backward(model, sequences, furlong.ChunkOptions(size=8))
    assert worst_relative_error(take_grads(model), truth) <= 1e-12


@pytest.mark.parametrize(
    ("kernels", "factor", "told"),
    [
        ("liger", 1.1, "gives other hidden states"),
        ("liger", None, "nothing for LlamaForCausalLM"),
        ("hub", None, "Kernels are not available"),
    ],
)
def test_others_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, kernels: Any, factor: float | None, told: str
) -> None:
    liger(monkeypatch, factor)
    model = build("llama")
    with pytest.raises(ConfigError, match=rf"model.kernels: {kernels}.*{told}"):
        put_kernels(HFDecoder(model), kernels, torch.float64)


def test_a_missing_library_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"fails: ModuleNotFoundError(.|\n)*liger-kernel, a GPU"):
        put_kernels(HFDecoder(build("llama")), "liger", torch.float64)


@pytest.mark.parametrize("compiled", [True, False])
def test_layers_are_compiled_where_the_run_says_so(compiled: bool) -> None:
    settings = ModelConfig(name="any", compile=compiled)
    model = build("llama")
    config: Any = SimpleNamespace(model=settings, data=SimpleNamespace(max_seq_len=8))
    assert with_kernels(config, model, torch.device("cpu")) is model
    assert len(compiled_in_place(model)) == 3 * compiled

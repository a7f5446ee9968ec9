"""Parameters that compute in another dtype: hooks, sums, and what stays in float32."""

from __future__ import annotations

import pytest
import torch
import transformers
from gradients import batch, take_grads
from tiny_families import VOCAB_SIZE, build
from torch import nn
from transformers import AutoModelForCausalLM

import furlong
from furlong.models.causal_lm import CausalLM
from furlong.runtime.precision import compute_parameters

OPTIONS = furlong.ChunkOptions(size=8)


@pytest.mark.parametrize(
    ("dtype", "compute_dtype"),
    [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None)],
)
def test_a_gradient_hook_sees_the_sum_once(
    dtype: torch.dtype, compute_dtype: torch.dtype | None
) -> None:
    model = build("llama", dtype)
    weight = model.model.layers[0].mlp.up_proj.weight
    furlong.forward_backward(model, batch([29]), OPTIONS, compute_dtype=compute_dtype)
    plain = take_grads(model)
    seen = []

    def keep_one_row(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad)
        return torch.zeros_like(grad).index_copy_(0, torch.tensor([3]), grad[3:4])

    weight.register_hook(keep_one_row)
    weight.grad = torch.ones_like(weight)
    furlong.forward_backward(model, batch([29]), OPTIONS, compute_dtype=compute_dtype)
    assert len(seen) == 1 and seen[0].dtype == dtype
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(seen[0].double(), plain[name])
    expected = torch.ones_like(weight).double()
    expected[3] += plain[name][3]
    grads = take_grads(model)
    assert torch.allclose(grads[name], expected, rtol=0, atol=2 * torch.finfo(dtype).eps * 2)
    assert all(torch.equal(grads[other], plain[other]) for other in plain if other != name)


def test_a_hook_that_fails_leaves_the_gradient_as_it_was() -> None:
    model = build("llama", torch.float32)
    weight = model.model.norm.weight
    weight.grad = torch.ones_like(weight)
    weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        furlong.forward_backward(model, batch([29]), OPTIONS)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert model.model.norm.weight is weight


def ernie() -> transformers.PreTrainedModel:
    config = transformers.Ernie4_5_MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, moe_num_experts=4,
        moe_k=2, moe_layer_start_index=0, moe_num_shared_experts=1, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().train()


def test_what_transformers_keeps_in_float32_computes_in_float32() -> None:
    model = ernie()
    adapter = CausalLM(model)
    assert adapter.stays_float32(torch.float64) == adapter.stays_float32(torch.float32) == []
    kept = adapter.stays_float32(torch.bfloat16)
    gate = model.model.layers[1].mlp.gate
    assert any(parameter is gate.weight for parameter in kept)
    with compute_parameters(model, torch.bfloat16, unchanged=kept):
        assert gate.weight.dtype == torch.float32
        assert model.model.layers[1].self_attn.q_proj.weight.dtype == torch.bfloat16
    dtypes = []
    handle = gate.register_forward_pre_hook(lambda m, i: dtypes.append(m.weight.dtype))
    furlong.forward_backward(model, batch([29]), OPTIONS, compute_dtype=torch.bfloat16)
    handle.remove()
    assert set(dtypes) == {torch.float32}
    assert gate.weight.grad is not None


def test_tied_parameters_are_one_leaf() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    with compute_parameters(model, torch.bfloat16):
        assert model[0].weight is model[1].weight and model[0].weight.dtype == torch.bfloat16
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert model[0].weight.grad is not None and model[0].weight.grad.dtype == torch.float32

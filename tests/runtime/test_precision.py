"""Parameters that compute in another dtype: hooks, sums, and what stays in float32."""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers.gradients import batch, take_grads, worst_relative_error
from helpers.tiny_families import VOCAB_SIZE, build
from torch import nn
from transformers import AutoModelForCausalLM

import furlong
from furlong.errors import ConfigError
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


WIDE = [
    (torch.bfloat16, torch.float32), (torch.float32, torch.float64), (torch.float64, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "compute_dtype"), WIDE)
def test_other_wide_dtypes_give_every_gradient(
    dtype: torch.dtype, compute_dtype: torch.dtype
) -> None:
    model = build("llama", dtype)
    furlong.forward_backward(model, batch([29]), OPTIONS, compute_dtype=compute_dtype)
    given = take_grads(model)
    furlong.forward_backward(model.to(compute_dtype), batch([29]), OPTIONS)
    rounding = max(torch.finfo(dtype).eps, torch.finfo(compute_dtype).eps)
    assert worst_relative_error(given, take_grads(model)) <= 100 * rounding


def test_a_hook_that_fails_leaves_the_gradient_as_it_was() -> None:
    model = build("llama", torch.float32)
    weight = model.model.norm.weight
    weight.grad = torch.ones_like(weight)
    weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        furlong.forward_backward(model, batch([29]), OPTIONS)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert model.model.norm.weight is weight


def test_a_hook_that_changes_a_rounded_gradient_in_place_is_heard() -> None:
    model = build("llama", torch.bfloat16)
    weight = model.model.norm.weight

    def clear(grad: torch.Tensor) -> None:
        grad.zero_()

    weight.register_hook(clear)
    furlong.forward_backward(model, batch([29]), OPTIONS)
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("given", [3, torch.ones(2)])
def test_a_hook_that_returns_no_gradient_is_named(dtype: torch.dtype, given: object) -> None:
    model = build("llama", dtype)
    model.model.norm.weight.register_hook(lambda grad: given)
    with pytest.raises(ConfigError, match=r"a hook on a gradient of shape \(32,\) that returned"):
        furlong.forward_backward(model, batch([29]), OPTIONS)
    assert model.model.norm.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_in_place(dtype: torch.dtype) -> None:
    """They may be views of one flat buffer, as optimizers and reducers make them."""
    model = build("llama", dtype)
    furlong.forward_backward(model, batch([29]), OPTIONS)
    plain = take_grads(model)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=dtype)
    start = 0
    for parameter in model.parameters():
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    model.model.norm.weight.register_hook(lambda grad: None)
    furlong.forward_backward(model, batch([29]), OPTIONS)
    assert torch.equal(flat.double(), torch.cat([grad.flatten() for grad in plain.values()]))


def test_a_failing_hook_leaves_gradients_of_others_as_they_were() -> None:
    model = build("llama", torch.bfloat16)
    buffers = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, buffer in zip(model.parameters(), buffers, strict=True):
        parameter.grad = buffer
    model.model.norm.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        furlong.forward_backward(model, batch([29]), OPTIONS)
    for parameter, buffer in zip(model.parameters(), buffers, strict=True):
        assert parameter.grad is buffer and bool((buffer == 1).all())


def test_sparse_gradients_are_added_to_dense_ones() -> None:
    model = build("llama", torch.bfloat16)
    embeddings = model.model.embed_tokens
    furlong.forward_backward(model, batch([29]), OPTIONS)
    plain = take_grads(model)["model.embed_tokens.weight"]
    embeddings.sparse = True
    for _ in range(2):  # the second one is added to a sparse one
        furlong.forward_backward(model, batch([29]), OPTIONS)
    twice = embeddings.weight.grad
    assert twice is not None and twice.is_sparse
    rounding = torch.finfo(torch.bfloat16).eps
    twice_plain = {"weight": 2 * plain}
    assert worst_relative_error({"weight": twice.to_dense().double()}, twice_plain) <= rounding
    embeddings.weight.grad = torch.zeros_like(embeddings.weight)
    furlong.forward_backward(model, batch([29]), OPTIONS)
    once = {"weight": embeddings.weight.grad.double()}
    assert worst_relative_error(once, {"weight": plain}) <= rounding


def test_a_gradient_may_be_wider_than_its_parameter() -> None:
    model = build("llama", torch.bfloat16)
    furlong.forward_backward(model, batch([29]), OPTIONS)
    rounded = take_grads(model)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    furlong.forward_backward(model, batch([29]), OPTIONS)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    wide = take_grads(model)
    assert all(torch.equal(wide[n].bfloat16().double(), rounded[n]) for n in rounded)
    assert any(not torch.equal(wide[n], rounded[n]) for n in rounded)


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


def test_parameters_that_nothing_reaches_keep_no_gradient():
    model = build("llama")
    model.unused = torch.nn.Parameter(torch.ones(3))
    model.zero_grad()
    furlong.forward_backward(model, batch([5]), furlong.ChunkOptions(size=8))
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert without == ["unused"]
    before = {n: p.grad for n, p in model.named_parameters()}
    furlong.forward_backward(model, batch([5]), furlong.ChunkOptions(size=8))
    assert all(p.grad is before[n] for n, p in model.named_parameters()), "added in place"

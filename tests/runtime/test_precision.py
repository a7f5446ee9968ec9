"""Parameters that compute in another dtype: hooks, sums, and what stays in float32."""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers.batches import batch
from helpers.tiny_families import VOCAB_SIZE, build
from torch import nn
from transformers import AutoModelForCausalLM

import furlong
from furlong.errors import UnsupportedModelError
from furlong.models.decoder import HFDecoder
from furlong.plan.plan import Reduce
from furlong.runtime.precision import compute_parameters
from furlong.testing import take_grads, worst_relative_error

OPTIONS = furlong.ChunkOptions(size=8)


@pytest.mark.parametrize("what", ["register_hook", "register_post_accumulate_grad_hook", "sparse"])
def test_hooks_on_weights_and_sparse_gradients_are_refused(what: str) -> None:
    """They would see, or be, a part of the gradient."""
    model = build("llama", torch.float32)
    embedding, options = model.model.embed_tokens, furlong.ChunkOptions(size=8, keep="kv")
    engine, seen = furlong.Engine(model), []
    if what == "sparse":
        embedding.sparse = True
    else:
        getattr(embedding.weight, what)(seen.append)
    with pytest.raises(UnsupportedModelError, match="embed_tokens"):
        engine.forward_backward(batch([29]), options)
    values = engine.token_values(batch([29]), options, gradients="added")[0]
    with pytest.raises(UnsupportedModelError, match="embed_tokens"):
        values.sum().backward()
    assert not seen and all(p.grad is None for p in model.parameters())
    engine.forward_backward(batch([29]), options, backward=False)
    embedding.requires_grad_(False)
    assert engine.forward_backward(batch([29]), options).loss > 0


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
    furlong.forward_backward(model, batch([29]), OPTIONS)
    assert torch.equal(flat.double(), torch.cat([grad.flatten() for grad in plain.values()]))


def test_an_error_leaves_gradients_as_they_were() -> None:
    model = build("llama", torch.bfloat16)
    engine = furlong.Engine(model)
    buffers = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, buffer in zip(model.parameters(), buffers, strict=True):
        parameter.grad = buffer

    def fail(action: object) -> None:
        if isinstance(action, Reduce):  # all gradients are summed
            raise ZeroDivisionError

    sequences = batch([29])
    with pytest.raises(ZeroDivisionError):
        engine.run(engine.plan([29], OPTIONS), sequences, begun=fail)
    for parameter, buffer in zip(model.parameters(), buffers, strict=True):
        assert parameter.grad is buffer and bool((buffer == 1).all())


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
    adapter = HFDecoder(model)
    assert adapter.stays_float32(torch.float64) == adapter.stays_float32(torch.float32) == []
    kept = adapter.stays_float32(torch.bfloat16)
    gate = model.model.layers[1].mlp.gate
    assert any(parameter is gate.weight for parameter in kept)
    with compute_parameters(model.modules(), torch.bfloat16, unchanged=kept):
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
    with compute_parameters(model.modules(), torch.bfloat16):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_are_summed_in_float32(dtype):
    """In bfloat16 256 + 1 is 256."""
    layer, x = nn.Linear(1, 1, bias=False).to(dtype), torch.ones(1, 1, dtype=torch.bfloat16)
    with compute_parameters(layer.modules(), torch.bfloat16):
        for _ in range(512):
            layer(x).sum().backward()
    assert layer.weight.grad.dtype == dtype and layer.weight.grad.item() == 512

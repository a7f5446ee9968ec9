"""The start-up check: what it must see, and what it must not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from helpers.attention_families import twin_of
from helpers.batches import batch
from helpers.nightly import seeds
from helpers.tiny_families import EXACT, FAMILIES, VOCAB_SIZE, bound, build
from transformers import AutoModelForCausalLM

import furlong
from furlong.errors import UnsupportedModelError
from furlong.models import attention
from furlong.models.decoder import HFDecoder
from furlong.ops.attention import LaterGrads
from furlong.ops.backends.select import ProbedBackend
from furlong.runtime import cell
from furlong.runtime.check import self_check

OPTIONS = furlong.ChunkOptions(size=8)


def check(model: Any) -> float:
    return self_check(HFDecoder(model), ProbedBackend())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(5)
def test_the_error_of_a_family_is_rounding_alone(family: str) -> None:
    assert check(build(family)) <= (EXACT if bound(family) == EXACT else 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mixtral"])
@pytest.mark.few(4)
def test_a_family_passes_in_other_dtypes(family: str, dtype: torch.dtype) -> None:
    assert 0 < check(build(family, dtype)) < 0.3


@pytest.mark.parametrize("seed", seeds(1, 9))
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_alone_never_refuses_a_family(family: str, seed: int) -> None:
    """A router's choice may flip by rounding: a check of one rounding refuses such models."""
    for dtype in (torch.bfloat16, torch.float16):
        try:
            check(build(family, dtype, seed=seed))
        except UnsupportedModelError as error:
            assert "not finite, without chunks too" in str(error), dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lost", ["all", "of the first piece"])
def test_a_dropped_relay_is_seen(
    lost: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states and the loss are right then: only gradients show it."""
    plain = cell.LayerView.later_grads

    def changed(self: Any, slice_index: int) -> LaterGrads | None:
        if lost == "of the first piece" and self.cell.pieces[0].index > 0:
            return plain(self, slice_index)
        return None

    monkeypatch.setattr(cell.LayerView, "later_grads", changed)
    with pytest.raises(UnsupportedModelError, match="other gradients in chunks than whole"):
        check(build("llama", dtype))


@pytest.mark.parametrize(
    ("stages", "dtype"),
    [(None, torch.float64), (None, torch.bfloat16), ((1, 1, 1), torch.float64)],
    ids=["whole", "16 bits", "stages"],
)
def test_attention_that_is_kept_wrongly_is_seen(
    stages: tuple[int, ...] | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that only retains graphs recalls nothing; in 16 bits the tiny twin sees it."""
    plain = cell.Cell._recalled

    def recalled(self: Any, *given: Any) -> Any:
        out, lses = plain(self, *given)
        return 1.01 * out, lses

    monkeypatch.setattr(cell.Cell, "_recalled", recalled)
    told = "other hidden states in (chunks|stages)"
    with pytest.raises(UnsupportedModelError, match=told):
        self_check(HFDecoder(build("llama", dtype)), ProbedBackend(), stages)


@pytest.mark.parametrize(("dtype", "share"), [(torch.float64, 1e-3), (torch.bfloat16, 0.2)])
def test_tokens_that_meet_beside_attention_are_seen(dtype: torch.dtype, share: float) -> None:
    """What is put into the model alone is not in its twin."""
    model = build("llama", dtype)
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x) + share * x.roll(1, dims=1)
    with pytest.raises(UnsupportedModelError, match="in chunks than whole"):
        check(model)


def test_a_head_that_is_not_a_function_of_each_token_is_seen() -> None:
    model = build("llama")
    model.lm_head.register_forward_hook(lambda m, i, out: out + 3)
    check(model)  # a constant is a function of each token
    calls: list[int] = []
    model.lm_head.register_forward_hook(lambda m, i, out: (calls.append(1), out + len(calls))[1])
    with pytest.raises(UnsupportedModelError, match="other logits"):
        check(model)


def test_a_head_that_mixes_tokens_is_seen() -> None:
    model = build("llama")
    model.lm_head.register_forward_hook(lambda m, i, out: out + out.mean(1, keepdim=True))
    with pytest.raises(UnsupportedModelError, match="other logits"):
        check(model)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_runs_of_a_few_tokens_pass(num_tokens: int) -> None:
    assert self_check(
        HFDecoder(build("llama"), max_seq_len=num_tokens), ProbedBackend()
    ) <= 1e-12  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_gradients_beyond_float16_are_no_fault(family: str) -> None:
    """A training in float16 scales its loss by what its gradients allow."""
    assert 0 < check(build(family, torch.float16, seed=1)) < 0.3


def test_what_rounding_moves_far_in_float32_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that have grown large, as a run goes on from; a relay that is lost is seen there."""
    model = build("llama", torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(200 if parameter.ndim > 1 else 1)
    assert 1e-3 < check(model) < 0.05
    monkeypatch.setattr(cell.LayerView, "later_grads", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="other gradients"):
        check(model)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 16])
def test_scores_that_a_family_rounds_are_no_fault(seed: int) -> None:
    """gpt-oss computes its softmax in bfloat16: more is rounded than what attention returns."""
    assert 0 < check(build("gpt_oss", torch.bfloat16, seed=seed)) < 0.3
    assert 0 < check(build("gpt_oss", torch.bfloat16, seed=seed, num_local_experts=16)) < 0.5


def layers(model: Any, order: list[int]) -> Any:
    model.model.layers = torch.nn.ModuleList(copy.deepcopy(model.model.layers[i]) for i in order)
    model.config.num_hidden_layers = len(order)
    return model


@pytest.mark.parametrize("order", [[0, 2], [2, 1, 0], [0, 1, 1, 2]])
def test_layers_that_were_cut_out_or_copied_are_named(order: list[int]) -> None:
    told = f"numbered {', '.join(map(str, order))}"
    with pytest.raises(UnsupportedModelError, match=told):
        furlong.Engine(layers(build("llama"), order))
    model = layers(build("llama"), order)
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = place
    assert check(model) <= 1e-12


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), torch.float64), (3e38, torch.float32)])
def test_values_that_are_not_finite_are_no_difference(value: float, dtype: torch.dtype) -> None:
    model = build("llama", dtype)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(value)
    with pytest.raises(UnsupportedModelError, match="not finite, without chunks too"):
        furlong.Engine(model)


@pytest.mark.parametrize("num_positions", [1, 3, 9])
def test_a_model_of_few_positions_is_checked_too(num_positions: int) -> None:
    assert check(build("llama", max_position_embeddings=num_positions)) <= 1e-12


def test_a_short_run_is_checked_on_as_many_tokens_as_a_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cell.LayerView, "later_grads", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="other gradients"):
        furlong.Engine(build("llama"), max_seq_len=2)


@pytest.mark.parametrize(
    ("error", "call"),
    [(MemoryError(), 5), (RuntimeError("can't allocate memory"), 5), (OSError(28, "no space"), 0)],
    ids=repr,
)
def test_a_lack_of_the_machine_is_no_fault_of_the_model(call: int, error: Exception) -> None:
    """In the search for states, and in the check itself."""
    model, calls = build("llama"), []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) > call:
            raise error

    model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(type(error)) as raised:
        check(model)
    assert raised.value is error


@pytest.mark.parametrize(
    ("make", "stages"),
    [
        (lambda: build("gemma2", torch.float32), None),
        (lambda: build("llama"), (1, 1, 1)),
        (lambda: twin_of("deepseek_v3"), None),
    ],
    ids=["whole", "stages", "latents"],
)
def test_it_leaves_no_trace(make: Any, stages: tuple[int, ...] | None) -> None:
    model, drawn = make(), torch.random.get_rng_state()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    keys = [module.__dict__.keys() for module in model.modules()]
    self_check(HFDecoder(model), ProbedBackend(), stages)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert [module.training for module in model.modules()] == modes
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert [module.__dict__.keys() for module in model.modules()] == keys
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_window_is_checked_beyond_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tiny twin, where it is shorter than the sequence."""
    assert check(build("gemma3_text", sliding_window=40)) <= 1e-5
    rule = attention.AttentionRule
    monkeypatch.setattr(
        attention, "AttentionRule", lambda scale, _, *rest: rule(scale, None, *rest)
    )
    with pytest.raises(UnsupportedModelError, match="other hidden states in chunks"):
        check(build("gemma3_text", sliding_window=40))


def phimoe(**changes: Any) -> Any:
    config = transformers.PhimoeConfig(
        **{
            "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_local_experts": 4, "max_position_embeddings": 256, "lm_head_bias": False,
            **changes,
        }
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().train()
    model.set_experts_implementation("eager")
    return model


def test_a_window_that_is_in_the_mask_alone_is_seen() -> None:
    with pytest.raises(UnsupportedModelError, match="other hidden states in chunks"):
        furlong.Engine(phimoe(sliding_window=40))


def test_a_scale_that_switches_beyond_a_short_check_is_seen() -> None:
    """By the last position of each call: in the tiny twin the sequence goes past the switch."""
    for short, long in ((1.25, 1.25), (1.0, 1.6)):
        model = phimoe(rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
            "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            "short_mscale": short, "long_mscale": long,
        })  # fmt: skip
        furlong.Engine(model, max_seq_len=64)
        if short == long:
            furlong.Engine(model, max_seq_len=200)
        else:
            with pytest.raises(UnsupportedModelError, match="other hidden states in chunks"):
                furlong.Engine(model, max_seq_len=200)


def test_routing_that_draws_is_checked_in_evaluation_mode() -> None:
    """PhiMoE samples its experts in train mode; its window never bites."""
    model = phimoe(sliding_window=256, router_jitter_noise=0.01, input_jitter_noise=0.0)
    assert furlong.forward_backward(model, batch([29]), OPTIONS).has_drawn


# What begins beyond thousands of tokens, a tiny copy shows.
LONG = {"attention_chunk_size": 8192, "floor_scale": 8192}
FAULTS = {
    "block ignored": (attention, "attention_block", lambda *_: None),
    "temperature ignored": (attention.LayerCache, "get_seq_length", lambda *_: 0),
}


@pytest.mark.parametrize("lengths", [{}, LONG], ids=["short", "long"])
def test_llama_4_passes(lengths: dict[str, int]) -> None:
    """Its tiny copy is of transformers' own class, which rounds to float32."""
    assert check(twin_of("llama4", **lengths)) <= 1e-6


@pytest.mark.parametrize("lengths", [{}, LONG], ids=["short", "long"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_though_the_lengths_are_beyond_the_check(
    fault: str, lengths: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(UnsupportedModelError, match="other hidden states in chunks"):
        check(twin_of("llama4", **lengths))


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma4 with shared keys"])
def test_a_dropped_relay_of_latents_or_shared_keys_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes another way than that of keys and values."""
    assert check(twin_of(name)) <= 1e-12
    monkeypatch.setattr("furlong.runtime.cell.LayerView.later_grads", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="other gradients in chunks"):
        check(twin_of(name))

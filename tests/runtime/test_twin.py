"""The start-up check of a process that holds one stage: on a tiny twin of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tiny_families import EXACT, FAMILIES, OTHERS, bound, build, build_other, own_settings
from torch import nn

from furlong.errors import PlanError, UnsupportedModelError
from furlong.models.decoder import HFDecoder
from furlong.models.placeholders import hold, placeholders
from furlong.ops.backends.select import ProbedBackend
from furlong.runtime import cell
from furlong.runtime import check as checks
from furlong.runtime.check import held_by, self_check, tiny_twin

# Values off the neutral ones: a stage that applied them again, or not at all, would show.
SETTINGS: dict[str, dict[str, Any]] = {
    "granite": {"embedding_multiplier": 12.0, "attention_multiplier": 0.4},
    "gpt_neox": {"use_parallel_residual": False, "rotary_pct": 0.5},
}
FAST = ("llama", "gemma3_text", "granite", "gpt2", "gpt_oss")


def of_stage(family: str, layers: range, **settings: Any) -> HFDecoder:
    """What a process holds of a model of three layers."""
    settings = SETTINGS.get(family, {}) | settings
    if family in FAMILIES:
        base = build(family, **settings)
    else:
        base = build_other(family, num_hidden_layers=3, **(own_settings(family) | settings))
    hold(base, placeholders(base, layers))
    return HFDecoder(base)


def check(model: HFDecoder, heights: tuple[int, ...] = (1, 1, 1)) -> float:
    return self_check(model, ProbedBackend(), heights)


def passes(family: str, layers: range, tied: bool) -> None:
    error = check(of_stage(family, layers, tie_word_embeddings=tied))
    assert error <= (EXACT if bound(family) == EXACT else 1e-5)


@pytest.mark.parametrize(
    ("family", "layers", "tied"),
    [
        ("llama", range(1), True), ("llama", range(1, 2), False), ("llama", range(2, 3), True),
        ("gemma3_text", range(1, 2), False), ("granite", range(1), True),
        ("gpt2", range(2, 3), True), ("gpt_oss", range(2, 3), False),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.few(2)
def test_each_stage_of_a_family_passes(family, layers, tied):
    passes(family, layers, tied)


def stages_of_families() -> list[Any]:
    """One stage of each family is slow, the others are nightly: whatever a process holds, it checks
    the same twin, in all its stages."""
    rest = [family for family in (*FAMILIES, *OTHERS) if family not in FAST]
    return [
        pytest.param(family, index, marks=pytest.mark.slow if number % 3 == index
                     else pytest.mark.nightly)
        for number, family in enumerate(rest)
        for index in range(3)
    ]  # fmt: skip


@pytest.mark.parametrize(("family", "index"), stages_of_families())
def test_each_stage_of_every_family_passes(family, index):
    passes(family, range(index, index + 1), tied=(index + len(family)) % 2 == 0)


def test_a_twin_has_the_models_class_layers_and_ties():
    model = of_stage("gemma3_text", range(1, 2), tie_word_embeddings=True)
    small = tiny_twin(model)
    assert type(small.base) is type(model.base) and small.local_layers == range(3) == range(
        small.num_layers
    )
    assert small.config.layer_types == model.config.layer_types
    assert small.tied_weight is small.base.get_output_embeddings().weight
    again = tiny_twin(of_stage("gemma3_text", range(1), tie_word_embeddings=True))
    for name, parameter in small.base.named_parameters():
        assert torch.equal(parameter, again.base.get_parameter(name)), "all processes make the same"


@pytest.mark.slow
def test_the_twin_of_a_deep_model_has_few_layers():
    """Families that scan in float32 are off by 2e-4 in the 48 layers of Qwen3-Next; these are half
    as many."""
    model = HFDecoder(build("qwen3_next", torch.bfloat16, num_hidden_layers=24, layer_types=None))
    (small,) = checks._twins(model)
    assert set(small.config.layer_types) == set(model.config.layer_types)
    assert small.num_layers < 9 and checks._check(small, ProbedBackend()) < 1e-4


def test_parts_of_a_twin_hold_their_own_layers():
    small = tiny_twin(of_stage("llama", range(1)))
    assert [part.local_layers for part in held_by(small, (1, 2))] == [range(1), range(1, 3)]
    assert small.local_layers == range(3)


@pytest.mark.parametrize("name", ["model.norm", "model.layers.1.mlp", "model.embed_tokens"])
def test_a_module_that_a_stage_lacks_is_seen(name, monkeypatch):
    """As of a decoder whose modules do not lie as they are listed."""
    plain = checks.placeholders

    def too_many(base: Any, layers: range) -> dict[str, nn.Module]:
        return plain(base, layers) | {name: nn.Identity()}

    monkeypatch.setattr(checks, "placeholders", too_many)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        check(of_stage("llama", range(1)))


def test_a_relay_that_is_dropped_is_seen(monkeypatch):
    monkeypatch.setattr(cell.LayerView, "later_grads", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="other gradients in chunks"):
        check(of_stage("llama", range(1)))


def test_stages_of_other_layers_are_no_plan_for_it():
    with pytest.raises(PlanError, match="are not those of LlamaForCausalLM"):
        check(of_stage("llama", range(1)), (1, 1))

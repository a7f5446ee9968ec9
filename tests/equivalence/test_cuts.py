"""Every family is exact however its layers are divided into stages, its config off its defaults."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.batches import batch
from helpers.covering import Design
from helpers.tiny_families import (
    FAMILIES,
    OTHERS,
    bound,
    build,
    build_other,
    own_settings,
)
from torch import nn

import furlong
from furlong.errors import UnsupportedModelError
from furlong.plan.plan import Recompute
from furlong.runtime.cell import Cell
from furlong.testing import TokenSequences, reference_loss, take_grads, worst_relative_error
from furlong.verify import spread_weights

LENS = [21, 4, 17]

# Values off the neutral ones: a stage that applied them again, or not at all, would show.
SETTINGS: dict[str, dict] = {
    "granite": {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
        "attention_multiplier": 0.4,
    },
    "stablelm": {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    "gpt_neox": {"use_parallel_residual": False, "rotary_pct": 0.5},
}  # fmt: skip


@functools.lru_cache(maxsize=2)
def subject(name: str) -> tuple[nn.Module, TokenSequences, float, dict, float]:
    """A model, a batch, the model's own loss and gradients, and the bound."""
    if name in FAMILIES:
        model = build(name, **SETTINGS.get(name, {}))
    else:
        model = build_other(name, num_hidden_layers=3, **own_settings(name))
        spread_weights(model, seed=0)
    sequences = batch(LENS)
    loss = reference_loss(model, sequences)
    return model, sequences, loss, take_grads(model), bound(name)


def options(height: int, keep: str) -> furlong.ChunkOptions:
    return furlong.ChunkOptions(size=8, keep=keep, order="layer-first", stage_layers=height)


def check(name: str, height: int, keep: str) -> None:
    model, sequences, loss, truth, most = subject(name)
    result = furlong.forward_backward(model, sequences, options(height, keep))
    assert len(result.plan.stages) == {1: 3, 2: 2}[height]
    assert abs(result.loss - loss) <= most * loss
    assert worst_relative_error(take_grads(model), truth) <= most


CUTS = Design(
    {"name": (*SETTINGS, *OTHERS), "height": (1, 2), "keep": ("input", "kv", "attention", "all")}
)
FEW = [{"name": name, "height": 1, "keep": "input"} for name in CUTS.dials["name"]]


@pytest.mark.parametrize("row", FEW, ids=lambda row: row["name"])
@pytest.mark.few(4)
def test_cut_between_all_layers(row):
    check(**row)


@pytest.mark.slow
@pytest.mark.parametrize("row", sorted(CUTS.array(2, FEW), key=str), ids=str)
def test_every_family_at_every_cut(row):
    """Every pair of a family, a height and a keep; those of `FAMILIES` are in the matrix too."""
    check(**row)


EMBEDDING_DROPOUT = {
    "gpt_neox": {"hidden_dropout": 0.3, "num_key_value_heads": 4},
    "starcoder2": {"embedding_dropout": 0.3, "residual_dropout": 0.0},
    "gpt2": {"n_positions": 64, "embd_pdrop": 0.3, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
}


def with_dropout(name: str, *, in_layers: bool) -> nn.Module:
    model = build_other(name, num_hidden_layers=3, **EMBEDDING_DROPOUT[name])
    spread_weights(model, seed=0)
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout) and any(part.isdigit() for part in path.split(".")):
            module.p = 0.2 if in_layers and "attn" not in path.rpartition(".")[0] else 0.0
    return model


@pytest.mark.parametrize(("name", "height"), [("gpt_neox", 1), ("starcoder2", 2), ("gpt2", 1)])
def test_embeddings_are_dropped_once(name, height):
    """Under one seed, in one chunk, as the model itself drops them: no later stage drops again."""
    model, sequences = with_dropout(name, in_layers=False), batch([21])
    torch.manual_seed(3)
    loss = reference_loss(model, sequences)
    truth = take_grads(model)
    for keep in ("input", "attention"):
        one_chunk = furlong.ChunkOptions(
            size=64, num_retained=0, keep=keep, order="layer-first", stage_layers=height
        )
        torch.manual_seed(3)
        result = furlong.forward_backward(model, sequences, one_chunk)
        assert result.loss == pytest.approx(loss, rel=1e-12)
        assert worst_relative_error(take_grads(model), truth) <= 1e-12
    torch.manual_seed(4)
    other = furlong.forward_backward(model, sequences, one_chunk)
    assert abs(other.loss - loss) > 1e-3, "the seed must matter"


@pytest.mark.parametrize(
    ("name", "keep"), [("gpt_neox", "input"), ("starcoder2", "kv"), ("gpt2", "input")]
)
def test_dropout_of_every_stage_is_replayed(name, keep):
    """The gradients are those of the loss under one seed, by its central difference."""
    model, sequences = with_dropout(name, in_layers=True), batch([21])
    chosen = options(1, keep)

    def loss_and_slope() -> tuple[float, float]:
        torch.manual_seed(3)
        result = furlong.forward_backward(model, sequences, chosen)
        assert any(isinstance(r.action, Recompute) for r in result.timeline.records)
        grads = take_grads(model)
        return result.loss, sum(float((grads[n] * direction[n]).sum()) for n in grads)

    generator = torch.Generator().manual_seed(0)
    direction = {
        n: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for n, p in model.named_parameters()
    }
    step = 1e-6
    slope = loss_and_slope()[1]
    losses = []
    for times in (step, -2 * step, step):
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                parameter.add_(times * direction[parameter_name])
        losses.append(loss_and_slope()[0])
    assert slope == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-5)


class NamedLayers(nn.Module):
    """Layers that are no list."""

    def __init__(self, layers):
        super().__init__()
        for index, layer in enumerate(layers):
            self.add_module(f"layer_{index}", layer)

    def __iter__(self):
        return self.children()

    def __getitem__(self, which):
        return list(self.children())[which]


def test_what_cannot_be_cut_is_refused_by_name_and_runs_whole():
    model, sequences = build("llama"), batch(LENS)
    model.model.layers = NamedLayers(model.model.layers)
    loss = reference_loss(model, sequences)
    truth = take_grads(model)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM holds no list") as error:
        furlong.forward_backward(model, sequences, options(1, "input"))
    assert "order: chunk-first" in error.value.change
    assert all(parameter.grad is None for parameter in model.parameters())
    result = furlong.forward_backward(model, sequences, furlong.ChunkOptions(size=8))
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert worst_relative_error(take_grads(model), truth) <= 1e-12


class AcrossLayers(nn.Module):
    """A layer that reads what another one left, as families with shared K,V or skips do."""

    left: torch.Tensor | None = None

    def __init__(self, layer: nn.Module, giver: AcrossLayers | None) -> None:
        super().__init__()
        self.layer, self.__dict__["giver"] = layer, giver
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, hidden, *given, **named):
        self.left = hidden
        out = self.layer(hidden, *given, **named)
        return out if self.giver is None else out + self.giver.left


def test_layers_that_meet_beside_the_hidden_states_are_refused_when_cut():
    model, sequences = build("llama"), batch([21])
    first = AcrossLayers(model.model.layers[0], None)
    model.model.layers[0] = first
    model.model.layers[2] = AcrossLayers(model.model.layers[2], first)
    reference_loss(model, sequences)
    truth = take_grads(model)
    furlong.forward_backward(model, sequences, furlong.ChunkOptions(size=8))
    assert worst_relative_error(take_grads(model), truth) <= 1e-12
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM .* in chunks") as error:
        furlong.forward_backward(model, sequences, options(1, "input"))
    assert "order: chunk-first" in error.value.change
    assert all(parameter.grad is None for parameter in model.parameters())


def test_self_check_looks_at_each_way_to_cut_once(monkeypatch):
    """Engines of one model share what was checked; another height is another check."""
    model, sequences = build("llama"), batch([9])
    counted: list[int] = []
    attend = Cell.attend

    def counting(self, *given):
        counted.append(1)
        return attend(self, *given)

    monkeypatch.setattr(Cell, "attend", counting)
    taken = []
    for height in (1, 1, 2, 2):
        before = len(counted)
        furlong.forward_backward(model, sequences, options(height, "all"))
        taken.append(len(counted) - before)
    assert taken[0] > taken[1] == taken[3] < taken[2]

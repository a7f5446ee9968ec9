"""A process that holds one stage builds, draws and reads what that stage has, and nothing else."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_families import FAMILIES, OTHERS, build, config_of
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from furlong.errors import ConfigError, PlanError, UnsupportedModelError
from furlong.models.build import build_model, draw_weights, export_model
from furlong.models.decoder import HFDecoder
from furlong.models.placeholders import constructed, hold, placeholders

STAGES = (range(1), range(1, 2), range(2, 3))
LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear"}
FAST = ("llama", "gemma3_text", "gpt2")


def written(folder: Path, family: str, **settings: Any) -> tuple[str, str]:
    """A folder with a config alone and one with the weights that it is given at random."""
    config_of(family, num_hidden_layers=3, **settings).save_pretrained(folder / "config")
    whole = build_model(str(folder / "config"), init="random", seed=3)
    export_model(whole, None, folder / "weights", dtype=torch.float32)
    return str(folder / "config"), str(folder / "weights")


def every_layout_starts_equal(family: str, tied: bool, folder: Path) -> None:
    config, weights = written(folder, family, tie_word_embeddings=tied)
    whole = build_model(config, init="random", seed=3)
    seen: dict[str, int] = {}
    for layers in STAGES:
        for source, init in ((config, "random"), (weights, "pretrained")):
            part = build_model(source, init=init, seed=3, layers=layers)  # type: ignore[arg-type]
            assert type(part) is type(whole) and HFDecoder(part).local_layers == layers
            for name, parameter in part.named_parameters():
                assert torch.equal(parameter, whole.get_parameter(name)), (init, name)
            for name, buffer in part.named_buffers():
                assert torch.equal(buffer, whole.get_buffer(name)), (init, name)
        for name, _ in part.named_parameters():
            seen[name] = seen.get(name, 0) + 1
    assert seen.keys() == dict(whole.named_parameters()).keys(), "every weight is somewhere"
    (embedding,) = (n for n, p in whole.named_parameters()
                    if p is whole.get_input_embeddings().weight)  # fmt: skip
    is_tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    assert {name for name, count in seen.items() if count > 1} == (
        {embedding} if is_tied else set()
    )


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("llama", True), ("gemma3_text", True), ("gpt2", False)]
)
def test_every_layout_starts_with_the_weights_of_one_process(family, tied, tmp_path):
    every_layout_starts_equal(family, tied, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in (*FAMILIES, *OTHERS) if f not in FAST])
def test_every_family_starts_with_the_weights_of_one_process(family, tmp_path):
    every_layout_starts_equal(family, len(family) % 2 == 0, tmp_path)


@pytest.mark.parametrize("family", FAST)
def test_random_weights_are_spread_as_transformers_spreads_them(family, tmp_path):
    config, _ = written(tmp_path, family)
    own = build_model(config, init="random", seed=5)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config_of(family, num_hidden_layers=3))
    for name, buffer in theirs.named_buffers():
        assert torch.equal(buffer, own.get_buffer(name)), "buffers are computed, not drawn"
    for name, parameter in theirs.named_parameters():
        ours = own.get_parameter(name)
        if parameter.ndim > 1:
            six_sigma = 6 / parameter.numel() ** 0.5
            assert float(ours.std() / parameter.std()) == pytest.approx(1, abs=six_sigma), name
            assert not torch.equal(ours, parameter)
        elif not parameter.std():
            assert torch.equal(ours, parameter), name
    drawn = [p for p in own.parameters() if p.ndim > 1]
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(drawn)
                   if a.shape == b.shape), "names make a difference"  # fmt: skip


class Forgetful(nn.Module):
    """A weight for which transformers has no random start."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_a_weight_that_nothing_draws_is_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("llama"))
        model.model.layers[1].mlp.add_module("extra", Forgetful())
    with pytest.raises(
        UnsupportedModelError, match=r"gives model\.layers\.1\.mlp\.extra\.scale no"
    ):
        draw_weights(model, 0, torch.device("cpu"))


@pytest.mark.parametrize("layers", STAGES, ids=str)
def test_weights_of_other_stages_are_not_read(layers, tmp_path, capsys):
    """They may be missing in the file, where the whole model is refused."""
    _, weights = written(tmp_path, "llama", tie_word_embeddings=True)
    file = Path(weights) / "model.safetensors"
    tensors = load_file(file)
    own = set(dict(build_model(weights, layers=layers).named_parameters()))
    assert not capsys.readouterr().out, "what other stages read is no surprise"
    save_file({n: x for n, x in tensors.items() if n in own}, file, metadata={"format": "pt"})
    assert set(dict(build_model(weights, layers=layers).named_parameters())) == own
    with pytest.raises(ConfigError, match="lacks"):
        build_model(weights)
    missing = next(name for name in sorted(own) if f"layers.{layers[0]}." in name)
    kept = {n: x for n, x in tensors.items() if n in own - {missing}} | {"stray": torch.ones(2)}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"lacks 1 weight, {missing}"):
        build_model(weights, layers=layers)
    save_file(kept | {missing: tensors[missing]}, file, metadata={"format": "pt"})
    build_model(weights, layers=layers)
    assert (
        "1 tensors are no weights of the model and are left out, stray" in capsys.readouterr().out
    )


def test_a_config_that_is_wrong_about_its_tied_head_is_refused(tmp_path):
    """transformers unties them where it sees both; the first stage sees no head."""
    _, weights = written(tmp_path, "llama", tie_word_embeddings=True)
    file = Path(weights) / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="two different weights"):
        build_model(weights, layers=STAGES[2])


@pytest.mark.parametrize(
    ("modules", "stages", "tied"),
    [
        (["q_proj", "lm_head"], {0, 1, 2}, False),
        (["embed_tokens"], {0}, True),
        (r".*layers\.[12]\..*_proj", {1, 2}, False),
    ],
)
def test_adapters_may_be_on_some_stages_only(modules, stages, tied, tmp_path):
    """Those of tied embeddings change what the first stage embeds, and not the head."""
    _, weights = written(tmp_path, "llama", tie_word_embeddings=tied)
    lora = LORA | {"target_modules": modules}
    whole = build_model(weights, lora=lora, seed=4)
    trained = {n: p for n, p in whole.named_parameters() if p.requires_grad}
    seen: set[str] = set()
    for stage, layers in enumerate(STAGES):
        part = build_model(weights, lora=lora, seed=4, layers=layers)
        own = {n: p for n, p in part.named_parameters() if p.requires_grad}
        assert bool(own) == (stage in stages)
        assert all(torch.equal(p, trained[n]) for n, p in own.items())
        seen |= own.keys()
    assert seen == trained.keys()
    with pytest.raises(ConfigError, match="names among"):
        build_model(weights, lora=LORA | {"target_modules": ["nope"]}, layers=STAGES[1])


def test_a_stage_knows_the_sizes_of_what_it_does_not_hold(tmp_path):
    config, _ = written(tmp_path, "llama")
    whole = HFDecoder(build_model(config, init="random"))
    for layers in STAGES:
        part = HFDecoder(build_model(config, init="random", layers=layers))
        assert (part.vocab_size, part.num_input_ids) == (whole.vocab_size, whole.num_input_ids)
        part.require_held(layers)
        others = set(range(3)) - set(layers)
        with pytest.raises(
            PlanError, match=rf"runs layer {min(others)} .* holds layers {layers[0]}"
        ):
            part.require_held(range(3))


def test_a_stage_counts_frozen_layers_by_what_it_holds():
    """The least of all stages is the model's number; tied embeddings lie below all layers."""
    for tied, expected in ((False, 2), (True, 0)):
        base = build("llama", tie_word_embeddings=tied)
        hold(base, placeholders(base, STAGES[2]))
        model = HFDecoder(base)
        assert model.num_frozen_layers == expected
        base.get_input_embeddings().requires_grad_(False)
        assert model.num_frozen_layers == 2, "norm and head lie above"
        base.model.layers[2].requires_grad_(False)
        assert model.num_frozen_layers == 3
    first = build("llama")
    hold(first, placeholders(first, STAGES[0]))
    assert HFDecoder(first).num_frozen_layers == 0
    first.get_input_embeddings().requires_grad_(False)
    first.model.layers[0].requires_grad_(False)
    assert HFDecoder(first).num_frozen_layers == 3, "it has nothing to train"


def test_what_cannot_be_cut_is_refused_by_name():
    base = build("llama")
    base.model.register_parameter("scale", nn.Parameter(torch.ones(2)))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has parameters beside"):
        placeholders(base, range(1))
    base = build("llama")
    base.model.layers = nn.Sequential(*base.model.layers)
    with pytest.raises(UnsupportedModelError, match="holds no list of its 3 layers"):
        placeholders(base, range(1))


def test_a_model_that_is_built_meanwhile_is_not_changed():
    """A tiny one of the same class, that is asked what it does, without end otherwise."""
    changed, asked = [], []

    def change(model: Any) -> None:
        changed.append(model)
        if len(changed) < 4:
            asked.append(build("llama"))

    with constructed(type(build("llama")), change):
        models = [build("llama"), build("llama")]
    assert [id(model) for model in changed] == [id(model) for model in models]
    assert len(asked) == 2

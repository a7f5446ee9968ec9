"""ChunkOptions: what they take, what they mean, and what they say of the rest."""

import json
from dataclasses import asdict

import pytest

from furlong.config.schema import RunConfig
from furlong.cost.machine import Machine
from furlong.cost.shape import model_shape
from furlong.errors import ConfigError
from furlong.plan.plan import ON_DEVICE, Offload
from furlong.planners.options import ChunkOptions, fixed_options
from furlong.planners.setup import cost_model_of


@pytest.mark.parametrize(
    ("target", "offload"),
    [
        ("none", ON_DEVICE),
        ("cpu", Offload("cpu", "cpu", "cpu", "cpu")),
        ({"attention": "cpu"}, Offload(attention="cpu")),
        ({"kv": "disk", "inputs": "cpu"}, Offload(kv="disk", inputs="cpu")),
        ({}, ON_DEVICE),
        (Offload(graphs="disk"), Offload(graphs="disk")),
    ],
)
def test_an_offload_is_of_all_kinds_or_of_those_that_are_named(target, offload):
    assert ChunkOptions(offload=target).offloading == offload


def test_options_that_mean_the_same_are_equal():
    every = dict.fromkeys(("kv", "inputs", "attention", "graphs"), "disk")
    assert ChunkOptions(offload=every) == ChunkOptions(offload="disk")
    assert ChunkOptions(offload={"kv": "none"}) == ChunkOptions()
    assert ChunkOptions(order="layer-first") == ChunkOptions(order="layer-first", stage_layers=1)
    assert len({ChunkOptions(offload={"kv": "cpu"}), ChunkOptions(offload=Offload(kv="cpu"))}) == 1


@pytest.mark.parametrize(
    "options",
    [
        ChunkOptions(),
        ChunkOptions(offload={"attention": "disk"}, order="layer-first", stage_layers=2),
        ChunkOptions(offload="cpu", recompute_layers=3),
    ],
)
def test_options_survive_json(options):
    """A checkpoint holds them so."""
    assert ChunkOptions(**json.loads(json.dumps(asdict(options)))) == options


@pytest.mark.parametrize(
    ("dials", "given", "required", "change"),
    [
        ({"offload": "dsk"}, "offload = 'dsk'", "none, cpu, disk or a mapping", "disk?"),
        ({"offload": 3}, "offload = 3", "one of none", "choose"),
        ({"offload": {"kv": "tape"}}, "offload.kv = 'tape'", "one of none", "choose"),
        ({"offload": {"atention": "cpu"}}, "atention", "kinds among kv, inputs", "attention?"),
        ({"offload": {7: "cpu"}}, "{7: 'cpu'}", "kinds among kv, inputs", "remove 7"),
        ({"order": "layerfirst"}, "'layerfirst'", "chunk-first, layer-first", "layer-first?"),
        ({"keep": "some"}, "chunks.keep = 'some'", "one of input, kv", "choose"),
        ({"stage_layers": 2}, "chunks.stage_layers = 2", "chunk-first", "layer-first, or leave"),
        (
            {"order": "layer-first", "stage_layers": 0},
            "chunks.stage_layers = 0",
            "at least 1",
            "set stage_layers",
        ),
        ({"order": "layer-first", "stage_layers": True}, "= True", "whole number", "set"),
        ({"recompute_layers": -1}, "chunks.recompute_layers = -1", "at least 0", "set"),
        ({"size": 0}, "chunks.size = 0", "at least 1", "set size"),
        ({"num_retained": 1.5}, "chunks.num_retained = 1.5", "whole number", "set"),
        ({"hybrid": 1}, "chunks.hybrid = 1", "True or False", "boolean"),
    ],
)
def test_what_is_wrong_is_told_in_four_parts(dials, given, required, change):
    with pytest.raises(ConfigError) as caught:
        ChunkOptions(**dials)
    error = caught.value
    assert given in error.given
    assert required in error.required
    assert error.source == "ChunkOptions"
    assert change in error.change


def test_the_fixed_rule_keeps_what_is_given():
    assert fixed_options(300) == ChunkOptions(size=256)
    given = {"order": "layer-first", "offload": {"inputs": "disk"}}
    assert fixed_options(100_000, given) == ChunkOptions(size=4096, **given)


@pytest.mark.parametrize("hardware", ["H100", "cpu"])
def test_modules_that_keep_their_forward_pass_more_bytes_on_a_card(hardware):
    """In Qwen3-8B 27.5 GB for 12.7 with all weights trained, 32 for 12 with adapters."""
    run = {"data": {"train": "a.jsonl"}, "train": {"steps": 1, "sequences_per_step": 1}}
    as_run, as_written = (
        cost_model_of(
            RunConfig.model_validate(run | {"model": {"name": "m", "kernels": kernels}}),
            model_shape("Qwen3-8B"), Machine.named(hardware), calibrate=False,
        ).hardware.activation_bytes_per_s
        for kernels in ("auto", "none")
    )  # fmt: skip
    times = as_run / as_written
    assert times == 1 if hardware == "cpu" else 27.5 / 12.7 < times < 32 / 12

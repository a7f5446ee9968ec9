"""Runs on checkpoints that are published quantized, in every layout, end in the weights of runs on
the floats."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launched import Launched
from helpers.published import fp8, mxfp4, publish
from helpers.tiny_families import config_of
from helpers.tiny_runs import TinyRun, run_command
from helpers.vision_checkpoints import tensors
from transformers import AutoModelForCausalLM

from furlong.cli.main import main

FLAGS = ("--train.epochs=1", "--model.init=pretrained")
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 24], "activation_scheme": "dynamic"}


def of_kind(tiny_run: TinyRun, folder: Path, kind: str) -> dict[str, TinyRun]:
    """Return runs over one model, packed and in floats."""
    sizes: dict[str, Any] = {"vocab_size": 300}
    if kind == "gpt_oss":
        sizes |= {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(kind, **sizes))
    model.save_pretrained(folder / "source")
    for file in (tiny_run.folder / "model").glob("tokenizer*"):
        shutil.copy(file, folder / "source")
    if kind == "gpt_oss":
        packs = lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj"))  # noqa: E731
        publish(folder / "source", folder, mxfp4, packs, {"quant_method": "mxfp4"})
    else:
        packs = lambda name: name.endswith("proj.weight")  # noqa: E731
        publish(folder / "source", folder, partial(fp8, block=(16, 24)), packs, FP8)
    runs = {}
    for each in ("packed", "floats"):
        home = folder / f"run-{each}"
        shutil.copytree(tiny_run.folder / "texts", home / "texts")
        (folder / each).rename(home / "model")
        runs[each] = replace(tiny_run, folder=home)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3"])
def test_a_run_ends_in_the_weights_of_the_floats(
    kind: str, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ((), ("--model.lora.rank=2",)):
        runs = of_kind(tiny_run, tmp_path / str(len(flags)), kind)
        ends, told = [], []
        for each, run in runs.items():
            out = run.folder / "run"
            assert main(run.arguments(out, *FLAGS, *flags)) == 0
            told.append(capsys.readouterr().out)
            again = ["export", str(out), f"--out={out / 'again'}", *["--merge"] * len(flags)]
            assert main(again) == 0
            capsys.readouterr()
            ends.append((tensors(out / "model"), tensors(out / "again")))
            config = json.loads((out / "again" / "config.json").read_text())
            assert "quantization_config" not in config, each
        assert ["not quantized" in one for one in told] == [True, False]
        for one, other in zip(*ends, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flags"),
    [("gpt_oss", ("--parallel.pp=2",)), ("qwen3", ("--parallel.dp=2", "--parallel.reshard=true")),
     ("qwen3", ("--parallel.pp=2", "--model.lora.rank=2"))],
)  # fmt: skip
def test_two_processes_end_in_the_weights_of_one(
    kind: str, flags: tuple[str, ...], tiny_run: TinyRun, tmp_path: Path
) -> None:
    run = of_kind(tiny_run, tmp_path / "runs", kind)["packed"]
    assert main(run.arguments(tmp_path / "one", *FLAGS, *flags[1:] * ("lora" in flags[-1]))) == 0
    arguments = run.arguments(tmp_path / "two", *FLAGS, *flags)
    ended = Launched(tmp_path / "out", run_command, arguments).ended(200)
    assert [process.code for process in ended] == [0, 0], ended
    assert "reads it whole" not in ended[0].said
    one, other = tensors(tmp_path / "one" / "model"), tensors(tmp_path / "two" / "model")
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=5e-6)

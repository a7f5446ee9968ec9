"""Runs of models with recurrent layers, on packed chats: cut, exported, on several processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launched import Launched
from helpers.tiny_runs import TinyRun, build_hybrid_run, run_command
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from furlong.cli.main import main

FAMILIES = ("qwen3_5_text", "bamba", "lfm2")
FLAGS = ("--train.steps=4", "--train.epochs=null", "--model.dtype=float64", "--chunks.keep=kv")
COVERED = [("qwen3_5_text", "pp"), ("bamba", "dp"), ("lfm2", "dp")]
LORA = ("--model.lora.rank=4", "--train.lr=1e-1")

slow, nightly = pytest.mark.slow, pytest.mark.nightly


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyRun]:
    return {name: build_hybrid_run(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


def records(run: Path, key: str) -> list[Any]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next((run / "model").glob("*.safetensors")))


def same_figures(one: Path, other: Path) -> None:
    """Two runs have the same losses and gradients."""
    for key in ("loss", "grad_norm", "num_tokens"):
        assert records(one, key) == pytest.approx(records(other, key), rel=1e-6), key


def same(one: Path, other: Path, start: TinyRun) -> None:
    """Two runs have the same losses and gradients, and come from the start to the same weights."""
    same_figures(one, other)
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    apart = sum(float((ours[name] - theirs[name]).square().sum()) for name in ours) ** 0.5
    before = load_file(start.folder / "model" / "model.safetensors")
    before = {name: weight for name, weight in before.items() if name in theirs}
    moved = sum(float((theirs[n] - before.get(n, 0)).square().sum()) for n in theirs) ** 0.5
    assert apart < 1e-7 * moved, apart / moved


@pytest.mark.parametrize(
    "family", ["lfm2", pytest.param("bamba", marks=slow), pytest.param("qwen3_5_text", marks=slow)]
)
def test_a_run_learns_and_its_model_is_one_of_transformers(
    folders: dict[str, TinyRun], tmp_path: Path, family: str
) -> None:
    run, out = tmp_path / "run", tmp_path / "exported"
    assert main(folders[family].arguments(run, "--chunks.size=64")) == 0
    losses = records(run, "loss")
    assert len(losses) == 9 and losses[-1] < losses[0] - 0.5
    assert main(["export", str(run), f"--out={out}"]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.model_type == family
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("word1 word2", return_tensors="pt")["input_ids"]
    before = AutoModelForCausalLM.from_pretrained(folders[family].folder / "model")
    after = [float(m(input_ids=ids, labels=ids, use_cache=False).loss) for m in (model, before)]
    assert after[0] < after[1] - 0.5


@slow
@pytest.mark.parametrize(
    ("family", "division", "flags"),
    [
        pytest.param(
            family,
            division,
            flags,
            id=f"{family}-{division}-{'adapters' if flags else 'weights'}",
            # one of each family, with both divisions, adapters and weights among them
            marks=() if (family, division) in COVERED else nightly,
        )
        for i, family in enumerate(FAMILIES)
        for division, flags in zip(("pp", "dp"), ((), LORA) if i % 2 else (LORA, ()), strict=True)
    ],
)
def test_two_processes_train_what_one_does(
    folders: dict[str, TinyRun], tmp_path: Path, family: str, division: str, flags: tuple[str, ...]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(folders[family].arguments(one, *FLAGS, *flags)) == 0
    arguments = folders[family].arguments(two, *FLAGS, *flags, f"--parallel.{division}=2")
    ended = Launched(tmp_path / "out", run_command, arguments).ended(240)
    assert [process.code for process in ended] == [0, 0], ended
    same(two, one, folders[family])


@pytest.mark.parametrize("family", ["lfm2", pytest.param("bamba", marks=slow)])
def test_sequence_parallelism_is_refused_by_name(
    folders: dict[str, TinyRun], tmp_path: Path, family: str
) -> None:
    arguments = folders[family].arguments(tmp_path / "run", *FLAGS, "--parallel.sp=2")
    ended = Launched(tmp_path / "out", run_command, arguments).ended(120)
    assert [process.code for process in ended] == [2, 2], ended
    assert f"sp 2 x pp 1, a multiple of 2 devices, for a {family}" in ended[0].said, ended[0].said
    assert "required: parallel.sp 1: the state of a sequence" in ended[0].said, ended[0].said

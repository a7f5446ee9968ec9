"""Runs on checkpoints with vision: from a folder to an export of all of it, in every layout."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.launched import Launched
from helpers.tiny_runs import TinyRun, run_command, signal_after
from helpers.vision_checkpoints import tensors, write_checkpoint

from furlong.cli.main import main

ONE_EPOCH = "--train.epochs=1"


def of_kind(tiny_run: TinyRun, folder: Path, kind: str) -> TinyRun:
    """Return the run with a checkpoint with vision in place of its model."""
    shutil.copytree(tiny_run.folder / "texts", folder / "texts")
    write_checkpoint(folder / "model", kind, vocab_size=300)
    for file in (tiny_run.folder / "model").glob("tokenizer*"):
        shutil.copy(file, folder / "model")
    return replace(tiny_run, folder=folder)


def assert_equal(given: Path, wanted: Path, most: float = 0.0) -> None:
    one, other = tensors(given), tensors(wanted)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=most)


@pytest.mark.slow
def test_a_run_says_what_it_carries_and_goes_on(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = of_kind(tiny_run, tmp_path, "gemma3")
    assert main(run.arguments(tmp_path / "run", ONE_EPOCH)) == 0
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    source, exported = tensors(tmp_path / "model"), tensors(tmp_path / "run" / "model")
    assert exported.keys() == source.keys()
    equal = {name for name in source if torch.equal(source[name], exported[name])}
    beside = {name for name in source if not name.startswith("language_model.")}
    assert equal == beside
    assert f"{len(beside)} tensors beside it (model.vision_tower," in capsys.readouterr().out
    with signal_after(2):
        assert main(run.arguments(tmp_path / "again", ONE_EPOCH)) == 0
    assert main(run.arguments(tmp_path / "again", ONE_EPOCH, "--resume")) == 0
    assert_equal(tmp_path / "again" / "model", tmp_path / "run" / "model")
    assert main(["export", str(tmp_path / "run"), f"--out={tmp_path / 'export'}"]) == 0
    assert_equal(tmp_path / "export", tmp_path / "run" / "model")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"), [("gemma3", "dp"), ("gemma3", "pp"), ("llama4", "pp"), ("qwen3_vl", "sp")]
)
def test_two_processes_export_what_one_does(
    kind: str, layout: str, tiny_run: TinyRun, tmp_path: Path
) -> None:
    run = of_kind(tiny_run, tmp_path, kind)
    assert main(run.arguments(tmp_path / "one", ONE_EPOCH)) == 0
    arguments = run.arguments(tmp_path / "two", ONE_EPOCH, f"--parallel.{layout}=2")
    ended = Launched(tmp_path / "out", run_command, arguments).ended(200)
    assert [process.code for process in ended] == [0, 0], ended
    assert_equal(tmp_path / "two" / "model", tmp_path / "one" / "model", most=5e-6)

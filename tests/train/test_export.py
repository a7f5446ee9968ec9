"""`furlong export`: the model of a run, of a named checkpoint, adapters and merged adapters."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_runs import TinyRun
from torch.distributed.checkpoint import HuggingFaceStorageReader, Metadata
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from furlong.cli.main import main
from furlong.errors import CheckpointError
from furlong.train import build
from furlong.train.export import export


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits


def test_a_run_and_a_checkpoint_are_exported(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In the dtype of the files, without a model of other weights beside them."""
    run, made = tmp_path / "run", list[torch.nn.Module]()
    tiny_run.leave_run(run)
    original = build.build_run_model

    def recorded(*given: Any, **named: Any) -> Any:
        made.append(original(*given, **named))
        return made[-1]

    monkeypatch.setattr(build, "build_run_model", recorded)
    assert main(["export", str(run), f"--out={tmp_path / 'last'}"]) == 0
    last = (tmp_path / "last" / "model.safetensors").read_bytes()
    assert last == (run / "model" / "model.safetensors").read_bytes()
    AutoTokenizer.from_pretrained(tmp_path / "last")

    assert main(["export", str(run / "checkpoints" / "step-00000006")]) == 0
    assert f"exported step 6 to {run / 'model-step-00000006'}" in capsys.readouterr().out
    assert (run / "model-step-00000006" / "model.safetensors").read_bytes() != last
    AutoModelForCausalLM.from_pretrained(run / "model-step-00000006")
    assert all(weight.is_meta for model in made for weight in model.parameters())


def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_missed(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    tiny_run.leave_run(run)
    newest = run / "checkpoints" / "step-00000009"
    exported = export(run, loading=lambda: shutil.rmtree(newest))
    assert exported == run / "model-step-00000008"
    AutoModelForCausalLM.from_pretrained(exported)
    named = run / "checkpoints" / "step-00000008"
    with pytest.raises(CheckpointError):
        export(named, out=tmp_path / "other", loading=lambda: shutil.rmtree(named))


def test_a_checkpoint_that_is_removed_while_it_is_loaded_is_not_missed(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, original = tmp_path / "run", HuggingFaceStorageReader.read_metadata
    tiny_run.leave_run(run)

    def last_read(reader: HuggingFaceStorageReader) -> Metadata:
        metadata = original(reader)
        shutil.rmtree(run / "checkpoints" / "step-00000009", ignore_errors=True)
        return metadata

    monkeypatch.setattr(HuggingFaceStorageReader, "read_metadata", last_read)
    assert export(run) == run / "model-step-00000008"


def test_adapters_are_exported_as_they_are_or_merged(
    tiny_run: TinyRun, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Those on another rope, with how they are loaded. Their base is named from the root, for a
    relative name is another folder elsewhere."""
    monkeypatch.chdir(tiny_run.folder)
    run, merged_folder = tmp_path / "run", tmp_path / "merged"
    flags = ("--model.name=model", "--model.lora.rank=4", "--train.lr=1e-1", "--train.epochs=1")
    rope = "--model.rope={rope_type: default, rope_theta: 2}"
    assert main(tiny_run.arguments(run, *flags, rope)) == 0
    assert f"AutoConfig.from_pretrained('{run}/model/base')" in capsys.readouterr().out
    assert "AutoConfig.from_pretrained('model/base')" in (run / "model" / "README.md").read_text()
    assert main(["export", str(run), "--merge", f"--out={merged_folder}"]) == 0
    assert "warning" not in capsys.readouterr().out
    assert main(["export", str(run), f"--out={tmp_path / 'adapters'}"]) == 0
    monkeypatch.chdir(tmp_path)
    config = AutoConfig.from_pretrained(run / "model" / "base")
    adapted = logits(AutoModelForCausalLM.from_pretrained(run / "model", config=config))
    without = logits(AutoModelForCausalLM.from_pretrained(run / "model"))
    merged = logits(AutoModelForCausalLM.from_pretrained(merged_folder))
    assert (merged - adapted).norm() < 1e-5 * merged.norm() < 0.01 * (merged - without).norm()
    AutoTokenizer.from_pretrained(merged_folder)
    (name,) = {path.name for path in (run / "model").glob("*.safetensors")}
    again = (tmp_path / "adapters" / name).read_bytes()
    assert name == "adapter_model.safetensors" and again == (run / "model" / name).read_bytes()


def test_another_base_is_refused(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(tiny_run.folder / "model").save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_run.folder / "model").save_pretrained(base)
    run = tmp_path / "run"
    flags = [f"--model.name={base}", "--model.lora.rank=2", "--train.epochs=1"]
    assert main(tiny_run.arguments(run, *flags)) == 0
    changed = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
    changed.save_pretrained(base)
    capsys.readouterr()
    assert main(["export", str(run), "--merge"]) == 2
    assert "frozen weights, which its adapters were trained upon" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "the following arguments are required: RUN_OR_CHECKPOINT"),
        (["{run}/nowhere"], "nowhere, which is no folder"),
        (["{run}/model"], "model, which holds no checkpoint"),
        (["{run}", "--marge"], "did you mean --merge"),
        (["{run}/checkpoints/step-00000003"], "checkpoint step-00000003 is damaged: state.json"),
    ],
)
def test_what_cannot_be_exported_is_told(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    part: str,
) -> None:
    run = tmp_path / "run"
    tiny_run.leave_run(run, "--train.epochs=1")
    state = run / "checkpoints" / "step-00000003" / "state.json"
    if "step-00000003" in part:
        state.write_text(state.read_text()[:-5])
    before = sorted(run.rglob("*"))
    capsys.readouterr()
    assert main(["export", *(a.format(run=run) for a in arguments)]) == 2
    message = capsys.readouterr().err
    assert part in message
    assert len(message.splitlines()) == 4
    assert sorted(run.rglob("*")) == before


def test_a_model_without_a_tokenizer_trains_on_token_ids_in_every_verb(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As models of proteins and of music have none."""
    model, run, data = tmp_path / "model", tmp_path / "run", tmp_path / "ids.jsonl"
    shutil.copytree(tiny_run.folder / "model", model)
    for file in [*model.glob("*token*"), *model.glob("chat_template*")]:
        file.unlink()
    data.write_text('{"input_ids": [5, 6, 7, 8]}\n' * 4)
    flags = (f"--model.name={model}", f"--data.train={data}", "--data.eval=null")
    assert main(tiny_run.arguments(run, *flags, "--train.epochs=1")) == 0
    assert main(["lengths", str(run / "config.json")]) == 0
    assert main(["export", str(run), f"--out={tmp_path / 'again'}"]) == 0
    assert not [*(run / "model").glob("*token*"), *(tmp_path / "again").glob("*token*")]
    AutoModelForCausalLM.from_pretrained(run / "model")
    capsys.readouterr()
    sampled = (*flags, "--log.samples=[a]", "--train.eval_every_steps=1")
    assert main(tiny_run.arguments(tmp_path / "other", *sampled)) == 2
    assert "log.samples" in capsys.readouterr().err

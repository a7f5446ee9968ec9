"""Kill and resume, sound and sabotaged, and the verb around all proofs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.ranks import server

from furlong import verify as verify_run
from furlong.cli.main import main
from furlong.config.schema import (
    ChunksConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
)
from furlong.config.sources import build_run, read_yaml
from furlong.models.shrink import shrink_config
from furlong.train import checkpoints
from furlong.verify import Finding, check_resume


def train_and_forget(arguments: list[str]) -> None:
    """`furlong train` whose resume loses the first moments."""
    restore = checkpoints.restore_tensors

    def forget(checkpoint: Any, model: Any, optimizer: Any, *others: Any) -> None:
        restore(checkpoint, model, optimizer, *others)
        for values in optimizer.state.values():
            values["exp_avg"].zero_()

    checkpoints.restore_tensors = forget
    sys.exit(main(arguments))


class Forked:
    """What `check_resume` uses of a Popen, of a process that has imported everything before."""

    def __init__(self, command: list[str], **_: Any) -> None:
        self._process = server().Process(target=train_and_forget, args=(command[3:],))
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, limit_s: float | None = None) -> int | None:
        self._process.join(limit_s)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def run_config(chunks: ChunksConfig | None = None, **model: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(name="tiny", **model),
        data=DataConfig(train=("none",)),
        chunks=chunks or ChunksConfig(),
        train=TrainConfig(lr=1e-2, weight_decay=0.1),
    )


def tiny() -> Any:
    return shrink_config(
        transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, hidden_size=256),
        max_seq_len=2048,
    )


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights() -> None:
    finding = check_resume(run_config(), tiny())
    assert finding.passed, finding
    assert "equal bit for bit" in finding.figure


@pytest.mark.nightly
def test_adapters_with_dropout_resume_to_the_same_weights() -> None:
    finding = check_resume(run_config(lora={"rank": 2, "dropout": 0.1}), tiny())
    assert finding.passed, finding


@pytest.mark.nightly
def test_a_sampled_run_resumes_to_the_same_draws() -> None:
    finding = check_resume(run_config(ChunksConfig(size=64, sample={"chunks": 8})), tiny())
    assert finding.passed, finding


@pytest.mark.slow
def test_a_resume_that_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_run.subprocess, "Popen", Forked)
    finding = check_resume(run_config(), tiny())
    assert not finding.passed and "differ" in finding.figure, finding


@pytest.mark.slow
def test_a_run_that_fails_is_told() -> None:
    finding = check_resume(run_config(), tiny(), program="import sys; sys.exit('no disk')")
    assert not finding.passed and "exit code 1: no disk" in finding.figure


@pytest.mark.slow
def test_the_verb_prints_every_proof_and_fails_with_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    def instead(config: RunConfig, shrunk: Any) -> Finding:
        asked.append((config, shrunk))
        return Finding("resume", "not run here", len(asked) == 2)

    monkeypatch.setattr(verify_run, "check_resume", instead)
    transformers.Qwen3Config(num_hidden_layers=4, max_position_embeddings=256).save_pretrained(
        tmp_path
    )
    arguments = [
        "verify",
        f"--model.name={tmp_path}",
        "--data.train=none",
        "--data.max_seq_len=1024",
    ]
    arguments += ["--model.rope.rope_type=yarn", "--model.rope.factor=4", "--chunks.keep=kv"]
    assert main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "Qwen3ForCausalLM, 3 layers" in lines[0] and "keep kv" in lines[0]
    assert [line.split()[1] for line in lines[1:5]] == [
        "gradients", "isolation", "accumulation", "resume",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[1:4]] == ["ok"] * 3
    assert lines[4].startswith("FAIL") and lines[5] == "failed: resume"
    config, shrunk = asked[0]
    assert shrunk.rope_parameters["rope_type"] == "yarn" and config.chunks.keep == "kv"
    for name in ("gradients", "isolation", "accumulation"):
        found = Finding(name, "not run again", True)
        monkeypatch.setattr(verify_run, f"check_{name}", lambda _, found=found: found)
    assert main(arguments) == 0


def test_a_model_that_cannot_be_trained_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers.LlamaConfig(attention_dropout=0.1).save_pretrained(tmp_path)
    flags = [f"--model.name={tmp_path}", "--data.train=none", "--data.max_seq_len=64"]
    assert main(["verify", *flags]) == 2
    assert "attention dropout 0.1" in capsys.readouterr().err
    transformers.T5Config().save_pretrained(tmp_path)
    assert main(["verify", *flags]) == 2
    assert "model type t5" in capsys.readouterr().err


def test_the_document_of_sampling_shows_runs_and_names_every_key() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text(encoding="utf-8")
    shown = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(shown) == 4
    for block in shown:
        values = read_yaml(block, "", "") | {"model": {"name": "x"}, "data": {"train": "x"}}
        assert build_run(values, "run.yaml").chunks.sample is not None
    table = text.split("| Key of `chunks.sample` |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(SampleConfig.model_fields)

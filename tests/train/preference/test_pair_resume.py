"""A run on pairs that was killed, and its reference: the same bits, or refused by name."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.pair_runs import pair_flags
from helpers.tiny_runs import TinyRun, build_tiny_run

from furlong.api import Engine
from furlong.cli.main import main
from furlong.config.sources import parse_run
from furlong.errors import ConfigError
from furlong.train import reference as module
from furlong.train.metrics import MetricsLog
from furlong.train.objective import objective_of

TIMES = ("_s", "tokens_per_s", "_memory_bytes")


def checked(config: Any, num_processes: int) -> None:
    objective_of(config.train).check(config, num_processes)


def records(run: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on the machine."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{k: v for k, v in one.items() if not k.endswith(TIMES)} for one in found]


def weights(run: Path) -> bytes:
    return next((run / "model").glob("*.safetensors")).read_bytes()


def numbers(cache: Path) -> list[bytes]:
    return sorted(file.read_bytes() for file in cache.glob("reference/*/log_probs.bin"))


def test_a_reference_that_was_cut_short_goes_on(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GROUP_TOKENS", 400)
    calls: list[int] = []
    original, fails_at = Engine.token_values, 0

    def token_values(engine: Engine, sequences: Any, *more: Any, **named: Any) -> Any:
        if named.get("gradients") != "added":
            calls.append(len(sequences))
            if len(calls) == fails_at:
                raise KeyboardInterrupt
        return original(engine, sequences, *more, **named)

    monkeypatch.setattr(Engine, "token_values", token_values)
    ends = []
    for name in ("whole", "cut"):
        folder = tmp_path / name
        folder.mkdir()
        arguments = tiny_run.arguments(
            folder / "run", *pair_flags(tiny_run, folder), "--train.steps=1", "--train.epochs=null"
        )
        if name == "cut":
            num_calls = len(calls)
            calls.clear()
            fails_at = 3
            with pytest.raises(KeyboardInterrupt):
                main(arguments)
            fails_at = 0
            done = next((folder / "cache" / "reference").glob("*/done.bin")).read_bytes()
            assert 0 < sum(done) < len(done)
        assert main(arguments) == 0
        ends.append(numbers(folder / "cache"))
    assert ends[0] == ends[1]
    assert num_calls >= 4
    assert len(calls) == num_calls + 1  # the one that failed was computed again, no other


@pytest.mark.slow
def test_resumed_in_mid_epoch_without_the_cache(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Eight pairs, three at a time, answers cut: reference and order come out as they were."""
    step, ends = MetricsLog.step, []

    def stopping(log: MetricsLog, at: int, figures: Any) -> None:
        step(log, at, figures)
        if at == 2:
            signal.raise_signal(signal.SIGTERM)

    for name in ("whole", "stopped"):
        folder = tmp_path / name
        folder.mkdir()
        flags = (*pair_flags(tiny_run, folder), "--train.epochs=2")
        flags += ("--data.max_seq_len=90", "--data.too_long=truncate")
        flags += (f"--data.eval={folder / 'pairs.jsonl'}", "--train.eval_train_share=0.4")
        arguments = tiny_run.arguments(folder / "run", *flags)
        if name == "stopped":
            with monkeypatch.context() as patched:
                patched.setattr(MetricsLog, "step", stopping)
                assert main(arguments) == 0
            shutil.rmtree(folder / "cache")
            arguments.append("--resume")
        assert main(arguments) == 0
        said = capsys.readouterr().out
        assert "truncated" in said and "16 answers computed" in said
        ends.append((weights(folder / "run"), records(folder / "run"), numbers(folder / "cache")))
    assert ends[0] == ends[1]
    assert sum("rewards/margins" in record for record in ends[0][1]) == 6
    evaluations = [record for record in ends[0][1] if "eval_rewards/margins" in record]
    assert len(evaluations) == 3
    assert all("eval_training_logps/chosen" in record for record in evaluations)


def test_a_second_run_takes_the_reference_of_the_first(
    tiny_run: TinyRun, tmp_path: Path, capsys: Any
) -> None:
    flags = (*pair_flags(tiny_run, tmp_path), "--train.steps=1", "--train.epochs=null")
    assert main(tiny_run.arguments(tmp_path / "one", *flags)) == 0
    assert "reference: 16 answers computed" in capsys.readouterr().out
    other_loss = ("--train.loss_type=ipo", "--train.beta=0.5", "--chunks.size=64")
    assert main(tiny_run.arguments(tmp_path / "two", *flags, *other_loss)) == 0
    assert "reference: cached" in capsys.readouterr().out
    assert len(numbers(tmp_path / "cache")) == 1


@pytest.mark.slow
def test_the_reference_of_another_model(tmp_path: Path, capsys: Any) -> None:
    """A changed base is refused on resume; a cached file of another model is refused always."""
    from safetensors.numpy import load_file, save_file

    tiny = build_tiny_run(tmp_path)
    flags = (*pair_flags(tiny, tmp_path), "--train.steps=4", "--train.epochs=null")
    half = tiny.arguments(tmp_path / "run", *flags, "--train.save_every_steps=1")
    assert main(half) == 0
    (tmp_path / "run" / "report.json").unlink()
    file = tmp_path / "model" / "model.safetensors"
    before = file.read_bytes()
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("norm.weight"))
    tensors[name] = tensors[name] * np.float32(1.5)
    save_file(tensors, file, metadata={"format": "pt"})
    assert main([*half, "--resume"]) == 2
    assert "reference model, with which" in capsys.readouterr().err
    assert len(numbers(tmp_path / "cache")) == 2
    file.write_bytes(before)
    for manifest in (tmp_path / "cache" / "reference").glob("*/manifest.json"):
        manifest.write_text(manifest.read_text().replace('"model": "', '"model": "other'))
    assert main(tiny.arguments(tmp_path / "next", *flags)) == 0
    assert "log-probabilities of the reference: cached" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--chunks.keep=all"], "chunks.keep = all with train.loss: dpo"),
        (["--chunks.order=layer-first"], "chunks.order = layer-first with train.loss: dpo"),
        (["--chunks.num_retained=1"], "chunks.num_retained = 1 with train.loss: dpo"),
        (["--chunks.sample={rate: 0.5}", "--chunks.size=64"], "chunks.sample"),
    ],
)
def test_refused_before_data_are_read(flags: list[str], said: str) -> None:
    given = ["--model.name=m", "--data.train=t", "--train.loss=dpo"]
    with pytest.raises(ConfigError, match=said):
        checked(parse_run([*given, *flags]), 1)


def test_what_one_process_refuses_several_may_have() -> None:
    given = ["--model.name=m", "--data.train=t", "--train.loss=dpo"]
    checked(parse_run([*given, "--chunks.num_retained=0"]), 1)
    checked(parse_run([*given, "--model.lora.dropout=0.1"]), 1)
    checked(parse_run([*given, "--chunks.keep=all"]), 2)
    with pytest.raises(ConfigError, match=r"chunks\.sample with train\.loss: dpo"):
        checked(parse_run([*given, "--chunks.sample={rate: 0.5}", "--chunks.size=64"]), 2)

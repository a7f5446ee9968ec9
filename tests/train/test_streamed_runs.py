"""Runs whose data is read while they train: errors in the middle, plans, several processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.launched import Launched
from helpers.tiny_runs import TEXTS, TinyRun

from furlong.cli.main import main
from furlong.data import stream
from furlong.errors import DataError

STREAMED = ("--train.epochs=null", "--train.steps=6", "--data.streaming=true")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BLOCK_RECORDS", 4)
    monkeypatch.setattr("furlong.data.tokenize._TEXTS_PER_CALL", 1)


def weights(run: Path) -> bytes:
    return next((run / "model").glob("*.safetensors")).read_bytes()


def write_lines(file: Path, *, broken: int | None = None) -> Path:
    lines = [json.dumps({"text": TEXTS[number % 8]}) for number in range(24)]
    if broken is not None:
        lines[broken] = '{"text": '
    file.write_text("\n".join(lines))
    return file


def test_a_broken_record_stops_the_run_with_a_checkpoint_and_a_mended_one_goes_on(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run = tmp_path / "texts.jsonl", tmp_path / "run"
    flags = (*STREAMED, f"--data.train={file}", "--train.save_every_steps=5")
    write_lines(file)
    assert main(tiny_run.arguments(tmp_path / "whole", *flags)) == 0
    write_lines(file, broken=14)
    assert main(tiny_run.arguments(run, *flags)) == 2
    told = capsys.readouterr()
    assert "Expecting value" in told.err and f"{file}:15" in told.err
    (saved,) = (run / "checkpoints").iterdir()
    assert saved.name == "step-00000003"  # of twelve records, the last ones were not handed out
    assert main(["train", str(run / "config.json"), "--resume"]) == 2
    write_lines(file)
    assert main(["train", str(run / "config.json"), "--resume"]) == 0
    assert weights(run) == weights(tmp_path / "whole")


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("--train.epochs=2", "train.epochs"),
        ("--train.loss=dpo", "train.loss"),
        ("--train.eval_train_share=0.5", "train.eval_train_share"),
        ("--data.train={path: texts, weight: 2}", "data.train"),
    ],
)
def test_what_needs_all_of_the_data_is_refused(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, key: str
) -> None:
    flags = [*STREAMED, flag]
    if "epochs" in flag:
        flags[1] = "--train.steps=null"
    assert main(tiny_run.arguments(tmp_path / "run", *flags)) == 2
    said = capsys.readouterr().err.splitlines()[0]
    assert f"{key} = " in said and "data.streaming = true" in said


def test_the_longest_sequence_that_may_come_is_planned_for(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [flag for flag in tiny_run.arguments(tmp_path, *STREAMED)[1:] if "--out" not in flag]
    assert main(["plan", *flags, "--json"]) == 0
    batch: Any = json.loads(capsys.readouterr().out)["batch"]
    assert batch["longest_tokens"] == batch["longest_of_data_tokens"] == 256
    assert batch["num_sequences"] == 3


def one_cannot_read_on(arguments: list[str]) -> None:
    """The second process loses its files behind the first sixteen records."""
    stream.BLOCK_RECORDS = 4
    original = stream.Reader.read

    def read(reader: stream.Reader, start: stream.Position) -> stream.StreamBlock:
        if start.line >= 16 and os.environ["RANK"] == "1":
            raise DataError(given="a file that is gone", required="", source="", change="")
        return original(reader, start)

    stream.Reader.read = read  # type: ignore[method-assign]
    if os.environ["RANK"] == "1":
        del stream.Reader._encode  # nothing is tokenized here
    raise SystemExit(main(arguments))


def test_two_processes_read_the_same_batches_and_stop_together(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    file, run, alone = write_lines(tmp_path / "texts.jsonl"), tmp_path / "run", tmp_path / "alone"
    flags = (*STREAMED, f"--data.train={file}", "--train.save_every_steps=5")
    launched = Launched(tmp_path / "1", one_cannot_read_on, tiny_run.arguments(run, *flags))
    ended = launched.ended(120)
    assert [one.code for one in ended] == [2, 2], ended
    assert "process 1: a file that is gone" in ended[0].said and not ended[1].said
    assert [one.name for one in (run / "checkpoints").iterdir()] == ["step-00000004"]
    assert main(tiny_run.arguments(alone, *flags)) == 0
    lines = [map(json.loads, (out / "metrics.jsonl").open()) for out in (run, alone)]
    losses = [[line["loss"] for line in own if "loss" in line] for own in lines]
    assert losses[0] == pytest.approx(losses[1][:4], rel=1e-5)

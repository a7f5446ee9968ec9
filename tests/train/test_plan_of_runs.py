"""`furlong plan` on runs: lengths counted from the data, the measured timeline of a run folder."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from furlong.cli.main import main
from furlong.report.measured import MEASURED, read_measured


@pytest.fixture(scope="module")
def run(tiny_run, tmp_path_factory):
    """A run file, and the folder that its steps have left."""
    folder = tmp_path_factory.mktemp("plan")
    out = folder / "out"
    flags = ["--train.epochs=1", "--train.save_every_steps=0", "--train.eval_every_steps=0"]
    assert main(tiny_run.arguments(out, *flags)) == 0
    config = json.loads((out / "config.json").read_text())
    file = folder / "run.yaml"
    file.write_text(json.dumps(config))
    return file, out


def test_a_run_file_has_its_lengths_counted_once(run, capsys):
    file, _ = run
    counted = file.with_name("run.lengths.json")
    counted.unlink(missing_ok=True)
    assert main(["plan", str(file), "--json"]) == 0
    captured = capsys.readouterr()
    batch = json.loads(captured.out)["batch"]
    assert batch["source"] == f"drawn from the 8 of {counted} with seed 0"
    assert batch["num_sequences"] == 3
    assert str(counted) in captured.err
    assert main(["plan", str(file), "--json"]) == 0
    again = capsys.readouterr()
    assert json.loads(again.out)["batch"] == batch
    assert again.err == ""


@pytest.fixture
def counting(run, tmp_path, monkeypatch):
    """A copy of the run file, and how often another process was asked for its lengths."""
    file = tmp_path / "run.yaml"
    file.write_text(run[0].read_text())
    asked = []

    def answer(command, **_):
        asked.append(command)
        Path(command[-1]).write_text('{"version": 1, "lengths": [9, 90, 99]}')
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("furlong.cli.plan_batch.subprocess.run", answer)
    return file, asked


def test_lengths_older_than_the_run_file_are_counted_again(counting):
    file, asked = counting
    assert main(["plan", str(file)]) == main(["plan", str(file)]) == 0
    assert len(asked) == 1
    written = file.with_name("run.lengths.json").stat().st_mtime
    os.utime(file, (written + 10, written + 10))
    assert main(["plan", str(file)]) == 0
    assert len(asked) == 2


def test_what_furlong_lengths_refuses_is_told_in_its_words(counting, monkeypatch, capsys):
    message = "given:    a\nrequired: b\nfrom:     c\nchange:   d\n"
    monkeypatch.setattr(
        "furlong.cli.plan_batch.subprocess.run",
        lambda command, **_: subprocess.CompletedProcess(command, 2, "", f"a warning\n{message}"),
    )
    assert main(["plan", str(counting[0])]) == 2
    assert capsys.readouterr().err.endswith(message)


def test_a_run_leaves_its_last_timeline_and_plan_shows_it(run, tmp_path, capsys):
    _, out = run
    picture = tmp_path / "a.svg"
    assert main(["plan", str(out), "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    measured = read_measured(out / MEASURED)
    assert f"step {measured.step} of {out}, measured" in printed
    assert "rank 0\n  F0.0" in printed
    assert picture.stat().st_size > 1000
    texts = {record.text for record in measured.timeline.records}
    assert any(text.startswith("B") for text in texts)
    assert main(["plan", str(out), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["duration_s"] == measured.timeline.duration_s > 0
    assert figures["step"] == measured.step


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "no such file"),
        ("{", "Expecting property name"),
        ('{"version": 9}', "not version 1"),
        ('{"version": 1, "step": 3, "plan": {}, "records": []}', "version None"),
    ],
)
def test_a_folder_without_a_timeline_is_refused(tmp_path, text, reason, capsys):
    if text is not None:
        (tmp_path / MEASURED).write_text(text)
    assert main(["plan", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert f"{tmp_path / MEASURED}: {reason}" in message
    assert "change:" in message

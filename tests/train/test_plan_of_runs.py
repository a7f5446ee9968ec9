"""`furlong plan` on runs: lengths counted from the data, the measured timeline of a run folder."""

import json
import os

import pytest

from furlong.cli.main import main
from furlong.plan.lengths import count_lengths
from furlong.timeline import MEASURED, read_measured


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
    assert batch["source"] == (f"the longest of the 8 of {counted}, and 2 others drawn with seed 0")
    assert batch["num_sequences"] == 3
    assert str(counted) in captured.err
    assert main(["plan", str(file), "--json"]) == 0
    again = capsys.readouterr()
    assert json.loads(again.out)["batch"] == batch
    assert again.err == ""


@pytest.fixture
def counting(run, tmp_path, monkeypatch):
    """A copy of the run file, and the runs whose lengths were counted."""
    file = tmp_path / "run.yaml"
    file.write_text(run[0].read_text())
    counted = []

    def answer(config):
        counted.append(config)
        return count_lengths([9, 90, 99])

    monkeypatch.setattr("furlong.cli.lengths.count_run", answer)
    return file, counted


def test_lengths_older_than_the_run_file_are_counted_again(counting):
    file, counted = counting
    assert main(["plan", str(file)]) == main(["plan", str(file)]) == 0
    assert len(counted) == 1
    written = file.with_name("run.lengths.json").stat().st_mtime
    os.utime(file, (written + 10, written + 10))
    assert main(["plan", str(file)]) == 0
    assert len(counted) == 2


def test_a_run_of_flags_alone_is_planned_as_it_would_be_trained(tiny_run, tmp_path, capsys):
    flags = [flag for flag in tiny_run.arguments(tmp_path / "out") if flag.startswith("--")]
    assert main(["plan", *flags, "--out", str(tmp_path / "plan.json"), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["runs_here"] and values["longest_of_data_fits"]
    assert "of data.train" in values["batch"]["source"]


def test_a_run_leaves_its_last_timeline_and_plan_shows_it(run, tmp_path, capsys):
    _, out = run
    picture = tmp_path / "a.svg"
    assert main(["plan", str(out), "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    measured = read_measured(out / MEASURED)
    assert f"step {measured.step} of {out}, measured" in printed
    assert "rank 0\n  F0.0" in printed
    assert "collectives" not in printed and "on a CPU that of the whole process" in printed
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
        (None, "No such file"),
        ("{", "Expecting property name"),
        ('{"version": 9}', "not version 1"),
        ('{"version": 1, "step": 3, "plan": {}, "records": []}', "no version"),
    ],
)
def test_a_folder_without_a_timeline_is_refused(tmp_path, text, reason, capsys):
    if text is not None:
        (tmp_path / MEASURED).write_text(text)
    assert main(["plan", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert f"{tmp_path / MEASURED}: {reason}" in message
    assert "change:" in message

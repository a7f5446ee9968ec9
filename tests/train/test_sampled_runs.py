"""Whole runs that sample: what is refused, and the log."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_runs import TinyRun

from furlong.cli.main import main
from furlong.config.schema import SampleConfig
from furlong.config.sources import build_run, read_yaml
from furlong.train.metrics import MetricsLog

HALF = ("--chunks.sample={rate: 0.5, label_rate: 0.5}", "--chunks.size=16")
FIXED = ("--chunks.sample={chunks: 2, rule: fixed}", "--chunks.size=16")
TIMES = ("_s", "tokens_per_s", "_memory_bytes")


def weights(run: Path) -> bytes:
    return next((run / "model").glob("*.safetensors")).read_bytes()


def records(run: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on the machine's speed."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.endswith(TIMES)}
        for line in lines
    ]


def test_the_sample_that_spaco_asks_for_trains_on_plain_text(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--chunks.method=spaco", "--train.epochs=1", "--chunks.size=16")
    assert main(tiny_run.arguments(tmp_path / "refused", *asked)) == 2
    change = capsys.readouterr().err.partition("change:")[2]
    sample = re.search(r"chunks\.sample: (\{.*?\})", change)
    assert sample is not None, change
    flags = (*asked, f"--chunks.sample={sample[1]}")
    assert main(tiny_run.arguments(tmp_path / "run", *flags)) == 0


@pytest.mark.parametrize(
    ("flags", "named", "source"),
    [
        (
            ["--chunks.sample.rate=0.5"],
            "rule unbiased and labels in every chunk, as plain text has them",
            "chunks.sample.label_rate",
        ),
        (
            ["--chunks.sample={rate: 0.5, label_rate: 0.5}", "--chunks.size=256"],
            "chunks.size = 256, and a longest sequence of",
            "chunks.size and chunks.sample",
        ),
        (
            ["--chunks.sample={chunks: 99, rule: fixed}"],
            "chunks.sample.chunks = 99, which draws all of the ",
            "chunks.sample.chunks",
        ),
        (["--chunks.sample.rate=1"], "chunks.sample.rate = 1.0", "chunks.sample.rate"),
    ],
)
def test_a_sample_that_leaves_nothing_out_is_refused_before_the_model(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: Any, capsys: Any, flags: Any, named: str,
    source: str,
) -> None:  # fmt: skip
    monkeypatch.delattr("furlong.train.build.build_run_model")
    assert main(tiny_run.arguments(tmp_path / "run", *flags)) == 2
    message = capsys.readouterr().err
    assert [line.split(":")[0] for line in message.splitlines()] == [
        "given", "required", "from", "change",
    ]  # fmt: skip
    assert named in message and f"from:     {source}\n" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_data_with_chunks_without_labels_need_no_label_rate(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chunks with labels are all drawn, others by the rate."""
    data = tmp_path / "tokens.jsonl"
    record = {"input_ids": [i % 300 for i in range(160)], "labels": [-100] * 128 + [5] * 32}
    data.write_text("\n".join([json.dumps(record)] * 8))
    flags = ("--chunks.sample.rate=0.25", "--chunks.size=16", f"--data.train={data}")
    assert main(tiny_run.arguments(tmp_path / "run", *flags, "--train.epochs=2")) == 0
    assert "sample: rate 0.25, rule unbiased; the gradient is an estimate" in (
        capsys.readouterr().out
    )
    steps = [record for record in records(tmp_path / "run") if "loss" in record]
    assert all(0.3 <= step["drawn_share"] < 1 for step in steps)
    assert sum(step["drawn_share"] for step in steps) / len(steps) < 0.7


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(HALF, id="unbiased"),
        pytest.param(FIXED, id="fixed", marks=pytest.mark.slow),
    ],
)
def test_draws_are_logged(tiny_run: TinyRun, tmp_path: Path, capsys: Any, flags: Any) -> None:
    run = tmp_path / "run"
    assert main(tiny_run.arguments(run, *flags)) == 0
    printed = capsys.readouterr().out
    steps = [record for record in records(run) if "loss" in record]
    assert len({step["drawn_share"] for step in steps}) > 1
    assert f"  drawn {steps[0]['drawn_share']:.0%}  grad" in printed


def test_what_changes_the_estimate_holds_for_the_whole_run(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def stop(log: MetricsLog, at: int, figures: Any) -> None:
        raise SystemError

    run = tmp_path / "run"
    once = (*HALF, "--train.epochs=1")
    with monkeypatch.context() as patched:
        patched.setattr(MetricsLog, "step", stop)
        with pytest.raises(SystemError):
            main(tiny_run.arguments(run, *once))
    for flag, named in (
        ("--chunks.sample={rate: 0.25, label_rate: 0.5}", "chunks.sample.rate = 0.25, the run"),
        ("--chunks.sample=null", "chunks.sample.rate = None, the run has 0.5"),
        ("--chunks.size=32", "chunks.size = 32, the run has 16"),
    ):
        capsys.readouterr()
        assert main(tiny_run.arguments(run, *once, flag, "--resume")) == 2
        message = capsys.readouterr().err
        assert named in message and "chunks.sample is set" in message
    free = [HALF[0].replace("}", ", report_loss: true}"), "--chunks.keep=kv"]
    assert main(tiny_run.arguments(run, *once, *free, "--resume")) == 0


@pytest.fixture
def run_file(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """The file of a run that samples, which was never started."""
    file = tmp_path / "run.yaml"
    file.write_text(
        json.dumps(
            {
                "model": {"name": str(tiny_run.folder / "model"), "dtype": "float32"},
                "data": {"train": str(tiny_run.folder / "texts"), "max_seq_len": 256},
                "chunks": {"size": 16, "sample": {"chunks": 2, "rule": "fixed"}},
                "train": {"sequences_per_step": 3},
            }
        )
    )
    counted = {"version": 1, "lengths": [14, 23, 32, 41, 50, 59, 68, 77]}
    file.with_name("run.lengths.json").write_text(json.dumps(counted))
    return file


def test_a_run_file_is_planned_with_its_sample(run_file: Path, capsys: Any) -> None:
    assert main(["plan", str(run_file)]) == 0
    printed = capsys.readouterr().out
    assert "sample     chunks 2, rule fixed: " in printed
    assert main(["plan", str(run_file), "--json"]) == 0
    sample = json.loads(capsys.readouterr().out)["sample"]
    assert (sample["chunks"], sample["rule"]) == (2, "fixed")
    assert 0 < sample["num_drawn"] < sample["num_chunks"]


def test_a_sample_is_planned_on_a_pool_and_compared(run_file: Path, capsys: Any) -> None:
    """SpaCO's row alone is of draws, beside exact ones."""
    pool = ["--devices=2", "--parallel.sp=2", "--chunks.method=spaco", "--json"]
    assert main(["plan", str(run_file), *pool]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"]["sp"] == 2 and found["sample"]["num_drawn"] > 0
    assert main(["plan", str(run_file), "--compare", "--json"]) == 0
    steps = {
        one["method"]: one.get("step_s") for one in json.loads(capsys.readouterr().out)["methods"]
    }
    assert steps["auto"] and steps["spaco"] < steps["seco"]


def test_a_sample_that_leaves_nothing_out_is_refused(run_file: Path, capsys: Any) -> None:
    assert main(["plan", str(run_file), "--chunks.size", "256"]) == 2
    assert "given:    chunks.size = 256, and a longest sequence" in capsys.readouterr().err


def test_the_document_of_sampling_shows_runs_and_names_every_key() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text(encoding="utf-8")
    shown = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(shown) == 4
    for block in shown:
        values = read_yaml(block, "", "") | {"model": {"name": "x"}, "data": {"train": "x"}}
        assert build_run(values, "run.yaml").chunks.sample is not None
    table = text.split("| Key of `chunks.sample` |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(SampleConfig.model_fields)

"""What the log writes, keeps and hands on."""

from __future__ import annotations

import io
import json
import sys
import types
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_runs import TinyRun

from furlong.cli.main import main
from furlong.config.schema import LogConfig
from furlong.train import metrics, start
from furlong.train.evaluation import Evaluation, PositionBucket
from furlong.train.metrics import MetricsLog, StepFigures, format_position, open_bar

FIGURES = StepFigures(
    loss=2.5, grad_norm=1.0, lr=1e-3, num_sequences=2, num_tokens=100, num_valid_tokens=90,
    longest_tokens=64, tokens_per_s=50.0, peak_memory_bytes=2**30,
    forward_s=0.5, recompute_s=0.25,
    backward_s=1.0, data_s=0.01, step_s=2.0, used_memory_bytes=2**29, gradients_s=1.75,
    chunk_size=64,
)  # fmt: skip


class Seen:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, Any]]] = []

    def __call__(self, step: int, values: Any) -> None:
        self.seen.append((step, dict(values)))


def test_one_line_and_one_record_per_step_and_evaluation(tmp_path: Path) -> None:
    lines: list[str] = []
    tracker, steps = Seen(), []
    buckets = (PositionBucket(0, 64, 2.5, 20), PositionBucket(1024, 2048, 1.0, 10))
    evaluation = Evaluation(2.0, 30, buckets)
    file = tmp_path / "metrics.jsonl"
    with MetricsLog(file, 10, lines.append, trackers=[tracker], advance=steps.append) as log:
        log.step(3, FIGURES)
        log.evaluation(3, {"held-out": evaluation, "training": evaluation}, 0.5)
        assert log.num_bytes == file.stat().st_size
    step, evaluated = [json.loads(line) for line in file.read_text().splitlines()]
    assert (step["loss"], step["peak_memory_bytes"], "mfu" in step) == (2.5, 2**30, False)
    assert (evaluated["eval_loss"], evaluated["eval_training_loss"]) == (2.0, 2.0)
    assert evaluated["eval_by_position"][1] == {
        "start": 1024, "stop": 2048, "loss": 1.0, "num_valid_tokens": 10,
    }  # fmt: skip
    assert lines[0].startswith("step  3/10  loss 2.5000") and "MFU" not in lines[0]
    assert "  memory    1 GiB" in lines[0]
    assert lines[1] == "held-out loss 2.0000 after step 3; by position <64 2.500  <2K 1.000"
    assert steps == [3]
    assert [at for at, _ in tracker.seen] == [3, 3, 3]
    assert tracker.seen[1][1] == {
        "eval_loss": 2.0, "eval_loss_at_0": 2.5, "eval_loss_at_1024": 1.0,
    }  # fmt: skip


def test_the_lines_of_steps_are_short_columns(tmp_path: Path) -> None:
    lines: list[str] = []
    with MetricsLog(tmp_path / "metrics.jsonl", 100, lines.append) as log:
        for number, (grad, speed, used, seconds) in enumerate(
            [(3.58, 137.0, 2**30, 7.3), (12.3456, 1010.0, 425 * 2**20, 0.85), (2, 8e5, 10**9, 59.9)]
        ):
            log.step(
                number + 9,
                replace(
                    FIGURES, grad_norm=grad, tokens_per_s=speed, peak_memory_bytes=used,
                    step_s=seconds,
                ),
            )  # fmt: skip
    for word in ("loss", "grad", "lr", "tokens/s", "memory", "iB"):
        assert len({line.index(word) for line in lines}) == 1, lines
    assert max(map(len, lines)) <= 112
    assert all(line.endswith("  recompute 14%") for line in lines)


@pytest.mark.parametrize(("keep_bytes", "kept"), [(8, 1), (15, 1), (16, 2), (24, 3), (99, 3)])
def test_a_continued_log_keeps_whole_lines_of_what_it_knows(
    tmp_path: Path, keep_bytes: int, kept: int
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"a":1}\n' * 3 + '{"torn')
    with MetricsLog(file, 1, keep_bytes=keep_bytes) as log:
        assert log.num_bytes == 8 * kept
        log.skipped(4)
    assert [json.loads(line) for line in file.read_text().splitlines()][:-1] == [{"a": 1}] * kept


@pytest.mark.parametrize("how", ["cut", "lost", "no UTF-8", "flipped"])
def test_a_log_that_was_damaged_is_told_with_its_first_lost_step(tmp_path: Path, how: str) -> None:
    file, lines = tmp_path / "metrics.jsonl", list[str]()
    with MetricsLog(file, 9, lines.append) as log:
        for step in range(1, 5):
            log.step(step, FIGURES)
        known = log.num_bytes
    records, told = file.read_bytes().splitlines(keepends=True), {"cut": 3, "lost": 1}.get(how, 2)
    if how == "lost":
        file.unlink()
    elif how == "cut":
        file.write_bytes(b"".join(records[:2]) + records[2][:40])
    else:
        records[1] = records[1].replace(b'"loss"', b'"l\xffss"' if how == "no UTF-8" else b'loss"')
        file.write_bytes(b"".join(records))
    lines.clear()
    with MetricsLog(file, 9, lines.append, keep_bytes=known, done=4) as log:
        log.step(5, FIGURES)
    assert f"the first of them step {told}:" in lines[0] and len(lines) == 2
    left = {"cut": [1, 2, 5], "lost": [5]}.get(how, [1, 3, 4, 5])
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == left
    with MetricsLog(file, 9, lines.append, keep_bytes=known, done=4):  # killed before a checkpoint
        pass
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == left[:-1]


def test_positions_are_told_as_context_lengths() -> None:
    assert [format_position(2**n) for n in (6, 9, 10, 17, 20)] == ["64", "512", "1K", "128K", "1M"]


def test_a_terminal_shows_a_bar_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(metrics.sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    with ExitStack() as stack:
        say, advance = open_bar(stack, 2, 8)
        say("step 3/8  [loss] " + "x" * 70)
        advance(3)
    shown = terminal.getvalue()
    assert "step 3/8  [loss] " + "x" * 70 in shown
    assert "3/8" in shown.rpartition("x")[2]


def test_tensorboard_gets_every_figure(tiny_run: TinyRun, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    flags = ["--log.tensorboard=true", f"--data.eval={tiny_run.folder / 'held-out.jsonl'}"]
    flags += ["--train.epochs=1", "--train.eval_train_share=0.3"]
    assert main(tiny_run.arguments(run, *flags)) == 0
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    losses = [record["loss"] for record in records if "loss" in record]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses)
    assert [event.step for event in events.Scalars("eval_training_loss_at_0")] == [0, 3]


class FakeServer:
    """Stands in for the packages of trackers, which are large and want a network."""

    def __init__(self, *, refuses: bool = False, breaks: bool = False) -> None:
        """`breaks`: when it is closed."""
        self.refuses, self.breaks = refuses, breaks
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.params: dict[str, Any] = {}
        self.num_finished = 0

    def init(self, **settings: Any) -> Any:
        """As of wandb and trackio."""
        if self.refuses:
            raise ValueError("No API key\nconfigured.")
        self.begun.append(settings)
        name = settings.get("id") or settings["name"] or "abc123"
        return types.SimpleNamespace(id=name, name=name, log=self.log, finish=self.finish)

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.num_finished += 1
        if self.breaks:
            raise ConnectionError("gone at the end")

    def package(self, name: str) -> Any:
        if name != "mlflow":
            return types.SimpleNamespace(init=self.init)

        def start_run(*, run_id: str | None, run_name: str | None) -> Any:
            run = self.init(id=run_id, name=run_name)
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run.id))

        return types.SimpleNamespace(
            start_run=start_run, set_experiment=lambda name: None, log_metrics=self.log,
            log_params=lambda params: self.params.update(params), end_run=self.finish,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_tracker_goes_on_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    server = FakeServer()
    monkeypatch.setitem(sys.modules, name, server.package(name))
    settings = LogConfig(**{name: "trials", "name": "first"})  # type: ignore[arg-type]
    for start_step in (0, 4):
        with ExitStack() as stack:
            config = {"train": {"lr": 1.0}, "out": "x"}
            (track,) = metrics.open_trackers(stack, tmp_path, settings, config, start_step)
            track(start_step + 1, {"loss": 2.0})
            settings = settings.model_copy(update={"name": "renamed"})
    key = "name" if name == "trackio" else "id"
    assert [run[key] for run in server.begun] == ["first" if key == "name" else None, "first"]
    assert name == "mlflow" or all(run["project"] == "trials" for run in server.begun)
    assert server.params == ({"train.lr": 1.0, "out": "x"} if name == "mlflow" else {})
    assert server.logged == [(1, {"loss": 2.0}), (5, {"loss": 2.0})] and server.num_finished == 2


def test_a_run_that_a_tracker_refuses_can_go_on(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeServer(refuses=True).package("wandb"))
    monkeypatch.setattr(start, "find_spec", lambda name: True)
    arguments = tiny_run.arguments(tmp_path / "run", "--train.epochs=1")
    assert main([*arguments, "--log.wandb=trials", "--log.wandb_entity=team"]) == 2
    assert "given:    log.wandb = trials: No API key configured." in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0


def test_a_tracker_that_fails_at_its_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeServer(breaks=True).package("wandb"))
    with ExitStack() as stack:
        metrics.open_trackers(stack, tmp_path, LogConfig(wandb="trials"), {}, 0)
    assert "wandb may lack the last figures" in capsys.readouterr().out


def test_a_tracker_that_fails_is_left_out(tmp_path: Path) -> None:
    def failing(step: int, values: Any) -> None:
        raise ConnectionError("no route")

    lines: list[str] = []
    seen = Seen()
    with MetricsLog(tmp_path / "metrics.jsonl", 2, lines.append, trackers=[failing, seen]) as log:
        log.step(1, FIGURES)
        log.step(2, FIGURES)
    assert [line for line in lines if "no route" in line] == [lines[0]]
    assert [step for step, _ in seen.seen] == [1, 2]


def test_a_package_that_is_not_installed_is_named_before_anything_is_written(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(start, "find_spec", lambda name: None)
    for package in start.TRACKERS:
        flag = f"--log.{package}={'true' if package == 'tensorboard' else 'x'}"
        assert main(tiny_run.arguments(tmp_path / "run", flag)) == 2
        assert f"pip install 'furlong[{package}]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

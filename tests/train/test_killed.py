"""kill -9 at random moments of steps and saves: what is resumed ends in the same bits."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from helpers.load import slowed
from helpers.ranks import server
from helpers.tiny_runs import TinyRun, run_command

NUM_STEPS = 12
NUM_KILLS = 20
LIMIT_S = 60
TRAINED = {
    "weights": (),
    "adapters": ("--model.lora.rank=4", "--model.lora.dropout=0.1", "--offload={weights: cpu}"),
}


@dataclass(frozen=True)
class Kill:
    """Where a process was when it was killed."""

    last_step: int
    """In the metrics."""
    checkpoint: str
    """The newest that has its final name."""
    unfinished: str
    """What was being written or removed."""


@dataclass(frozen=True)
class Subject:
    """A run that may be killed."""

    context: ForkServerContext
    tiny: TinyRun
    folder: Path
    trained: str
    save_every_steps: int

    def start(self, *flags: str) -> BaseProcess:
        arguments = self.tiny.arguments(
            self.folder,
            f"--train.steps={NUM_STEPS}",
            "--train.epochs=null",
            f"--train.save_every_steps={self.save_every_steps}",
            *TRAINED[self.trained],
            *flags,
        )
        process = self.context.Process(target=run_command, args=(arguments,))
        process.start()
        return process

    def finish(self, *flags: str) -> None:
        process = self.start(*flags)
        process.join(slowed(LIMIT_S))
        assert process.exitcode == 0, f"{self.folder}: exit code {process.exitcode}"

    def kill(self, aim: str, draw: random.Random) -> Kill | None:
        """Starts or resumes the run and kills it after a random step, or while it saves after
        that; None if it was faster."""
        checkpoints = self.folder / "checkpoints"
        target_step = draw.randrange(NUM_STEPS)
        config_before = modified_ns(self.folder / "config.json")
        process = self.start("--resume")
        for _ in until_it_ends(process):
            # The config is written again right before the steps.
            if modified_ns(self.folder / "config.json") == config_before:
                continue
            if len(metrics(self.folder)) < target_step:
                continue
            if aim == "step":
                time.sleep(draw.uniform(0, 0.2))
                break
            if unfinished(checkpoints):
                time.sleep(draw.uniform(0, 0.01))
                break
        process.kill()
        process.join(LIMIT_S)
        if process.exitcode != -signal.SIGKILL:
            assert process.exitcode == 0, f"{self.folder}: exit code {process.exitcode}"
            return None
        names = sorted(path.name for path in checkpoints.glob("step-*"))
        return Kill(
            len(metrics(self.folder)),
            max((name for name in names if not name.endswith(".tmp")), default="-"),
            ", ".join(sorted(unfinished(checkpoints))) or "-",
        )

    def final_state(self) -> tuple[bytes, list[float]]:
        """The weights' file, and the loss of every step."""
        weights = next((self.folder / "model").glob("*.safetensors")).read_bytes()
        return weights, [json.loads(line)["loss"] for line in metrics(self.folder)]


def modified_ns(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


def unfinished(checkpoints: Path) -> set[str]:
    return {path.name for path in checkpoints.glob("*.tmp")}


def until_it_ends(process: BaseProcess) -> Iterator[None]:
    started_s = time.monotonic()
    while process.is_alive():
        assert time.monotonic() - started_s < slowed(LIMIT_S), "the run hangs"
        yield
        time.sleep(0.0005)


def metrics(run: Path) -> list[str]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in lines if '"grad_norm"' in line]


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    return server()


def survive(
    context: ForkServerContext,
    tiny: TinyRun,
    folder: Path,
    *,
    num_kills: int,
    kills_per_run: tuple[int, ...],
    trains: tuple[str, ...] = tuple(TRAINED),
    seed: int = 0,
) -> list[Kill]:
    """Runs that are killed and resumed, and then resumed to their end, until there are enough."""
    draw = random.Random(seed)
    truths = {}
    for trained in trains:
        undisturbed = Subject(context, tiny, folder / trained, trained, 5)
        undisturbed.finish()
        truths[trained] = undisturbed.final_state()
    kills: list[Kill] = []
    number = 0
    while len(kills) < num_kills:
        number += 1
        assert number < 10 * num_kills, "runs end before they can be killed"
        trained = trains[number % len(trains)]
        run = Subject(context, tiny, folder / f"run-{number}", trained, draw.choice((1, 2, 3)))
        for _ in range(min(draw.choice(kills_per_run), num_kills - len(kills))):
            kill = run.kill(("save", "step")[len(kills) % 2], draw)
            if kill is None:
                break
            kills.append(kill)
        if not (run.folder / "report.json").exists():
            run.finish("--resume")
        assert run.final_state() == truths[trained], f"{run.folder} after {kills}"
        left = {path.suffix for path in (run.folder / "checkpoints").iterdir()}
        assert left == {""}, f"{run.folder} holds {left}"
    return kills


def test_two_kills(processes: ForkServerContext, tiny_run: TinyRun, tmp_path: Path) -> None:
    survive(processes, tiny_run, tmp_path, num_kills=2, kills_per_run=(2,), trains=("adapters",))


@pytest.mark.nightly
def test_twenty_kills(processes: ForkServerContext, tiny_run: TinyRun, tmp_path: Path) -> None:
    kills = survive(processes, tiny_run, tmp_path, num_kills=NUM_KILLS, kills_per_run=(1, 2, 3, 4))
    assert sum(kill.unfinished != "-" for kill in kills) >= 5, "too few kills hit a save"
    assert sum(kill.checkpoint != "-" for kill in kills) >= 10, "too few had a checkpoint"
    assert len({kill.last_step for kill in kills}) >= 6

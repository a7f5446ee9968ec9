"""torchrun itself: a run from end to end, and kill -9 of a process at a random moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from helpers.launched import Launched
from helpers.load import slowed
from helpers.tiny_runs import TinyRun, run_command

NUM_STEPS = 12
LIMIT_S = 180
STEPS = (f"--train.steps={NUM_STEPS}", "--train.epochs=null", "--train.save_every_steps=2")

pytestmark = pytest.mark.slow


@dataclass
class Torchrun:
    """Two processes under torchrun, until it has ended."""

    arguments: list[str]
    output: Path
    max_restarts: int = 0
    started_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
            f"--max-restarts={self.max_restarts}", "--master-port=0", "--standalone",
            "-m", "furlong", *self.arguments,
        ]  # fmt: skip
        with self.output.open("w") as opened:
            self.process = subprocess.Popen(
                command, stdout=opened, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def worker(self, number: int) -> psutil.Process | None:
        """The process of a number, as soon as it is there."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if child.environ().get("RANK") == str(number):
                    return child
            except psutil.Error:
                continue
        return None

    def wait(self) -> int:
        try:
            return self.process.wait(slowed(LIMIT_S))
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def said(self) -> str:
        return self.output.read_text()


def steps_of(run: Path) -> list[str]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in lines if '"grad_norm"' in line]


def losses_of(run: Path) -> list[str]:
    return [line.split('"loss": ')[1].split(",")[0] for line in steps_of(run)]


def weights_of(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def killed(tiny: TinyRun, folder: Path, draw: random.Random) -> float:
    """Kill a process of a run, which torchrun starts anew; seconds until the other was gone."""
    folder.mkdir()
    run, target = folder / "run", draw.randrange(1, NUM_STEPS - 1)
    started = Torchrun(tiny.arguments(run, *STEPS), folder / "said.txt", max_restarts=1)
    worker = other = None
    while len(steps_of(run)) < target or worker is None or other is None:
        assert started.process.poll() is None, started.said
        worker, other = started.worker(0), started.worker(1)
        time.sleep(0.01)
    time.sleep(draw.uniform(0, 0.3))
    worker.kill()
    killed_s = time.monotonic()
    while other.is_running() and other.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    others_s = time.monotonic() - killed_s
    assert started.wait() == 0, started.said
    assert "resumed from step-" in started.said or "begins again" in started.said
    return others_s


def test_a_run_of_which_a_process_is_killed_ends_in_the_same_bits(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "killed" / "run"
    plain = Launched(tmp_path / "said", run_command, tiny_run.arguments(undisturbed, *STEPS))
    assert [process.code for process in plain.ended(LIMIT_S)] == [0, 0]
    assert killed(tiny_run, tmp_path / "killed", random.Random(0)) < slowed(60)
    assert weights_of(run) == weights_of(undisturbed)
    assert losses_of(run) == losses_of(undisturbed)


def test_a_signal_to_torchrun_leaves_a_checkpoint(tiny_run: TinyRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    started = Torchrun(tiny_run.arguments(run, *STEPS), tmp_path / "said.txt")
    while len(steps_of(run)) < 3:
        assert started.process.poll() is None, started.said
        time.sleep(0.01)
    os.kill(started.process.pid, signal.SIGTERM)
    asked_s = time.monotonic()
    started.wait()
    assert time.monotonic() - asked_s < slowed(60)
    assert "stopped by SIGTERM after step" in started.said
    steps = len(steps_of(run))
    assert (run / "checkpoints" / f"step-{steps:08d}").is_dir() or steps == NUM_STEPS

"""A verb that a signal ends before there is something to save: one line and an exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.load import slowed

# Stands in for the verb: at work for long, with something to clean up.
WORKING = """
import sys, time
from pathlib import Path
from furlong.cli import main as module

def work(arguments):
    folder = Path(arguments[-1])
    try:
        (folder / "begun").touch()
        time.sleep(60)
    finally:
        (folder / "cleaned").touch()

module._dispatch = work
sys.exit(module.main(sys.argv[1:]))
"""
SWALLOWING = WORKING.replace(
    "        time.sleep(60)",
    "        try:\n            time.sleep(60)\n        except BaseException as error:\n"
    "            raise ImportError('half imported') from error",
)
PROGRAM = """
import sys
from furlong.cli.main import main
print("begun", flush=True)
sys.exit(main(sys.argv[1:]))
"""


def end(folder: Path, number: int, program: str = WORKING, *, nohup: bool = False) -> tuple:
    command = [sys.executable, "-c", program, "verb", str(folder)]
    process = subprocess.Popen(
        (["nohup"] if nohup else []) + command,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    started_s = time.monotonic()
    while not (folder / "begun").exists():
        assert time.monotonic() - started_s < slowed(60) and process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    if nohup:
        time.sleep(0.2)
        is_alive = process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        return is_alive, process.returncode
    said = "".join(process.communicate(timeout=60))
    return process.returncode, said


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_a_signal_ends_a_verb_with_one_line(tmp_path: Path, name: str) -> None:
    number = signal.Signals[name]
    assert end(tmp_path, number) == (128 + number, f"ended by {name}\n")
    assert (tmp_path / "cleaned").exists()


def test_whatever_a_library_makes_of_it(tmp_path: Path) -> None:
    assert end(tmp_path, signal.SIGINT, SWALLOWING) == (130, "ended by SIGINT\n")


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    assert end(tmp_path, signal.SIGHUP, nohup=True) == (True, 128 + signal.SIGTERM)


@pytest.mark.slow
def test_ctrl_c_at_any_moment_of_the_imports(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("words\n" * 100)
    arguments = ["lengths", str(tmp_path / "data.txt"), "--tokenizer", str(tmp_path)]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    for tenths in (2, 4, 8, 13, 18, 28):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        time.sleep(tenths / 10)
        process.send_signal(signal.SIGINT)
        said = "".join(process.communicate(timeout=60))
        assert "Traceback" not in said and "Exception ignored" not in said, f"{tenths}: {said}"
        # -2: when Python is ending
        assert process.returncode in (2, 130, -2)

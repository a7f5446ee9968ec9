"""What becomes of a verb whose output cannot be written: closed, full, or its reader gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Stands in for a verb: lines before, between and after the work, one of them to stderr.
WORKING = """
import sys
from pathlib import Path
from furlong.cli import main as module

def work(arguments):
    for number in range(3000):
        print(f"line {number}", flush=number % 100 == 0)
    print("a warning", file=sys.stderr)
    Path(arguments[-1]).write_text("done")
    print("the end")
    return 0

module._dispatch = work
module.command()
"""


def call(
    folder: Path, redirection: str, verb: str = "train", program: str = WORKING
) -> subprocess.CompletedProcess[str]:
    command = f'"$0" -c "$1" {verb} "$2" {redirection}; echo "code $?" >"$3"'
    return subprocess.run(
        ["sh", "-c", command, sys.executable, program, str(folder / "out"), str(folder / "code")],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
    )


@pytest.mark.parametrize(
    "redirection",
    [">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full", ">/dev/full 2>&1"],
)
def test_the_work_is_done_whatever_becomes_of_the_output(tmp_path: Path, redirection: str) -> None:
    finished = call(tmp_path, redirection)
    assert (tmp_path / "out").read_text() == "done", finished.stderr
    assert (tmp_path / "code").read_text() == "code 0\n"
    assert "Traceback" not in finished.stderr and "Exception" not in finished.stderr


def test_a_closed_stream_is_no_file_of_the_run(tmp_path: Path) -> None:
    """The operating system gives the next file that is opened the number of a closed stream."""
    program = "import os\nfrom furlong.cli import main as module\n" + (
        "def work(arguments):\n"
        "    opened = open(arguments[-1], 'w')\n"
        "    os.write(1, b'not for the file'); os.write(2, b'nor this')\n"
        "    opened.write('done')\n"
        "    return 0\n"
        "module._dispatch = work\nimport sys; sys.exit(module.main(sys.argv[1:]))\n"
    )
    call(tmp_path, "<&- >&- 2>&-", program=program)
    assert (tmp_path / "out").read_text() == "done"


def test_a_reader_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", WORKING, "train", str(tmp_path / "out")],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    os.read(reader, 10)
    os.close(reader)
    _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (0, "a warning\n")
    assert (tmp_path / "out").read_text() == "done"


def test_output_that_is_lost_to_a_full_disk_is_reported(tmp_path: Path) -> None:
    """A run is its folder and its exit code; a table that is cut short is no answer."""
    assert "warning: the output is incomplete: No space left on device" in (
        call(tmp_path, ">/dev/full").stderr
    )
    finished = call(tmp_path, ">/dev/full", verb="lengths")
    assert (tmp_path / "code").read_text() == "code 2\n"
    assert (tmp_path / "out").read_text() == "done"
    assert "the output is incomplete: No space left on device" in finished.stderr

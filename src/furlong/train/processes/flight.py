"""Flight files: where each process is, in a small mapped file that outlives even kill -9.

    RUN/flight/ATTEMPT/PROCESS

A page that a process has written to a mapped file belongs to the operating system: it is there
whatever becomes of the process. The next attempt prints them. Loads no torch.
"""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path

FLIGHT = "flight"
"""Folder of the flight files in a run folder."""
_NUM_BYTES = 128


class Flight:
    """The position of this process: a line of text, and how many there were before it."""

    def __init__(self) -> None:
        self.text = "its start"
        self.count = 0
        self._map: mmap.mmap | None = None
        self._file: Path | None = None

    def write_to(self, file: Path) -> None:
        """From now on the position is in a file too, whose folder is made if need be."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w+b") as opened:
            try:  # to write to a mapped hole on a full disk would end the process by SIGBUS
                os.posix_fallocate(opened.fileno(), 0, _NUM_BYTES)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(file)) from error
            self._map = mmap.mmap(opened.fileno(), _NUM_BYTES)
        self._file = file
        self._write()

    def at(self, text: str) -> None:
        """This process begins what `text` says."""
        self.text = text
        self.count += 1
        self._write()

    def of(self, number: int) -> str | None:
        """The position of another process, where it writes to the same folder: newer than what it
        has told."""
        try:
            return None if self._file is None else _text_of(self._file.with_name(str(number)))
        except OSError:
            return None

    def close(self) -> None:
        """Later positions are not written any more."""
        if self._map is not None:
            self._map.close()
            self._map = None

    def _write(self) -> None:
        if self._map is not None:
            line = self.text.encode()[: _NUM_BYTES - 1]
            self._map[:] = line.ljust(_NUM_BYTES, b"\0")


def flight_file(run: Path, attempt: int, number: int) -> Path:
    """The flight file of a process of an attempt."""
    return run / FLIGHT / str(attempt) / str(number)


def read_flights(run: Path) -> dict[int, str]:
    """The positions at which the processes of the last attempt ended, by their numbers; empty
    after an attempt that came to its end."""
    attempts = [folder for folder in (run / FLIGHT).glob("*") if folder.name.isdecimal()]
    if not attempts:
        return {}
    last = max(attempts, key=lambda folder: int(folder.name))
    numbers = sorted(int(file.name) for file in last.iterdir() if file.name.isdecimal())
    return {number: _text_of(last / str(number)) for number in numbers}


def remove_flights(run: Path) -> None:
    """Forget all attempts, in the end or after they were told."""
    shutil.rmtree(run / FLIGHT, ignore_errors=True)


def _text_of(file: Path) -> str:
    with open(file, "rb") as opened:
        return os.fsdecode(opened.read(_NUM_BYTES).rstrip(b"\0"))

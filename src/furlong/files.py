"""Atomic writes of files and folders, checksums, and the operating system's errors as UserErrors.

A file or folder is written under a temporary name (`.NAME.XXXX.tmp`, in the same folder), flushed
to disk and then renamed. A reader sees the old content or all of the new content, also after a
power failure. Checksums (xxh3, 128 bits) detect damage, not tampering.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import xxhash
from safetensors import SafetensorError

from furlong.errors import ConfigError, UserError

TEMPORARY = ".tmp"
_STALE_S = 86400.0
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CHANGES = {
    **dict.fromkeys(FULL_DISK, "make room"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "move the file of that name away"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "check who owns it and its permissions"),
    errno.EISDIR: "move the folder of that name away",
    errno.ENOENT: "check the path, or restore what was there",
    errno.EROFS: "mount the disk for writing",
}


def write_text(file: Path, text: str) -> None:
    """Write text to a file atomically, in UTF-8; its folder must exist."""
    with whole_file(file) as opened:
        opened.write(text.encode())


def write_json(file: Path, value: object) -> None:
    """Write a value as indented JSON, atomically."""
    write_text(file, json.dumps(value, indent=2) + "\n")


@contextmanager
def whole_file(file: Path) -> Iterator[IO[bytes]]:
    """Context manager: open a temporary file for bytes; if the block ends without an error, rename
    it to `file`, which it replaces."""
    aside = _aside(file)
    try:
        with aside.open("wb") as opened:
            yield opened
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(aside, file)
        sync(file.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Context manager: create a temporary folder to fill; if the block ends without an error,
    rename it to `folder`. Parents are created. Raises OSError if `folder` then has files already.

    Temporary folders beside it that have not changed for a day are removed: their writers died.
    """
    aside = _aside(folder)
    remove_stale(folder.parent.glob(f".{folder.name}.*{TEMPORARY}"))
    aside.mkdir(parents=True)
    try:
        yield aside
        publish(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_stale(folders: Iterable[Path]) -> None:
    """Remove the folders that have not changed for a day: the processes that wrote them died."""
    for folder in folders:
        with suppress(OSError):
            if folder.stat().st_mtime < time.time() - _STALE_S:
                shutil.rmtree(folder, ignore_errors=True)


def publish(aside: Path, folder: Path) -> None:
    """Flush everything in the folder `aside` to disk, then rename it to `folder`."""
    for path in (*aside.rglob("*"), aside):
        sync(path)
    os.rename(aside, folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")


def checksum(file: Path) -> str:
    """Return the checksum of a file's bytes. Raises OSError with the name of the file."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
    except OSError as error:  # errors of reading name no file
        raise OSError(error.errno, error.strerror, str(file)) from error


class SummedFile:
    """A file written from start to end that counts its bytes and computes their checksum."""

    def __init__(self, opened: IO[bytes]) -> None:
        self._opened = opened
        self._checksum = xxhash.xxh3_128()
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        """Write all of `data`, also to an unbuffered file, whose `write` may accept only a part."""
        left = whole = memoryview(data).cast("B")
        self._checksum.update(whole)
        self.num_bytes += whole.nbytes
        while left:
            left = left[self._opened.write(left) :]
        return whole.nbytes

    def checksum(self) -> str:
        """Return the checksum of the bytes so far, as the function `checksum` does for a file."""
        return self._checksum.hexdigest()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)


@contextmanager
def os_errors_told(
    kind: type[UserError], *, required: str, source: str, or_else: str = "", during: str = "",
    inside: Path | None = None,
) -> Iterator[None]:  # fmt: skip
    """Context manager: turn errors of the operating system into errors of the class `kind`.

    `required`, `source`: parts of the error. Its advice depends on the operating system's error.
    `or_else`: more advice, with a comma in front. `during`: the activity to name instead of a path.
    `inside`: a folder; errors about a path outside it stay as they are, and so do errors without a
    path unless the disk is full.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        refused = _os_error(error)
        if refused is None:
            raise
        path = _path_of(refused, inside)
        if inside and path is None and (refused.filename or refused.errno not in FULL_DISK):
            raise
        reason = refused.strerror or str(refused)
        told = f"{reason} while {during}" if during else f"{path or inside or source}: {reason}"
        change = _CHANGES.get(refused.errno or 0, "check the path and its permissions")
        raise kind(
            given=told, required=required, source=source, change=f"{change}{or_else}"
        ) from error


def _os_error(error: OSError | SafetensorError) -> OSError | None:
    """Return the operating system's error, or None. An error of safetensors has only a text; if
    this reports a full disk, return the OSError for it."""
    if isinstance(error, OSError):
        return error
    full = (number for number in FULL_DISK if os.strerror(number) in str(error))
    return next((OSError(number, os.strerror(number)) for number in full), None)


def _path_of(error: OSError, inside: Path | None) -> Path | None:
    """Return the first path that an error names. With `inside`, return the first path in that
    folder. Return None if there is no such path."""
    names = [name for name in (error.filename2, error.filename) if isinstance(name, str)]
    for name in names:
        if inside is None or Path(os.path.realpath(name)).is_relative_to(os.path.realpath(inside)):
            return Path(name)
    return None


def read_object(file: str | Path, *, source: str, change: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ConfigError if it holds none or cannot be read."""
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            given=f"{file}: {error.strerror if isinstance(error, OSError) else error}",
            required="JSON that can be read",
            source=source,
            change=change,
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            given=f"{file} holds a {type(found).__name__}", required="one JSON object",
            source=source, change=change,
        )  # fmt: skip
    return found


def user_cache() -> Path:
    """Return furlong's folder in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "furlong"

"""Tokenized sources on disk: written once, memory-mapped ever after.

    <folder>/tokens/<key>/       one source; the key is a checksum of contents, tokenizer and format
      input_ids.bin, labels.bin  int32, sequence after sequence; no labels.bin if labels are ids;
                                 of a record of two answers chosen, then rejected
      index.npy                  (N, 4) int64: stop, file, line, labelled tokens of each sequence
      manifest.json              notes and the files' checksums, written last
    <folder>/seen/<key>          checksum of files whose names, sizes and times have this key

An entry is written under another name, synchronised with the disk and renamed, so that it is there
whole or not at all; of several writers of one entry the first one wins and the others take what it
wrote. What does not fit its manifest is written anew: every byte is compared at a start. Nothing is
ever unpickled.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import uuid
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from furlong.data.sources import SourceFile
from furlong.data.tokenize import Encoded
from furlong.errors import ConfigError, DataError

# 2: the manifest has a checksum of the tokens. 3: notes have the rows of a record. 4: texts of a
# pair that repeat their prompt are whole texts, and learnt from the first token that differs. 5:
# contents of parts are texts, marked answers are not learnt; the manifest has checksums of files.
# 6: white space of answers is learnt with every tokenizer, tags of templates are found wherever
# they write, keys that a table fills with null are absent, and more marks are known.
VERSION = 6

_SOURCE = "data.cache_dir, by default furlong in the user's cache directory"
_PARTIAL = ".partial"
_STALE_S = 24 * 3600.0
# A file written so shortly before it was read could be written again within the clock's tick.
_SETTLED_S = 2.0
_READ_BYTES = 2**20
_KEY_CHARS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A tokenized source, memory-mapped."""

    folder: Path
    key: str
    input_ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    index: npt.NDArray[np.int64]
    notes: dict[str, Any]
    """Plain values that the writer wanted to be remembered."""
    tokens_key: str
    """A checksum of all tokens and labels, as they were written."""
    sizes: dict[str, int]
    """Bytes of each file."""

    def tokens(self, row: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """`input_ids` and `labels` of a sequence, (T,) both: views, read when they are used.

        Raises DataError where files were cut short meanwhile: reading such memory would end the
        process.
        """
        for name, num_bytes in self.sizes.items():
            with suppress(FileNotFoundError):  # what is mapped stays there
                if (found := os.stat(self.folder / name).st_size) < num_bytes:
                    raise DataError(
                        given=f"{self.folder / name}: cut to {found:,} of {num_bytes:,} bytes while"
                        " it is in use",
                        required="a cache whose files stay as they are",
                        source="data.cache_dir",
                        change="start again (--resume goes on): the data are tokenized anew",
                    )
        start, stop = int(self.index[row - 1, 0]) if row else 0, int(self.index[row, 0])
        return self.input_ids[start:stop], self.labels[start:stop]

    @property
    def seq_lens(self) -> npt.NDArray[np.int64]:
        return np.diff(self.index[:, 0], prepend=0)


def cache_folder(given: str | None) -> Path:
    """`data.cache_dir`, or furlong's folder in the user's cache directory. Raises ConfigError."""
    try:
        if given is not None:
            return Path(given).expanduser()
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base).expanduser() / "furlong"
    except RuntimeError as error:
        raise ConfigError(
            given=f"no home directory: {error}",
            required="a folder for tokenized data",
            source=_SOURCE,
            change="set data.cache_dir, or HOME",
        ) from error


def read_entry(folder: Path, key: str) -> Entry | None:
    """The entry of a key, or None if there is none that is whole."""
    entry = folder / "tokens" / key
    try:
        manifest = json.loads((entry / "manifest.json").read_text(encoding="utf-8"))
        sizes = _sizes(entry)
        if manifest["version"] != VERSION or manifest["sizes"] != sizes:
            return None
        if manifest["checksums"] != _checksums(entry, sizes):
            return None
        index = np.load(entry / "index.npy", mmap_mode="r", allow_pickle=False)
        ids = _map(entry / "input_ids.bin")
        labels = _map(entry / "labels.bin") if (entry / "labels.bin").exists() else ids
        notes, tokens_key = manifest["notes"], manifest["tokens_key"]
        return Entry(entry, key, ids, labels, index, notes, tokens_key, sizes)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_entry(folder: Path, key: str, encoded: Iterable[Encoded], notes: dict[str, Any]) -> Entry:
    """Writes what `encoded` yields, sequence by sequence, and maps it.

    `notes` is saved as it is after the last sequence. Raises ConfigError if the folder cannot be
    written, and whatever `encoded` raises; either way nothing half written stays.
    """
    aside = folder / "tokens" / f"{key}.{uuid.uuid4().hex}{_PARTIAL}"
    with writing(folder):
        aside.mkdir(parents=True)
        _remove_stale(folder / "tokens")
    try:
        _write(aside, folder, encoded, notes)
        with writing(folder):
            entry = _publish(aside, folder, key)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return entry


def content_key(files: Iterable[SourceFile], folder: Path) -> str:
    """A checksum of the files' contents and kinds, in order; where they are does not matter.

    Files whose `status_key` is known are not read again.
    """
    listed = [(file, part) for file in files for part in file.parts]
    seen = folder / "seen" / status_key(files)
    with suppress(OSError, ValueError):
        key = seen.read_text(encoding="ascii")
        if len(key) == _KEY_CHARS:
            return key
    started_s = time.time()
    newest_s = max(max(part.stat().st_mtime, part.stat().st_ctime) for _, part in listed)
    key = _checksum([[file.kind, _content(part)] for file, part in listed])
    if newest_s < started_s - _SETTLED_S:
        with writing(folder):
            seen.parent.mkdir(parents=True, exist_ok=True)
            aside = seen.with_name(f"{seen.name}.{uuid.uuid4().hex}{_PARTIAL}")
            aside.write_text(key, encoding="ascii")
            os.replace(aside, seen)
    return key


def status_key(files: Iterable[SourceFile]) -> str:
    """A checksum of the files' paths, sizes, inodes and times."""
    return _checksum([_status(part) for file in files for part in file.parts])


def entry_key(*parts: object) -> str:
    """The key of an entry that `parts`, plain values, decide."""
    return _checksum([VERSION, *parts])


def _write(aside: Path, folder: Path, encoded: Iterable[Encoded], notes: dict[str, Any]) -> None:
    index = array("q")
    tokens = xxhash.xxh3_128()
    stop = 0
    with ExitStack() as opened:
        with writing(folder):
            ids = opened.enter_context((aside / "input_ids.bin").open("wb", buffering=0))
        labels: FileIO | None = None
        for sequence in encoded:
            own_labels = sequence.labels is not sequence.input_ids
            with writing(folder):
                if own_labels and labels is None:
                    # The first labels of their own: those before are the ids.
                    shutil.copyfile(aside / "input_ids.bin", aside / "labels.bin")
                    labels = opened.enter_context((aside / "labels.bin").open("ab", buffering=0))
                _append(ids, sequence.input_ids)
                if labels is not None:
                    _append(labels, sequence.labels)
            for values in (sequence.input_ids, sequence.labels):
                tokens.update(values.tobytes())
            stop += len(sequence.input_ids)
            valid = int(np.count_nonzero(sequence.labels[1:] >= 0))
            index.extend((stop, sequence.file, sequence.line, valid))
    with writing(folder):
        rows = np.frombuffer(index, np.int64) if index else np.zeros(0, np.int64)
        np.save(aside / "index.npy", rows.reshape(-1, 4), allow_pickle=False)
        tokens.update(rows.tobytes())
        manifest = {
            "version": VERSION,
            "sizes": (sizes := _sizes(aside)),
            "checksums": _checksums(aside, sizes),
            "notes": notes,
            "tokens_key": tokens.hexdigest(),
        }
        (aside / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        for file in (*aside.iterdir(), aside):
            _synchronise(file)


def _append(file: FileIO, values: npt.NDArray[np.int32]) -> None:
    """An unbuffered file may take a part only, and holds back nothing that its end could lose."""
    left = memoryview(values.tobytes())
    while left:
        left = left[file.write(left) :]


def _publish(aside: Path, folder: Path, key: str) -> Entry:
    """Renames a finished entry into its place, unless another writer was sooner."""
    place = folder / "tokens" / key
    for _ in range(2):
        try:
            os.rename(aside, place)
        except OSError:
            if not place.exists():
                raise
        else:
            _synchronise(place.parent)
        if (entry := read_entry(folder, key)) is not None:
            return entry
        # What is in the place is damaged: out of the way with it, in one step.
        damaged = place.with_name(f"{key}.{uuid.uuid4().hex}{_PARTIAL}")
        with suppress(FileNotFoundError):
            os.rename(place, damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    raise OSError(f"{place} is damaged again and again")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns what the file system refuses into a message."""
    try:
        yield
    except OSError as error:
        reason, change = error.strerror or str(error), "make space there"
        if not os.path.isdir(folder):
            reason, change = f"cannot be created: {reason}", "make it possible to create it"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            change = "check its permissions"
        raise ConfigError(
            given=f"{folder}: {reason}",
            required="a folder with space for 4 to 8 bytes per token",
            source=_SOURCE,
            change=f"{change}, or set data.cache_dir to another folder",
        ) from error


def _remove_stale(tokens: Path) -> None:
    """Removes what writers that were killed a day ago or more left behind."""
    for partial in tokens.glob(f"*{_PARTIAL}"):
        try:
            newest_s = max(part.stat().st_mtime for part in (partial, *partial.iterdir()))
        except OSError:
            continue
        if newest_s < time.time() - _STALE_S:
            shutil.rmtree(partial, ignore_errors=True)


def _map(file: Path) -> npt.NDArray[np.int32]:
    if file.stat().st_size == 0:
        return np.zeros(0, np.int32)
    # A plain view: torch takes no subclass.
    return np.asarray(np.memmap(file, np.int32, mode="r"))


def _sizes(entry: Path) -> dict[str, int]:
    return {
        file.name: file.stat().st_size
        for file in sorted(entry.iterdir())
        if file.name != "manifest.json"
    }


def _checksums(entry: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: _content(entry / name) for name in names}


def _status(file: Path) -> list[Any]:
    status = file.stat()
    times = [status.st_mtime_ns, status.st_ctime_ns]
    return [str(file.resolve()), status.st_size, status.st_ino, *times]


def _content(file: Path) -> str:
    checksum = xxhash.xxh3_128()
    try:
        with file.open("rb") as opened:
            while piece := opened.read(_READ_BYTES):
                checksum.update(piece)
    except OSError as error:
        # Only opening names the file.
        raise OSError(error.errno, error.strerror, str(file)) from error
    return checksum.hexdigest()


def _checksum(value: object) -> str:
    return xxhash.xxh3_128(json.dumps(value).encode()).hexdigest()


def _synchronise(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

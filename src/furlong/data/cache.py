"""Cache tokenized sources and reference log-probabilities as memory-mapped arrays.

    <folder>/tokens/<key>/       one source; the key is a checksum of the names, sizes and times of
                                 its files, of the tokenizer and of the format
      input_ids.bin, labels.bin  int32, sequence after sequence; no labels.bin if labels equal ids.
                                 A pair is two sequences: chosen, then rejected. An answer of KTO is
                                 followed by its mismatch (its prompt with another answer)
      index.bin                  (N, 5) int64, for each sequence: its end in input_ids, file number,
                                 line, number of tokens with a label, and 1, -1 or 0 for a
                                 desirable, an undesirable or no answer of KTO
    <folder>/reference/<key>/    log-probabilities of one source by one model
      log_probs.bin              one number per token with a label, sequence after sequence
      done.bin                   one byte per sequence: 1 once its numbers are on disk

Each folder has a manifest.json. It holds the types and shapes of the arrays, plain values
("facts"), and the checksums of arrays that are complete. When a run starts, one process of each
machine computes the checksums of the token arrays again. Arrays that do not match the manifest are
written again. If several processes write one folder, the first one wins and the others read its
arrays. Nothing is unpickled.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from furlong.config.schema import Source
from furlong.data.records import SourceRecord
from furlong.data.sources import Listing, SourceFile
from furlong.data.tokenize import Encoded
from furlong.errors import ConfigError
from furlong.files import checksum, os_errors_told, user_cache, whole_folder, write_json

# 12: texts that begin with BOS, or end with a special token, get no other one. Every resume is
# refused after a change of this number: what changes chats alone is in `tokenizer_checksum`.
CACHE_VERSION = 13

CACHE_KEY = "data.cache_dir (default: furlong in the user's cache directory)"
_MANIFEST = "manifest.json"
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)

Mode = Literal["r", "r+"]
ArrayKinds = Mapping[str, tuple[str, tuple[int, ...]]]
"""The dtype and shape of each array of a folder."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """The arrays of one folder of the cache, memory-mapped."""

    folder: Path
    arrays: dict[str, npt.NDArray[Any]]
    facts: dict[str, Any]
    """Plain values from the writer."""
    checksums: dict[str, str]


def read_arrays(place: Path, mode: Mode = "r", *, is_compared: bool = False) -> Arrays | None:
    """Return the arrays of a folder, or None if it is missing, incomplete or damaged.

    Args:
        place: the folder.
        mode: `r` to read, `r+` to write in place.
        is_compared: skip the checksums, as another process of this machine has just compared them.
    """
    arrays = {}
    try:
        manifest = json.loads((place / _MANIFEST).read_text(encoding="utf-8"))
        checksums, facts = manifest["checksums"], manifest["facts"]
        for name, (dtype, shape) in manifest["arrays"].items():
            file = place / f"{name}.bin"
            num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
            if file.stat().st_size != num_bytes or np.dtype(dtype).hasobject:
                return None
            if checksums and not is_compared and checksums[name] != checksum(file):
                return None
            mapped = np.memmap(file, dtype, mode=mode) if num_bytes else np.zeros(0, dtype)
            # torch accepts no subclass such as memmap, which is needed to write alone
            arrays[name] = (np.asarray(mapped) if mode == "r" else mapped).reshape(shape)
        return Arrays(place, arrays, dict(facts), dict(checksums))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_arrays(
    place: Path, fill: Callable[[Path], tuple[ArrayKinds, dict[str, Any]]], *, mode: Mode = "r"
) -> Arrays:
    """Write a folder of arrays, and return the arrays memory-mapped.

    A folder that exists already, such as a damaged one, is removed first. If another process writes
    the folder at the same time and ends first, the arrays of that process are returned.

    Args:
        place: the folder.
        fill: writes `NAME.bin` for each array into the folder that it gets, and returns the arrays'
            dtypes and shapes, and plain values to store with them.
        mode: `r+` for arrays that are filled in later; these get no checksums.

    Raises:
        OSError: the folder cannot be written, or what was written cannot be read back intact.
    """
    if place.exists():
        damaged = place.with_name(f"{place.name}.{uuid.uuid4().hex}")
        with suppress(FileNotFoundError):
            os.rename(place, damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        with whole_folder(place) as aside:
            kinds, facts = fill(aside)
            sums = {name: checksum(aside / f"{name}.bin") for name in kinds} if mode == "r" else {}
            manifest = {"arrays": kinds, "facts": facts, "checksums": sums}
            write_json(aside / _MANIFEST, manifest)
    except OSError as error:
        if error.errno not in _TAKEN:  # another process was first
            raise
    found = read_arrays(place, mode)
    if found is None:
        raise OSError(errno.EIO, "damaged as soon as it is written", str(place))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedSource:
    """One data source, and its tokenized sequences in the cache."""

    source: Source
    listing: Listing
    arrays: Arrays
    tokenizer: str
    """A checksum of all that determines the ids of a text."""
    tokenized_s: float | None = None
    """The seconds that tokenizing took; None if the sequences were in the cache."""

    @property
    def index(self) -> npt.NDArray[np.int64]:
        """Array (N, 5) with a row for each sequence: its end in `input_ids`, file number, line,
        number of labelled tokens, and 1, -1 or 0 for a desirable, an undesirable or no answer of
        KTO."""
        return self.arrays.arrays["index"]

    @property
    def notes(self) -> dict[str, Any]:
        return self.arrays.facts

    @property
    def tokens_key(self) -> str:
        """A checksum of the arrays `input_ids`, `labels` and `index`."""
        return cache_key(self.arrays.checksums)

    @property
    def seq_lens(self) -> npt.NDArray[np.int64]:
        return np.diff(self.index[:, 0], prepend=0)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Array with an entry for each record: the row of `index` at which its sequences begin. A
        preference pair is one record with two rows, and so is an answer of KTO with its
        mismatch."""
        origins = self.index[:, 1:3]
        is_first = np.ones(len(origins), bool)
        is_first[1:] = (origins[1:] != origins[:-1]).any(axis=1)
        return np.flatnonzero(is_first)

    @property
    def noun(self) -> str:
        """The noun for one item that is drawn from the source, used in messages: "sequence", "pair"
        or "answer"."""
        return {"preference": "pair", "unpaired": "answer"}.get(self.notes["format"], "sequence")

    def lines_of(self, file: int) -> npt.NDArray[np.int64]:
        """Return the line numbers of all sequences that were read from one file. `file`: the number
        of the file in the source."""
        return self.index[self.index[:, 1] == file, 2]

    def tokens(
        self, row: int, begin: int = 0, length: int | None = None
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return `input_ids` and `labels` of a sequence, (T,) both: memory-mapped, read when used.

        Args:
            row: the sequence's row in `index`.
            begin: the index of the first token to return.
            length: the number of tokens, which may extend into the sequences that follow; None for
                the rest of the sequence.
        """
        start = begin + (int(self.index[row - 1, 0]) if row else 0)
        stop = int(self.index[row, 0]) if length is None else start + length
        ids = self.arrays.arrays["input_ids"]
        labels = self.arrays.arrays.get("labels", ids)
        return ids[start:stop], labels[start:stop]

    def desirable(self, row: int) -> bool | None:
        """Return whether the answer in a row of `index` is desirable; None for any loss but KTO."""
        wanted = int(self.index[row, 4])
        return wanted > 0 if wanted else None

    def origin(self, row: int) -> str:
        """Return file and line of a sequence's record, for messages."""
        _, file, line, *_ = self.index[row]
        return self.listing.files[int(file)].origin(int(line))


def cache_folder(given: str | None) -> Path:
    """Return the cache's folder: `data.cache_dir` (`given`), or one in the user's cache folder."""
    return Path(os.path.expanduser(given)) if given else user_cache()


@contextmanager
def creating_folder(folder: Path) -> Iterator[None]:
    """Context manager: create the cache's folder. Turn an OSError about the folder, or about a file
    in it, into a ConfigError."""
    told = partial(
        os_errors_told,
        ConfigError,
        required="a folder with space for 4 to 8 bytes per token",
        source=CACHE_KEY,
        or_else=", or set data.cache_dir to another folder",
    )
    with told():
        folder.mkdir(parents=True, exist_ok=True)
    with told(inside=folder):
        yield


def status_key(files: Iterable[SourceFile]) -> str:
    """Return a cache key made from each file's format, path, size, inode and times. Raises
    OSError."""
    found = []
    for file in files:
        parts = []
        for path in file.parts:
            status = path.stat()
            times = [status.st_mtime_ns, status.st_ctime_ns]
            parts.append([str(path.resolve()), status.st_size, status.st_ino, *times])
        found.append([file.kind, *parts])
    return cache_key(found)


def cache_key(*parts: object) -> str:
    """Return a checksum of plain values and the version of the cache's format."""
    return xxhash.xxh3_128_hexdigest(json.dumps([CACHE_VERSION, *parts]).encode())


def write_tokens(
    place: Path, encoded: Iterable[tuple[SourceRecord, Items[Encoded]]], facts: dict[str, Any]
) -> Arrays:
    """Write the sequences of records into a folder, and return the arrays memory-mapped.

    If the folder cannot be written or `encoded` raises an error, no folder is left.

    Args:
        place: the folder.
        encoded: yields records with their sequences.
        facts: plain values to store in the manifest. They are written last, so `encoded` may change
            them while it yields sequences.

    Raises:
        OSError: the folder cannot be written.
    """

    def fill(aside: Path) -> tuple[ArrayKinds, dict[str, Any]]:
        index = array("q")
        stop, labels = 0, None
        with ExitStack() as opened:
            ids = opened.enter_context((aside / "input_ids.bin").open("wb"))
            for record, sequences in encoded:
                for sequence in sequences:
                    if labels is None and sequence.labels is not sequence.input_ids:
                        # The first labels that differ from ids: all before are equal.
                        ids.flush()
                        shutil.copyfile(aside / "input_ids.bin", aside / "labels.bin")
                        labels = opened.enter_context((aside / "labels.bin").open("ab"))
                    ids.write(sequence.input_ids.tobytes())
                    if labels is not None:
                        labels.write(sequence.labels.tobytes())
                    stop += len(sequence.input_ids)
                    valid = int(np.count_nonzero(sequence.labels[1:] >= 0))
                    wanted = {None: 0, True: 1, False: -1}[sequence.desirable]
                    index.extend((stop, record.file, record.line, valid, wanted))
        (aside / "index.bin").write_bytes(index.tobytes())
        names = ("input_ids", *(("labels",) if labels is not None else ()))
        return dict.fromkeys(names, ("int32", (stop,))) | {
            "index": ("int64", (len(index) // 5, 5))
        }, facts

    return write_arrays(place, fill)


class ReferenceLogProbs:
    """Log-probabilities of one source's tokens under a reference model, stored in the cache.

    Sequences may be written in any order. Each sequence is marked as done once its
    log-probabilities are on disk, so a computation that was killed can be resumed. The cache key
    does not depend on the loss or on the way in which log-probabilities are computed, such as the
    chunk size. Log-probabilities that are on disk are therefore used again if only these have
    changed.
    """

    def __init__(
        self, folder: Path, source: TokenizedSource, facts: Mapping[str, Any], dtype: str
    ) -> None:
        """Open the log-probabilities of a source, or create their folder, in which no sequence is
        done yet.

        Args:
            folder: the cache's folder, which holds the folders of all sources.
            source: the source.
            facts: plain values, besides the tokens, on which the log-probabilities depend.
            dtype: the dtype of the log-probabilities.

        Raises:
            ConfigError: the folder cannot be written.
        """
        own = {**facts, "tokens": source.tokens_key, "dtype": dtype}
        self._stops = np.cumsum(source.index[:, 3])
        num_rows = len(source.index)
        kinds = {"log_probs": (dtype, (int(self._stops[-1]),)), "done": ("uint8", (num_rows,))}

        def fill(aside: Path) -> tuple[ArrayKinds, dict[str, Any]]:
            for name, (kind, (length,)) in kinds.items():
                with (aside / f"{name}.bin").open("wb") as file:
                    file.truncate(length * np.dtype(kind).itemsize)
            return kinds, own

        self.folder = folder / "reference" / cache_key(own)
        with creating_folder(folder):
            found = read_arrays(self.folder, "r+")
            if found is None or found.facts != own:
                found = write_arrays(self.folder, fill, mode="r+")
        self._log_probs: Any = found.arrays["log_probs"]
        self._done: Any = found.arrays["done"]

    def is_done(self, rows: Iterable[int]) -> bool:
        """Return whether the log-probabilities of all these sequences are on disk."""
        return bool(self._done[list(rows)].all())

    def write(self, found: Mapping[int, npt.NDArray[Any]]) -> None:
        """Write the log-probabilities of some sequences, and mark the sequences as done once the
        log-probabilities are on disk.

        Args:
            found: log-probabilities by row of the sequence. A truncated sequence may have fewer
                than there is room for; the room that is left keeps its values.
        """
        for row, values in found.items():
            start = self._start(row)
            self._log_probs[start : start + len(values)] = values
        self._log_probs.flush()
        self._done[list(found)] = 1
        self._done.flush()

    def read(self, row: int, count: int) -> npt.NDArray[Any]:
        """Return the first `count` log-probabilities of a row, in the dtype of the stored array."""
        start = self._start(row)
        return np.asarray(self._log_probs[start : start + count])

    def _start(self, row: int) -> int:
        return int(self._stops[row - 1]) if row else 0

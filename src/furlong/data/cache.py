"""Memory-mapped arrays on disk, whole or not at all: tokenized sources, and numbers beside them.

    <folder>/tokens/<key>/       one source; the key is of its files' names, sizes and times, the
                                 tokenizer and the format
      input_ids.bin, labels.bin  int32, sequence after sequence; no labels.bin if labels are ids;
                                 of a record of two answers chosen, then rejected; an answer that
                                 is wanted or not has what it is compared with behind it
      index.bin                  (N, 5) int64: stop, file, line, labelled tokens of each sequence,
                                 and 1 or -1 if it is an answer that is wanted or not, else 0
    <folder>/reference/<key>/    log-probabilities of one source by one model
      log_probs.bin              one number per token with a label, row after row of the tokens
      done.bin                   a byte per row: 1 as soon as its numbers are there

Each folder of arrays has a manifest.json: types, shapes, facts, and checksums of what is complete.
What does not fit it is written anew: every byte of the tokens is compared at a start, once on each
machine. Of several writers of one folder the first one wins and the others take what it wrote.
Nothing is unpickled.
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

# 12: texts that begin with BOS, or end with a special token, get no other one.
VERSION = 13

_SOURCE = "data.cache_dir, by default furlong in the user's cache directory"
_MANIFEST = "manifest.json"
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)

Mode = Literal["r", "r+"]
Kinds = Mapping[str, tuple[str, tuple[int, ...]]]
"""The type of each array of a folder, and its shape."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """The arrays of a folder, memory-mapped."""

    folder: Path
    arrays: dict[str, npt.NDArray[Any]]
    facts: dict[str, Any]
    """Plain values that the writer wanted to be remembered."""
    checksums: dict[str, str]


def read_arrays(place: Path, mode: Mode = "r", *, is_compared: bool = False) -> Arrays | None:
    """The arrays of a folder, or None if it is not whole. `is_compared`: another process of this
    machine has compared its bytes with their checksums just now."""
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
            # A plain view where nothing is written: torch takes no subclass.
            arrays[name] = (np.asarray(mapped) if mode == "r" else mapped).reshape(shape)
        return Arrays(place, arrays, dict(facts), dict(checksums))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_arrays(
    place: Path, fill: Callable[[Path], tuple[Kinds, dict[str, Any]]], *, mode: Mode = "r"
) -> Arrays:
    """Fill a folder with arrays and map it; what is there and not whole goes.

    `fill` writes `NAME.bin` for each array into the folder that it gets, and returns their kinds
    and the facts. mode `r+` is for arrays that are completed later: they have no checksums.
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
        if error.errno not in _TAKEN:  # another writer was sooner
            raise
    found = read_arrays(place, mode)
    if found is None:
        raise OSError(errno.EIO, "damaged as soon as it is written", str(place))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedSource:
    """A source, and its sequences in the cache."""

    source: Source
    listing: Listing
    arrays: Arrays
    tokenizer: str
    """A checksum of all that decides which ids a text gets."""
    tokenized_s: float | None = None
    """Seconds that tokenizing took; None if the sequences were there."""

    @property
    def index(self) -> npt.NDArray[np.int64]:
        """(N, 5) stop, file, line, labelled tokens of each sequence, and whether it is wanted."""
        return self.arrays.arrays["index"]

    @property
    def notes(self) -> dict[str, Any]:
        return self.arrays.facts

    @property
    def tokens_key(self) -> str:
        """A checksum of all tokens and labels, and where they are from."""
        return key_of(self.arrays.checksums)

    @property
    def seq_lens(self) -> npt.NDArray[np.int64]:
        return np.diff(self.index[:, 0], prepend=0)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Rows with which a record begins: a pair of answers is two rows of one file and line."""
        origins = self.index[:, 1:3]
        is_first = np.ones(len(origins), bool)
        is_first[1:] = (origins[1:] != origins[:-1]).any(axis=1)
        return np.flatnonzero(is_first)

    @property
    def noun(self) -> str:
        """The word for what a record makes."""
        return {"preference": "pair", "unpaired": "answer"}.get(self.notes["format"], "sequence")

    def lines_of(self, file: int) -> npt.NDArray[np.int64]:
        """The lines of a file of which it has sequences."""
        return self.index[self.index[:, 1] == file, 2]

    def tokens(
        self, row: int, begin: int = 0, length: int | None = None
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """`input_ids` and `labels` of a sequence, (T,) both: views, read when they are used. From
        its token `begin` on, `length` of them, which may reach into those that follow."""
        start = begin + (int(self.index[row - 1, 0]) if row else 0)
        stop = int(self.index[row, 0]) if length is None else start + length
        ids = self.arrays.arrays["input_ids"]
        labels = self.arrays.arrays.get("labels", ids)
        return ids[start:stop], labels[start:stop]

    def desirable(self, row: int) -> bool | None:
        """Whether the answer of a row is wanted; None where data does not say it."""
        wanted = int(self.index[row, 4])
        return wanted > 0 if wanted else None

    def origin(self, row: int) -> str:
        """Where the record of a sequence is, for messages."""
        _, file, line, *_ = self.index[row]
        return self.listing.files[int(file)].origin(int(line))


def cache_folder(given: str | None) -> Path:
    """`data.cache_dir`, or furlong's folder in the user's cache directory."""
    return Path(os.path.expanduser(given)) if given else user_cache()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Within it the cache's folder is there, and what the file system refuses is a ConfigError."""
    told = partial(
        os_errors_told,
        ConfigError,
        required="a folder with space for 4 to 8 bytes per token",
        source=_SOURCE,
        or_else=", or set data.cache_dir to another folder",
    )
    with told():
        folder.mkdir(parents=True, exist_ok=True)
    with told(inside=folder):
        yield


def status_key(files: Iterable[SourceFile]) -> str:
    """A key of the files' kinds, paths, sizes, inodes and times. Raises OSError."""
    found = []
    for file in files:
        parts = []
        for path in file.parts:
            status = path.stat()
            times = [status.st_mtime_ns, status.st_ctime_ns]
            parts.append([str(path.resolve()), status.st_size, status.st_ino, *times])
        found.append([file.kind, *parts])
    return key_of(found)


def key_of(*parts: object) -> str:
    """The key of what `parts`, plain values, decide."""
    return xxhash.xxh3_128_hexdigest(json.dumps([VERSION, *parts]).encode())


def write_tokens(
    place: Path, encoded: Iterable[tuple[SourceRecord, Items[Encoded]]], facts: dict[str, Any]
) -> Arrays:
    """Write what `encoded` yields, sequence by sequence, and map it.

    `facts` is saved as it is after the last sequence. Raises OSError if the folder cannot be
    written, and whatever `encoded` raises; either way nothing half written stays.
    """

    def fill(aside: Path) -> tuple[Kinds, dict[str, Any]]:
        index = array("q")
        stop, labels = 0, None
        with ExitStack() as opened:
            ids = opened.enter_context((aside / "input_ids.bin").open("wb"))
            for record, sequences in encoded:
                for sequence in sequences:
                    if labels is None and sequence.labels is not sequence.input_ids:
                        # The first labels of their own: those before are the ids.
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
    """Log-probabilities of a reference model, of the tokens of one source.

    Rows are written in any order, and marked when they are on the disk: a pass that was killed goes
    on. No loss and no option of it is in the key, and neither is how the numbers were computed.
    """

    def __init__(
        self, folder: Path, source: TokenizedSource, facts: Mapping[str, Any], dtype: str
    ) -> None:
        """Opens what is there, or makes it. `facts`: plain values that decide the numbers besides
        the tokens. Raises ConfigError if the folder cannot be written."""
        own = {**facts, "tokens": source.tokens_key, "dtype": dtype}
        self._stops = np.cumsum(source.index[:, 3])
        num_rows = len(source.index)
        kinds = {"log_probs": (dtype, (int(self._stops[-1]),)), "done": ("uint8", (num_rows,))}

        def fill(aside: Path) -> tuple[Kinds, dict[str, Any]]:
            for name, (kind, (length,)) in kinds.items():
                with (aside / f"{name}.bin").open("wb") as file:
                    file.truncate(length * np.dtype(kind).itemsize)
            return kinds, own

        self.folder = folder / "reference" / key_of(own)
        with writing(folder):
            found = read_arrays(self.folder, "r+")
            if found is None or found.facts != own:
                found = write_arrays(self.folder, fill, mode="r+")
        self._log_probs: Any = found.arrays["log_probs"]
        self._done: Any = found.arrays["done"]

    def is_done(self, rows: Iterable[int]) -> bool:
        """Whether the numbers of all these rows are there."""
        return bool(self._done[list(rows)].all())

    def write(self, found: Mapping[int, npt.NDArray[Any]]) -> None:
        """Writes the numbers of rows, and marks them when they are on the disk. A row that was cut
        has fewer."""
        for row, values in found.items():
            start = self._start(row)
            self._log_probs[start : start + len(values)] = values
        self._log_probs.flush()
        self._done[list(found)] = 1
        self._done.flush()

    def read(self, row: int, count: int) -> npt.NDArray[Any]:
        """The first `count` numbers of a row, as float32 or as wide as they were computed."""
        start = self._start(row)
        return np.asarray(self._log_probs[start : start + count])

    def _start(self, row: int) -> int:
        return int(self._stops[row - 1]) if row else 0

"""Log-probabilities of a reference model, beside the tokens that they are of.

    <folder>/reference/<key>/    one tokenized source under one model
      log_probs.bin              one number per token with a label, row after row of the token cache
      done.bin                   a byte per row: 1 as soon as its numbers are there
      facts.json                 what decides the numbers; the key is its checksum

Rows are written in any order, and marked when they are on the disk: a pass that was killed goes on.
No loss and no option of it is in the key, and neither is how the numbers were computed.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from furlong.data.cache import Entry, entry_key, writing
from furlong.errors import DataError


class ReferenceLogProbs:
    """The numbers of one tokenized source."""

    def __init__(self, folder: Path, entry: Entry, facts: Mapping[str, Any], dtype: str) -> None:
        """Opens what is there, or makes it. `facts`: plain values that decide the numbers besides
        the tokens. Raises DataError where those that are there are of other facts, and ConfigError
        if the folder cannot be written."""
        own = {**facts, "tokens": entry.tokens_key, "dtype": dtype}
        self.folder = folder / "reference" / entry_key(own)
        self._stops = np.cumsum(entry.index[:, 3])
        sizes = {
            "log_probs.bin": int(self._stops[-1]) * np.dtype(dtype).itemsize,
            "done.bin": len(self._stops),
        }
        with writing(folder):
            if not self._is_whole(sizes):
                _make(self.folder, sizes, own)
            self._require(own)
            self._log_probs = np.memmap(self.folder / "log_probs.bin", dtype, mode="r+")
            self._done = np.memmap(self.folder / "done.bin", np.uint8, mode="r+")

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

    def _is_whole(self, sizes: Mapping[str, int]) -> bool:
        with suppress(OSError):
            return all((self.folder / n).stat().st_size == size for n, size in sizes.items())
        return False

    def _require(self, own: Mapping[str, Any]) -> None:
        with suppress(ValueError):
            found = json.loads((self.folder / "facts.json").read_text(encoding="utf-8"))
            if found == own:
                return
            names = sorted(k for k in own.keys() | found.keys() if own.get(k) != found.get(k))
            raise DataError(
                given=f"{self.folder}: the reference of another {' and '.join(names) or 'kind'}",
                required="log-probabilities by the model that the run begins with",
                source="the folder of references in data.cache_dir",
                change="remove the folder: its numbers are then computed anew",
            )
        raise DataError(
            given=f"{self.folder}/facts.json, which cannot be read",
            required="the facts of a reference, as they were written",
            source="the folder of references in data.cache_dir",
            change="remove the folder: its numbers are then computed anew",
        )


def _make(folder: Path, sizes: Mapping[str, int], facts: Mapping[str, Any]) -> None:
    """An empty reference, in one step; of several writers the first one wins."""
    aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.partial")
    aside.mkdir(parents=True)
    try:
        for name, size in sizes.items():
            with (aside / name).open("wb") as file:
                file.truncate(size)
        (aside / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
        if folder.exists():  # of other sizes: damaged
            os.rename(folder, aside / "damaged")
        with suppress(FileExistsError, OSError):
            os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)

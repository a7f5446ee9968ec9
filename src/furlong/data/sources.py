"""What `data.train` and `data.eval` name: files, folders of files, and folders of `datasets`.

A source is listed without being read: names and kinds only. Loading data runs no code of the data:
there is no pickle, no loading script and no remote code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from furlong.errors import DataError

Kind = Literal["text", "json lines", "parquet", "arrow", "dataset"]

_KINDS: dict[str, Kind] = {
    ".jsonl": "json lines", ".ndjson": "json lines", ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
_SPLIT_FILE = re.compile(r"(.+)-\d{5}-of-\d{5}(-[0-9a-f]+)?")
_SPLIT_NAMES = frozenset(
    ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval")
)
# Of a folder of data files these describe the data and are none of it.
_CARD_NAMES = ("readme", "license", "licence", "notice", "citation")
_CARD_ENDINGS = frozenset((".md", ".json", ".yaml", ".yml", ".gitattributes"))


@dataclass(frozen=True, slots=True)
class Source:
    """One entry of `data.train` or `data.eval`."""

    path: str
    weight: float = 1.0
    """How often an epoch draws from it relative to its size, see `loader.Mixture`."""
    split: str | None = None
    """Which split of a folder that holds several."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of sequences, or a folder that `datasets.load_from_disk` reads."""

    path: Path
    kind: Kind
    named: bool = True
    """False for a file that was found in a folder: there, what holds no text is left out."""

    @property
    def parts(self) -> tuple[Path, ...]:
        """The files whose bytes are its content."""
        if self.kind != "dataset":
            return (self.path,)
        return tuple(sorted(file for file in self.path.rglob("*") if file.is_file()))

    def origin(self, line: int) -> str:
        """Where a record is, for messages; line 0 is the whole file."""
        if line == 0:
            return str(self.path)
        return f"{self.path}:{line}" if self.kind == "json lines" else f"{self.path}, row {line}"


def list_files(source: Source, key: str = "data.train") -> tuple[SourceFile, ...]:
    """The files of a source in a fixed order, folders sorted by path, hidden files left out.

    `key` is where the source was named. Raises DataError.
    """
    path = Path(source.path).expanduser()
    if path.is_dir():
        return _files_of(path, source, key)
    if not path.is_file():
        raise DataError(
            given=f"{source.path}: "
            + ("neither a file nor a folder" if path.exists() else "no such file or folder"),
            required="text, .jsonl or .parquet files, or folders of them",
            source=key,
            change="check the path; it is relative to the folder you call furlong from",
        )
    if source.split is not None:
        raise DataError(
            given=f"split {source.split} of the file {source.path}",
            required="a folder with several splits",
            source=key,
            change="remove split, or name the folder",
        )
    return (SourceFile(path, _kind_of(path)),)


def _files_of(folder: Path, source: Source, key: str) -> tuple[SourceFile, ...]:
    if (folder / "dataset_dict.json").is_file():
        split = _choose_split(_splits_on_disk(folder), source, key)
        folder = folder / (split or "")
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return (SourceFile(folder, "dataset"),)
    files = sorted(
        file
        for file in folder.rglob("*")
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and file.is_file()
    )
    records = [file for file in files if _kind_of(file) != "text"]
    if not records:
        if not files:
            raise _empty_folder(folder, key)
        _choose_split((), source, key)
        return tuple(SourceFile(file, "text", named=False) for file in files)
    _refuse_mixture(folder, records, files, key)
    by_split = {file: _split_of(file.relative_to(folder)) for file in records}
    split = _choose_split(sorted({name or "" for name in by_split.values()}), source, key)
    return tuple(
        SourceFile(file, _kind_of(file), named=False)
        for file in records
        if (by_split[file] or "") == split
    )


def _kind_of(file: Path) -> Kind:
    return _KINDS.get(file.suffix.lower(), "text")


def _refuse_mixture(folder: Path, records: Items[Path], files: Iterable[Path], key: str) -> None:
    texts = [file for file in files if _kind_of(file) == "text" and not _is_card(file)]
    if texts:
        raise DataError(
            given=f"{folder}: {len(records)} files of records and {len(texts)} others,"
            f" {records[0].name} and {texts[0].name} among them",
            required="a folder of text files, or one of .jsonl and .parquet files",
            source=key,
            change="name the files themselves, or folders of one kind",
        )


def _is_card(file: Path) -> bool:
    return file.suffix.lower() in _CARD_ENDINGS or file.stem.lower() in _CARD_NAMES


def _split_of(file: Path) -> str | None:
    """The split that a file's name or folder says: `test-00000-of-00003`, `train.jsonl`, `dev/`."""
    if match := _SPLIT_FILE.fullmatch(file.stem):
        return match[1]
    return next((name for name in (file.stem, file.parent.name) if name in _SPLIT_NAMES), None)


def _splits_on_disk(folder: Path) -> list[str]:
    file = folder / "dataset_dict.json"
    try:
        splits = json.loads(file.read_text(encoding="utf-8"))["splits"]
        return [str(split) for split in splits if (folder / str(split)).is_dir()]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            given=f"{file}: no list of splits",
            required="a folder that datasets' save_to_disk wrote",
            source="dataset_dict.json",
            change="save the data set again",
        ) from error


def _choose_split(splits: Items[str], source: Source, key: str) -> str:
    """The only split, or the one that the source names."""
    if source.split is None and len(splits) <= 1:
        return splits[0] if splits else ""
    if source.split in splits and source.split:
        return source.split
    listed = ", ".join(split or "files without a split" for split in splits) or "no splits"
    wanted = "" if source.split is None else f"split {source.split} of "
    # What is trained on is called train, what is held out is called something else.
    likely = sorted(filter(None, splits), key=lambda split: (split != "train") == ("train" in key))
    first = next(iter(likely), "train")
    raise DataError(
        given=f"{wanted}{source.path}, which holds {listed}",
        required="one split of a folder that holds several",
        source=key,
        change=f"write {{path: {source.path}, split: {first}}}" if splits else "remove split",
    )


def _empty_folder(folder: Path, key: str) -> DataError:
    return DataError(
        given=f"{folder}: a folder without files",
        required="at least one text, .jsonl or .parquet file",
        source=key,
        change="name the files themselves, or another folder",
    )

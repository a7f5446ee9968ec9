"""Sources of data, as `data.train` and `data.eval` name them: files, folders, `datasets`.

A source is listed without being read: names and kinds only. Loading data runs no code of the data:
there is no pickle, no loading script and no remote code.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Literal

from furlong.errors import DataError

DANGLING = "links that lead nowhere"
REPEATED = "links to folders above it or read already"
SPECIAL = "pipes, sockets or devices"

_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


Kind = Literal["text", "json lines", "parquet", "arrow", "dataset"]

_KINDS: dict[str, Kind] = {
    ".jsonl": "json lines", ".ndjson": "json lines", ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
_SPLIT_FILE = re.compile(r"(.+)-(\d{5})-of-(\d{5})(-[0-9a-f]+)?")
_HUB = "hf://datasets/"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]*[\w-]")
_TRAIN_NAMES = frozenset(("train", "training"))
_SPLIT_NAMES = frozenset(
    ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval")
)
# Of a folder of data files these describe the data and are none of it.
CARD_NAMES = frozenset(("readme", "license", "licence", "notice", "citation"))
_CARD_ENDINGS = frozenset((".md", ".json", ".yaml", ".yml", ".gitattributes"))
_MAX_NAMED = 3


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
        """The files whose bytes are its content. Raises OSError."""
        if self.kind != "dataset":
            return (self.path,)
        return tuple(walk(self.path)[0])

    def origin(self, line: int) -> str:
        """Where a record is, for messages; line 0 is the whole file."""
        path = printable(self.path)
        if line == 0:
            return path
        return f"{path}:{line}" if self.kind == "json lines" else f"{path}, row {line}"


@dataclass(frozen=True, slots=True)
class Listing:
    """Files of a source."""

    files: tuple[SourceFile, ...]
    left_out: list[str]
    """Lines that count and name what is in the folder and is no file, and its folders of records if
    there are several."""


def list_files(source: Source, key: str = "data.train") -> Listing:
    """The files of a source in a fixed order, folders sorted by path, hidden files left out.

    Links are followed. `key` is where the source was named. Raises DataError, also for a folder
    that cannot be read.
    """
    try:
        is_of_hub = source.path.startswith(_HUB)
        path = _fetched(source.path, key) if is_of_hub else Path(source.path).expanduser()
        if not source.path:
            raise RuntimeError("an empty path")
        if path.is_dir():
            return _files_of(path, source, key)
        is_file, exists = path.is_file(), path.exists()
    except (OSError, RuntimeError) as error:  # without a home `~` is a RuntimeError
        raise unreadable(source.path, key, error) from error
    if not is_file:
        raise _no_file(source.path, exists, key)
    if source.split is not None:
        raise DataError(
            given=f"split {source.split} of the file {source.path}",
            required="a folder with several splits",
            source=key,
            change="remove split, or name the folder",
        )
    return Listing((SourceFile(path, _kind_of(path)),), [])


def _fetched(address: str, key: str) -> Path:
    """The folder of a data set of the hub, fetched unless it is there: its files but for programs,
    as other folders' files are. Raises DataError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    owner, name, *inner = [*address.removeprefix(_HUB).split("/"), ""]
    folder = "/".join(filter(None, inner))
    try:
        fetched = snapshot_download(
            f"{owner}/{name}",
            repo_type="dataset",
            allow_patterns=f"{folder}/*" if folder else None,
            ignore_patterns="*.py",
        )
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise DataError(
            given=f"{printable(address)}: {str(error).strip().splitlines()[0]}",
            required=f"a data set of the hub as {_HUB}OWNER/NAME, or /FOLDER behind it",
            source=key,
            change="check the name and the connection, log in (hf auth login) if it is closed, or"
            " name a folder with its files",
        ) from error
    return Path(fetched, folder)


def unreadable(path: object, key: str, error: Exception) -> DataError:
    """The message about a file or folder that the system does not let us read."""
    reason = getattr(error, "strerror", None) or str(error)
    named = getattr(error, "filename", None) or path
    return DataError(
        given=f"{printable(named)}: {reason}" if named else reason,
        required="files and folders that exist and can be read",
        source=key,
        change="check the path and its permissions, or name only the parts that can be read",
    )


def printable(path: object) -> str:
    """A path as text that every terminal takes, whatever bytes its name has."""
    text = str(path).encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _files_of(folder: Path, source: Source, key: str) -> Listing:
    if (folder / "dataset_dict.json").is_file():
        split = _choose_split(_splits_on_disk(folder), source, key)
        folder = folder / (split or "")
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return Listing((SourceFile(folder, "dataset"),), [])
    found, others = walk(folder)
    left_out = [_count(what, paths, folder) for what, paths in others.items()]
    records = [file for file in found if _kind_of(file) != "text"]
    if not records:
        if not found:
            raise _empty_folder(folder, left_out, key)
        texts = _texts_of(folder, found, source, left_out, key)
        return Listing(tuple(SourceFile(file, "text", named=False) for file in texts), left_out)
    _refuse_missing(others.get(DANGLING, []), key)
    _refuse_mixture(folder, records, found, key)
    if beside := [file for file in found
                  if _kind_of(file) == "text" and file.stem.lower() not in CARD_NAMES]:  # fmt: skip
        left_out.append(_count("files beside the records", beside, folder))
    by_split = _splits_of(folder, records)
    split = _choose_split(sorted(set(by_split.values())), source, key)
    chosen = [file for file in records if by_split[file] == split]
    _refuse_missing_shards(chosen, key)
    if len(parents := sorted({file.parent for file in chosen})) > 1:
        names = [printable(parent.relative_to(folder)) for parent in parents[:_MAX_NAMED]]
        listed = ", ".join(names) + ", ..." * (len(parents) > _MAX_NAMED)
        left_out.append(f"records of {len(parents):,} folders as one source ({listed})")
    by_stem = {file.with_suffix(""): file for file in chosen}
    if twice := [file for file in chosen if by_stem[file.with_suffix("")] != file]:
        one, other = twice[0].name, by_stem[twice[0].with_suffix("")].name
        left_out.append(f"records of one name in two formats, read twice if they are the same"
                        f" ({printable(one)}, {printable(other)})")  # fmt: skip
    files = tuple(SourceFile(file, _kind_of(file), named=False) for file in chosen)
    return Listing(files, left_out)


def _texts_of(
    folder: Path, files: Items[Path], source: Source, told: list[str], key: str
) -> Items[Path]:
    """The texts of a folder, or of one split where the name of each says one; to `told` goes a line
    where some do not."""
    texts = [file for file in files if file.stem.lower() not in CARD_NAMES]
    by_split = _splits_of(folder, texts)
    splits = sorted(set(by_split.values()))
    if not (_TRAIN_NAMES.intersection(splits) and set(splits) - _TRAIN_NAMES - {""}):
        _choose_split((), source, key)
    elif source.split is not None or "" not in splits:
        split = _choose_split(splits, source, key)
        return [file for file in texts if by_split[file] == split]
    else:
        told.append(f"texts of several splits as one source ({', '.join(filter(None, splits))})")
    return files


def _no_file(given: str, exists: bool, key: str) -> DataError:
    """The message about a path without a file or folder, and about what people take for one."""
    what = "neither a file nor a folder" if exists else "no such file or folder"
    change = "check the path; it is relative to the folder you call furlong from"
    if "://" in given:
        what, change = "an address", f"fetch the file, and name it; of the hub {_HUB}OWNER/NAME"
    elif any(char in given for char in "*?["):
        change = "patterns are not expanded: name the folder that holds the files, or each file"
    elif _HUB_ID.fullmatch(given) and _kind_of(Path(given)) == "text":
        change += f"; if it is a data set of the hub, write {_HUB}{given}"
    return DataError(
        given=f"{printable(given if '://' in given else Path(given).expanduser())}: {what}",
        required="text, .jsonl or .parquet files, or folders of them",
        source=key,
        change=change,
    )


def _count(what: str, paths: Items[Path], folder: Path) -> str:
    """`links that lead nowhere: 6 left out (a, b, c and 3 more)`."""
    named = ", ".join(printable(path.relative_to(folder)) for path in paths[:_MAX_NAMED])
    more = f" and {len(paths) - _MAX_NAMED:,} more" if len(paths) > _MAX_NAMED else ""
    return f"{what}: {len(paths):,} left out ({named}{more})"


def _refuse_missing(links: Iterable[Path], key: str) -> None:
    """Among records a link without its file is a part of the data that is missing."""
    missing = [link for link in links if _kind_of(link) != "text"]
    if missing:
        more = f", and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise DataError(
            given=f"{printable(missing[0])}: a link that leads nowhere{more}",
            required="records that are complete",
            source=key,
            change="fetch the file that it should lead to, or remove the link",
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
    return file.suffix.lower() in _CARD_ENDINGS or file.stem.lower() in CARD_NAMES


def _refuse_missing_shards(files: Iterable[Path], key: str) -> None:
    """Raise DataError where `train-00000-of-00002` is there and not all of its like are."""
    shards: dict[tuple[Path, str, int], set[int]] = {}
    for file in files:
        if match := _SPLIT_FILE.fullmatch(file.stem):
            shards.setdefault((file.parent, match[1], int(match[3])), set()).add(int(match[2]))
    for (folder, name, total), found in shards.items():
        if missing := set(range(total)) - found - ({0} if total in found else set()):
            raise DataError(
                given=f"{printable(folder)}: {len(found):,} of the {total:,} files of {name},"
                f" without {name}-{min(missing):05}-of-{total:05}",
                required="records that are complete",
                source=key,
                change="fetch the files that are missing, or name those that are meant one by one",
            )


def _splits_of(folder: Path, files: Iterable[Path]) -> dict[Path, str]:
    """The split of each file, "" where its name says none.

    A name that only holds a word such as test says it where another one holds train.
    """
    by_split = {file: _split_of(file.relative_to(folder)) for file in files}
    others = _counterparts([file.relative_to(folder) for file in by_split])
    words = {file: split or _word_of_split(own := file.relative_to(folder)) or others.get(own)
             for file, split in by_split.items()}  # fmt: skip
    found = set(words.values()) & _SPLIT_NAMES
    if found & _TRAIN_NAMES and found - _TRAIN_NAMES:
        by_split = words
    return {file: split or "" for file, split in by_split.items()}


def _split_of(file: Path) -> str | None:
    """The split that a file's name or folder says: `test-00000-of-00003`, `train.jsonl`, `dev/`."""
    if match := _SPLIT_FILE.fullmatch(file.stem):
        return match[1]
    names = (file.stem, *reversed(file.parent.parts))
    return next((name for name in names if name in _SPLIT_NAMES), None)


def _word_of_split(file: Path) -> str | None:
    """The first word of a file's name or folder that is one of a split: `my_train`, `test-sft`."""
    words = re.split("[^a-z]+", f"{file.stem} {file.parent.name}".lower())
    return next((word for word in words if word in _SPLIT_NAMES), None)


def _counterparts(files: Items[Path]) -> dict[Path, str]:
    """The splits of files whose names differ by one alone, such as `mytrain` and `mytest`."""
    by_name = {str(file).lower(): file for file in files}
    splits: dict[Path, str] = {}
    for name, file in by_name.items():
        for train, other in product(_TRAIN_NAMES, _SPLIT_NAMES - _TRAIN_NAMES):
            if train in name and (found := by_name.get(name.replace(train, other))):
                splits |= {file: train, found: other}
    return splits


def _splits_on_disk(folder: Path) -> list[str]:
    file = folder / "dataset_dict.json"
    try:
        splits = json.loads(file.read_text(encoding="utf-8"))["splits"]
        # A name with a folder in it would lead out of this one.
        names = [str(split) for split in splits if Path(str(split)).name == str(split)]
        return [name for name in names if (folder / name).is_dir()]
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
    likely = sorted(filter(None, splits), key=lambda split: (split == "train") == ("eval" in key))
    change = "remove split, or name the files that are meant"
    if likely:  # the verb that is handed data has a flag for all of them
        change = f"write {{path: {source.path}, split: {likely[0]}}}"
        change = f"add --split {likely[0]}" if key == "data" else change
    raise DataError(
        given=f"{wanted}{source.path}, which holds {listed}",
        required="one split of a folder that holds several",
        source=key,
        change=change,
    )


def _empty_folder(folder: Path, left_out: Items[str], key: str) -> DataError:
    return DataError(
        given="; ".join((f"{printable(folder)}: a folder without files", *left_out)),
        required="at least one text, .jsonl or .parquet file that is not hidden",
        source=key,
        change="name the files themselves, or another folder",
    )


def walk(folder: Path) -> tuple[list[Path], dict[str, list[Path]]]:
    """The files below a folder, without hidden ones, and what is left out, under `DANGLING`,
    `REPEATED` and `SPECIAL`; everything sorted by path. Links are followed.

    A folder is read once, however many links lead to it: under its own path where that is below
    `folder`, else under the first link's. One that contains `folder` is not read. Raises OSError,
    with the file's name, for a folder that cannot be read.
    """
    files: list[Path] = []
    left_out: dict[str, list[Path]] = {DANGLING: [], REPEATED: [], SPECIAL: []}
    seen = {_identity(parent) for parent in folder.resolve().parents}
    links = [folder]
    # Links wait until no folder is left that stands there itself.
    while links:
        folders, links = sorted(links), []
        while folders:
            path = folders.pop(0)
            if (identity := _identity(path)) in seen:
                left_out[REPEATED].append(path)
                continue
            seen.add(identity)
            with os.scandir(path) as entries:
                visible = [entry for entry in entries if not entry.name.startswith(".")]
            for entry in sorted(visible, key=lambda entry: entry.name):
                inside = path / entry.name
                match _kind_of_entry(entry):
                    case "file":
                        files.append(inside)
                    case "folder":
                        (links if entry.is_symlink() else folders).append(inside)
                    case other:
                        left_out[other].append(inside)
    return sorted(files), {what: sorted(paths) for what, paths in left_out.items() if paths}


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _kind_of_entry(entry: os.DirEntry[str]) -> str:
    if entry.is_file(follow_symlinks=False):
        return "file"
    try:
        mode = os.stat(entry.path).st_mode
    except OSError as error:
        if entry.is_symlink() and error.errno in _NOWHERE:
            return DANGLING
        raise
    return "folder" if S_ISDIR(mode) else "file" if S_ISREG(mode) else SPECIAL

"""Sources of data, as `data.train` and `data.eval` name them: files, folders, data sets of the hub.

A source is listed without being read: names and kinds only. Loading data runs no code of the data:
there is no pickle, no loading script and no remote code.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from furlong.config.schema import Source
from furlong.errors import DataError

Kind = Literal["text", "json lines", "parquet", "arrow", "dataset"]

_KINDS: dict[str, Kind] = {
    ".jsonl": "json lines",
    ".ndjson": "json lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_MAYBE_RECORDS = frozenset((".json", ".csv", ".tsv"))
_HUB = "hf://datasets/"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(-[0-9a-f]+)?")
_SPLITS = frozenset(
    ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval")
)
# Of a folder of data files these describe the data and are none of it.
_CARD_NAMES = frozenset(("readme", "license", "licence", "notice", "citation"))
_CARD_ENDINGS = frozenset((".md", ".json", ".yaml", ".yml", ".gitattributes"))
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of sequences, or a folder that `datasets.load_from_disk` reads."""

    path: Path
    kind: Kind

    @property
    def parts(self) -> list[Path]:
        """The files whose bytes are its content. Raises OSError."""
        return walk(self.path)[0] if self.kind == "dataset" else [self.path]

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
    notes: list[str]
    """Lines about what is in the folder and not read, or read as one source."""


def list_files(source: Source, key: str = "data.train", format: str = "auto") -> Listing:
    """The files of a source in a fixed order, folders sorted by path, hidden files left out.

    Links are followed. `key` is where the source was named. Raises DataError, also for a folder
    that cannot be read, and for tables that only `format` text reads, as they stand.
    """
    try:
        is_of_hub = source.path.startswith(_HUB)
        path = _fetched(source.path, key) if is_of_hub else _path(source.path)
        if path.is_dir():
            listing = _files_of(path, source, key)
        elif path.is_file() and source.split is None:
            listing = Listing((SourceFile(path, _kind_of(path)),), [])
        else:
            raise _no_file(path, source, key)
    except OSError as error:
        raise unreadable(source.path, key, error) from error
    described = [file.path for file in listing.files if not _is_named_card(file.path)]
    if described and format != "text":
        endings = {path.suffix.lower() for path in described}
        if endings <= _MAYBE_RECORDS:
            raise DataError(
                given=f"{printable(described[0])}: it may hold records or be a text itself",
                required="records as .jsonl (one JSON object in a line) or .parquet",
                source=key,
                change="convert it, or set data.format: text to read every such file as one text",
            )
    return listing


def walk(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files below a folder, and links that lead nowhere, both sorted and without hidden ones.

    Links are followed, and a folder is read once, however many of them lead to it. Raises OSError
    for a folder that cannot be read.
    """
    files, dangling = [], []
    seen = {str(path) for path in (folder.resolve(), *folder.resolve().parents)}

    def is_new(path: str) -> bool:
        is_known = (real := os.path.realpath(path)) in seen
        seen.add(real)
        return not is_known

    def refuse(error: OSError) -> None:
        raise error

    for top, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        visible = sorted(name for name in folders if not name.startswith("."))
        folders[:] = [name for name in visible if is_new(os.path.join(top, name))]
        for path in (Path(top, name) for name in names if not name.startswith(".")):
            if path.is_file():
                files.append(path)
            elif path.is_symlink() and not path.exists():
                dangling.append(path)
    return sorted(files), sorted(dangling)


def unreadable(path: object, key: str, error: OSError) -> DataError:
    """The message about a file or folder that the system does not let us read."""
    return DataError(
        given=f"{printable(error.filename or path)}: {error.strerror or error}",
        required="files and folders that exist and can be read",
        source=key,
        change="check the path and its permissions, or name only the parts that can be read",
    )


def printable(path: object) -> str:
    """A path as text that every terminal takes, whatever bytes its name has."""
    text = str(path).encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _path(given: str) -> Path:
    return Path(os.path.expanduser(given))


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


def _no_file(path: Path, source: Source, key: str) -> DataError:
    what = "no such file or folder"
    if path.exists():
        is_file = path.is_file()
        what = f"a file, without split {source.split}" if is_file else "neither a file nor a folder"
    return DataError(
        given=f"{printable(path)}: {what}",
        required="text, .jsonl or .parquet files, or folders of them",
        source=key,
        change="check the path, which is relative to the folder that furlong is called from;"
        " patterns (*) and addresses are not read, and a data set of the hub is"
        f" {_HUB}OWNER/NAME",
    )


def _files_of(folder: Path, source: Source, key: str) -> Listing:
    if (folder / "dataset_dict.json").is_file():
        splits = _splits_on_disk(folder)
        if source.split not in splits and (source.split is not None or len(splits) != 1):
            raise _no_split(splits, source, key)
        folder = folder / (source.split or splits[0])
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return Listing((SourceFile(folder, "dataset"),), [])
    found, dangling = walk(folder)
    records = [file for file in found if _kind_of(file) != "text"]
    notes = []
    if dangling:
        notes.append(f"links that lead nowhere: {len(dangling):,} left out ({_some(dangling)})")
    if not found:
        raise DataError(
            given="; ".join((f"{printable(folder)}: a folder without files", *notes)),
            required="at least one text, .jsonl or .parquet file that is not hidden",
            source=key,
            change="name the files themselves, or another folder",
        )
    if records:
        texts = [file for file in found if _kind_of(file) == "text" and not _is_card(file)]
        if texts:
            raise DataError(
                given=f"{folder}: files of records and others, {records[0].name} and"
                f" {texts[0].name} among them",
                required="a folder of text files, or one of .jsonl and .parquet files",
                source=key,
                change="name the files themselves, or folders of one kind",
            )
    files = _of_split(folder, records or found, source, key, notes)
    if records:
        _refuse_incomplete(files, dangling, key)
    if records and len(parents := sorted({file.parent for file in files})) > 1:
        notes.append(f"records of {len(parents):,} folders as one source ({_some(parents)})")
    return Listing(tuple(SourceFile(file, _kind_of(file)) for file in files), notes)


def _of_split(
    folder: Path, files: Items[Path], source: Source, key: str, notes: list[str]
) -> Items[Path]:
    """The files of the split that the source names; all of them where they are of one split. Of
    texts some may say none: a program may be called test. Raises DataError."""
    is_text = _kind_of(files[0]) == "text"
    described = [file for file in files if not (is_text and _is_named_card(file))]
    by_split = {file: _split_of(file.relative_to(folder)) for file in described}
    splits = sorted(set(by_split.values()))
    if source.split is not None and source.split in splits:
        return [file for file in described if by_split[file] == source.split]
    several = len(set(splits) - {""}) > 1
    if source.split is not None or (several and not (is_text and "" in splits)):
        raise _no_split(splits, source, key)
    if several:
        named = ", ".join(filter(None, splits))
        notes.append(f"texts of several splits as one source ({named})")
    return files


def _split_of(file: Path) -> str:
    """The split that a file's name or folder says, `test-00000-of-00003`, `my_train.jsonl` or
    `dev/`; empty where they say none."""
    if match := _SHARD.fullmatch(file.stem):
        return match[1]
    names = " ".join((file.stem, *reversed(file.parent.parts))).lower()
    return next((word for word in re.split("[^a-z]+", names) if word in _SPLITS), "")


def _no_split(splits: Items[str], source: Source, key: str) -> DataError:
    listed = ", ".join(split or "files without a split" for split in splits) or "no splits"
    wanted = "" if source.split is None else f"split {source.split} of "
    # What is trained on is called train, what is held out is called something else.
    likely = sorted(filter(None, splits), key=lambda split: (split == "train") == ("eval" in key))
    change = "remove split, or name the files that are meant"
    if likely:  # the verb that is handed data has a flag for all of them
        mapping = f"write {{path: {source.path}, split: {likely[0]}}}"
        change = f"add --split {likely[0]}" if key == "data" else mapping
    return DataError(
        given=f"{wanted}{source.path}, which holds {listed}",
        required="one split of a folder that holds several",
        source=key,
        change=change,
    )


def _splits_on_disk(folder: Path) -> list[str]:
    """The splits that datasets' save_to_disk has written into a folder; none if it is damaged."""
    try:
        listed = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        # A name with a folder in it would lead out of this one.
        names = [str(split) for split in listed if Path(str(split)).name == str(split)]
    except (ValueError, KeyError, TypeError):
        return []
    return [name for name in names if (folder / name).is_dir()]


def _refuse_incomplete(records: Iterable[Path], dangling: Iterable[Path], key: str) -> None:
    """Raise DataError where a link among records leads nowhere, or `train-00000-of-00002` is there
    and not all of its like are, as an interrupted download leaves them."""
    missing = [
        f"{printable(link)}: a link that leads nowhere"
        for link in dangling
        if _kind_of(link) != "text"
    ]
    shards: dict[tuple[Path, str, int], set[int]] = {}
    for file in records:
        if match := _SHARD.fullmatch(file.stem):
            shards.setdefault((file.parent, match[1], int(match[3])), set()).add(int(match[2]))
    for (folder, name, total), found in shards.items():
        if lost := set(range(total)) - found - ({0} if total in found else set()):
            missing.append(
                f"{printable(folder)}: {len(found):,} of the {total:,} files of {name}, without"
                f" {name}-{min(lost):05}-of-{total:05}"
            )
    if missing:
        raise DataError(
            given="; ".join(missing[:_MAX_NAMED]),
            required="records that are complete",
            source=key,
            change="fetch the files that are missing, or name those that are meant one by one",
        )


def _some(paths: Items[Path]) -> str:
    """The names of the first paths."""
    named = ", ".join(printable(path.name) for path in paths[:_MAX_NAMED])
    return named + ", ..." * (len(paths) > _MAX_NAMED)


def _kind_of(file: Path) -> Kind:
    return _KINDS.get(file.suffix.lower(), "text")


def _is_named_card(file: Path) -> bool:
    return file.stem.lower() in _CARD_NAMES


def _is_card(file: Path) -> bool:
    return file.suffix.lower() in _CARD_ENDINGS or _is_named_card(file)

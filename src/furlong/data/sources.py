"""List the files of a source of `data.train` or `data.eval`: a file, a folder or a hub data set.

Listing reads no records: it goes by the names and endings of files, and by the configurations in a
data set's card. Loading data runs no code of the data: no pickle, no loading script, no remote
code.

The listing of `datasets` is not used, for three reasons. If some names of files have a word for a
split, it silently leaves out all other files. For each card, also a valid one, it composes an error
message in which all YAML aliases of the card are expanded. And it reads no folder of texts unless
their names end in .txt.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from furlong.config.schema import Source
from furlong.config.sources import read_yaml
from furlong.errors import DataError, first_line, in_short

FileFormat = Literal["text", "json lines", "json", "csv", "tsv", "parquet", "arrow", "dataset"]
Codec = Literal["gzip", "zstd", "bz2"]

_KINDS: dict[str, FileFormat] = {
    ".jsonl": "json lines",
    ".ndjson": "json lines",
    ".jsonlines": "json lines",
    ".jl": "json lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
# In a folder that holds other texts these are texts too.
_MAYBE_RECORDS: dict[str, FileFormat] = {".json": "json", ".csv": "csv", ".tsv": "tsv"}
_CODECS: dict[str, Codec] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2"}
_HUB = "hf://datasets/"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(-[0-9a-f]+)?")
# Words in file names that mean a split, and the name that `datasets` has for it.
_SPLITS = {
    word: name
    for name, words in (
        ("train", ("train", "training")),
        ("validation", ("validation", "valid", "val", "dev")),
        ("test", ("test", "testing", "eval", "evaluation")),
    )
    for word in words
}
# Files beside records that describe the data and are no data.
_CARD_NAMES = frozenset(("readme", "license", "licence", "notice", "citation"))
_CARD_ENDINGS = frozenset((".md", ".json", ".yaml", ".yml", ".gitattributes"))
_CARD_FILES = frozenset(
    ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
)
_POINTER = b"version https://git-lfs.github.com/spec/"
_JSON = re.compile(rb'(\xef\xbb\xbf)?\s*(\[\s*)*\{\s*"[^"\\\n]*"\s*:')
_MAX_NAMED = 3
_BUFFER_BYTES = 2**20
_BYTES_LOOKED_AT = 4096
_AS_TEXTS = "records read as texts"
_MEND_CARD = "mend the card, or name the files that are meant"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of sequences, or a folder that `datasets.load_from_disk` reads."""

    path: Path
    kind: FileFormat
    address: str | None = None
    """The fsspec address of a file that is not on this machine; `path` is its name there."""

    @property
    def parts(self) -> list[Path]:
        """The files to read: the file itself, or all files of the folder. Raises OSError."""
        return walk(self.path)[0] if self.kind == "dataset" else [self.path]

    @property
    def codec(self) -> Codec | None:
        """The compression of the file; None if it has none."""
        return None if self.kind == "dataset" else _CODECS.get(self.path.suffix.lower())

    def origin(self, line: int) -> str:
        """Return path and line of a record, for messages; line 0 is the whole file."""
        path = printable(self.address or self.path)
        if line == 0:
            return path
        is_of_lines = self.kind in ("json lines", "csv", "tsv")
        return f"{path}:{line}" if is_of_lines else f"{path}, row {line}"

    def open(self) -> io.BufferedReader:
        """Open the file for reading, without decompressing it.

        Raises:
            OSError, `client_error()`: the file cannot be read.
            DataError: it is a pointer of Git LFS.
        """
        if self.address is None:
            opened = self.path.open("rb")
        else:
            import fsspec  # type: ignore[import-untyped]

            opened = io.BufferedReader(fsspec.open(self.address, "rb").open(), _BUFFER_BYTES)
        if opened.peek(len(_POINTER)).startswith(_POINTER):
            raise DataError(
                given="a pointer of Git LFS in the place of the file",
                required="the file itself",
                source=self.origin(0),
                change="git lfs pull in the repository that it belongs to, or fetch the file anew",
            )
        return opened


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a source."""

    files: tuple[SourceFile, ...]
    notes: list[str]
    """Lines about files that are left out, and about folders or splits read as one source."""
    parts: tuple[tuple[int, str], ...] = ()
    """For several splits or slices, in the order of `files`, the number of files of each and its
    slice as `datasets` writes it, such as `train[:5%]`; empty if all records are meant."""

    @property
    def slices(self) -> tuple[tuple[int, str], ...]:
        """The pairs in `parts` if at least one is a slice, which leaves records out; otherwise
        empty."""
        return self.parts if any(slice for _, slice in self.parts) else ()


@dataclass(frozen=True, slots=True)
class _Meant:
    """The split of a source to list, and the key of the run file that names the source."""

    source: Source
    split: str | None
    key: str
    notes: list[str]
    """The notes of the listing, which are added to."""

    def refusal(self, given: str, required: str, change: str) -> DataError:
        """Return the error for files or names in a source that cannot be used.

        `given`: the files or names, in words. `required`: what is accepted. `change`: advice.
        """
        return DataError(given=given, required=required, source=self.key, change=change)

    def no_file(self, path: Path, what: str) -> DataError:
        """Return the error for a path where nothing can be read. `what`: the reason, in words."""
        return self.refusal(
            f"{printable(path)}: {what}",
            "a file of texts or records, or a folder of them",
            "check the path, which is relative to the folder that furlong is called from;"
            " patterns (*) are not read, addresses with data.streaming alone, and a data set of"
            f" the hub is OWNER/NAME or {_HUB}OWNER/NAME",
        )

    def not_one_of(self, kind: Literal["name", "split"], known: Items[str]) -> DataError:
        """Return the error about a configuration's name or a split that is not in `known`, or that
        is missing where there are several."""
        noun = {"name": "configuration", "split": "split"}[kind]
        wanted = self.source.name if kind == "name" else self.split
        listed = ", ".join(one or "files without a split" for one in known) or f"no {noun}s"
        # Offer train for training and another split for evaluation.
        is_held_out = "eval" in self.key
        likely = sorted(filter(None, known), key=lambda one: (one == "train") == is_held_out)
        change = f"remove {kind}, or name the files that are meant"
        if likely and self.key == "data":  # `furlong lengths` takes flags
            change = f"add --{kind} {likely[0]}"
        elif likely:
            own = {"name": self.source.name, "split": self.source.split, kind: likely[0]}
            named = "".join(f", {key}: {value}" for key, value in own.items() if value)
            change = f"write {{path: {self.source.path}{named}}}"
        of = "" if wanted is None else f"{kind} {wanted} of "
        given = f"{of}{printable(self.source.path)}, which holds {listed}"
        return self.refusal(given, f"one {noun} of a data set that has several", change)


def list_files(source: Source, key: str = "data.train", *, fetch: bool = True) -> Listing:
    """Return the files of a source, sorted by path, without hidden ones. Links are followed.

    Args:
        source: the source.
        key: the key of the run file that names it, for messages.
        fetch: True downloads files of the hub. False leaves them, and files at any other address,
            to be read remotely.

    Raises:
        DataError: the source does not exist, cannot be read, or is ambiguous.
    """
    from huggingface_hub import constants

    is_of_hub = is_hub_name(source.path)
    is_online = not constants.HF_HUB_OFFLINE if is_of_hub else "://" in source.path
    find: Callable[[_Meant], list[SourceFile]] = _fetched if is_of_hub else _found_here
    if is_online and not fetch:
        find = _found_elsewhere
    if source.revision is not None and not is_of_hub:
        raise DataError(
            given=f"revision {source.revision} of {printable(source.path)}, none of the hub",
            required="a data set of the hub with revision",
            source=key,
            change=f"remove revision, or write {_HUB}OWNER/NAME",
        )
    files: list[SourceFile] = []
    notes: list[str] = []
    parts = []
    try:
        for split, part in _splits_in(source, key):
            found = _by_content(find(_Meant(source, split, key, notes)), notes)
            files += found
            parts.append((len(found), part))
    except (OSError, client_error()) as error:
        raise unreadable(source.path, key, error) from error
    is_whole = len(parts) == 1 and not parts[0][1]
    return Listing(tuple(files), notes, () if is_whole else tuple(parts))


def _by_content(files: list[SourceFile], notes: list[str]) -> list[SourceFile]:
    """Return the files. If all of them are plain texts that begin like JSON, the files are returned
    as files of JSON, and the notes that call them texts are removed from `notes`. Raises
    OSError."""
    for file in files:
        if file.kind != "text" or file.codec is not None:
            return files
        with file.open() as opened:
            if not _JSON.match(opened.peek(_BYTES_LOOKED_AT)):
                return files
    notes[:] = [note for note in notes if not note.startswith(_AS_TEXTS)]
    return [replace(file, kind="json") for file in files]


def is_hub_name(path: str) -> bool:
    """Return whether a source's path names a data set of the hub.

    Such a path begins with hf://datasets/, or is OWNER/NAME without an ending of a data file. The
    second form names a local file or folder instead if one exists.
    """
    if path.startswith(_HUB):
        return True
    ending = _plain(Path(path)).suffix.lower()
    is_file_name = ending in (*_KINDS, *_MAYBE_RECORDS, ".txt", ".md")
    return bool(_HUB_ID.fullmatch(path)) and not is_file_name and not _path(path).exists()


def walk(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files below a folder and the links that lead nowhere, sorted, without hidden ones.

    Links are followed, and a folder is read once however many links lead to it.

    Raises:
        OSError: a folder cannot be read.
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


def client_error() -> type[Exception]:
    """Return the class of error, besides OSError, that the hub's client raises after six tries."""
    from huggingface_hub import errors

    error: Any = errors.HTTPError  # type: ignore[attr-defined]  # of requests or of httpx
    return error  # type: ignore[no-any-return]


def unreadable(path: object, key: str, error: Exception) -> DataError:
    """Return the error for a local or remote file or folder that cannot be read."""
    reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    change = "check the path and its permissions, or name only the parts that can be read"
    if "://" in str(path):
        change = "check the name, log in (hf auth login) if it is closed, and go on with --resume"
        change += " when a connection that was lost is back"
    return DataError(
        given=f"{printable(getattr(error, 'filename', None) or path)}: {reason.splitlines()[0]}",
        required="files and folders that exist and can be read",
        source=key,
        change=change,
    )


def printable(path: object) -> str:
    """Return a path as printable text, whatever bytes its name has."""
    text = str(path).encode("utf-8", "backslashreplace").decode("utf-8")
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _path(given: str) -> Path:
    return Path(os.path.expanduser(given))


def _splits_in(source: Source, key: str) -> list[tuple[str | None, str]]:
    """Return the splits that a source names, each with its slice or "". Raises DataError."""
    given = source.split
    if given is None or not any(mark in given for mark in "[+("):
        return [(given, "")]
    from datasets import ReadInstruction

    try:
        named = re.split(r"\s*\+\s*", given.strip())
        ReadInstruction.from_spec(given.strip())
    except ValueError as error:
        raise DataError(
            given=f"split {given}",
            required="train, train[:5%], train[100:200], or several such with + between",
            source=key,
            change="write the split as one of these",
        ) from error
    return [(re.split(r"[\[(]", one)[0], one if "[" in one else "") for one in named]


def _found_here(meant: _Meant, copy: Path | None = None) -> list[SourceFile]:
    """Return the files of a path on this machine, or of `copy`, the download of a hub data set.
    Raises OSError and DataError."""
    folder = copy or _path(meant.source.path)
    if folder.is_file():
        return _chosen(folder, [Path()], meant)
    if not folder.is_dir():
        what = "neither a file nor a folder" if folder.exists() else "no such file or folder"
        raise meant.no_file(folder, what)
    if (folder / "dataset_dict.json").is_file():
        splits = _splits_on_disk(folder)
        if meant.split not in splits and (meant.split is not None or len(splits) != 1):
            raise meant.not_one_of("split", splits)
        folder = folder / (meant.split or splits[0])
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        if meant.source.name is not None:
            raise meant.not_one_of("name", [])
        return [SourceFile(folder, "dataset")]
    found, dangling = walk(folder)
    if dangling:
        named = _some(dangling)
        meant.notes.append(f"links that lead nowhere: {len(dangling):,} left out ({named})")
    return _chosen(folder, [file.relative_to(folder) for file in found], meant, dangling)


def _fetched(meant: _Meant) -> list[SourceFile]:
    """Return the files of a hub data set, downloaded unless they are in the cache. Raises
    DataError."""
    import glob

    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub import errors as hub

    source = meant.source
    owner, name, *inner = [*source.path.removeprefix(_HUB).split("/"), ""]
    folder = Path(*inner)

    def fetch(*names: str | Path, **options: Any) -> Path:
        patterns = [glob.escape(str(folder / name)) for name in names] or None
        fetched = snapshot_download(
            f"{owner}/{name}", repo_type="dataset", revision=source.revision,
            allow_patterns=patterns, **options,
        )  # fmt: skip
        return Path(fetched, folder)

    try:
        try:
            found = HfApi().dataset_info(f"{owner}/{name}", revision=source.revision)
        except hub.HfHubHTTPError:
            raise
        except (ConnectionError, client_error()):  # offline: use what the cache holds
            return _found_here(meant, fetch(local_files_only=True))
        listed = [Path(file.rfilename) for file in found.siblings or ()]
        found_below = (one.relative_to(folder) for one in listed if one.is_relative_to(folder))
        names = sorted(_visible(found_below))  # as they lie in a folder, whose path is sorted
        if Path("state.json") in names or Path("dataset_dict.json") in names:
            return _found_here(meant, fetch(*names))
        files = _chosen(home := fetch("README.md"), names, meant)
        fetch(*(file.path.relative_to(home) for file in files))
        return files
    except (OSError, client_error(), hub.HFValidationError) as error:
        here = "" if source.path.startswith(_HUB) else "nothing of that name is here, and the hub: "
        is_offline = isinstance(error, hub.LocalEntryNotFoundError)
        of = f" of revision {source.revision}" * (source.revision is not None)
        why = f"no connection, and no copy{of} in its cache" if is_offline else first_line(error)
        raise meant.refusal(
            f"{printable(source.path)}: {here}{why}",
            f"a file, a folder, or a data set of the hub: OWNER/NAME, {_HUB}OWNER/NAME"
            " or the same with /FOLDER behind it",
            "check the name and the connection, log in (hf auth login) if it is closed, or"
            " name a folder with its files",
        ) from error


def _found_elsewhere(meant: _Meant) -> list[SourceFile]:
    """Return the files of an fsspec address without downloading them. Raises DataError, and the
    errors of the address's file system."""
    import fsspec

    source = meant.source
    address = source.path if "://" in source.path else _HUB + source.path
    if source.revision is not None:
        owner, name, *inner = address.removeprefix(_HUB).split("/")
        revision = quote(source.revision, safe="")
        address = _HUB + "/".join((owner, f"{name}@{revision}", *inner))
    try:
        system, root = fsspec.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise meant.refusal(
            f"{address}: {str(error).splitlines()[0]}",
            "an address that fsspec reads, such as hf://datasets/OWNER/NAME or s3://...",
            "install the package that fsspec names, or write another address",
        ) from error

    def address_of(name: Path) -> str:
        return str(system.unstrip_protocol(f"{root}/{name.as_posix()}" if name.parts else root))

    try:
        found = sorted(system.find(root))
    except (OSError, client_error()) as error:
        raise unreadable(address, meant.key, error) from error
    names = _visible(Path(file).relative_to(root) for file in found)
    return _chosen(Path(root), names, meant, address_of=address_of)


def _visible(names: Iterable[Path]) -> list[Path]:
    return [name for name in names if not any(part.startswith(".") for part in name.parts)]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


class _SplitFiles(BaseModel):
    split: str
    path: Annotated[list[str], BeforeValidator(_listed)]


def _by_split(value: object) -> object:
    files = _listed(value)
    if isinstance(files, list) and all(isinstance(file, str) for file in files):
        return [{"split": "train", "path": files}]
    return files


class _CardConfig(BaseModel):
    """A configuration in a data set's card."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    config_name: str
    data_files: Annotated[list[_SplitFiles] | None, BeforeValidator(_by_split)] = None
    data_dir: str = ""
    default: bool = False

    def patterns(self) -> dict[str, list[str]]:
        """Return the file patterns of each split; empty if the card names no files."""
        return {
            files.split: [str(Path(self.data_dir, one)) for one in files.path]
            for files in self.data_files or ()
        }


def _configs_in(text: str, card: Path, meant: _Meant) -> dict[str, _CardConfig]:
    """Return the configurations in the text of a data set's card, by name. Raises DataError."""
    if "\nconfigs:" not in text:
        return {}
    try:
        _, block, _ = re.split(r"^---\s*$", text, maxsplit=2, flags=re.MULTILINE)
        values = read_yaml(block, str(card), _MEND_CARD)
        configs = TypeAdapter(list[_CardConfig]).validate_python(values["configs"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, ValidationError):  # its text would have all aliases written out
            first = error.errors(include_input=False, include_url=False)[0]
            reason = f"configs.{'.'.join(map(str, first['loc']))}: {first['msg']}"
        else:
            reason = str(error)
        raise meant.refusal(
            f"{printable(card)}: {in_short(reason)}",
            "configs of a data set's card, each with config_name and data_files",
            _MEND_CARD,
        ) from error
    return {config.config_name: config for config in configs}


def _chosen(
    root: Path,
    names: list[Path],
    meant: _Meant,
    dangling: Items[Path] = (),
    address_of: Callable[[Path], str] | None = None,
) -> list[SourceFile]:
    """Return the files that belong to a source, among all files below `root`.

    Args:
        root: a folder, or the only file of the source.
        names: the paths of all files, relative to `root`; one empty path if `root` is a file.
        meant: the source and split.
        dangling: links below `root` that lead nowhere.
        address_of: returns the address of a name if the files are not on this machine.

    Raises:
        DataError: the source is ambiguous, incomplete, or of files that are not read.
    """

    def file_of(name: Path, kind: FileFormat) -> SourceFile:
        return SourceFile(root / name, kind, address_of and address_of(name))

    source, split = meant.source, meant.split
    if any(_plain(root / name).suffix.lower() == ".mds" for name in names):
        raise meant.refusal(
            f"{printable(source.path)}: shards of MDS, which are not read",
            "records as .jsonl or .parquet, tokens in a column input_ids",
            "read them with MosaicML's streaming, and write each document's input_ids, and labels"
            " that are -100 where it is not learnt, into .parquet files",
        )
    if names == [Path()]:
        if source.name is not None or split not in (None, "train"):
            lacking = f"split {split}" if split else f"the name {source.name}"
            raise meant.no_file(root, f"a file, without {lacking}")
        return [file_of(Path(), _kind_of(root))]
    if not names:
        raise meant.refusal(
            "; ".join((f"{printable(root)}: a folder without files", *meant.notes)),
            "at least one file of texts or records that is not hidden",
            "name the files themselves, or another folder",
        )
    config = None
    if (card := Path("README.md")) in names:
        with file_of(card, "text").open() as opened:
            text = opened.read().decode(errors="replace")
        config = _config_among(_configs_in(text, root / card, meant), meant)
    if config is not None:
        names = [name for name in names if name.is_relative_to(config.data_dir)]
    elif source.name is not None:
        below = [name for name in names if source.name in name.parts[:-1][:2]]
        if not below:
            folders = sorted({name.parts[0] for name in names if len(name.parts) > 1})
            raise meant.not_one_of("name", folders)
        names = below
    by_split = {} if config is None else config.patterns()
    if by_split:
        names, are_records = _kind_among(_named_by_card(names, by_split, meant), meant)
    else:
        names, are_records = _kind_among(names, meant)
        names = _of_split(names, are_records, meant)
    if not are_records:
        return [file_of(name, "text") for name in names]
    _refuse_incomplete([root / name for name in names], dangling, meant)
    if len(parents := sorted({root / name.parent for name in names})) > 1:
        meant.notes.append(f"records of {len(parents):,} folders as one source ({_some(parents)})")
    return [file_of(name, _kind_of(name)) for name in names]


def _config_among(configs: Mapping[str, _CardConfig], meant: _Meant) -> _CardConfig | None:
    """Return the configuration that the source names; None if the card has none. Raises
    DataError."""
    if not configs:
        return None
    unnamed = [
        name
        for name, config in configs.items()
        if config.default or name == "default" or len(configs) == 1
    ]
    name = meant.source.name or (unnamed[0] if len(unnamed) == 1 else "")
    if name not in configs:
        raise meant.not_one_of("name", list(configs))
    return configs[name]


def _named_by_card(
    names: list[Path], by_split: Mapping[str, list[str]], meant: _Meant
) -> list[Path]:
    """Return the files of the source's split by the patterns of a card. Raises DataError."""
    from fsspec.utils import glob_translate  # type: ignore[import-untyped]

    split = meant.split or (next(iter(by_split)) if len(by_split) == 1 else "")
    if split not in by_split:
        raise meant.not_one_of("split", list(by_split))
    patterns = [re.compile(glob_translate(one)) for one in by_split[split]]
    found = [name for name in names if any(one.match(str(name)) for one in patterns)]
    if not found:
        raise meant.refusal(
            f"{printable(meant.source.path)}: no file of {', '.join(by_split[split])}, which the"
            f" card names as split {split}",
            "the files of the split",
            "fetch the files that are missing, or name those that are meant",
        )
    return found


def _kind_among(names: list[Path], meant: _Meant) -> tuple[list[Path], bool]:
    """Return the files that are read, and whether they hold records. If no file holds records, all
    files are returned, to be read as texts.

    If only some files hold records, DataError is raised; but in a data set of the hub, the other
    files are left out and noted.
    """
    is_of_hub = is_hub_name(meant.source.path)
    records = [name for name in names if _kind_of(name) in _KINDS.values()]
    described = [name for name in names if not _is_named_card(name)]
    others = [name for name in described if name not in records and not _is_card(name)]
    if not records:
        records = [
            name for name in described if _kind_of(name) != "text" and name.name not in _CARD_FILES
        ]
        others = [name for name in described if _kind_of(name) == "text"]
        if not records or (others and not is_of_hub):
            if records:
                meant.notes.append(f"{_AS_TEXTS}: {len(records):,} ({_some(records)})")
            return names, False
    if others and not is_of_hub:
        raise meant.refusal(
            f"{printable(meant.source.path)}: files of records and others, {records[0].name} and"
            f" {others[0].name} among them",
            "a folder of text files, or one of .jsonl, .parquet and other records",
            "name the files themselves, or folders of one kind",
        )
    others += [
        n
        for n in described
        if n not in [*records, *others] and n.suffix == ".json" and n.name not in _CARD_FILES
    ]
    if others:
        meant.notes.append(f"files beside the records: {len(others):,} left out ({_some(others)})")
    return records, True


def _of_split(names: list[Path], are_records: bool, meant: _Meant) -> list[Path]:
    """Return the files of the source's split, or all if they belong to one split.

    If only some texts have a split in their name, all texts are returned: test.py may be a program.
    Raises DataError.
    """
    split = meant.split
    described = [name for name in names if are_records or not _is_named_card(name)]
    by_split = {name: _split_of(name) for name in described}
    splits = sorted(set(by_split.values()))
    if split is not None:
        # `datasets` calls dev and val validation, and files that name no split train.
        same = [one for one in splits if _SPLITS.get(one, one or "train") == split]
        named = [split] if split in splits else same if splits == [""] or "" not in same else []
        if named:
            return [name for name in described if by_split[name] in named]
    several = [one for one in splits if one] if len({*splits} - {""}) > 1 else []
    if split is not None or (several and (are_records or "" not in splits)):
        raise meant.not_one_of("split", splits)
    if several:
        meant.notes.append(f"texts of several splits as one source ({', '.join(several)})")
    return names


def _split_of(file: Path) -> str:
    """Return the split that a file's name or folder says (`test-00000-of-00003`, `my_train.jsonl`),
    or "" if there is none."""
    stem = _plain(file).stem
    if match := _SHARD.fullmatch(stem):
        return match[1]
    names = " ".join((stem, *reversed(file.parent.parts))).lower()
    return next((word for word in re.split("[^a-z]+", names) if word in _SPLITS), "")


def _splits_on_disk(folder: Path) -> list[str]:
    """Return the splits of a folder of `DatasetDict.save_to_disk`; none if it is damaged."""
    try:
        listed = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        # A name with a slash would lead out of the folder.
        names = [str(split) for split in listed if Path(str(split)).name == str(split)]
    except (ValueError, KeyError, TypeError):
        return []
    return [name for name in names if (folder / name).is_dir()]


def _refuse_incomplete(records: Iterable[Path], dangling: Iterable[Path], meant: _Meant) -> None:
    """Raise DataError if a link to records leads nowhere, or if a shard such as
    `train-00000-of-00002` lacks a sibling, as after an interrupted download."""
    missing = [
        f"{printable(link)}: a link that leads nowhere"
        for link in dangling
        if _kind_of(link) in _KINDS.values()
    ]
    shards: dict[tuple[Path, str, int], set[int]] = {}
    for file in records:
        if match := _SHARD.fullmatch(_plain(file).stem):
            shards.setdefault((file.parent, match[1], int(match[3])), set()).add(int(match[2]))
    for (folder, name, total), found in shards.items():
        if lost := set(range(total)) - found - ({0} if total in found else set()):
            missing.append(
                f"{printable(folder)}: {len(found):,} of the {total:,} files of {name}, without"
                f" {name}-{min(lost):05}-of-{total:05}"
            )
    if missing:
        raise meant.refusal(
            "; ".join(missing[:_MAX_NAMED]),
            "records that are complete",
            "fetch the files that are missing, or name those that are meant one by one",
        )


def _some(paths: Items[Path]) -> str:
    named = ", ".join(printable(path.name) for path in paths[:_MAX_NAMED])
    return named + ", ..." * (len(paths) > _MAX_NAMED)


def _plain(file: Path) -> Path:
    """Return a file's path without a suffix of compression such as .gz."""
    return file.with_suffix("") if file.suffix.lower() in _CODECS else file


def _kind_of(file: Path) -> FileFormat:
    ending = _plain(file).suffix.lower()
    return _KINDS.get(ending) or _MAYBE_RECORDS.get(ending, "text")


def _is_named_card(file: Path) -> bool:
    return file.stem.lower() in _CARD_NAMES


def _is_card(file: Path) -> bool:
    return file.suffix.lower() in _CARD_ENDINGS or _is_named_card(file)

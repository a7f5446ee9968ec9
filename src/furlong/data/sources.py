"""Text out of files and folders: one file is one sequence, or one line of a JSONL file.

JSON lines are read here and not by `datasets`, whose reader cannot name a broken line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from furlong.errors import DataError

_JSON_LINES = (".jsonl", ".ndjson")
_BYTES_LOOKED_AT = 8192


@dataclass(frozen=True, slots=True)
class Document:
    """A text before it is tokenized, and where it came from (`file` or `file:line`)."""

    text: str
    origin: str


def read_documents(paths: Sequence[str], *, format: str = "auto") -> Iterator[Document]:
    """The documents of files and folders, in the order of `paths`, folders sorted by path.

    Of a folder, hidden, binary (a NUL byte at the start, git's rule) and empty files are left out;
    bytes that are no UTF-8 become U+FFFD. `format="text"` reads JSON lines as plain text too.
    Raises DataError.
    """
    for path in paths:
        given = Path(path).expanduser()
        if given.is_dir():
            files = _files_of(given)
        elif given.is_file():
            files = [given]
        else:
            raise DataError(
                given=f"{path}: no such file or folder",
                required="text files, .jsonl files, or folders of them",
                source="data.train or data.eval",
                change="check the path; it is relative to the folder you call furlong from",
            )
        for file in files:
            if format == "auto" and file.suffix in _JSON_LINES:
                yield from _read_json_lines(file)
            else:
                text = file.read_text(encoding="utf-8", errors="replace")
                if text.strip():
                    yield Document(text, str(file))
                elif not given.is_dir():
                    raise _empty(str(file))


def _files_of(folder: Path) -> list[Path]:
    files = sorted(
        file
        for file in folder.rglob("*")
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and file.is_file()
        and _is_text(file)
    )
    if not files:
        raise DataError(
            given=f"{folder}: a folder without text files",
            required="at least one text file or .jsonl file",
            source="data.train or data.eval",
            change="name the files themselves, or another folder",
        )
    return files


def _is_text(file: Path) -> bool:
    with file.open("rb") as opened:
        return b"\0" not in opened.read(_BYTES_LOOKED_AT)


def _read_json_lines(file: Path) -> Iterator[Document]:
    empty = True
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            empty = False
            text = _text_of(line, f"{file}:{number}")
            if text.strip():
                yield Document(text, f"{file}:{number}")
    if empty:
        raise _empty(str(file))


def _text_of(line: str, origin: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            given=f"{line.strip()[:60]!r}: {error.msg} at column {error.colno}",
            required="one JSON object in a line",
            source=origin,
            change="mend or remove the line",
        ) from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        keys = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise DataError(
            given=f"a record with {keys or 'no field'}",
            required='a record with a text: {"text": "..."}',
            source=origin,
            change="rename the field to text, or set data.format: text to read lines as they are",
        )
    return str(record["text"])


def _empty(file: str) -> DataError:
    return DataError(
        given=f"{file}: an empty file",
        required="at least one text",
        source="data.train or data.eval",
        change="remove it from the list, or fill it",
    )

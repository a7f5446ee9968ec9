"""Records out of files: a text file is one record, so is a line of JSON or a row of a table.

JSON lines are read here and not by `datasets`, whose reader cannot name a broken line. Memory is
bounded for whatever bytes a file holds: no line above `MAX_LINE_BYTES` and no text above
`MAX_TEXT_BYTES` is taken in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from furlong.data.sources import SourceFile, unreadable
from furlong.errors import DataError
from furlong.units import count_words, format_bytes

MAX_LINE_BYTES = 64 * 2**20
MAX_TEXT_BYTES = 16 * 2**20
"""Bytes of one sequence in UTF-8: at most as many tokens, and a tokenizer takes 250 to 500 bytes
of memory for each while it works."""

BINARY, BLANK = "binary files left out", "blank texts left out"
REPLACED = "bytes that are no UTF-8 replaced"

_MARK = b"\xef\xbb\xbf"  # Windows begins a text in UTF-8 with it
_BYTES_LOOKED_AT = 8192
_ROWS_PER_BATCH = 64
_MAX_REPLACED_SHARE = 0.1

Rows = Iterator[tuple[int, Mapping[str, Any]]]
"""Fields with their line or row, from 1; 0 = the whole file."""


class Notes(dict[str, list[int]]):
    """Counts of what a source did not take as it is: number, file and line of the first of them."""

    def add(self, what: str, file: int, line: int, number: int = 1) -> None:
        """Count what is true of a record."""
        if number:
            self.setdefault(what, [0, file, line])[0] += number


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """The fields that make a sequence, and where they came from."""

    fields: Mapping[str, Any]
    """A field that no format reads may be there without its value."""
    file: int
    """Number of its file in the source."""
    line: int
    """Line or row, from 1; 0 = the whole file."""
    origin: str

    def refusal(
        self, given: str, required: str, change: str = "mend or remove the record"
    ) -> DataError:
        """The error of a record that cannot be trained on."""
        return DataError(given=given, required=required, source=self.origin, change=change)


def read_records(
    files: tuple[SourceFile, ...],
    notes: Notes,
    fields: Collection[str],
    key: str = "data.train",
) -> Iterator[SourceRecord]:
    """The records of a source, file after file. `fields`: those that are read; of a table, no other
    column is decoded.

    Binary files (a NUL byte at the start, git's rule, or mostly no UTF-8) are left out and counted,
    so are texts of nothing but white space; single bytes that are no UTF-8 become U+FFFD. Raises
    DataError, with file and line, for anything that cannot be read, and for a source without any
    record.
    """
    empty = True
    for number, file in enumerate(files):
        read = {"text": _read_text, "json lines": _read_json_lines}.get(file.kind, _read_table)
        try:
            for line, values in read(file, number, notes, fields):
                empty = False
                yield SourceRecord(values, number, line, file.origin(line))
        except OSError as error:
            raise unreadable(file.path, key, error) from error
    if empty:
        left_out = ", ".join(f"{number:,} {what}" for what, (number, *_) in notes.items())
        raise DataError(
            given=f"{files[0].origin(0)}: {count_words(len(files), 'file')} without a record"
            + (f", {left_out}" if left_out else ""),
            required="UTF-8 text, .jsonl, .parquet or .arrow, not compressed, and not empty",
            source=key,
            change="decompress or convert the files (iconv -t utf-8), or name others",
        )


def _read_text(file: SourceFile, number: int, notes: Notes, fields: Collection[str]) -> Rows:
    with file.path.open("rb") as opened:
        content = opened.read(_BYTES_LOOKED_AT)
        if b"\0" in content:
            notes.add(BINARY, number, 0)
            return
        num_bytes = os.fstat(opened.fileno()).st_size
        if num_bytes > MAX_TEXT_BYTES:
            raise too_large(file.origin(0), f"a text of {format_bytes(num_bytes)}")
        content += opened.read()
    text, num_replaced = _decode(content.removeprefix(_MARK))
    if num_replaced > _MAX_REPLACED_SHARE * len(text):
        notes.add(BINARY, number, 0)
    elif not text.strip():
        notes.add(BLANK, number, 0)
    else:
        notes.add(REPLACED, number, 0, num_replaced)
        yield 0, {"text": text}


def _read_json_lines(file: SourceFile, number: int, notes: Notes, fields: Collection[str]) -> Rows:
    with file.path.open("rb") as opened:
        for at in count(1):
            line = opened.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_LINE_BYTES:
                more = f"a line of more than {format_bytes(MAX_LINE_BYTES)}"
                raise too_large(file.origin(at), more)
            if at == 1:
                line = line.removeprefix(_MARK)
            if line.strip():
                text, num_replaced = _decode(line)
                is_binary = b"\0" in line or num_replaced > _MAX_REPLACED_SHARE * len(text)
                notes.add(REPLACED, number, at, num_replaced)
                yield at, _parse(text, file.origin(at), is_binary)


def _parse(line: str, origin: str, is_binary: bool) -> Mapping[str, Any]:
    try:
        if is_binary:
            raise ValueError("a binary file, or text in another encoding than UTF-8")
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError(f"it is of type {type(record).__name__}")
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise DataError(
            given=f"{line.strip()[:60]!r}: {reason}",
            required='one JSON object in a line, such as {"text": "..."}',
            source=origin,
            change="mend or remove the line",
        ) from error
    # Half of a UTF-16 pair can be written in JSON; no tokenizer takes it.
    return _without_surrogates(record) if "\\ud" in line or "\\uD" in line else record


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [_without_surrogates(item) for item in value]
        case dict():
            return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value


def _read_table(file: SourceFile, number: int, notes: Notes, fields: Collection[str]) -> Rows:
    """Rows of a Parquet file, an Arrow file or a folder of `datasets`."""
    import datasets
    import pyarrow

    try:
        if file.kind == "parquet":
            columns, rows = _parquet_rows(file, fields)
        else:
            is_file = file.kind == "arrow"
            load = datasets.Dataset.from_file if is_file else datasets.load_from_disk
            table = load(str(file.path))
            columns = table.column_names
            wanted = table.select_columns([column for column in columns if column in fields])
            rows = iter(wanted) if wanted.column_names else ({} for _ in range(len(table)))
        others = dict.fromkeys(column for column in columns if column not in fields)
        for at, row in enumerate(rows, start=1):
            yield at, {name: _without_null(value) for name, value in row.items()} | others
    except (
        pyarrow.ArrowException,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        datasets.exceptions.DatasetsError,
    ) as error:
        raise DataError(
            given=f"{file.path}: {' '.join(str(error).split())[:200]}",
            required=f"what datasets or pyarrow reads as {file.kind} (Arrow's stream, not Feather)",
            source=str(file.path),
            change="write the file again, or remove it",
        ) from error


def _without_null(value: Any) -> Any:
    """A cell without the keys that a table fills with null where other rows alone have them."""
    match value:
        case dict():
            return {key: _without_null(own) for key, own in value.items() if own is not None}
        case [int(), *_]:  # tokens
            return value
        case list():
            return [_without_null(item) for item in value]
    return value


def _parquet_rows(
    file: SourceFile, fields: Collection[str]
) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """The columns of a file, and its rows with those of `fields`.

    pyarrow reads them and `datasets` decodes its own types: its reader would take the path for a
    pattern, lock files in its cache, and fail on a file without rows.
    """
    import datasets
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file.path)
    schema = table.schema_arrow
    wanted = [column for column in schema.names if column in fields]
    typed = [schema.field(column) for column in wanted]
    # of other columns `datasets` may not know the type
    used = datasets.Features.from_arrow_schema(pyarrow.schema(typed, metadata=schema.metadata))
    batches = table.iter_batches(batch_size=_ROWS_PER_BATCH, columns=wanted)
    return schema.names, (
        used.decode_example(row) for batch in batches for row in batch.to_pylist()
    )


def _decode(content: bytes) -> tuple[str, int]:
    """The text, and how many times U+FFFD stands for bytes that are no UTF-8."""
    try:
        return content.decode("utf-8"), 0
    except UnicodeDecodeError:
        text = content.decode("utf-8", errors="replace")
        return text, text.count("\ufffd") - content.count("\ufffd".encode())


def too_large(origin: str, given: str) -> DataError:
    """The message about a line or text beyond its limit."""
    return DataError(
        given=given,
        required=f"lines of at most {format_bytes(MAX_LINE_BYTES)} and texts of at most"
        f" {format_bytes(MAX_TEXT_BYTES)}",
        source=origin,
        change="split it into several records, or give token ids (input_ids) in Parquet",
    )

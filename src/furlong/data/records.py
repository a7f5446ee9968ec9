"""Records out of files: a text file is one record, so is a line of JSON or a row of a table.

JSON lines are read here and not by `datasets`, whose reader cannot name a broken line. Time and
memory are bounded for whatever bytes a file holds: no line above `MAX_LINE_BYTES` and no text above
`MAX_TEXT_BYTES` is taken in.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from furlong.data.sources import SourceFile, unreadable
from furlong.errors import DataError
from furlong.units import count_words, format_bytes

MAX_LINE_BYTES = 64 * 2**20
MAX_TEXT_BYTES = 16 * 2**20
"""Bytes of one sequence in UTF-8: at most as many tokens, and a tokenizer takes 250 to 500 bytes
of memory for each while it works."""

BINARY, BLANK, REPLACED = "binary files", "blank texts", "bytes that are no UTF-8"
RAW = "texts that begin with a JSON record"
"""Counted with what is left out, though they are read, as they stand."""

_ARROW_FILE = b"ARROW1"
_READ = "UTF-8 text, .jsonl, .parquet or .arrow, not compressed"
_COMPRESSED = frozenset((".gz", ".zst", ".xz", ".bz2", ".lz4", ".zip", ".tgz", ".7z"))
_MARK = b"\xef\xbb\xbf"  # Windows begins a text in UTF-8 with it
_BYTES_LOOKED_AT = 8192
_ROWS_PER_BATCH = 64
_MAX_REPLACED_SHARE = 0.1
_FIELD_DEPTH = 2
_NESTED = frozenset(("messages", "tools", "prompt", "chosen", "rejected"))


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

    def refusal(self, given: str, required: str, change: str) -> DataError:
        """The error of a record that cannot be trained on."""
        return DataError(given=given, required=required, source=self.origin, change=change)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Counts of all that a source did not take as it is, and where the first of each kind is."""

    counts: Counter[str]
    first: dict[str, tuple[int, int]]
    """File and line."""

    def add(self, what: str, record: Any) -> None:
        """Count a record, or what it was encoded to."""
        self.counts[what] += 1
        self.first.setdefault(what, (record.file, record.line))


def read_records(
    files: tuple[SourceFile, ...],
    left_out: Counter[str],
    fields: Collection[str],
    key: str = "data.train",
) -> Iterator[SourceRecord]:
    """The records of a source, file after file. `fields`: those that are read; of a table, no other
    column is decoded.

    `left_out` counts what was not taken as it is, under `BINARY`, `BLANK` and `REPLACED`: binary
    files (a NUL byte at the start, git's rule, or mostly no UTF-8) are left out of folders, so are
    texts of nothing but white space; single bytes that are no UTF-8 become U+FFFD.
    Raises DataError, with file and line, for anything that cannot be read, and for a source without
    any record.
    """
    empty = True
    for number, file in enumerate(files):
        match file.kind:
            case "text":
                records = _read_text(file, left_out, fields, key)
            case "json lines":
                records = _read_json_lines(file, left_out, key)
            case _:
                records = _read_table(file, fields)
        empty_file = True
        try:
            for line, values in records:
                empty_file = False
                yield SourceRecord(values, number, line, file.origin(line))
        except OSError as error:
            raise unreadable(file.path, key, error) from error
        if empty_file and file.named:
            raise _empty(file, key)
        empty = empty and empty_file
    if empty:
        raise DataError(
            given=f"{count_words(len(files), 'file')} without a record, {left_out[BINARY]:,} of"
            f" them binary, {files[0].origin(0)} among them",
            required=f"at least one record or text in {_READ}",
            source=key,
            change="decompress or convert them, or name others",
        )


def _read_text(
    file: SourceFile, left_out: Counter[str], fields: Collection[str], key: str
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with file.path.open("rb") as opened:
        content = opened.read(_BYTES_LOOKED_AT)
        if not (is_binary := b"\0" in content):
            num_bytes = os.fstat(opened.fileno()).st_size
            if num_bytes > MAX_TEXT_BYTES:
                raise too_large(str(file.path), f"a text of {format_bytes(num_bytes)}")
            content += opened.read()
    text, num_replaced = _decode(content.removeprefix(_MARK))
    if is_binary or num_replaced > _MAX_REPLACED_SHARE * len(text):
        if file.named:
            raise _binary(file, key)
        left_out[BINARY] += 1
    elif text.strip():
        left_out[REPLACED] += num_replaced
        if _begins_with_record(text, fields):
            left_out[RAW] += 1
        yield 0, {"text": text}
    else:
        left_out[BLANK] += 1


def _read_json_lines(
    file: SourceFile, left_out: Counter[str], key: str
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with file.path.open("rb") as opened:
        if b"\0" in opened.peek(_BYTES_LOOKED_AT)[:_BYTES_LOOKED_AT]:
            raise _binary(file, key)
        all_replaced = num_chars = 0
        for number in count(1):
            line = opened.readline(MAX_LINE_BYTES + 1)
            if not line:
                if all_replaced > _MAX_REPLACED_SHARE * num_chars:
                    raise _binary(file, key)
                return
            if len(line) > MAX_LINE_BYTES:
                more = f"a line of more than {format_bytes(MAX_LINE_BYTES)}"
                raise too_large(file.origin(number), more)
            if number == 1:
                line = line.removeprefix(_MARK)
            if line.strip():
                text, num_replaced = _decode(line)
                left_out[REPLACED] += num_replaced
                all_replaced, num_chars = all_replaced + num_replaced, num_chars + len(text)
                yield number, _parse(text, file.origin(number))


def _begins_with_record(text: str, fields: Collection[str]) -> bool:
    try:
        record = json.loads(text.lstrip().partition("\n")[0])
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and not record.keys().isdisjoint(fields)


def _parse(line: str, origin: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        reason = (
            f"{error.msg} at column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else str(error)
        )
        raise DataError(
            given=f"{line.strip()[:60]!r}: {reason}",
            required="one JSON object in a line",
            source=origin,
            change="mend or remove the line",
        ) from error
    if not isinstance(record, dict):
        raise DataError(
            given=f"a line with a {type(record).__name__}",
            required="one JSON object in a line",
            source=origin,
            change='write an object such as {"text": "..."} in every line',
        )
    # Half of a UTF-16 pair can be written in JSON; no tokenizer takes it.
    return _without_surrogates(record) if "\\ud" in line or "\\uD" in line else record


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice} is there twice")
    return values


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [_without_surrogates(item) for item in value]
        case dict():
            return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value


def _read_table(
    file: SourceFile, fields: Collection[str]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows of a Parquet file, an Arrow file or a folder of `datasets`."""
    import datasets
    import pyarrow

    try:
        match file.kind:
            case "parquet":
                columns, rows = _parquet_rows(file.path, fields)
            case "arrow":
                _refuse_arrow_file(file.path)
                columns, rows = _dataset_rows(datasets.Dataset.from_file(str(file.path)), fields)
            case _:
                columns, rows = _dataset_rows(datasets.load_from_disk(str(file.path)), fields)
        others = dict.fromkeys(column for column in columns if column not in fields)
        for number, row in enumerate(rows, start=1):
            at = file.origin(number)
            own = {k: _plain(v, k, at) if k in _NESTED else v for k, v in dict(row).items()}
            yield number, own | others
    except (
        pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError,
        datasets.exceptions.DatasetsError,
    ) as error:  # fmt: skip
        raise DataError(
            given=f"{file.path}: {' '.join(str(error).split())[:200]}",
            required=f"a readable {file.kind} {'folder' if file.kind == 'dataset' else 'file'}",
            source=str(file.path),
            change="write the file again, or remove it",
        ) from error


def _plain(value: Any, column: str, origin: str, depth: int = 0) -> Any:
    """A cell without the keys that a table fills with null where other rows alone have them.

    Raises DataError for what no template writes, within a field of a message or tool.
    """
    match value:
        case dict():
            return {
                k: _plain(v, column, origin, depth + 1) for k, v in value.items() if v is not None
            }
        case list():
            return [_plain(item, column, origin, depth + 1) for item in value]
    if depth > _FIELD_DEPTH and not isinstance(value, str | int | float | None):
        raise DataError(
            given=f"a {type(value).__name__} within {column}",
            required="texts, numbers, lists and objects, as JSON has them",
            source=origin,
            change="write it as a string: pyarrow and pandas make times of texts that look so",
        )
    return value


def _parquet_rows(
    path: Path, fields: Collection[str]
) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """The columns of a file, and its rows with those of `fields`.

    pyarrow reads them and `datasets` decodes its own types: its reader would take the path for a
    pattern, lock files in its cache, and fail on a file without rows.
    """
    import datasets
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(path)
    schema = table.schema_arrow
    for name, times in Counter(schema.names).items():
        if times > 1:
            raise ValueError(f"the column {name} is there twice")
    wanted = [column for column in schema.names if column in fields]
    typed = [schema.field(column) for column in wanted]
    # of other columns `datasets` may not know the type
    used = datasets.Features.from_arrow_schema(pyarrow.schema(typed, metadata=schema.metadata))
    batches = table.iter_batches(batch_size=_ROWS_PER_BATCH, columns=wanted)
    rows = (used.decode_example(row) for batch in batches for row in batch.to_pylist())
    return schema.names, rows


def _dataset_rows(
    dataset: Any, fields: Collection[str]
) -> tuple[list[str], Iterator[dict[str, Any]]]:
    columns = dataset.column_names
    wanted = dataset.select_columns([column for column in columns if column in fields])
    return columns, iter(wanted) if wanted.column_names else ({} for _ in range(len(dataset)))


def _refuse_arrow_file(path: Path) -> None:
    """Raises DataError for the other one of Arrow's two formats, which `datasets` does not read."""
    with path.open("rb") as opened:
        if opened.read(len(_ARROW_FILE)) == _ARROW_FILE:
            raise DataError(
                given=f"{path}: Arrow's file format (pyarrow.ipc.new_file, Feather)",
                required="Arrow's stream format, which datasets writes, or Parquet",
                source=str(path),
                change="convert it: pyarrow.parquet.write_table(pyarrow.feather.read_table(FILE),"
                " 'FILE.parquet')",
            )


def _decode(content: bytes) -> tuple[str, int]:
    """The text, and how many times U+FFFD stands for bytes that are no UTF-8."""
    try:
        return content.decode("utf-8"), 0
    except UnicodeDecodeError:
        text = content.decode("utf-8", errors="replace")
        return text, text.count("\ufffd") - content.count("\ufffd".encode())


def _binary(file: SourceFile, key: str) -> DataError:
    ending = file.path.suffix.lower()
    kind = "a binary file, or text in another encoding than UTF-8"
    return DataError(
        given=f"{file.origin(0)}: "
        + (f"a compressed file ({ending})" if ending in _COMPRESSED else kind),
        required=_READ,
        source=key,
        change="decompress or convert it (iconv -t utf-8), or remove it from the list",
    )


def _empty(file: SourceFile, key: str) -> DataError:
    return DataError(
        given=f"{file.origin(0)}: an empty file",
        required="at least one record or text",
        source=key,
        change="remove it from the list, or fill it",
    )


def too_large(origin: str, given: str) -> DataError:
    """The message about a line or text beyond its limit."""
    return DataError(
        given=given,
        required=f"lines of at most {format_bytes(MAX_LINE_BYTES)} and texts of at most"
        f" {format_bytes(MAX_TEXT_BYTES)}",
        source=origin,
        change="split it into several records, or give token ids (input_ids) in Parquet",
    )


def check_size(record: SourceRecord, field: str, *texts: str) -> None:
    """Raises DataError for texts that are too large together."""
    # Counting bytes takes a copy; a character has at most four.
    if 4 * sum(map(len, texts)) > MAX_TEXT_BYTES:
        num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if num_bytes > MAX_TEXT_BYTES:
            raise too_large(record.origin, f"{field} of {format_bytes(num_bytes)}")


def kind_of(value: Any) -> str:
    """The type of a value, for people."""
    match value:
        case None:
            return "null"
        case list():
            kinds = {type(item).__name__ for item in value}
            return f"a list of {' and '.join(sorted(kinds)) or 'nothing'}"
    return f"of type {type(value).__name__}"

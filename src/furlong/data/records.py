"""Read records from files: a text file is one record, and so is a line of JSON or a row of a table.

JSON and CSV are read here because `datasets` (5.2) infers one type per column. It reads the answer
"None" in a .csv file as null and the id 007 as 7.0, reads texts that look like dates as datetimes,
shifts the cells of a row that is too long, fills the keys that a record lacks with null, and names
no line of a broken file. It also takes five times the CPU seconds. Tables that have types of their
own (.parquet, .arrow, `save_to_disk`) are read by pyarrow and decoded by `datasets`.

Memory is bounded whatever bytes a file holds, compressed or not: no line or record longer than
`MAX_LINE_BYTES` and no text longer than `MAX_TEXT_BYTES` is read into memory.
"""

from __future__ import annotations

import io
import json
import re
import sys
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, utf_8_decode
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from typing import Any, BinaryIO

from furlong.data.sources import Listing, SourceFile, client_error, printable, unreadable
from furlong.errors import DataError, in_short
from furlong.units import count_words, format_bytes

MAX_LINE_BYTES = 64 * 2**20
MAX_TEXT_BYTES = 16 * 2**20
"""The most bytes of one text in UTF-8. A text has at most as many tokens as bytes, and a tokenizer
allocates 250 to 500 bytes per token while it works."""

BINARY, BLANK = "binary files left out", "blank texts left out"
REPLACED = "bytes that are no UTF-8 replaced"
HALVES = "records with halves of UTF-16 pairs replaced"

_MARK = b"\xef\xbb\xbf"  # the byte order mark with which Windows begins a text in UTF-8
_BYTES_LOOKED_AT = 8192
_BUFFER_BYTES = 2**20
_ROWS_PER_BATCH = 64
_MAX_MESSAGES = 100_000
_MAX_REPLACED_SHARE = 0.1
_NO_TEXT = "a binary file, or text in another encoding than UTF-8"
_REQUIRED = {
    "json lines": 'one JSON object in a line, such as {"text": "..."}',
    "json": 'JSON objects such as {"text": "..."}, or a list of them',
}
_A_TABLE = "names in the first row and as many cells in each other; those with line ends in quotes"
_NEXT = re.compile(r"[^\s,]")
_FASTA = re.compile(r"^>.*\n[A-Za-z*-]+$", re.MULTILINE)
IS_MEDIA = re.compile(r"(^|_)(image|img|picture|video|audio|pixel)s?(_(url|path|value|byte)s?)?$")
"""Matches the names of fields that hold images, video or sound."""

Note = Callable[..., None]
"""`Notes.add`, with the number of a file bound."""
Rows = Iterator[tuple[int, Mapping[str, Any]]]
"""Pairs of a line or row number (from 1; 0 is the whole file) and the fields of its record."""


class Notes(dict[str, list[int]]):
    """Counts of records that were changed or left out, by reason.

    Each value is a count, and the file and line of the first such record.
    """

    def __init__(self) -> None:
        self.unread = Counter[str]()
        """For each field that nothing reads, the number of records that have it."""
        self.num_records = 0

    def add(self, what: str, file: int, line: int, number: int = 1) -> None:
        """Add `number` to the count of a reason (`what`). `file`, `line`: where the record is."""
        if number:
            self.setdefault(what, [0, file, line])[0] += number


def left_out(notes: Mapping[str, Items[int]], listing: Listing | None = None) -> str:
    """Return the counts as text, such as `, 3 empty answers`, with a comma before each count. If
    `listing` is given, also name file and line of the first record of each count."""
    return "".join(
        f", {count:,} {what}" + (f" (first: {listing.files[file].origin(line)})" if listing else "")
        for what, (count, file, line) in notes.items()
    )


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """The fields of one record, and where it was read."""

    fields: Mapping[str, Any]
    """Values by name. A column of a table that nothing reads is `...` instead of its value."""
    file: int
    """The number of its file in the source."""
    line: int
    """Its line or row, from 1; 0 if the record is the whole file."""
    origin: str
    """File and line, for messages."""

    def refusal(
        self, given: str, required: str, change: str = "mend or remove the record"
    ) -> DataError:
        """Return the error that says why this record cannot be trained on.

        `given`: the wrong value, in words. `required`: what is accepted. `change`: how to fix the
        record.
        """
        return DataError(given=given, required=required, source=self.origin, change=change)


def read_records(
    listing: Listing,
    notes: Notes,
    fields: Collection[str],
    key: str = "data.train",
    limit: int | None = None,
    skip: int = 0,
) -> Iterator[SourceRecord]:
    """Yield the records of a source, file after file, as its slices select them.

    Binary files (with a NUL byte at the start, as git has it, or with mostly invalid UTF-8) and
    texts of white space alone are left out and counted; single invalid bytes become U+FFFD.

    Args:
        listing: the files of the source.
        notes: counts what is changed or left out.
        fields: the fields that will be read. Other columns of a table are not decoded.
        key: the key of the run file that names the source, for messages.
        limit: the most records to yield; None for all.
        skip: how many lines or rows at the start of the first file the caller does not need. They
            are left out where this saves reading them.

    Raises:
        DataError: a file or record cannot be read (names file and line), or no record is left.
    """
    parts = _slices(listing, key) if listing.parts else [(0, listing.files, 0, sys.maxsize)]
    records = (
        islice(_read_files(files, first, notes, fields, key, skip), start, stop)
        for first, files, start, stop in parts
    )
    empty = True
    for record in islice(chain.from_iterable(records), limit):
        empty = False
        yield record
    if empty:
        files = listing.files
        sliced = "".join(f", {slice}" for _, slice in listing.slices)
        raise DataError(
            given=f"{files[0].origin(0)}{sliced}: {count_words(len(files), 'file')} without a"
            f" record{left_out(notes)}",
            required="UTF-8 text, or records as .jsonl, .json, .csv, .parquet or .arrow, also as"
            " .gz or .zst, and not empty",
            source=key,
            change="name files of text or records: unpack archives, and write arrays of token ids"
            " into .parquet with a column input_ids"
            if BINARY in notes and _has_nul(files[0])
            else "convert the files (iconv -t utf-8), or name others or another slice",
        )


def _has_nul(file: SourceFile) -> bool:
    """Return whether a file has a NUL byte near its start and is not UTF-16."""
    with _open(file) as opened:
        head = opened.read(_BYTES_LOOKED_AT)
    return b"\0" in head and not head.startswith((BOM_UTF16_LE, BOM_UTF16_BE))


def _slices(listing: Listing, key: str) -> list[tuple[int, Items[SourceFile], int, int]]:
    """Return, for each split or slice listed: the number of its first file, its files, and the
    start and stop of its range of records. Raises DataError for an invalid slice and for an
    overlap."""
    from datasets import ReadInstruction

    found: list[tuple[int, Items[SourceFile], int, int]] = []
    first = 0
    for num_files, slice in listing.parts:
        files = listing.files[first : first + num_files]
        split, _, bounds = slice.partition("[")
        start, stop = 0, sys.maxsize
        if "%" in bounds or "-" in bounds:
            stop = sum(1 for _ in _read_files(files, 0, Notes(), (), key))
        try:
            if slice:
                (own,) = ReadInstruction.from_spec(slice).to_absolute({split: stop})
                start, stop = own.from_, own.to
        except ValueError as error:
            raise DataError(
                given=f"{slice} of {count_words(stop, 'record')}",
                required="a slice that can be cut",
                source=key,
                change=str(error),
            ) from error
        for _, others, begin, end in found:
            if others == files and max(start, begin) < min(stop, end):
                raise DataError(
                    given=f"{files[0].origin(0)}: {slice or 'a split'}, of which the source"
                    " names records twice",
                    required="slices that share no record",
                    source=key,
                    change="name each record once; {path: ..., weight: 2.0} draws from a source"
                    " twice as often",
                )
        found.append((first, files, start, stop))
        first += num_files
    return found


def _read_files(
    files: Items[SourceFile],
    first: int,
    notes: Notes,
    fields: Collection[str],
    key: str,
    skip: int = 0,
) -> Iterator[SourceRecord]:
    """Yield the records of files; `first` is the number of the first file in its source."""
    for number, file in enumerate(files, start=first):
        read = _READERS.get(file.kind, _read_table)
        note = partial(notes.add, file=number)
        try:
            for line, values in read(file, note, fields, 0 if number else skip):
                yield SourceRecord(values, number, line, file.origin(line))
        except (OSError, client_error()) as error:
            if file.codec is None or getattr(error, "errno", 0) is not None:
                raise unreadable(file.address or file.path, key, error) from error
            raise DataError(
                given=f"{printable(file.path)}: {error}",
                required=f"a whole file compressed by {file.codec}",
                source=key,
                change="fetch or compress it again; a file that is not compressed has another name",
            ) from error


def _open(file: SourceFile) -> BinaryIO:
    """Open a file for reading, and decompress it as it is read."""
    if file.codec is None:
        return file.open()
    import pyarrow

    # typed as no stream of Python, which it is
    raw: Any = pyarrow.CompressedInputStream(file.open(), file.codec)
    return io.BufferedReader(raw, _BUFFER_BYTES)


def _read_text(file: SourceFile, note: Note, fields: Collection[str], skip: int) -> Rows:
    with _open(file) as opened:
        content = opened.read(_BYTES_LOOKED_AT)
        if b"\0" in content:
            note(BINARY, line=0)
            return
        content += opened.read(max(0, MAX_TEXT_BYTES + 1 - len(content)))
    if len(content) > MAX_TEXT_BYTES:
        raise too_large(file.origin(0), "a text", MAX_TEXT_BYTES)
    text, num_replaced = _decode(content.removeprefix(_MARK))
    if num_replaced > _MAX_REPLACED_SHARE * len(text):
        note(BINARY, line=0)
    elif not text.strip():
        note(BLANK, line=0)
    else:
        note(REPLACED, line=0, number=num_replaced)
        num_parts = len(_FASTA.findall(text)) if text.startswith(">") else 0
        if num_parts > 1:
            note("sequences of FASTA in the text of one file", line=0, number=num_parts)
        yield 0, {"text": text}


def _read_json_lines(file: SourceFile, note: Note, fields: Collection[str], skip: int) -> Rows:
    for at, line in _lines(file, note):
        if at > skip and line.strip():
            try:
                yield at, _record(json.loads(line), line, partial(note, line=at))
            except (ValueError, RecursionError) as error:
                raise _broken(file, at, line, error) from error


def _read_csv(file: SourceFile, note: Note, fields: Collection[str], skip: int) -> Rows:
    """Yield the rows of a table; each cell is a text, and the first row names the columns."""
    import csv

    csv.field_size_limit(MAX_LINE_BYTES)  # for the whole process; 128 KiB by default
    lines = (line for _, line in _lines(file, note))
    rows = csv.reader(lines, delimiter="\t" if file.kind == "tsv" else ",", strict=True)
    columns: list[str] = []
    try:
        for row in filter(None, rows):
            if not columns:
                columns = row
                if len(set(columns)) < len(columns):
                    raise ValueError("two columns of the same name")
            elif len(row) != len(columns):
                raise ValueError(f"{len(row)} cells in a table of {len(columns)} columns")
            else:
                yield rows.line_num, dict(zip(columns, row, strict=True))
    except csv.Error as error:
        if "field limit" in str(error):
            raise too_large(file.origin(rows.line_num), "a cell", MAX_LINE_BYTES) from error
        raise _broken(file, rows.line_num, "", error) from error
    except ValueError as error:
        raise _broken(file, rows.line_num, ", ".join(row), error) from error


def _lines(file: SourceFile, note: Note) -> Iterator[tuple[int, str]]:
    """Yield the number of each line of a file, from 1, and its text."""
    with _open(file) as opened:
        for at in count(1):
            line = opened.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_LINE_BYTES:
                raise too_large(file.origin(at), "a line", MAX_LINE_BYTES)
            text, num_replaced = _decode(line.removeprefix(_MARK) if at == 1 else line)
            if b"\0" in line or num_replaced > _MAX_REPLACED_SHARE * len(text):
                raise _broken(file, at, text, ValueError(_NO_TEXT))
            if num_replaced:
                note(REPLACED, line=at, number=num_replaced)
            yield at, text


def _read_json(file: SourceFile, note: Note, fields: Collection[str], skip: int) -> Rows:
    """Yield the number and value of each object in a JSON file. If the file holds only messages,
    yield them as one conversation."""
    rows = _json_objects(file, note)
    talk: list[Mapping[str, Any]] = []
    for at, record in rows:
        if at == 1 and is_message(record):
            talk.append(record)
        elif not talk:
            yield at, record
        elif not is_message(record):
            raise _broken(file, at, "", ValueError("it follows messages, and is none"))
        elif at > _MAX_MESSAGES:
            raise too_large(file.origin(0), "a conversation", MAX_LINE_BYTES)
        else:
            talk.append(record)
    if talk:
        yield 1, {"messages": talk}


def _json_objects(file: SourceFile, note: Note) -> Rows:
    """Yield the number and value of each object in a file, with one in memory at a time. The
    objects follow each other, or are the items of one list."""
    decode = json.JSONDecoder().raw_decode
    with _open(file) as opened:
        pieces = _texts(opened, file, note)
        text, begin, at = next(pieces, "").removeprefix("\ufeff"), 0, 0
        is_list = is_closed = False
        while True:
            if (found := _NEXT.search(text, begin)) is None:
                if not (text := next(pieces, "")):
                    break
                begin = 0
                continue
            begin = found.start()
            if not at and not is_list and text[begin] == "[":
                is_list, begin = True, begin + 1
            elif is_list and not is_closed and text[begin] == "]":
                is_closed, begin = True, begin + 1
            else:
                rest = len(text) - begin
                try:
                    if is_closed:
                        raise ValueError("it follows the end of the list")
                    value, stop = decode(text, begin)
                    record = _record(value, text[begin:stop], partial(note, line=at + 1))
                except (ValueError, RecursionError) as error:
                    if rest > MAX_LINE_BYTES:
                        raise too_large(file.origin(at + 1), "a record", MAX_LINE_BYTES) from error
                    # The object may end in bytes not read yet: double what is looked at, so that
                    # the time to parse it stays linear in its size.
                    more = "".join(islice(pieces, 1 + rest // _BUFFER_BYTES))
                    if not more:
                        raise _broken(file, at + 1, text[begin:], error) from error
                    text, begin = text[begin:] + more, 0
                    continue
                at, begin = at + 1, stop
                yield at, record
        if is_list and not is_closed:
            raise _broken(file, at, "", ValueError("the file ends within the list"))


def _texts(opened: BinaryIO, file: SourceFile, note: Note) -> Iterator[str]:
    rest = b""
    while True:
        read = opened.read(_BUFFER_BYTES)
        content = rest + read
        text, used = utf_8_decode(content, "replace", not read)
        num_replaced = text.count("\ufffd") - content[:used].count("\ufffd".encode())
        if "\0" in text or num_replaced > _MAX_REPLACED_SHARE * len(text):
            raise _broken(file, 0, text, ValueError(_NO_TEXT))
        note(REPLACED, line=0, number=num_replaced)
        if text:
            yield text
        rest = content[used:]
        if not read:
            return


def _record(value: Any, text: str, note: Note) -> Mapping[str, Any]:
    if isinstance(value, list) and value and all(map(is_message, value)):
        value = {"messages": value}  # a conversation without an object around it
    if not isinstance(value, dict):
        raise ValueError(f"it is of type {type(value).__name__}")
    if "\\ud" in text or "\\uD" in text:
        # JSON can hold half of a UTF-16 pair, which no tokenizer accepts.
        whole = _without_surrogates(value)
        note(HALVES, number=int(whole != value))
        return whole  # type: ignore[no-any-return]
    return value


def is_message(value: Any) -> bool:
    """Return whether a value is a message. An object with the keys of a message and an id, such as
    `conversation_id`, is a record instead."""
    keys = value.keys() if isinstance(value, dict) else set[str]()
    is_message = keys >= {"role", "content"} or keys >= {"from", "value"}
    return is_message and not any(key.endswith("_id") and key != "tool_call_id" for key in keys)


def _broken(file: SourceFile, at: int, text: str, error: Exception) -> DataError:
    reason = str(error)
    if isinstance(error, json.JSONDecodeError):
        at_char = min(error.pos, len(error.doc.rstrip()))  # not in a line after the last one
        column = at_char - error.doc.rfind("\n", 0, at_char)
        reason = f"{error.msg.removesuffix(' at')} at column {column}"
    return DataError(
        given=f"{in_short(text, 60)!r}: {reason}",
        required=_REQUIRED.get(file.kind, _A_TABLE),
        source=file.origin(at),
        change="mend or remove it",
    )


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [_without_surrogates(item) for item in value]
        case dict():
            return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value


def _read_table(file: SourceFile, note: Note, fields: Collection[str], skip: int) -> Rows:
    """Yield the rows of a Parquet file, an Arrow file or a folder of `datasets.save_to_disk`."""
    import datasets
    import pyarrow

    errors = (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError)
    try:
        if file.kind == "dataset":
            for part in file.parts:
                SourceFile(part, "arrow").open().close()
        first, rows = _table_rows(file, fields, skip)
        yield from enumerate(rows, start=first)
    except (*errors, datasets.exceptions.DatasetsError) as error:
        if file.address and isinstance(error, OSError):  # a connection
            raise
        raise DataError(
            given=f"{file.origin(0)}: {in_short(error)}",
            required=f"what datasets or pyarrow reads as {file.kind} (Arrow's stream, not Feather)",
            source=file.origin(0),
            change="write the file again, or remove it",
        ) from error


def _without_null(value: Any, feature: Any) -> Any:
    """Return a cell without the null keys of its structs: a table writes null for each key that
    other rows have and this row lacks. A column of type JSON keeps its nulls."""
    if isinstance(value, dict) and isinstance(feature, dict):
        known = {key: own for key, own in value.items() if own is not None}
        return {key: _without_null(own, feature[key]) for key, own in known.items()}
    of = getattr(feature, "feature", None)
    if isinstance(value, list) and (isinstance(of, dict) or getattr(of, "feature", None)):
        return [_without_null(item, of) for item in value]
    return value


def _table_rows(
    file: SourceFile, fields: Collection[str], skip: int
) -> tuple[int, Iterator[dict[str, Any]]]:
    """Return the number of the first row that is read, and an iterator over the rows of a table.

    Columns in `fields` and columns of numbers are decoded. The other columns are not: a value in a
    column of images or sound is `...` (Ellipsis), or None if the row has none there, and any value
    in another column is `...`. Row groups of a Parquet file that end before row `skip` are not
    read.

    pyarrow reads the file and `datasets` decodes its types: the reader of `datasets` would take the
    path for a pattern, lock files in its cache, and fail on a file without rows.
    """
    import datasets
    import pyarrow.parquet

    first, table = 1, None
    if file.kind == "dataset":
        disk = datasets.load_from_disk(str(file.path)).with_format("arrow")
        schema, batches = disk.features.arrow_schema, disk.iter(_ROWS_PER_BATCH)
    elif file.kind == "parquet":
        table = pyarrow.parquet.ParquetFile(file.open())
        schema = table.schema_arrow
    else:
        stream = pyarrow.ipc.open_stream(file.open())
        schema = stream.schema
        batches = (
            batch.slice(start, _ROWS_PER_BATCH)
            for batch in stream
            for start in range(0, batch.num_rows, _ROWS_PER_BATCH)
        )
    read = [name for name in schema.names if name in fields or _is_plain(schema.field(name).type)]
    media = [name for name in schema.names if name not in read and IS_MEDIA.search(name)]
    wanted, others = [*read, *media], dict.fromkeys({*schema.names} - {*read, *media}, ...)
    typed = [schema.field(column) for column in read]
    # `datasets` may not know the types of columns that nothing reads
    used = datasets.Features.from_arrow_schema(pyarrow.schema(typed, metadata=schema.metadata))
    if table is not None:
        groups = [table.metadata.row_group(n).num_rows for n in range(table.num_row_groups)]
        while groups and first + groups[0] <= skip + 1:
            first += groups.pop(0)
        numbers = range(table.num_row_groups - len(groups), table.num_row_groups)
        batches = table.iter_batches(_ROWS_PER_BATCH, row_groups=[*numbers], columns=wanted)

    def rows() -> Iterator[dict[str, Any]]:
        for batch in batches:
            there = {name: _is_there(batch.column(name)) for name in media}
            for at, row in enumerate(batch.select(read).to_pylist() or [{}] * batch.num_rows):
                cells = used.decode_example(row) if read else {}
                own = {name: _without_null(cell, used[name]) for name, cell in cells.items()}
                yield own | {name: ... if there[name][at] else None for name in media} | others

    return first, rows()


def _is_plain(kind: Any) -> bool:
    """Return whether a type is a bool or a number, or a list of them."""
    from pyarrow import types

    own = kind.value_type if types.is_list(kind) or types.is_large_list(kind) else kind
    return bool(types.is_boolean(own) or types.is_integer(own) or types.is_floating(own))


def _is_there(column: Any) -> list[bool]:
    """Return for each cell whether it holds a value: neither null nor an empty list."""
    from pyarrow import compute, types

    if types.is_list(column.type) or types.is_large_list(column.type):
        found = compute.greater(compute.list_value_length(column), 0)
        return found.fill_null(False).to_pylist()  # type: ignore[no-any-return]
    return column.is_valid().to_pylist()  # type: ignore[no-any-return]


def _decode(content: bytes) -> tuple[str, int]:
    """Return the text, and the number of U+FFFD in it that replace invalid bytes."""
    try:
        return content.decode("utf-8"), 0
    except UnicodeDecodeError:
        text = content.decode("utf-8", errors="replace")
        return text, text.count("\ufffd") - content.count("\ufffd".encode())


_READERS = {
    "text": _read_text,
    "json lines": _read_json_lines,
    "json": _read_json,
    "csv": _read_csv,
    "tsv": _read_csv,
}


def too_large(origin: str, what: str, most_bytes: int) -> DataError:
    """Return the error for a line, record or text (`what`) of more than `most_bytes`. `origin`: its
    file and line."""
    return DataError(
        given=f"{what} of more than {format_bytes(most_bytes)}",
        required=f"lines of at most {format_bytes(MAX_LINE_BYTES)} and texts of at most"
        f" {format_bytes(MAX_TEXT_BYTES)}",
        source=origin,
        change="split it into several records, or give token ids (input_ids) in Parquet",
    )

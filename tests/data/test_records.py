"""Bytes of any kind to records, or to a message that names file and line."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from furlong.config.schema import Source
from furlong.data import records
from furlong.data.formats import FIELDS
from furlong.data.records import Notes, SourceRecord, read_records
from furlong.data.sources import list_files
from furlong.errors import DataError

datasets.disable_progress_bars()

LINES = b'{"text":"x"}\n{"text":"y"}\n'
ZST = pa.Codec("zstd").compress(LINES, asbytes=True)


def read(path: Path, notes: Notes | None = None) -> list[SourceRecord]:
    counted = Notes() if notes is None else notes
    return list(read_records(list_files(Source(path=str(path))), counted, FIELDS))


def found(path: Path) -> list[tuple[dict[str, Any], str]]:
    return [(dict(r.fields), Path(r.origin).name) for r in read(path)]


def test_a_text_file_is_a_record_and_what_holds_no_text_is_left_out_of_folders(
    tmp_path: Path,
) -> None:
    (tmp_path / "b.txt").write_text("two\nlines \ufffd")
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbfcaf\xe9 au lait, s'il vous pla\xeet")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "cyrillic.txt").write_bytes("Война и мир".encode("cp1251"))
    notes = Notes()
    found = read(tmp_path, notes)
    assert [(r.fields["text"], Path(r.origin).name, r.file, r.line) for r in found] == [
        ("caf\ufffd au lait, s'il vous pla\ufffdt", "a.md", 0, 0),
        ("two\nlines \ufffd", "b.txt", 1, 0),
    ]
    assert notes == {
        records.BINARY: [2, 2, 0], records.BLANK: [1, 3, 0], records.REPLACED: [2, 0, 0],
    }  # fmt: skip


def test_every_line_of_json_is_a_record(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n   \n{"text": "two", "id": 1}')
    assert found(file) == [
        ({"text": "one"}, "a.jsonl:1"),
        ({"text": "two", "id": 1}, "a.jsonl:4"),
    ]
    file.write_text(r'{"text": "x\ud83d!", "messages": [{"content": "\udc00"}], "n": 1}')
    ((half, _),) = found(file)
    assert half == {"text": "x\ufffd!", "messages": [{"content": "\ufffd"}], "n": 1}
    file.write_text(r'{"text": "\ud83d\ude00"}')
    assert found(file)[0][0] == {"text": "\U0001f600"}


@pytest.mark.parametrize(
    ("line", "given"),
    [
        (b'{"text": ', "Expecting value at column"),
        (b"[1]", "it is of type list"),
        (b"[" * 100_000, "recursion"),
        (b'{"text": ' + b"1" * 5000 + b"}", "digits"),
        (b"PK\x03\x04\0", "a binary file"),
        ('{"text": "战争与和平是一部小说"}'.encode("gb18030"), "another encoding than UTF-8"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, given: str) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "café"}\n'.encode() + line + b"\n")
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.jsonl")
    assert given in caught.value.given
    assert len(caught.value.given) < 400
    assert caught.value.source == f"{tmp_path / 'a.jsonl'}:2"


@pytest.mark.parametrize(
    ("name", "content", "given"),
    [
        ("a.txt", b" \n\t", "1 file without a record, 1 blank texts"),
        ("a.jsonl", b"\n\n", "1 file without a record"),
        ("a.txt", "text".encode("utf-16"), "1 file without a record, 1 binary files"),
        ("a.gz", b"\x1f\x8b\x08\0\0\xfe\xff", "Truncated compressed stream"),
        ("a.jsonl.gz", b'{"text": "x"}', "incorrect header"),
        ("a.jsonl.zst", ZST[:-3], "Truncated compressed stream"),
        ("a.jsonl.gz", gzip.compress(b""), "1 file without a record"),
        ("a.json", b"[]", "1 file without a record"),
        ("a.csv", b"text,n\n", "1 file without a record"),
        ("a.parquet", b"", "0 bytes"),
        ("a.parquet", b"PAR1 junk " * 9, "not a parquet file"),
        ("a.arrow", b"junk" * 99, "a.arrow"),
    ],
)
def test_a_file_that_was_named_must_hold_something(
    tmp_path: Path, name: str, content: bytes, given: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    assert given in caught.value.given and name in caught.value.given


def test_lines_and_texts_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 20)
    monkeypatch.setattr(records, "MAX_TEXT_BYTES", 20)
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "1234567"}\n{"text": "12345678"}\n')
    with pytest.raises(DataError, match=r"a line of more than 20 B[\s\S]*a\.jsonl:2"):
        read(file)
    (tmp_path / "a.txt").write_text("x" * 21)
    with pytest.raises(DataError, match=r"a text of more than 20 B\n"):
        read(tmp_path / "a.txt")
    # What a few bytes of an archive become is bounded too.
    for name, content in (
        ("b.txt.gz", b"x" * 2**20),
        ("b.jsonl.gz", b'"' * 2**20),
        ("b.json.gz", b'["' + b"x" * 2**22),
        ("b.csv.gz", b'text\n"' + b"x\n" * 2**10),
        ("b.tsv.gz", b"x" * 2**20),
    ):
        (tmp_path / name).write_bytes(gzip.compress(content))
        with pytest.raises(DataError, match=r"of more than 20 B\n"):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(LINES[:13]) + gzip.compress(LINES[13:])),
        ("a.jsonl.zst", ZST),
        ("a.json", LINES),
        ("a.json", b'\xef\xbb\xbf[{"text": "x"},\n\n {"text": "y"}\n]\n'),
        ("a.json.bz2", bz2.compress(b'[{"text":"x"},{"text":"y"}]')),
        ("a.csv", b'\xef\xbb\xbfid,text\r\n1,x\r\n\r\n2,"y"\r\n'),
        ("a.TSV.gz", gzip.compress(b"text\tid\nx\t1\ny\t2")),
    ],
)
def test_the_same_records_in_other_clothes(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert [record.fields["text"] for record in read(tmp_path / name)] == ["x", "y"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", "text,id\nNone,007\n,NA\n", [("None", "007"), ("", "NA")]),
        (
            "a.jsonl",
            '{"text": "2020-01-01", "id": 1}\n{"id": "x"}\n{"text": null, "id": 1E2}\n{"id": '
            f"{2**70}}}",
            [("2020-01-01", 1), (..., "x"), (None, 100.0), (..., 2**70)],
        ),
        ("a.json", '[{"text": "null", "id": 1}, {"id": "x"}]', [("null", 1), (..., "x")]),
    ],
)
def test_no_type_is_inferred(tmp_path: Path, name: str, content: str, expected: Any) -> None:
    """Which `datasets` does by the column: the reason why these files are not read by it."""
    (tmp_path / name).write_text(content)
    rows = [(own.get("text", ...), own["id"]) for own, _ in found(tmp_path / name)]
    assert rows == expected


@pytest.mark.parametrize("buffer_bytes", [1, 2, 7, 2**20])
def test_a_list_is_read_in_pieces(
    tmp_path: Path, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_BUFFER_BYTES", buffer_bytes)
    texts = ["", "é☃😀 ]},[{", 'a "b" \\ \n', "x" * 50]
    (tmp_path / "a.json").write_text(json.dumps([{"text": t, "n": {"k": []}} for t in texts]))
    assert [record.fields["text"] for record in read(tmp_path / "a.json")] == texts
    (tmp_path / "a.json").write_text(json.dumps([{"text": t} for t in texts], ensure_ascii=False))
    assert [record.fields["text"] for record in read(tmp_path / "a.json")] == texts


@pytest.mark.parametrize(
    ("name", "content", "given", "source"),
    [
        ("a.json", '[{"text": "x"}, {"te', "column", "row 2"),
        ("a.json", '[{"text": "x"},', "the file ends within the list", "row 1"),
        ("a.json", '[{"text": "x"}] {"text": "y"}', "it follows the end of the list", "row 2"),
        ("a.json", '{"text": "x"}\n3', "it is of type int", "row 2"),
        ("a.json", '[[{"text": "x"}]]', "it is of type list", "row 1"),
        ("a.json", "\0", "a binary file", "a.json"),
        ("a.json", "[" * 10**5, "recursion", "row 1"),
        ("a.csv", 'text,n\nx,1\n"y', "unexpected end of data", "a.csv:3"),
        ("a.csv", "text,n\nx,1,2\n", "3 cells in a table of 2 columns", "a.csv:2"),
        ("a.csv", "text,text\nx,1\n", "two columns of the same name", "a.csv:1"),
        ("a.tsv", "text\r1\r2", "new-line character", "a.tsv:1"),
        ("a.csv", "text\n\0", "a binary file", "a.csv:2"),
    ],
)
def test_what_is_no_record_is_named(
    tmp_path: Path, name: str, content: str, given: str, source: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    assert given in caught.value.given and caught.value.source.endswith(source)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train[:20%]", [0, 1]),
        ("train[3:5]", [3, 4]),
        ("train[-1:] + train[:1]", [9, 0]),
        ("train[8:9]+train[90%:]", [8, 9]),
        ("train", list(range(10))),
    ],
)
def test_slices_are_those_of_datasets(tmp_path: Path, split: str, expected: list[int]) -> None:
    lines = (f'{{"text": "{number}"}}\n\n' for number in range(10))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    table = {"text": [str(number) for number in range(10)]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    for file in ("a.jsonl", "a.parquet"):
        listing = list_files(Source(path=str(tmp_path / file), split=split))
        for limit in (None, 2):
            found = read_records(listing, Notes(), FIELDS, limit=limit)
            assert [int(record.fields["text"]) for record in found] == expected[:limit]


@pytest.mark.parametrize("split", ["train[8:]+train[90%:]", "train[:2]+train", "train+train"])
def test_a_record_that_is_named_twice_is_told(tmp_path: Path, split: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 10)
    for path in (tmp_path, tmp_path / "a.jsonl"):
        listing = list_files(Source(path=str(path), split=split))
        with pytest.raises(DataError, match="names records twice"):
            next(read_records(listing, Notes(), FIELDS))


@pytest.mark.parametrize("split", ["train[5:5]", "train[:1%](pct1_dropremainder)", "train[:1%]"])
def test_a_slice_without_a_record_is_told(tmp_path: Path, split: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}')
    with pytest.raises(DataError) as caught:
        list(read_records(list_files(Source(path=str(tmp_path), split=split)), Notes(), FIELDS))
    assert split in caught.value.given


def test_rows_of_parquet_are_records(tmp_path: Path) -> None:
    # The name is no pattern; a column that is not needed may be of any type, and is not decoded.
    file = tmp_path / "we*[i]rd?.parquet"
    meta = pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64()))
    columns = {"text": ["one", None], "labels": [None, [1, 2]], "image": [b"x", b"y"], "meta": meta}
    pq.write_table(pa.table(columns), file, row_group_size=1)  # rows are numbered over batches
    rest = {"image": ..., "meta": ...}  # they are there, and not decoded
    assert found(file) == [
        ({"text": "one", "labels": None} | rest, "we*[i]rd?.parquet, row 1"),
        ({"text": None, "labels": [1, 2]} | rest, "we*[i]rd?.parquet, row 2"),
    ]
    pq.write_table(pa.table({"id": [1]}), file)
    assert [fields for fields, _ in found(file)] == [{"id": 1}]
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), file)
    with pytest.raises(DataError, match="without a record"):
        read(file)


def test_folders_and_files_of_datasets_are_read(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    rows = datasets.Dataset.from_list([{"messages": turns, "id": 1}] * 3)
    rows.save_to_disk(tmp_path / "disk")
    rows.to_parquet(tmp_path / "a.parquet")
    (arrow,) = (tmp_path / "disk").glob("*.arrow")
    for path in (tmp_path / "disk", tmp_path / "a.parquet", arrow):
        assert [fields for fields, _ in found(path)] == [{"messages": turns, "id": 1}] * 3
    rows.remove_columns("messages").save_to_disk(tmp_path / "other")
    assert [fields for fields, _ in found(tmp_path / "other")] == [{"id": 1}] * 3
    for content in ("{}", "[]", '{"_data_files": [{"filename": "gone.arrow"}]}'):
        (tmp_path / "disk" / "state.json").write_text(content)
        with pytest.raises(DataError, match="reads as dataset"):
            read(tmp_path / "disk")


def test_keys_that_a_table_fills_with_null_are_absent(tmp_path: Path) -> None:
    calls = [[{"name": "f", "arguments": a}] for a in ({"city": "Rome"}, {"zone": [None, "CET"]})]
    turns = [[{"role": "assistant", "content": None, "tool_calls": call}] for call in calls]
    rows = [
        {"messages": turn, "tools": [{"a": i} if i else {"b": i}]} for i, turn in enumerate(turns)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "d")
    del turns[0][0]["content"], turns[1][0]["content"]
    for path in (tmp_path / "a.parquet", tmp_path / "d"):
        assert [fields for fields, _ in found(path)] == rows


def test_no_code_of_the_data_runs(tmp_path: Path) -> None:
    trap = tmp_path / "trapped"
    pickled = f"cos\nsystem\n(S'touch {trap}'\ntR.".encode()
    (tmp_path / "a.pkl").write_bytes(pickled)
    assert [r.fields["text"] for r in read(tmp_path / "a.pkl")] == [pickled.decode()]
    script = tmp_path / "set"
    script.mkdir()
    (script / "set.py").write_text(f"open({str(trap)!r}, 'w')")
    pq.write_table(pa.table({"text": ["x"]}), script / "a.parquet")
    with pytest.raises(DataError, match=r"set\.py among them"):
        read(script)
    assert not trap.exists()


POINTER = b"version https://git-lfs" + b".github.com/spec/v1\noid sha256:" + b"ab" * 32


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz"])
def test_a_pointer_of_git_lfs_is_no_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "0.txt").write_text("a book")
    (tmp_path / name).write_bytes(POINTER)
    for path in (tmp_path / name, tmp_path):
        if path == tmp_path and name != "a.txt":
            continue
        with pytest.raises(DataError) as caught:
            read(path)
        assert "git lfs pull" in caught.value.change and name in caught.value.source


def test_a_pointer_among_the_files_of_datasets_is_none(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(tmp_path / "d")
    (arrow,) = (tmp_path / "d").glob("*.arrow")
    arrow.write_bytes(POINTER)
    with pytest.raises(DataError, match="git lfs pull"):
        read(tmp_path / "d")


@pytest.mark.parametrize(
    ("name", "content", "is_iconv"),
    [
        ("a.npy", b"\x93NUMPY\x01\0v\0", False), ("a.tar", b"a" + b"\0" * 511, False),
        ("a.xz", b"\xfd7zXZ\0", False), ("a.zip", b"PK\x03\x04\x14\0", False),
        ("a.txt", "text".encode("utf-16"), True), ("a.txt", "Война и мир".encode("cp1251"), True),
    ],
)  # fmt: skip
def test_iconv_is_offered_for_texts_alone(
    tmp_path: Path, name: str, content: bytes, is_iconv: bool
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    assert ("iconv" in caught.value.change) == is_iconv


MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("a.json", MESSAGES),
        ("a.traj.json", MESSAGES),
        ("a.json", [MESSAGES]),
        ("a.jsonl", MESSAGES),
    ],
)
def test_a_conversation_alone_is_a_record(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / name).write_text(json.dumps(value))
    assert [fields for fields, _ in found(tmp_path / name)] == [{"messages": MESSAGES}]


def test_messages_of_several_conversations_stay_apart(tmp_path: Path) -> None:
    rows = [{**turn, "conversation_id": 1} for turn in MESSAGES]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert [fields for fields, _ in found(tmp_path / "a.json")] == rows
    (tmp_path / "a.json").write_text(json.dumps([*MESSAGES, {"text": "x"}]))
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.json")
    assert caught.value.source.endswith("row 3")


def test_halves_of_pairs_and_sequences_of_fasta_are_counted(tmp_path: Path) -> None:
    notes = Notes()
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n{"text": "\\ud83d"}\n')
    read(tmp_path / "a.jsonl", notes)
    assert notes == {records.HALVES: [1, 0, 2]}
    (tmp_path / "a.fa").write_text(">one\nMKV\nLL*\n>two\nACD\n")
    notes.clear()
    assert len(read(tmp_path / "a.fa", notes)) == 1
    assert [own[0] for own in notes.values()] == [2]
    (tmp_path / "mail.txt").write_text("> you said\n> that\n\nYes.\n")
    notes.clear()
    assert read(tmp_path / "mail.txt", notes) and not notes

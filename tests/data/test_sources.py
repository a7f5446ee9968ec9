"""Files and folders to documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from furlong.data.sources import Document, read_documents
from furlong.errors import DataError


def read(*paths: Path, format: str = "auto") -> list[Document]:
    return list(read_documents([str(path) for path in paths], format=format))


def test_a_folder_is_read_in_sorted_order_without_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("two")
    (tmp_path / "a.md").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_text("hidden")
    assert [(d.text, Path(d.origin).name) for d in read(tmp_path)] == [
        ("caf\ufffd", "a.md"),
        ("two", "two.txt"),
    ]


def test_every_line_of_json_lines_is_a_document(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text, "id": 1}) for text in ("one", "", "two\nlines")]
    file.write_text("\n".join(lines) + "\n\n")
    assert read(file) == [Document("one", f"{file}:1"), Document("two\nlines", f"{file}:3")]
    assert read(file, format="text") == [Document(file.read_text(), str(file))]


@pytest.mark.parametrize(
    ("name", "text", "given", "source"),
    [
        ("a.txt", "", "an empty file", "data.train"),
        ("a.jsonl", "\n\n", "an empty file", "data.train"),
        ("a.jsonl", '{"text": "x"}\n{"text": ', "Expecting value at column", "a.jsonl:2"),
        ("a.jsonl", '{"content": "x"}', "a record with content", "a.jsonl:1"),
        ("a.jsonl", '{"text": 5}', "a record with text", "a.jsonl:1"),
        ("a.jsonl", "[1]", "a record with list", "a.jsonl:1"),
    ],
)
def test_bad_files_are_told_by_name(
    tmp_path: Path, name: str, text: str, given: str, source: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    assert given in caught.value.given
    assert source in caught.value.source


def test_missing_and_empty_folders_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(DataError, match="a folder without text files"):
        read(tmp_path)

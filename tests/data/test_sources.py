"""Names in a run file to files, without reading them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from furlong.data.sources import Source, list_files
from furlong.errors import DataError


def names(folder: Path, split: str | None = None) -> list[tuple[str, str]]:
    files = list_files(Source(str(folder), split=split))
    return [(str(file.path.relative_to(folder)), file.kind) for file in files]


def write(folder: Path, *files: str) -> None:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")


def test_a_folder_of_texts_is_sorted_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "b/two.txt", "a.md", ".hidden", ".git/config", "code.json")
    assert names(tmp_path) == [("a.md", "text"), ("b/two.txt", "text"), ("code.json", "text")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.txt", "text"), ("a.jsonl", "json lines"), ("a.NDJSON", "json lines"),
     ("a.parquet", "parquet"), ("a.arrow", "arrow"), ("README", "text")],
)  # fmt: skip
def test_the_ending_tells_the_kind(tmp_path: Path, name: str, kind: str) -> None:
    write(tmp_path, name)
    (file,) = list_files(Source(str(tmp_path / name)))
    assert (file.kind, file.named, file.parts) == (kind, True, (tmp_path / name,))


def test_of_a_folder_of_records_what_describes_it_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "README.md", "LICENSE", "config.json", "b.jsonl", "sub/a.jsonl")
    assert names(tmp_path) == [("b.jsonl", "json lines"), ("sub/a.jsonl", "json lines")]


def test_texts_beside_records_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", "loader.py")
    with pytest.raises(DataError, match=r"a\.jsonl and loader\.py among them"):
        list_files(Source(str(tmp_path)))


@pytest.mark.parametrize(
    "files",
    [
        ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet",
         "data/test-00000-of-00001.parquet"),
        ("train.jsonl", "test.jsonl"),
        ("train/0.jsonl", "train/1.jsonl", "test/0.jsonl"),
    ],
)  # fmt: skip
def test_one_of_several_splits_must_be_named(tmp_path: Path, files: tuple[str, ...]) -> None:
    write(tmp_path, *files)
    with pytest.raises(DataError, match=r"which holds test, train[\s\S]*split: train}"):
        names(tmp_path)
    with pytest.raises(DataError, match="split: test}"):
        list_files(Source(str(tmp_path)), "data.eval")
    with pytest.raises(DataError, match="split dev of"):
        names(tmp_path, "dev")
    assert [name for name, _ in names(tmp_path, "test")] == [f for f in files if "test" in f]
    assert [name for name, _ in names(tmp_path, "train")] == [f for f in files if "train" in f]


def test_one_split_needs_no_name(tmp_path: Path) -> None:
    write(tmp_path, "train-00000-of-00001.parquet")
    assert names(tmp_path) == [("train-00000-of-00001.parquet", "parquet")]


def test_a_folder_of_datasets_is_one_file(tmp_path: Path) -> None:
    write(tmp_path, "train/state.json", "train/dataset_info.json", "train/data-0.arrow")
    write(tmp_path, "test/state.json", "test/dataset_info.json", "test/data-0.arrow")
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    (file,) = list_files(Source(str(tmp_path / "train")))
    assert (file.kind, len(file.parts)) == ("dataset", 3)
    assert list_files(Source(str(tmp_path), split="train")) == (file,)
    with pytest.raises(DataError, match="which holds train, test"):
        list_files(Source(str(tmp_path)))
    (tmp_path / "dataset_dict.json").write_text("{")
    with pytest.raises(DataError, match="no list of splits"):
        list_files(Source(str(tmp_path)))


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file or folder[\s\S]*data\.eval"):
        list_files(Source(str(tmp_path / "nowhere")), "data.eval")
    with pytest.raises(DataError, match="a folder without files"):
        list_files(Source(str(tmp_path)))
    write(tmp_path, "a.txt")
    with pytest.raises(DataError, match="split train of the file"):
        list_files(Source(str(tmp_path / "a.txt"), split="train"))
    with pytest.raises(DataError, match="which holds no splits"):
        list_files(Source(str(tmp_path), split="train"))

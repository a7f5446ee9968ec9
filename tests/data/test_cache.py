"""Arrays that are there whole or not at all, and the keys of what they are made of."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from furlong.config.schema import Source
from furlong.data import cache
from furlong.data.cache import (
    ReferenceLogProbs,
    TokenizedSource,
    creating_folder,
    read_arrays,
    status_key,
    write_tokens,
)
from furlong.data.records import SourceRecord
from furlong.data.sources import Listing, SourceFile
from furlong.data.tokenize import Encoded
from furlong.errors import ConfigError

LENS = (3, 1, 5)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "tokens" / "key"


def sequences(own_labels_from: int = 9) -> Iterator[tuple[SourceRecord, list[Encoded]]]:
    for number, seq_len in enumerate(LENS):
        ids = np.arange(seq_len, dtype=np.int32) + 10 * number
        labels = ids
        if number >= own_labels_from:
            labels = ids.copy()
            labels[:2] = -100
        yield SourceRecord({}, 0, number + 1, ""), [Encoded(ids, labels)]


def source_of(arrays: Any) -> TokenizedSource:
    return TokenizedSource(Source(path="x"), Listing((), []), arrays, "")


@pytest.mark.parametrize("own_labels_from", [0, 1, 9])
def test_what_is_written_is_read(place: Path, own_labels_from: int) -> None:
    notes: dict[str, int] = {}

    def counting() -> Iterator[Any]:
        for sequence in sequences(own_labels_from):
            notes["n"] = notes.get("n", 0) + 1  # notes are saved as they are in the end
            yield sequence

    for arrays in (write_tokens(place, counting(), notes), read_arrays(place)):
        source = source_of(arrays)
        assert source.notes == {"n": 3}
        assert source.seq_lens.tolist() == list(LENS)
        for row, (_, (sequence,)) in enumerate(sequences(own_labels_from)):
            ids, labels = source.tokens(row)
            assert ids.tolist() == sequence.input_ids.tolist()
            assert labels.tolist() == sequence.labels.tolist()
            valid = sum(label >= 0 for label in sequence.labels[1:].tolist())
            assert source.index[row, 1:].tolist() == [0, row + 1, valid, 0]
    assert (place / "labels.bin").exists() == (own_labels_from < 9)
    assert sorted(p.name for p in place.parent.iterdir()) == ["key"]
    empty = source_of(write_tokens(place.with_name("empty"), iter(()), {}))
    assert (len(empty.index), empty.seq_lens.tolist()) == (0, [])


@pytest.mark.parametrize(
    "damage", ["manifest.json", "input_ids.bin", "index.bin", "a bit of input_ids.bin", "objects"]
)
def test_what_is_damaged_is_written_anew_and_never_unpickled(place: Path, damage: str) -> None:
    write_tokens(place, sequences(), {})
    if damage == "objects":
        manifest = json.loads((place / "manifest.json").read_text())
        manifest["arrays"]["input_ids"] = ["O", [len(range(9)) // 2]]
        (place / "manifest.json").write_text(json.dumps(manifest))
    elif damage.startswith("a bit"):
        ids = np.memmap(place / "input_ids.bin", np.int32, mode="r+")
        ids[3] ^= 1
        ids.flush()
    else:
        content = (place / damage).read_bytes()
        (place / damage).write_bytes(content[: len(content) // 2])
    assert read_arrays(place) is None
    assert source_of(write_tokens(place, sequences(), {})).tokens(2)[0].tolist() == [*range(20, 25)]
    assert read_arrays(place) is not None
    assert sorted(p.name for p in place.parent.iterdir()) == ["key"]


def test_an_error_leaves_nothing_behind(place: Path) -> None:
    def broken() -> Iterator[Any]:
        yield from sequences()
        raise ValueError("broken record")

    with pytest.raises(ValueError, match="broken record"):
        write_tokens(place, broken(), {})
    assert list(place.parent.iterdir()) == []


def test_several_writers_agree(place: Path) -> None:
    barrier = Barrier(4)

    def together() -> Iterator[Any]:
        barrier.wait(10)
        yield from sequences()

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write_tokens, place, together(), {}) for _ in range(4)]
        sources = [source_of(writer.result()) for writer in writers]
    assert {tuple(s.tokens(2)[0].tolist()) for s in sources} == {tuple(range(20, 25))}
    assert sorted(p.name for p in place.parent.iterdir()) == ["key"]


def test_log_probs_of_a_reference_go_on_and_are_of_their_facts(place: Path) -> None:
    source = source_of(write_tokens(place, sequences(), {}))
    folder = place.parents[1]
    first = ReferenceLogProbs(folder, source, {"model": "a"}, "float32")
    first.write({2: np.arange(4, dtype=np.float32)})
    again = ReferenceLogProbs(folder, source, {"model": "a"}, "float32")
    assert again.is_done([2]) and not again.is_done([0, 2])
    assert again.read(2, 3).tolist() == [0, 1, 2]
    other = ReferenceLogProbs(folder, source, {"model": "b"}, "float32")
    assert other.folder != first.folder and not other.is_done([2])
    for damage in ("log_probs.bin", "manifest.json"):
        (first.folder / damage).write_bytes(b"{}")
        assert not ReferenceLogProbs(folder, source, {"model": "a"}, "float32").is_done([2])


@pytest.mark.parametrize("limit_bytes", [8, 40])
def test_a_disk_without_space_is_told(place: Path, limit_bytes: int) -> None:
    """A limit on the size of files stands for the disk: the write is cut short, then refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        with (
            pytest.raises(ConfigError, match=r"File too large[\s\S]*make room"),
            creating_folder(place.parents[1]),
        ):
            write_tokens(place, sequences(), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(place.parent.iterdir()) == []
    assert read_arrays(place) is None


@pytest.mark.parametrize("given", [None, "/proc/nope/x", "/dev/null"])
def test_a_folder_that_cannot_be_made_is_told(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/nope")
    with pytest.raises(ConfigError, match=r"set data\.cache_dir"):
        folder = cache.cache_folder(given)
        with creating_folder(folder):
            write_tokens(folder / "key", [], {})


def test_the_folder_is_the_given_one_or_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.cache_folder("~/x") == Path.home() / "x"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.cache_folder(None) == Path("/somewhere/furlong")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder(None) == Path.home() / ".cache" / "furlong"


def test_the_key_follows_what_files_are(tmp_path: Path) -> None:
    one, two = (tmp_path / name for name in ("one", "two"))
    keys = set()

    def is_new(*files: SourceFile) -> bool:
        before = len(keys)
        keys.add(status_key(files))
        return len(keys) > before

    one.write_text("content")
    two.write_text("content")
    assert is_new(SourceFile(one, "text")) and not is_new(SourceFile(one, "text"))
    assert is_new(SourceFile(one, "json lines")) and is_new(SourceFile(two, "text"))
    assert is_new(SourceFile(one, "text"), SourceFile(two, "text"))
    assert is_new(SourceFile(two, "text"), SourceFile(one, "text"))
    one.write_text("CONTENT")
    os.utime(one, (1e9, 1e9))
    assert is_new(SourceFile(one, "text"))
    os.replace(two, one)
    os.utime(one, (1e9, 1e9))
    assert is_new(SourceFile(one, "text"))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "x").write_text("x")
    assert is_new(SourceFile(folder, "dataset"))
    (folder / "x").write_text("xy")
    assert is_new(SourceFile(folder, "dataset"))

"""Entries that are there whole or not at all."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

from furlong.data import cache
from furlong.data.cache import content_key, read_entry, status_key, write_entry
from furlong.data.sources import SourceFile
from furlong.data.tokenize import Encoded
from furlong.errors import ConfigError, DataError

KEY = "a" * 32
LENS = (3, 1, 5)


def sequences(own_labels_from: int = 9) -> Iterator[Encoded]:
    for number, seq_len in enumerate(LENS):
        ids = np.arange(seq_len, dtype=np.int32) + 10 * number
        labels = ids
        if number >= own_labels_from:
            labels = ids.copy()
            labels[:2] = -100
        yield Encoded(ids, labels, 0, number + 1)


def files(*paths: Path) -> tuple[SourceFile, ...]:
    return tuple(SourceFile(path, "text") for path in paths)


def make_old(*paths: Path) -> None:
    """As if the files had been written long ago: their content may be remembered."""
    for path in paths:
        os.utime(path, (1e9, 1e9))


@pytest.mark.parametrize("own_labels_from", [0, 1, 9])
def test_what_is_written_is_read(tmp_path: Path, own_labels_from: int) -> None:
    written = write_entry(tmp_path, KEY, sequences(own_labels_from), {"n": 1})
    read = read_entry(tmp_path, KEY)
    assert read is not None
    for entry in (written, read):
        assert entry.notes == {"n": 1}
        assert entry.seq_lens.tolist() == list(LENS)
        expected = list(sequences(own_labels_from))
        for row, sequence in enumerate(expected):
            ids, labels = entry.tokens(row)
            assert ids.tolist() == sequence.input_ids.tolist()
            assert labels.tolist() == sequence.labels.tolist()
            valid = sum(label >= 0 for label in sequence.labels[1:].tolist())
            assert entry.index[row, 1:].tolist() == [0, row + 1, valid]
    folder = tmp_path / "tokens" / KEY
    assert (folder / "labels.bin").exists() == (own_labels_from < 9)
    assert sorted(p.name for p in folder.parent.iterdir()) == [KEY]


def test_an_entry_without_sequences_can_be_read(tmp_path: Path) -> None:
    entry = write_entry(tmp_path, KEY, iter(()), {})
    assert (len(entry.index), len(entry.input_ids), entry.seq_lens.tolist()) == (0, 0, [])


def test_notes_are_saved_as_they_are_in_the_end(tmp_path: Path) -> None:
    notes: dict[str, int] = {}

    def counting() -> Iterator[Encoded]:
        for sequence in sequences():
            notes["n"] = notes.get("n", 0) + 1
            yield sequence

    assert write_entry(tmp_path, KEY, counting(), notes).notes == {"n": 3}


@pytest.mark.parametrize(
    "damage", ["manifest.json", "input_ids.bin", "index.npy", "version", "a bit of input_ids.bin"]
)
def test_a_damaged_entry_is_written_anew(tmp_path: Path, damage: str) -> None:
    write_entry(tmp_path, KEY, sequences(), {})
    folder = tmp_path / "tokens" / KEY
    if damage == "version":
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | {"version": 0}))
    elif damage.startswith("a bit"):
        ids = np.memmap(folder / "input_ids.bin", np.int32, mode="r+")
        ids[3] ^= 1
        ids.flush()
    else:
        content = (folder / damage).read_bytes()
        (folder / damage).write_bytes(content[: len(content) // 2])
    assert read_entry(tmp_path, KEY) is None
    entry = write_entry(tmp_path, KEY, sequences(), {})
    assert entry.tokens(2)[0].tolist() == [20, 21, 22, 23, 24]
    assert read_entry(tmp_path, KEY) is not None
    assert sorted(p.name for p in folder.parent.iterdir()) == [KEY]


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    write_entry(tmp_path, KEY, sequences(), {})
    index = tmp_path / "tokens" / KEY / "index.npy"
    np.save(index, np.array([{}], dtype=object), allow_pickle=True)
    manifest = index.with_name("manifest.json")
    values = json.loads(manifest.read_text())
    values["sizes"]["index.npy"] = index.stat().st_size
    values["checksums"]["index.npy"] = cache._content(index)
    manifest.write_text(json.dumps(values))
    assert read_entry(tmp_path, KEY) is None


def test_a_file_that_is_cut_while_it_is_in_use_is_told(tmp_path: Path) -> None:
    entry = write_entry(tmp_path, KEY, sequences(), {})
    for name in ("index.npy", "input_ids.bin"):
        file = tmp_path / "tokens" / KEY / name
        content = file.read_bytes()
        os.truncate(file, 0)
        with pytest.raises(DataError, match=rf"{name}: cut to 0 of {len(content):,} bytes"):
            entry.tokens(1)
        file.write_bytes(content)
    shutil.rmtree(tmp_path / "tokens")  # what is mapped stays
    assert entry.tokens(1)[0].tolist() == [10]


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken() -> Iterator[Encoded]:
        yield from sequences()
        raise ValueError("broken record")

    with pytest.raises(ValueError, match="broken record"):
        write_entry(tmp_path, KEY, broken(), {})
    assert list((tmp_path / "tokens").iterdir()) == []


def test_several_writers_agree(tmp_path: Path) -> None:
    barrier = Barrier(4)

    def together() -> Iterator[Encoded]:
        barrier.wait(10)
        yield from sequences()

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write_entry, tmp_path, KEY, together(), {}) for _ in range(4)]
        entries = [writer.result() for writer in writers]
    assert {tuple(entry.input_ids.tolist()) for entry in entries} == {(0, 1, 2, 10, *range(20, 25))}
    assert sorted(p.name for p in (tmp_path / "tokens").iterdir()) == [KEY]


def test_what_killed_writers_left_is_removed_after_a_day(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    for name, age_s in (("old", 90_000), ("young", 80_000)):
        folder = tokens / f"{name}.partial"
        folder.mkdir(parents=True)
        (folder / "input_ids.bin").write_bytes(b"1234")
        for path in (folder / "input_ids.bin", folder):
            os.utime(path, (time.time() - age_s,) * 2)
    write_entry(tmp_path, KEY, sequences(), {})
    assert sorted(p.name for p in tokens.iterdir()) == [KEY, "young.partial"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Not a directory[\s\S]*data\.cache_dir"):
        write_entry(tmp_path / "file", KEY, sequences(), {})


@pytest.mark.parametrize("limit_bytes", [8, 40])
def test_a_disk_without_space_is_told(tmp_path: Path, limit_bytes: int) -> None:
    """A limit on the size of files stands for the disk: the write is cut short, then refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        with pytest.raises(ConfigError, match=r"File too large[\s\S]*make space"):
            write_entry(tmp_path, KEY, sequences(), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "tokens").iterdir()) == []
    assert read_entry(tmp_path, KEY) is None


def test_the_key_is_that_of_the_content(tmp_path: Path) -> None:
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    one.write_text("content")
    two.write_text("content")
    other.write_text("other")
    key = content_key(files(one), tmp_path)
    assert content_key(files(two), tmp_path) == key
    assert content_key(files(other), tmp_path) != key
    assert content_key(files(one, other), tmp_path) != content_key(files(other, one), tmp_path)
    assert content_key((SourceFile(one, "json lines"),), tmp_path) != key


def test_known_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    make_old(file)
    # The change of the times is a change too, and may have been a moment ago.
    monkeypatch.setattr(cache, "_SETTLED_S", -60.0)
    key = content_key(files(file), tmp_path)
    read = cache._content
    monkeypatch.setattr(cache, "_content", lambda path: 1 / 0)
    assert content_key(files(file), tmp_path) == key
    file.write_text("CONTENT")
    make_old(file)
    monkeypatch.setattr(cache, "_content", read)
    assert content_key(files(file), tmp_path) != key


def test_a_file_that_was_just_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    content_key(files(file), tmp_path)
    assert not (tmp_path / "seen").exists()


def test_the_status_follows_every_change(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    make_old(file)
    before = status_key(files(file))
    assert status_key(files(file)) == before
    file.write_text("CONTENT")
    make_old(file)
    assert status_key(files(file)) != before


def test_the_folder_is_the_given_one_or_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.cache_folder("~/x") == Path.home() / "x"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.cache_folder(None) == Path("/somewhere/furlong")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder(None) == Path.home() / ".cache" / "furlong"


@pytest.mark.parametrize("given", [None, "~nobody-of-that-name/cache", "/proc/nope/cache"])
def test_a_folder_that_cannot_be_made_is_told(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/nope")
    with pytest.raises(ConfigError, match=r"(cannot be created|no home)[\s\S]*set data\.cache_dir"):
        write_entry(cache.cache_folder(given), "key", [], {})

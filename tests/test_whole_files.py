"""A file or folder appears whole or not at all, and what is refused is told by its cause."""

from __future__ import annotations

import errno
import json
import os
import resource
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from furlong.errors import CheckpointError, difference_words, differing
from furlong.files import (
    SummedFile,
    checksum,
    os_errors_told,
    whole_file,
    whole_folder,
    write_json,
    write_text,
)


def test_a_file_is_the_old_one_until_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "a"
    write_json(file, {"é": 0.1 + 0.2})
    assert json.loads(file.read_text()) == {"é": 0.1 + 0.2}
    with pytest.raises(RuntimeError), whole_file(file) as opened:
        opened.write(b"x" * 100)
        opened.flush()
        assert len(list(tmp_path.iterdir())) == 2
        raise RuntimeError
    assert json.loads(file.read_text()) == {"é": 0.1 + 0.2}
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_cut_short_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "a"
    write_text(file, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_text(file, "new" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with pytest.raises(RuntimeError), whole_folder(folder) as aside:
        (aside / "a").write_text("half")
        raise RuntimeError
    assert list(folder.parent.iterdir()) == []
    left, young = (folder.parent / f".folder.{name}.tmp" for name in ("killed", "other"))
    for aside in (left, young):
        aside.mkdir()
    os.utime(left, (time.time() - 10**6,) * 2)
    with whole_folder(folder) as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "a").write_text("whole")
        assert not folder.exists()
    assert (folder / "inner" / "a").read_text() == "whole"
    assert sorted(folder.parent.iterdir()) == [young, folder]
    with pytest.raises(OSError), whole_folder(folder) as aside:
        (aside / "a").write_text("second")
    assert sorted(folder.parent.iterdir()) == [young, folder]


def test_a_file_is_summed_as_it_is_written(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb", buffering=0) as opened:
        summed = SummedFile(opened)
        for data in (b"abc", memoryview(b"defg").cast("i"), b""):
            summed.write(data)
    assert (tmp_path / "a").read_bytes() == b"abcdefg"[: summed.num_bytes]
    assert summed.num_bytes == 7 and summed.checksum() == checksum(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="none"):
        checksum(tmp_path / "none")


def told(error: Exception, inside: Path | None = None, during: str = "") -> CheckpointError:
    with (
        pytest.raises(CheckpointError) as caught,
        os_errors_told(
            CheckpointError, required="a folder", source="out", or_else=", or set another out",
            during=during, inside=inside,
        ),
    ):  # fmt: skip
        raise error
    return caught.value


def test_what_the_system_refuses_is_told_by_its_cause(tmp_path: Path) -> None:
    inner = str(tmp_path / "a")
    found = told(PermissionError(errno.EACCES, "Permission denied", inner), tmp_path)
    assert found.given == f"{inner}: Permission denied" and found.source == "out"
    assert found.change == "check who owns it and its permissions, or set another out"
    for full in (
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError(f"Error: I/O error: {os.strerror(errno.ENOSPC)} (os error 28)"),
    ):
        assert told(full, tmp_path).change == "make room, or set another out"
        assert "while it was saved" in told(full, during="it was saved").given


def test_what_is_elsewhere_or_no_refusal_is_passed_on(tmp_path: Path) -> None:
    for error in (
        FileNotFoundError(errno.ENOENT, "No such file", str(tmp_path / "b" / "a")),
        ConnectionResetError(errno.ECONNRESET, "Connection reset"),
        SafetensorError("Error while deserializing header"),
    ):
        with (
            pytest.raises(type(error)),
            os_errors_told(CheckpointError, required="", source="", inside=tmp_path / "c"),
        ):
            raise error


def test_keys_that_differ() -> None:
    own = {"a": {"b": 1, "c": 2}, "d": [1], "e": None}
    found = differing(own, {"a": {"b": 1, "c": 3}, "d": [1], "f": "x"})
    assert found == {"a.c": (2, 3), "f": (None, "x")}
    assert difference_words(found, "before") == 'a.c = 2, before 3; f = null, before "x"'
    many = differing({str(number): number for number in range(9)}, {})
    assert difference_words(many, "before").endswith("and 4 more")

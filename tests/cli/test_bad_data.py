"""Data that cannot be trained on, through the command: exit code 2, four parts, nothing written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.byte_tokenizer import byte_tokenizer

from furlong.cli.main import main

TEXT = {"text": "a few words"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with a tokenizer of bytes."""
    tokenizer = byte_tokenizer(["<end>"])
    tokenizer.save_pretrained(tmp_path / "model")
    transformers.LlamaConfig(
        vocab_size=222, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64,
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    return tmp_path / "model"


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


BAD: dict[str, tuple[str, str, tuple[str, ...], str, str]] = {
    # file, content, flags, a part of what is said, where it is from
    "too long": (
        "a.jsonl", lines(TEXT, {"text": "x" * 70}, {"text": "x" * 90}), (),
        "a sequence of 91 tokens, and 1 more above the limit, of 3 sequences", "a.jsonl:3",
    ),
    "token id": ("a.jsonl", lines({"text": "\x7f"}), (), "token id 222", "a.jsonl:1"),
    "a batch above the data": (
        "a.jsonl", lines(TEXT, TEXT), ("--train.sequences_per_step=1000000",),
        "sequences_per_step = 1,000,000", "train.sequences_per_step",
    ),
    "held-out data": ("a.jsonl", lines(TEXT), ("--data.eval=nowhere",), "nowhere", "data.eval"),
    "cache": ("a.txt", "abc", ("--data.cache_dir=/dev/null",), "File exists", "cache_dir"),
    "no tokenizer": ("a.txt", "abc", ("--model.name=bare",), "without a tokenizer", "a.txt"),
    "no place for a run": ("a.txt", "abc", ("--out=a.txt/run",), "a.txt is no folder", "out"),
    "too long a name": ("a.txt", "abc", (f"--out={'a' * 300}",), "name too long", "out"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_told_in_four_parts(
    name: str, folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, content, flags, told, source = BAD[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "bare")
    data = tmp_path / file
    data.write_text(content)
    arguments = [
        "train", f"--model.name={folder}", "--model.init=random", "--model.dtype=float32",
        f"--data.train={data}", "--data.max_seq_len=64", "--train.steps=1",
        "--train.sequences_per_step=1",
        f"--data.cache_dir={tmp_path / 'cache'}", f"--out={tmp_path / 'run'}", *flags,
    ]  # fmt: skip
    assert main(arguments) == 2
    message = capsys.readouterr().err
    parts = dict(line.split(":", 1) for line in message.splitlines() if line[:1].strip())
    assert list(parts) == ["given", "required", "from", "change"], message
    assert told in parts["given"]
    assert source in parts["from"]
    assert not (tmp_path / "run").exists()
    # The tokens of data that turned out not to fit the model may be kept, never half an entry.
    assert not list(tmp_path.glob("cache/tokens/.*.tmp"))

"""`furlong lengths`: counts, table, file and picture."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.byte_tokenizer import byte_tokenizer
from transformers import LlamaConfig

from furlong.cli.main import main
from furlong.errors import ConfigError
from furlong.plan.lengths import read_lengths
from furlong.report.patience import patience
from furlong.train import build

NUM_BYTES = (10, 100, 100, 3000)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    byte_tokenizer(["<end>"]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": "x" * (n - 1)}) + "\n" for n in NUM_BYTES))
    return file


def test_data_and_tokenizer_are_enough(
    tokenizer: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    out, picture = tmp_path / "new" / "lengths.json", tmp_path / "lengths.png"
    flags = [f"--tokenizer={tokenizer}", f"--out={out}", f"--picture={picture}"]
    assert main(["lengths", str(data), *flags]) == 0
    said = capsys.readouterr().out
    assert "4 sequences, format text by the field text" in said
    assert "median 100, p90 3,000, p99 3,000, longest 3,000 tokens" in said
    assert read_lengths(out).counts == ((10, 1), (100, 2), (3000, 1))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_file_says_where_data_and_tokenizer_are(
    tokenizer: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    """Lengths are those of an epoch's draws, as the run will have them."""
    run = tmp_path / "run.yaml"
    out = tmp_path / "lengths.json"
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "abc"}\n')
    settings = {
        "model": {"name": str(tokenizer)},
        "data": {
            "train": [{"path": str(data), "weight": 2}, str(other)],
            "eval": "nowhere",
            "max_seq_len": 1000,
        },
    }
    run.write_text(json.dumps(settings))
    assert main(["lengths", str(run), f"--out={out}"]) == 0
    assert "longer than data.max_seq_len = 1,000: 1 sequence\n" in capsys.readouterr().out
    assert read_lengths(out).counts == ((4, 1), (10, 2), (100, 4), (3000, 2))
    settings["data"]["too_long"] = "truncate"  # type: ignore[index]
    run = tmp_path / "config.json"  # as in a run's folder
    run.write_text(json.dumps(settings))
    assert main(["lengths", str(run), f"--out={out}"]) == 0
    assert "above 1,000: 1 truncated, 0 dropped" in capsys.readouterr().out
    assert read_lengths(out).counts == ((4, 1), (10, 2), (100, 4), (1000, 2))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "the following arguments are required"),
        (["a.yaml", "b.yaml"], "a.yaml: no such file"),
        (["a.yaml", "--format=text"], "--format with a run file"),
        (["a.yaml", "--split=train"], "--split with a run file"),
        (["a.yaml", "--name=en"], "--name with a run file"),
        (["nowhere.yaml"], "nowhere.yaml: No such file"),
        (["data", "--tokenizer=nowhere"], "nowhere"),
        (["data", "--out=lengths.txt"], "--out lengths.txt"),
        (["data", "--picture=lengths.gif"], "--picture lengths.gif"),
        (["data", "--format=csv"], "invalid choice: 'csv'"),
        (["data", "--tokeniser=x"], "--tokeniser"),
    ],
)
def test_a_wrong_command_line_is_told(arguments: list[str], told: str, capsys: Any) -> None:
    assert main(["lengths", *arguments]) == 2
    message = capsys.readouterr().err
    assert told in message.splitlines()[0]
    assert [line.split(":")[0] for line in message.splitlines()] == [
        "given", "required", "from", "change",
    ]  # fmt: skip


def test_token_ids_are_counted_without_a_tokenizer_and_texts_are_not(
    data: Path, tmp_path: Path, capsys: Any
) -> None:
    ids, out = tmp_path / "ids.jsonl", tmp_path / "lengths.json"
    ids.write_text('{"input_ids": [1, 2, 3]}\n')
    assert main(["lengths", str(ids), f"--out={out}"]) == 0
    assert read_lengths(out).counts == ((3, 1),)
    assert main(["lengths", str(data)]) == 2
    told = capsys.readouterr().err
    assert f"{data}:1" in told and "--tokenizer" in told and "input_ids" in told


def test_of_pairs_both_answers_are_counted(tokenizer: Path, tmp_path: Path, capsys: Any) -> None:
    pairs, out = tmp_path / "pairs.jsonl", tmp_path / "lengths.json"
    record = {"prompt": "xxxx", "chosen": "yyyyy", "rejected": "zz"}
    pairs.write_text(2 * (json.dumps(record) + "\n"))
    run = tmp_path / "run.yaml"
    settings = {
        "model": {"name": str(tokenizer)},
        "data": {"train": str(pairs), "max_seq_len": 8, "cache_dir": str(tmp_path)},
        "train": {"loss": "dpo"},
    }
    run.write_text(json.dumps(settings))
    assert main(["lengths", str(run), f"--out={out}"]) == 0
    assert read_lengths(out).counts == ((7, 2), (10, 2))
    assert "2 pairs, format preference" in capsys.readouterr().out
    flags = [f"--tokenizer={tokenizer}", "--format=preference", f"--out={out}"]
    assert main(["lengths", str(pairs), *flags]) == 0
    assert read_lengths(out).counts == ((7, 2), (10, 2))


@pytest.mark.parametrize("verb", ["lengths", "train"])
def test_a_long_reading_of_data_gives_signs_of_life(
    verb: str, tokenizer: Path, data: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    def read(*_: Any, **__: Any) -> None:
        time.sleep(0.2)
        raise ConfigError(given="read", required="", source="", change="")

    monkeypatch.setattr(patience.__wrapped__, "__kwdefaults__", {"every_s": 0.02, "speaks": True})
    monkeypatch.setattr(build, "load_splits", read)
    LlamaConfig(vocab_size=300, max_position_embeddings=2**17).save_pretrained(tokenizer)
    run = tmp_path / "run.yaml"
    values = {"model": {"name": str(tokenizer), "init": "random"}, "data": {"train": str(data)}}
    run.write_text(json.dumps(values | {"out": str(tmp_path / "out")}))
    assert main([verb, str(run)]) == 2
    assert "so far" in capsys.readouterr().err

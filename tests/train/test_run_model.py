"""What a run reads of its model before the weights: which RoPE its records have."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.byte_tokenizer import byte_tokenizer

from furlong.cli.main import main

SHORT, LONG = 16, 40


@pytest.fixture
def home(tmp_path: Path) -> Path:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    transformers.Phi3Config(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=256, pad_token_id=0,
        original_max_position_embeddings=SHORT,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.5, 4.0, 9.0, 16.0],
        },
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    for name, length in (("short", SHORT), ("long", LONG)):
        draw = random.Random(0)
        rows = [{"input_ids": draw.choices(range(5, 200), k=n)} for n in (length, 9, 9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def train(home: Path, out: str, *flags: str) -> int:
    return main(
        [
            "train", f"--model.name={home / 'model'}", "--model.init=random",
            "--model.dtype=float32", f"--data.train={home / 'short.jsonl'}",
            "--data.max_seq_len=256", f"--data.cache_dir={home / 'cache'}", "--train.steps=1",
            "--train.sequences_per_step=3", f"--out={home / out}", *flags,
        ]
    )  # fmt: skip


def first_loss(run: Path) -> Any:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return next(record["loss"] for record in records if "loss" in record)


def test_longrope_goes_by_the_longest_record(home: Path, capsys: Any) -> None:
    losses = []
    for cap in (SHORT, 256):
        assert train(home, f"{cap}", f"--data.max_seq_len={cap}") == 0
        told = [line for line in capsys.readouterr().out.splitlines() if "type longrope" in line]
        assert len(told) == 1 and "short factors" in told[0]
        losses.append(first_loss(home / f"{cap}"))
    assert losses[0] == losses[1]
    long = f"--data.eval={home / 'long.jsonl'}"
    # a run that goes on keeps its factors, and so does one that had the others
    assert train(home, "256", long, "--train.steps=2", "--resume") == 2
    assert f"{LONG} tokens, where the longest one had {SHORT}" in capsys.readouterr().err
    assert train(home, "other", long) == 0
    assert "the long factors" in capsys.readouterr().out
    assert first_loss(home / "other") != losses[0]
    assert train(home, "other", "--train.steps=2", "--resume") == 0
    assert "the long factors" in capsys.readouterr().out

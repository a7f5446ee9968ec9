"""Runs of models with recurrent layers, on packed chats: cut and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_runs import TinyRun, build_hybrid_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from furlong.cli.main import main

FAMILIES = ("qwen3_5_text", "bamba", "lfm2")

slow = pytest.mark.slow


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyRun]:
    return {name: build_hybrid_run(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


def records(run: Path, key: str) -> list[Any]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("lfm2", marks=slow),
        pytest.param("qwen3_5_text", marks=slow),
        pytest.param("bamba", marks=pytest.mark.nightly),
    ],
)
def test_a_run_learns_and_its_model_is_one_of_transformers(
    folders: dict[str, TinyRun], tmp_path: Path, family: str
) -> None:
    run, out = tmp_path / "run", tmp_path / "exported"
    assert main(folders[family].arguments(run, "--chunks.size=64")) == 0
    losses = records(run, "loss")
    assert len(losses) == 9 and losses[-1] < losses[0] - 0.5
    assert main(["export", str(run), f"--out={out}"]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.model_type == family
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("word1 word2", return_tensors="pt")["input_ids"]
    before = AutoModelForCausalLM.from_pretrained(folders[family].folder / "model")
    after = [float(m(input_ids=ids, labels=ids, use_cache=False).loss) for m in (model, before)]
    assert after[0] < after[1] - 0.5

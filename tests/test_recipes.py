"""The recipes: what their heads say, and that they train as they stand, in small."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from data.tiny_tokenizers import CHATML_WITH_TAGS, byte_tokenizer
from helpers.hybrids import HYBRIDS
from transformers import AutoConfig, AutoModelForCausalLM

from furlong.cli.main import main
from furlong.config.sources import load_run

ROOT = Path(__file__).parents[1]
MADE = runpy.run_path(str(ROOT / "scripts" / "recipes.py"))
RECIPES = {recipe.stem: recipe for recipe in MADE["RECIPES"]}
PLANNED = [name for name, file in RECIPES.items() if "# Planned:" in file.read_text()]
ALIKE = {
    "dpo-64k",
    "agent-traces-64k-24gb",
    "pretraining-512k",
    "reasoning-32k",
    "agent-traces-131k",
}
"""Planned in seconds, by what plans another one: pairs (apo-16k), several devices (8b-full-1m), one
device (8b-lora-1m)."""
TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 320, "max_position_embeddings": 1024,
    "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "Qwen2.5": ("qwen2", TINY),
    "Qwen3-30B": (
        "qwen3_moe",
        TINY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "Qwen3": ("qwen3", TINY),
    "Llama": ("llama", TINY),
    "Olmo-Hybrid": ("olmo_hybrid", HYBRIDS["olmo_hybrid"]),
    "model": ("qwen2", TINY),  # of the examples
}
WORDS = [" ".join(f"word{(i * j) % 17}" for j in range(1, 4 * i)) for i in range(1, 9)]


@pytest.mark.parametrize("name", RECIPES)
def test_the_head_says_what_for_which_machine_and_what_it_takes(name: str) -> None:
    what, machine, takes, *rest = RECIPES[name].read_text().splitlines()
    assert what.startswith("# ") and machine.startswith("# For ") and rest
    assert takes.startswith(("# Planned: ", "# Measured: "))
    assert f"recipes/{name}.yaml " in takes or name not in PLANNED
    assert f"[{name}.yaml]({name}.yaml)" in (ROOT / "recipes/README.md").read_text()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in ALIKE else pytest.mark.slow)
        for name in PLANNED
    ],
)
def test_what_is_planned_is_planned_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    line = MADE["planned_line"](RECIPES[name])
    assert RECIPES[name].read_text().splitlines()[2] == line, "run scripts/recipes.py"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in ALIKE else pytest.mark.slow)
        for name in RECIPES
    ],
)
def test_two_steps_in_small(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = load_run(RECIPES[name])
    write_model(config.model.name, tmp_path / "model")
    sources = [
        {"path": str(write_data(config, tmp_path / f"{number}.jsonl"))}
        | {key: getattr(source, key) for key in ("fields", "share") if getattr(source, key)}
        for number, source in enumerate(config.data.train)
    ]
    flags = {
        "model.name": tmp_path / "model", "model.init": "pretrained", "model.dtype": "float32",
        "data.train": json.dumps(sources), "data.max_seq_len": 1024,
        "data.cache_dir": tmp_path / "cache", "chunks.size": 64, "parallel.dp": 1,
        "parallel.sp": 1, "parallel.pp": 1, "memory.cpu": "auto", "train.epochs": "null",
        "train.steps": 2, "train.sequences_per_step": 2, "out": tmp_path / "run",
    }  # fmt: skip
    if config.model.rope is not None and config.model.rope.original_max_position_embeddings:
        flags["model.rope.original_max_position_embeddings"] = 1024
    if config.train.tokens_per_step is not None:
        del flags["train.sequences_per_step"]
        flags["train.tokens_per_step"] = 1500
    if config.data.eval is not None:
        flags["data.eval"] = write_data(config, tmp_path / "held-out.jsonl")
    if config.data.eval_share is not None:
        flags["data.eval_share"] = 2
    command = ["train", str(RECIPES[name]), *(f"--{key}={value}" for key, value in flags.items())]
    assert main(command) == 0, capfd.readouterr().err
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [r["step"] for r in records if "loss" in r] == [1, 2]
    assert (tmp_path / "run/model").is_dir()


def write_model(name: str, folder: Path) -> None:
    """A tiny random model of the family of a recipe's model, with a tokenizer of bytes."""
    family, settings = next(v for start, v in FAMILIES.items() if start in name)
    settings = {key: value for key, value in settings.items() if value is not None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    model.save_pretrained(folder)
    byte_tokenizer(CHATML_WITH_TAGS).save_pretrained(folder)


def write_data(config: Any, file: Path) -> Path:
    """Eight records of the shape that a recipe reads."""
    records = [record(config, words) for words in WORDS]
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    return file


def record(config: Any, words: str) -> dict[str, Any]:
    if config.train.loss == "dpo":
        return {"prompt": words, "chosen": " yes", "rejected": " no"}
    if "agent" in config.out:
        call = {"function": {"name": "look", "arguments": {"at": words[:9]}}}
        return {
            "trajectory": [
                {"role": "user", "content": "What is there?"},
                {"role": "assistant", "content": "I look.", "tool_calls": [call]},
                {"role": "tool", "content": words},
                {"role": "assistant", "content": words[-9:]},
            ],
            "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
        }
    if config.train.loss == "kto":
        return {"prompt": "Why? ", "completion": words, "label": len(words) % 3 == 0}
    if config.data.format == "sharegpt":
        turns = ("user", "Why?"), ("assistant", words)
        return {"conversations": [{"from": role, "value": value} for role, value in turns]}
    return {"text": words}

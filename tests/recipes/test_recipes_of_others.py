"""Public recipes of other trainers: what becomes of their keys, and that they train."""

from __future__ import annotations

import json
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from data.tiny_tokenizers import byte_tokenizer
from helpers.hybrids import HYBRIDS
from helpers.recipes_of_others import converted, recipes_of_others, write_recipe
from helpers.tiny_families import config_of
from transformers import AutoConfig, AutoModelForCausalLM

from furlong.cli.main import main
from furlong.config.sources import load_run

ROOT = Path(__file__).parents[2]
WORDS = [" ".join(f"word{(i * j) % 17}" for j in range(1, 4 + i % 5)) for i in range(1, 121)]
RECORDS: dict[str, Any] = {
    "text": lambda text: {"text": text, "chapter": text},
    "tokens": lambda text: {"input_ids": list(text.encode())},
    "alpaca": lambda text: {"instruction": "repeat", "input": text[:5], "output": text},
    "messages": lambda text: {"messages": _turns("role", "content", "user", "assistant", text)},
    "sharegpt": lambda text: {"conversations": _turns("from", "value", "human", "gpt", text)},
    "openthoughts": lambda text: {
        "conversations": _turns("from", "value", "user", "assistant", text)
    },
    "pairs": lambda text: {
        "prompt": [{"role": "user", "content": "repeat"}],
        "chosen": [{"role": "assistant", "content": text}],
        "rejected": [{"role": "assistant", "content": text[::-1]}],
    },
    "alpaca pairs": lambda text: {"instruction": "say", "chosen": text, "rejected": text[::-1]},
}
IN_SMALL = {
    "model.dtype": "float32",
    "model.revision": "null",
    "model.tokenizer": "null",
    "data.max_seq_len": "512",
    "data.min_len": "0",
    "data.too_long": "truncate",
    "data.cache_dir": "cache",
    "train.steps": "2",
    "train.epochs": "null",
    "train.save_every_steps": "0",
    "train.saves_per_epoch": "null",
    "train.eval_every_steps": "0",
    "train.evals_per_epoch": "null",
    "parallel.sp": "1",
    "parallel.pp": "1",
    "log.wandb": "null",
    "hub": "null",
    "out": "trained",
}
"""Keys of size and place alone."""


TRIED = {
    "ax1", "ax3", "ax5", "sw3", "sw4", "sw5", "lf1", "lf5", "lf6", "hf1", "hf3", "hf7", "la1",
    "ar1", "oi1", "oi4", "pl1", "trl",
}  # fmt: skip


def _turns(role: str, content: str, asks: str, answers: str, text: str) -> list[dict[str, str]]:
    return [{role: asks, content: text[:9]}, {role: answers, content: text}]


@cache
def tiny_model(family: str) -> Any:
    """A tiny random model."""
    if family in HYBRIDS:
        settings = {key: value for key, value in HYBRIDS[family].items() if value is not None}
        config = AutoConfig.for_model(family, **settings)
    else:
        config = config_of(family, vocab_size=320, max_position_embeddings=2048)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)


def lay_out(name: str, folder: Path) -> None:
    """Puts model and data where the run names them, as a folder of that name in this one."""
    recipe = recipes_of_others()[name]
    run = load_run("run.yaml")
    model = folder / run.model.name
    assert model.resolve().is_relative_to(folder), model
    tiny_model(recipe["family"]).save_pretrained(model)
    tokenizer = byte_tokenizer()
    named = [run.data.eos_token, run.data.pad_token, *run.data.eot_tokens]
    tokenizer.add_tokens([token for token in named if token], special_tokens=True)
    tokenizer.save_pretrained(model)
    lines = [json.dumps(RECORDS[recipe["records"]](text)) for text in WORDS]
    for source in run.data.train:
        place = folder / source.path / (source.name or "")
        assert place.resolve().is_relative_to(folder), place
        if place.suffix in (".jsonl", ".json"):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("\n".join(lines))
            continue
        place.mkdir(parents=True, exist_ok=True)
        split = (source.split or "train").partition("[")[0]
        (place / f"{split}-00000-of-00001.jsonl").write_text("\n".join(lines))


def marked(name: str) -> Any:
    """A recipe of each trainer and loss is tried each time, all of them each night."""
    kind = pytest.mark.slow if name in TRIED else pytest.mark.nightly
    return pytest.param(name, marks=kind)


@pytest.mark.parametrize("name", [marked(name) for name in sorted(recipes_of_others())])
def test_a_converted_recipe_trains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipes_of_others()[name]
    whole = converted(name, tmp_path).is_whole
    flags = [f"--devices={recipe['devices']}"] if "devices" in recipe else []
    code = main(["convert", str(write_recipe(name, tmp_path)), "--out=run.yaml", *flags])
    assert code == (0 if whole else 1)
    text = (tmp_path / "run.yaml").read_text()
    # what it writes outside of its folder, conversions of other tests would read
    for other, here in {"hf://datasets/": "", "/weka/": "weka/", ".jsonl.zst": ".jsonl"}.items():
        text = text.replace(other, here)
    (tmp_path / "run.yaml").write_text(text)
    lay_out(name, tmp_path)
    run = load_run("run.yaml")
    batch = "sequences" if run.train.tokens_per_step is None else "tokens"
    small = IN_SMALL | {f"train.{batch}_per_step": {"sequences": "2", "tokens": "600"}[batch]}
    flags = [f"--{key}={value}" for key, value in small.items()]
    assert main(["train", "run.yaml", *flags]) == 0
    lines = (tmp_path / "trained/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]
    assert len(losses) == 2 and all(0 < loss < 10 for loss in losses)


def test_the_page_of_converted_recipes_is_fresh() -> None:
    script = runpy.run_path(str(ROOT / "scripts/converted.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"]()

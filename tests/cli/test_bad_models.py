"""Models that cannot be trained, through the command: exit code 2, four parts, no run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.byte_tokenizer import byte_tokenizer

from furlong.cli.main import main

TINY = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder: a tokenizer, and whatever config a test writes beside it."""
    folder = tmp_path / "model"
    byte_tokenizer(["<end>"]).save_pretrained(folder)
    (tmp_path / "data.jsonl").write_text('{"text": "a few words"}\n')
    return folder


def train(folder: Path, *flags: str) -> int:
    home = folder.parent
    return main(
        [
            "train", f"--model.name={folder}", "--model.init=random", "--model.dtype=float32",
            f"--data.train={home / 'data.jsonl'}", "--data.max_seq_len=64", "--train.steps=1",
            f"--data.cache_dir={home / 'cache'}", f"--out={home / 'run'}",
            "--train.sequences_per_step=1", *flags,
        ]
    )  # fmt: skip


def assert_refused(folder: Path, told: str, capsys: Any, *flags: str) -> None:
    capsys.readouterr()
    assert train(folder, *flags) == 2
    message = capsys.readouterr().err
    parts = [line.split(":")[0] for line in message.splitlines() if line[:1].strip()]
    assert parts == ["given", "required", "from", "change"], message
    assert told in message
    assert not (folder.parent / "run").exists()


def test_what_cannot_be_trained_is_refused_by_name(folder: Path, capsys: Any) -> None:
    """One of those that tests/models refuse, before and behind the weights."""
    transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1).save_pretrained(folder)
    assert_refused(folder, "model type t5", capsys)
    transformers.ViTConfig().save_pretrained(folder)
    assert_refused(folder, "model type vit", capsys)
    transformers.LlamaConfig(**TINY, attention_dropout=0.1).save_pretrained(folder)
    assert_refused(folder, "attention dropout 0.1", capsys)
    transformers.BertConfig(**TINY).save_pretrained(folder)
    assert_refused(folder, "BertLMHeadModel", capsys)


def test_a_tokenizer_that_is_missing_is_told(folder: Path, capsys: Any) -> None:
    transformers.LlamaConfig(**TINY).save_pretrained(folder)
    for file in folder.glob("*token*"):
        file.unlink()
    assert_refused(folder, "without a tokenizer", capsys)
    # For some families transformers then makes one that knows nothing but special tokens.
    transformers.Qwen2Config(**TINY, num_key_value_heads=2).save_pretrained(folder)
    assert_refused(folder, "without a tokenizer", capsys)
    (folder / "tokenizer.json").write_text('{"model": 1}')
    assert_refused(folder, "without a tokenizer", capsys)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("{folder}/tokenizer.json", "name its folder: {folder}"),
        ("https://huggingface.co/Qwen/Qwen2.5-0.5B/tree/main", "write Qwen/Qwen2.5-0.5B"),
        ("Qwen/Qwen2.5-0.5B@main", "write name: Qwen/Qwen2.5-0.5B and revision: main"),
    ],
)
def test_a_name_that_is_no_folder_and_no_id(
    folder: Path, name: str, told: str, capsys: Any
) -> None:
    name, told = name.format(folder=folder), told.format(folder=folder)
    assert_refused(folder, told, capsys, f"--model.name={name}")
    assert main(["lengths", str(folder.parent / "data.jsonl"), f"--tokenizer={name}"]) == 2
    message = capsys.readouterr().err
    assert told in message and "from:     --tokenizer" in message


@pytest.mark.parametrize("text", ["{", '{"model_type": "nobody-knows"}'])
def test_a_config_that_nobody_can_read_is_told(folder: Path, text: str, capsys: Any) -> None:
    (folder / "config.json").write_text(text)
    assert_refused(folder, "config.json", capsys)


def test_more_tokens_than_positions_need_rope(folder: Path, capsys: Any) -> None:
    transformers.LlamaConfig(**TINY).save_pretrained(folder)
    assert_refused(folder, "rope_type: yarn, factor: 4", capsys, "--data.max_seq_len=200")
    yarn = ["--model.rope.rope_type=yarn", "--data.max_seq_len=200"]
    assert_refused(folder, "factor to 4", capsys, *yarn, "--model.rope.factor=2")
    assert_refused(folder, "dynamic", capsys, "--model.rope.rope_type=dynamic")
    assert_refused(folder, "did you mean", capsys, *yarn, "--model.rope.facto=4")
    assert_refused(folder, "Missing required keys", capsys, "--model.rope.rope_type=linear")
    assert train(folder, *yarn, "--model.rope.factor=4") == 0
    exported = json.loads((folder.parent / "run" / "model" / "config.json").read_text())
    assert exported["rope_parameters"]["factor"] == 4
    assert exported["max_position_embeddings"] == 256


def test_a_change_of_the_config_that_a_message_names_is_taken(folder: Path, capsys: Any) -> None:
    transformers.GPT2Config(
        vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=64, attn_pdrop=0.1
    ).save_pretrained(folder)
    assert_refused(folder, "model.config: {attn_pdrop: 0}", capsys)
    assert_refused(folder, "model.config: {attn_pdrop: ...}", capsys, "--model.attn_pdrop=0")
    assert_refused(folder, "attn_pdrop", capsys, "--model.config", "{attn_dropp: 0}")
    assert_refused(folder, "attn_pdrop", capsys, "--model.config", "{attn_pdrop: none at all}")
    assert_refused(folder, "model.rope", capsys, "--model.config", "{rope_theta: 1e6}")
    assert train(folder, "--model.config", "{attn_pdrop: 0}") == 0
    assert "attn_pdrop 0.1 -> 0.0" in capsys.readouterr().out
    exported = folder.parent / "run" / "model" / "config.json"
    assert json.loads(exported.read_text())["attn_pdrop"] == 0
    (folder.parent / "run").rename(folder.parent / "first")
    model = folder.parent / "first" / "model"
    pretrained = "--model.init=pretrained", f"--model.name={model}"
    assert_refused(folder, "transformer.h.0", capsys, *pretrained, "--model.config", "{n_embd: 48}")
    # beside a table of positions there is nothing but a smaller length
    assert_refused(folder, "lower data.max_seq_len to 64", capsys, "--data.max_seq_len=65",
                   "--model.config", "{attn_pdrop: 0}")  # fmt: skip


def test_weights_that_are_no_safetensors_are_not_read(folder: Path, capsys: Any) -> None:
    import torch

    config = transformers.LlamaConfig(**TINY)
    config.save_pretrained(folder)
    weights = transformers.LlamaForCausalLM(config).state_dict()
    torch.save(weights, folder / "pytorch_model.bin")
    assert_refused(folder, "required: weights (safetensors)", capsys, "--model.init=pretrained")
    assert_refused(folder, "pytorch_model.bin is a pickle", capsys, "--model.init=pretrained")
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    assert_refused(folder, "required: weights (safetensors)", capsys, "--model.init=pretrained")

"""A tiny model with its tokenizer, the command line that trains it, and folders of its runs."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from furlong.cli.main import main
from furlong.train.metrics import MetricsLog

TEXTS = [" ".join(f"word{(i * j) % 17}" for j in range(1, 5 + 9 * i)) for i in range(1, 9)]


@dataclass(frozen=True)
class TinyRun:
    """Files for a run of nine steps: three epochs over eight texts, three at a time."""

    folder: Path
    chunk_size: int = 32

    def arguments(self, out: Path, *flags: str) -> list[str]:
        """Return the arguments of `furlong train` with `out`; flags override the defaults here."""
        values = {
            "--model.name": str(self.folder / "model"),
            "--model.dtype": "float32",
            "--data.train": str(self.folder / "texts"),
            "--data.max_seq_len": "256",
            "--chunks.size": str(self.chunk_size),
            "--train.epochs": "3",
            "--train.sequences_per_step": "3",
            "--train.lr": "1e-2",
            "--train.eval_every_steps": "4",
            "--train.save_every_steps": "2",
            "--out": str(out),
        }
        values |= dict(flag.split("=", 1) for flag in flags if "=" in flag)
        switches = [flag for flag in flags if "=" not in flag]
        return ["train", *(f"{key}={value}" for key, value in values.items()), *switches]

    def leave_run(self, out: Path, *flags: str, stopped_after: int | None = None) -> None:
        """Make `out` the folder of a run that has finished, or was stopped after a step: a copy of
        one that is trained once, for tests of what comes after."""
        name = hashlib.sha256(repr((flags, stopped_after)).encode()).hexdigest()[:16]
        original = self.folder / "runs" / name
        if not original.exists():
            if stopped_after is None:
                assert main(self.arguments(original, *flags)) == 0
            else:
                with signal_after(stopped_after):
                    assert main(self.arguments(original, *flags)) == 0
        shutil.copytree(original, out)
        for file in (out / "config.json", out / "report.json"):
            if file.exists():
                file.write_text(file.read_text().replace(str(original), str(out)))


@contextmanager
def signal_after(step: int, number: int = signal.SIGTERM) -> Iterator[None]:
    """Context manager: send this process a signal while it takes a step."""
    original = MetricsLog.step

    def send(log: MetricsLog, at: int, figures: Any) -> None:
        original(log, at, figures)
        if at == step:
            signal.raise_signal(number)

    MetricsLog.step = send
    try:
        yield
    finally:
        MetricsLog.step = original


def build_tiny_run(folder: Path, *, num_layers: int = 2, num_heads: int = 2) -> TinyRun:
    """Write model, tokenizer and texts into a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(special_tokens=["<end>"], vocab_size=300, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped.save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "texts" / f"{number}.txt").write_text(text)
    (folder / "held-out.jsonl").write_text(json.dumps({"text": TEXTS[3][10:]}) + "\n")
    return TinyRun(folder)


def build_hybrid_run(model_type: str, folder: Path) -> TinyRun:
    """Write a model with recurrent layers, its tokenizer, and chats of which most are shorter than
    a chunk of the run."""
    from data.tiny_tokenizers import byte_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    from helpers.hybrids import HYBRIDS

    settings = {k: v for k, v in HYBRIDS[model_type].items() if v is not None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "texts").mkdir()
    with (folder / "texts" / "chats.jsonl").open("w") as file:
        for number, text in enumerate(TEXTS):
            turns = ["user", text[-5:]], ["assistant", text[: 3 + 23 * number]]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    held_out = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    }
    (folder / "held-out.jsonl").write_text(json.dumps(held_out) + "\n")
    return TinyRun(folder)


def run_command(arguments: list[str]) -> None:
    """Run the command, then exit the process with its code."""
    raise SystemExit(main(arguments))

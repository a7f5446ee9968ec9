"""Runs on records of other programs, from the command line to the exported tokenizer."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.tiny_runs import TinyRun
from transformers import AutoTokenizer, GenerationConfig
from transformers.utils import chat_template_utils

from furlong.cli.main import main
from furlong.train import trainer

TALK = [
    {"who": "me", "says": "word1 word2"},
    {"who": "gpt", "says": "word3"},
    {"who": "me", "says": "word4"},
    {"who": "gpt", "says": "word5<end>"},
]
NAMES = {"messages": "talk", "role": "who", "content": "says", "roles": {"me": "user"}}


def test_a_run_on_data_of_others(tiny_run: TinyRun, tmp_path: Path, capsys: Any) -> None:
    chats, tasks = tmp_path / "chats.jsonl", tmp_path / "tasks.jsonl"
    chats.write_text(json.dumps({"talk": TALK, "system": "word6"}) + "\n")
    tasks.write_text(
        json.dumps({"instruction": "word1", "input": "", "output": "word2<end>"}) + "\n"
    )
    sources = [{"path": str(chats), "fields": NAMES}, {"path": str(tasks), "format": "alpaca"}]
    flags = (
        f"--data.train={json.dumps(sources)}", "--data.chat_template=mistral",
        "--data.train_on=last", "--data.pad_token=<end>", "--data.eot_tokens=[<end>]",
        "--data.chat_template_kwargs={enable_thinking: false}", "--train.sequences_per_step=2",
        "--train.epochs=2", "--train.eval_every_steps=0",
    )  # fmt: skip
    out = tmp_path / "out"
    assert main(tiny_run.arguments(out, *flags)) == 0
    told = capsys.readouterr().out
    assert "format chat by the field talk" in told and "format alpaca" in told
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert "[INST]" in tokenizer.chat_template and tokenizer.pad_token == "<end>"
    generation = GenerationConfig.from_pretrained(out / "model")
    assert tokenizer.eos_token_id in np.atleast_1d(generation.eos_token_id)
    changed = (*flags, "--data.train_on=all", "--resume", "--train.epochs=3")
    assert main(tiny_run.arguments(out, *changed)) == 2
    assert "data.train_on = 'all', the run has 'last'" in capsys.readouterr().err


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_a_run_goes_on_with_the_day_of_its_start(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: str
) -> None:
    """Also of a stream, and where the tokens are not in the cache any more."""
    template = "{{ strftime_now('%Y') }} {% for m in messages %}{{ m.content }} {% endfor %}"
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "word1"}, {"role": "assistant", "content": "word2"}]
    chats.write_text(f"{json.dumps({'messages': turns})}\n" * 9)
    flags = (
        f"--data.train={chats}", f"--data.chat_template={template}", "--train.save_every_steps=1",
        f"--data.streaming={streaming}", "--train.epochs=null", "--train.eval_every_steps=0",
        "--chunks.size=16",
    )  # fmt: skip
    out = tmp_path / "out"
    for steps in (1, 2):
        cache = f"--data.cache_dir={tmp_path / str(steps)}"
        own = (*flags, cache, f"--train.steps={steps}", *["--resume"] * (steps - 1))
        assert main(tiny_run.arguments(out, *own)) == 0
        monkeypatch.setattr(trainer, "date", Later)
        monkeypatch.setattr(chat_template_utils, "datetime", Later)


class Later(datetime):
    """A clock of another year."""

    @classmethod
    def today(cls) -> Later:
        return cls(2031, 1, 1)

    def __str__(self) -> str:
        return self.date().isoformat()

    @classmethod
    def now(cls, tz: Any = None) -> Later:
        return cls.today()


def test_a_run_with_another_tokenizer(tiny_run: TinyRun, tmp_path: Path, capsys: Any) -> None:
    other = AutoTokenizer.from_pretrained(tiny_run.folder / "model")
    other.eos_token = "word1"
    other.save_pretrained(tmp_path / "other")
    flags = (f"--model.tokenizer={tmp_path / 'other'}", "--train.epochs=1")
    out = tmp_path / "out"
    assert main(tiny_run.arguments(out, *flags)) == 0
    assert AutoTokenizer.from_pretrained(out / "model").eos_token == "word1"
    again = (*flags, "--model.tokenizer=null", "--train.epochs=2", "--resume")
    assert main(tiny_run.arguments(out, *again)) == 2
    assert "model.tokenizer" in capsys.readouterr().err
    nowhere = ("--model.tokenizer=/no/such/folder", "--train.epochs=1")
    assert main(tiny_run.arguments(tmp_path / "new", *nowhere)) == 2
    assert "model.tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--data.fields={foo: bar}"], "data.fields"),
        (["--data.fields={text: [a]}"], "data.fields"),
        (["--data.fields={text: a, prompt: a}"], "data.fields"),
        (["--data.fields={roles: user}"], "data.fields"),
        (["--data.chat_template_kwargs={tools: 1}"], "data.chat_template_kwargs"),
        (["--data.chat_template=no-such"], "data.chat_template"),
        (["--data.eos_token=<no>"], "data.eos_token"),
        (["--data.format=unpaired"], "data.format"),
        (["--train.loss=dpo", "--data.train_on=last"], "data.train_on"),
        (["--train.loss=dpo", "--data.train={path: x, format: chat}"], "data.train"),
    ],
)
def test_keys_that_do_not_fit_are_refused(
    tiny_run: TinyRun, tmp_path: Path, capsys: Any, flags: list[str], key: str
) -> None:
    assert main(tiny_run.arguments(tmp_path / "out", *flags)) == 2
    err = capsys.readouterr().err
    assert key in err and err.startswith("given: ")
    assert not (tmp_path / "out").exists()

"""Every change that a refusal offers in keys of a run is made: the run then starts, or is refused
for another reason; no message leads back to itself."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from data.tiny_tokenizers import byte_tokenizer
from helpers.hybrids import HYBRIDS
from helpers.mends import ASKING, KEY, Followed, Run

import furlong
from furlong.cli.main import _VERBS
from furlong.config.schema import _OPTIONS, all_keys
from furlong.config.sources import parse_run
from furlong.data.tokenize import tokenizer_of
from furlong.errors import UserError
from furlong.train.build import load_splits
from furlong.train.objective import objective_of
from furlong.train.start import _check as check_start
from furlong.train.trainer import Trainer

TINY = {
    "vocab_size": 260, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 512, "vocab_size": 260}
PACKED = {"quant_method": "bitsandbytes", "load_in_4bit": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", TINY),
    "bare": ("llama", TINY),
    "base": ("llama", TINY),
    "gpt2": ("gpt2", GPT2),
    "dropping": ("llama", {**TINY, "attention_dropout": 0.1}),
    "whole": ("zamba2", {k: v for k, v in HYBRIDS["zamba2"].items() if v is not None}),
    "packed": ("llama", {**TINY, "quantization_config": PACKED}),
}
TURNS = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
CALLS = [{"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}]
DATA: dict[str, list[Any]] = {
    "texts": [{"text": "some words " * 9}] * 4,
    "chats": [{"messages": TURNS}] * 4,
    "long_chats": [{"messages": [{"role": "user", "content": "q" * 400}, TURNS[1]]}] * 4,
    "long_texts": [{"text": "w" * 400}] * 4,
    "books": [{"text": "w" * 1100}] * 2,
    "pairs": [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4,
    "labelled": [{"prompt": "a", "completion": "b", "label": True},
                 {"prompt": "a", "completion": "c", "label": False}] * 2,
    "ids": [{"input_ids": [1, 2, 3] * 9}] * 4,
    "chapters": [{"chapter": "some words"}] * 4,
    "questions": [{"question": "a", "answer": "b"}] * 4,
    "prompts": [{"prompt": "a", "completion": "b"}] * 4,
    "bots": [{"messages": [{**TURNS[0], "role": "person"}, TURNS[1]]}] * 4,
    "questions_of_pairs": [{"question": "a", "chosen": "b", "rejected": "c"}] * 4,
    "asked_pairs": [{"prompt": "a" * 400, "chosen": "b", "rejected": "c"}] * 4,
    "marked": [{"messages": [{**TURNS[0], "weight": 0}, {**TURNS[1], "weight": 0}, *TURNS]}] * 4,
    "learnt_marks": [{"messages": [TURNS[0], {**TURNS[1], "learn": n}]} for n in (0, 1)] * 2,
    "asked": [{"messages": TURNS[:1], "chosen": "b", "rejected": "c"}] * 4,
    "answered": [{"messages": TURNS[:1], "response": "b"}] * 4,
    "further": [{"prompt": "a", "input": "c", "completion": "b"}] * 4,
    "calls": [{"messages": [TURNS[0], {**TURNS[1], "tool_calls": CALLS}]}] * 4,
    "long_pairs": [{"prompt": "a", "chosen": "b" * 400, "rejected": "c" * 99}] * 4,
}  # fmt: skip


class Doors:
    """Opens the door of a verb for a run, each time with another folder of the run."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.came: dict[str, UserError | None] = {}

    def __call__(self, run: Run) -> None:
        """Raises the error of the run, of which many are asked for twice."""
        if (seen := repr(run)) not in self.came:
            self.came[seen] = None
            try:
                self._open(run)
            except UserError as error:
                error.__context__ = error.__cause__ = None  # whose frames hold open files
                self.came[seen] = error.with_traceback(None)
        if (known := self.came[seen]) is not None:
            raise known

    def _open(self, run: Run) -> None:
        if not run.keys:
            self._run(run.verb, list(run.flags))
            return
        keys = {"out": f"{tempfile.mkdtemp(dir=self.home / 'runs')}/run"} | dict(run.keys)
        if keys["model.name"] in MODELS:
            keys["model.name"] = str(self.home / keys["model.name"])
        for key in ("data.train", "data.eval"):
            if isinstance(keys.get(key), str) and keys[key] in DATA:
                keys[key] = str(self.home / f"{keys[key]}.jsonl")
        file = self.home / "run.yaml"
        file.write_text(yaml.safe_dump(Run(keys).sections()))
        self._run(run.verb, [str(file), *run.flags])

    def _run(self, verb: str, arguments: list[str]) -> None:
        said = io.StringIO()
        with (
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            contextlib.chdir(self.home),
        ):
            if verb in _VERBS and verb != "train":
                import_module(f"furlong.cli.{verb}").run(arguments)
                return
            config = parse_run(arguments)
            if verb.isdigit():  # so many processes
                check_start(config, int(verb))
            elif verb == "data":
                own = objective_of(config.train).format
                load_splits(config.data, tokenizer_of(config), own)
            elif verb == "train":
                with Trainer(config):  # starts, and takes no step
                    pass


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Doors:
    """The doors of a folder with tiny models, without weights, and files of records."""
    home = tmp_path_factory.mktemp("mends")
    for name, (family, settings) in MODELS.items():
        if name != "bare":
            tokenizer = byte_tokenizer(None) if name == "base" else byte_tokenizer()
            tokenizer.save_pretrained(home / name)
        transformers.AutoConfig.for_model(family, **settings).save_pretrained(home / name)
    for name, records in DATA.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (home / f"{name}.jsonl").write_text(lines)
    (home / "held-out.jsonl").write_text((home / "texts.jsonl").read_text())
    (home / "runs").mkdir()
    return Doors(home)


BASE = {
    "model.name": "llama", "model.init": "random", "model.dtype": "float32",
    "data.train": "texts", "data.max_seq_len": 512, "train.steps": 1, "train.sequences_per_step": 2,
}  # fmt: skip


def _of_options() -> Iterator[tuple[str, Run]]:
    """A run for each key that is an option of another one, with a value of that one for which it
    is none."""
    unfit = {
        "train.optimizer": "adafactor", "train.loss_type": "ipo", "train.schedule": "constant",
        "chunks.order": "chunk-first", "model.dtype": "float64", "data.too_long": "drop",
        "data.streaming": True, "data.eval": "texts", "log.samples": [], "model.init": "random",
    }  # fmt: skip
    values = {
        "data.join": True, "data.streaming": True, "data.train_on": "all",
        "train.betas": [0.8, 0.9], "train.label_smoothing": 0.1, "train.loss_type": "robust",
        "train.state_dtype": "bfloat16", "train.min_lr": 1e-9, "model.lora": {"rank": 4},
        "log.sample_tokens": 9, "train.epochs": 1, "memory.disk_dir": ".",
    }  # fmt: skip
    for key, of, fitting, _ in _OPTIONS:
        keys = {key: values.get(key, (all_keys()[key].examples or [0.5])[0])}
        if of in unfit or fitting:
            keys[of] = unfit.get(of, "kto" if fitting == ("sft",) else "sft")
        if key == "train.label_smoothing" or (key == "train.beta"):
            keys["train.loss"] = "dpo" if of == "train.loss_type" else "sft"
        if of == "model.dtype":
            keys |= {"model.lora": {"rank": 4}, "model.init": "pretrained"}
        if "train.epochs" in keys:
            keys["train.steps"] = None
        yield f"{key} of {of}", Run(keys, "config")


def _rows() -> Iterator[tuple[str, Run]]:
    long = {"data.train": "long_texts"}
    sampled = {"chunks.sample": {"rate": 0.5}}
    pairs = {"data.train": "pairs", "train.loss": "dpo"}
    away = {"offload": {"weights": "cpu"}}
    of_config: dict[str, dict[str, Any]] = {
        "min_lr": {"train.min_lr": 1.0},
        "min_len": {"data.min_len": 1000},
        "steps of a profile": {"log.profile_steps": [2, 3]},
        "no targets": {"model.lora": {"target_modules": []}, "model.init": "pretrained"},
        "keep_best": {"train.keep_best": True},
        "early_stopping": {
            "train.early_stopping": 2, "data.eval": "texts", "train.eval_every_steps": 0,
        },
        "format of the loss": {"data.format": "preference"},
        "loss of the format": {"data.format": "chat", "train.loss": "kto"},
        "format of a source": {"data.train": [{"path": "a", "format": "preference"}]},
        "float64": {"model.dtype": "float64", "train.optimizer": "adamw_8bit"},
        "split pairs": {**pairs, "data.too_long": "split"},
        "steps and epochs": {"train.steps": 3, "train.epochs": 2},
        "neither": {"train.steps": None},
        "two shares": {"train.sequences_per_step": 3, "train.tokens_per_step": 2000},
        "a near key": {"train.warmup_step": 3},
        "a key elsewhere": {"data.lr": 3e-4},
        "a section as a value": {"chunks.sample": 0.25},
        "a wrong value": {"train.optimizer": "adam"},
        "a wrong number": {"train.lr": -1},
        "a wrong layout": {"parallel.dp": 0},
        "freed stages of chunk-first": {"parallel.reshard": True, "chunks.order": "chunk-first"},
        "weights on disk": {"offload": {"weights": "disk"}},
        "weights on the CPU in a pipeline": {**away, "parallel.pp": 2},
        "weights on the CPU, chunk-first": {**away, "chunks.order": "chunk-first"},
        "weights on the CPU that stay whole": {**away, "parallel.reshard": False},
        "weights on the CPU of compiled layers": {**away, "model.compile": True},
        "weights on the CPU by bitsandbytes": {**away, "train.optimizer": "paged_adamw_8bit"},
    }  # fmt: skip
    for name, keys in of_config.items():
        yield name, Run(keys, "config")
    of_data: dict[str, dict[str, Any]] = {
        "long texts": {**long, "data.max_seq_len": 99},
        "long chats": {"data.train": "long_chats", "data.max_seq_len": 99},
        "long chats split": {
            "data.train": "long_chats", "data.max_seq_len": 99, "data.too_long": "split",
        },
        "long pairs": {"data.train": "long_pairs", "train.loss": "dpo", "data.max_seq_len": 99},
        "pairs": {"data.train": "pairs"},
        "labelled": {"data.train": "labelled"},
        "pairs with kto": {"data.train": "pairs", "train.loss": "kto"},
        "labelled with dpo": {"data.train": "labelled", "train.loss": "dpo"},
        "no pairs": {"train.loss": "dpo"},
        "no labels": {"train.loss": "kto"},
        "join": {"data.train": "chats", "data.join": True},
        "chapters": {"data.train": "chapters"},
        "questions": {"data.train": "questions"},
        "bots": {"data.train": "bots"},
        "min_len": {"data.train": "texts", "data.min_len": 500},
        "no template": {"data.train": "chats", "model.name": "base"},
        "too many held out": {"data.eval_share": 50},
        "questions of pairs": {"data.train": "questions_of_pairs", "train.loss": "dpo"},
        "learnt marks": {"data.train": "learnt_marks"},
        "pairs beside a question": {"data.train": "asked"},
        "an answer beside a question": {"data.train": "answered"},
        "an input beside a prompt": {"data.train": "further"},
        "a lost call": {"data.train": "calls"},
        "cut pairs": {
            "data.train": "asked_pairs", "train.loss": "dpo", "data.max_seq_len": 99,
            "data.too_long": "truncate",
        },
        "marks": {"data.train": "marked", "data.train_on": "all"},
        "no folder for tokens": {"data.cache_dir": "/dev/null"},
    }  # fmt: skip
    for name, keys in of_data.items():
        yield f"data: {name}", Run(keys, "data")
    of_start: dict[str, dict[str, Any]] = {
        "to disk": {"offload": "disk"},
        "to cpu": {"offload": {"kv": "cpu"}, "memory.cpu": 0},
        "cpu on a cpu": {"memory.cpu": "1GiB"},
        "sample without a size": {**sampled, **long},
        "a sample of one chunk": {**sampled, **long, "chunks.size": 500},
        "a sample of all": {"chunks.sample": {"chunks": 50}, **long, "chunks.size": 64},
        "a sample of labels": {**sampled, **long, "chunks.size": 64},
        "a sample of pairs": {**sampled, **pairs, "chunks.size": 64},
        "a sample with a method": {**sampled, **long, "chunks.size": 64, "chunks.method": "seco"},
        "keep all of pairs": {**pairs, "chunks.keep": "all"},
        "layer-first pairs": {**pairs, "chunks.order": "layer-first"},
        "retained pairs": {**pairs, "chunks.num_retained": 2},
        "a method of pairs": {**pairs, "chunks.method": "seco"},
        "options of a method": {"chunks.method": "spaco", "chunks.size": 64},
        "little memory": {"memory.device": "150KiB"},
        "little disk": {"memory.device": "1MiB", "offload": "disk", "memory.disk": "1KiB"},
        "rope": {"data.max_seq_len": 4096},
        "beyond a table": {
            "model.name": "gpt2", "data.eval": [{"path": "texts.jsonl", "max_seq_len": 4096}],
        },
        "short rope": {
            "data.max_seq_len": 4096, "model.rope": {"rope_type": "yarn", "factor": 2},
        },
        "rope without its lists": {"model.rope": {"rope_type": "longrope", "factor": 2}},
        "rope without a factor": {"model.rope": {"rope_type": "linear"}},
        "learned positions": {"model.name": "gpt2", "data.max_seq_len": 4096},
        "rope of learned positions": {
            "model.name": "gpt2", "model.rope": {"rope_type": "yarn", "factor": 2},
        },
        "attention dropout": {"model.name": "dropping"},
        "stages without their order": {"chunks.stage_layers": 1, "chunks.order": "chunk-first"},
        "a large step": {"train.sequences_per_step": 64},
        "long samples": {"log.samples": ["word"], "log.sample_tokens": 512},
        "samples without a template": {
            "model.name": "base", "log.samples": [[{"role": "user", "content": "a"}]],
        },
        "samples of ids": {
            "model.name": "bare", "data.train": "ids", "log.samples": ["word"],
        },
        "kernels": {"model.kernels": "liger"},
        "a RoPE of the config": {"model.config": {"rope_parameters": {"rope_theta": 1e6}}},
        "a RoPE type of the config": {
            "model.config": {"rope_scaling": {"rope_type": "yarn", "factor": 2}},
        },
        "a shape of the config": {"model.config": {"hidden_size": 32}, "model.init": "pretrained"},
        "packed": {"model.name": "packed", "model.init": "pretrained"},
        "packed twice": {
            "model.name": "packed", "model.init": "pretrained", "model.quantize": "nf4",
            "model.lora": {"rank": 4},
        },
        "data around the run": {"data.train": ".", "out": "runs/here"},
        "revision of a folder": {"model.revision": "main"},
        "no weights": {"model.init": "pretrained"},
        "one machine": {"parallel.pp": 4},
        "freed weights of one process": {"parallel.reshard": True},
        "pairs with weights on the CPU": {**pairs, **away},
        "groups of one process": {"parallel.replicate": 2},
    }  # fmt: skip
    for name, keys in of_start.items():
        yield f"start: {name}", Run(keys)
    of_plans: dict[str, tuple[dict[str, Any], str]] = {
        "layer-first in one stage": (
            {"model.name": "whole", "chunks.order": "layer-first", "chunks.stage_layers": 1},
            "--devices=1",
        ),
        "stages of one": ({"model.name": "whole", "parallel.pp": 2}, "--devices=2"),
        "too many chunks": ({"data.max_seq_len": 5000, "chunks.size": 2}, "--lengths=4500"),
        "stages of a pipeline": ({"parallel.pp": 4}, "--devices=4"),
        "a wrong product": ({"parallel.sp": 3, "parallel.dp": 1}, "--devices=4"),
        "layer-first in a pipeline": (
            {"parallel.pp": 2, "chunks.order": "layer-first"}, "--devices=2",
        ),
        "freed states": ({"model.name": "whole", "parallel.reshard": True}, "--devices=2"),
        "one freed stage": (
            {"parallel.reshard": True, "chunks.stage_layers": 2}, "--devices=2",
        ),
        "one stage with weights on the CPU": ({**away, "chunks.stage_layers": 2}, "--devices=1"),
        "freed weights of groups of one": (
            {"parallel.reshard": True, "parallel.replicate": 2}, "--devices=2",
        ),
        "freed weights of one device": ({"parallel.reshard": True}, "--devices=1"),
        "groups of odd replicas": ({"parallel.replicate": 2}, "--devices=3"),
        "freed weights where stages are left": (
            {"parallel.reshard": True, "parallel.dp": 1, "parallel.pp": "auto"}, "--devices=2",
        ),
        "freed weights of a method": (
            {"parallel.reshard": True, "chunks.method": "chunkflow"}, "--devices=2",
        ),
        "freed weights of chunks of its own": (
            {"parallel.reshard": True, "parallel.sp": 2, "chunks.method": "places"}, "--devices=2",
        ),
        "float32 moments": ({"memory.device": "150KiB"}, "--devices=2"),
        "codes on the CPU": (
            {**away, "model.init": "pretrained", "model.quantize": "nf4",
             "model.lora": {"rank": 4}}, "--devices=1",
        ),
        "kept weights": (
            {"parallel.reshard": False, "memory.device": "150KiB"}, "--devices=2",
        ),
        "pairs": (pairs, "--devices=2"),
        "compared pairs": (pairs, "--compare"),
        "counted pairs": (pairs, "--sequences=2"),
        "no pipeline": ({"chunks.method": "infinipipe"}, "--devices=2"),
        "no pool": ({"chunks.method": "places"}, "--devices=2"),
        "no sample": ({"chunks.method": "spaco", **long, "chunks.size": 64}, "--devices=1"),
        "own chunks": ({"chunks.method": "infinipipe", "chunks.size": 64}, "--devices=1"),
    }  # fmt: skip
    for name, (keys, flag) in of_plans.items():
        yield f"plan: {name}", Run(keys, "plan", (flag,))
    of_launch: dict[str, dict[str, Any]] = {
        "layer-first stages": {"parallel.pp": 2, "chunks.order": "layer-first"},
        "8-bit states": {"train.optimizer": "adamw_8bit"},
        "8-bit states on the CPU": {**away, "train.optimizer": "adamw_torch_8bit"},
        "8-bit states in a pool": {"parallel.sp": 2, "train.optimizer": "adamw_torch_8bit"},
        "8-bit states of freed weights": {
            "parallel.reshard": True, "train.optimizer": "adamw_torch_8bit",
        },
        "another product": {"parallel.dp": 4},
        "sampled pairs": {**pairs, **sampled, "chunks.size": 64},
    }  # fmt: skip
    for name, keys in of_launch.items():
        yield f"two processes: {name}", Run(keys, "2")
    of_flags: dict[str, tuple[str, ...]] = {
        "lengths": ("held-out.jsonl",),
        "plan": ("--lengths=1000", "--model.name=llama"),
        "plan of nothing": ("--model.name=llama", "--hardware=H100"),
    }
    of_ropes = {
        "pairs": pairs,
        "another base": {"model.rope": {"rope_type": "default", "rope_theta": 1e6}},
        "nothing longer": {"data.eval": "books"},
        "a share": {"data.train": "books", "data.eval_share": 0.5},
    }
    for name, keys in of_ropes.items():
        yield f"rope: {name}", Run(keys, "rope")
    for name, flags in of_flags.items():
        yield f"flags: {name}", Run({}, name.split()[0], flags)


SLOW = ("plan: too many chunks",)
ROWS = {
    name: replace(run, keys=BASE | dict(run.keys)) if run.keys else run
    for name, run in (*_rows(), *_of_options())
}


_TRIED = "tried on the record before it is offered"
_USAGE = "no change: how a verb is called"
_DURING = "while a run takes its steps"
_PYTHON = "a call in Python"
_OWN_TEMPLATE = "a template of the user's own"
_SP = "of several processes with a model whose attention they cannot share"
_NEEDS = "needs what no test has: "
ELSEWHERE = {
    "models/build.py: set model.config: {tie": "weights with a head of their own: followed in"
    " tests/models/test_folders.py",
    "calibrate/run.py: leave --device": f"{_NEEDS}a machine without a GPU, asked for one",
    "chunked_model.py: leave the key out: tok": "no key of a run: an argument of a call",
    "cli/convert.py: remove it": "a file that is there: followed in tests/cli/test_convert.py",
    "cli/plan.py: furlong plan RUN": _USAGE,
    "cli/plan.py: leave the flag out": "a saved plan and a flag of the search",
    "cli/plan_question.py: RUN.yaml, PLAN": _USAGE,
    "cli/plan_question.py: raise chunks.size": "followed by the slow row",
    "cli/train.py: add --out": "a run folder that was moved: tests/train/test_resume.py",
    "config/adapter.py: remove model.lora.": f"{_NEEDS}an adapter of peft",
    "config/conversion.py: ": "remarks on a recipe's keys, no refusals",
    "config/messages.py: a run: its file": _USAGE,
    "config/messages.py: set model.config": "a value that only the user knows",
    "config/recipes.py: keep the script": _PYTHON,
    "config/schema.py: write data.max_seq_len": "a value that only the user knows",
    "data/chat.py: correct that line": _OWN_TEMPLATE,
    "data/chat.py: mend or remove": _OWN_TEMPLATE,
    "data/chat.py: set data.chat_template": _TRIED,
    "data/chat.py: set data.train_on": _TRIED,
    "data/formats.py: set data.chat_template": "conversations under a loss of pairs",
    "data/formats.py: set data.fields": "a field that only the user knows",
    "data/tokenize.py: remove model.new_tokens": "a model without tokenizer.json",
    "data/sources.py: a file, a folder": "no change: what is required",
    "integrations/transformers.py: leave": _PYTHON,
    "kv/disk.py: make room there": f"{_NEEDS}a full disk",
    "kv/pools.py: the system refuses": "a warning",
    "models/build.py: name the model": f"{_NEEDS}an adapter of peft",
    "models/build.py: name the tokens": "followed in tests/train/test_new_token_runs.py",
    "models/build.py: remove what shapes": f"{_NEEDS}weights",
    "models/decoder.py: name the checkpoint": _PYTHON,
    "models/decoder.py: use parallel": _SP,
    "models/describe.py: train without": "a model that no description counts",
    "models/folder.py: name their base": f"{_NEEDS}an adapter of peft",
    "models/new_tokens.py: ": "followed in tests/models/test_new_tokens.py",
    "models/quantized.py: name the checkpoint": f"{_NEEDS}a checkpoint with vision in 4 bits",
    "models/quantized.py: remove model.quantize, or": f"{_NEEDS}weights",
    "models/support.py: leave it out": _PYTHON,
    "ops/attention.py: use parallel": _SP,
    "planners/question.py: use shorter": "activations above the memory of many devices",
    "planners/search.py: leave chunks.method": "adapters over the last stage alone",
    "planners/spaco.py: write what is required": "values that the schema refuses: Python",
    "runtime/distributed/mesh.py: leave process_group": _PYTHON,
    "train/card.py: ": f"{_NEEDS}a hub",
    "train/export.py: leave --merge": f"{_NEEDS}a run",
    "train/memory.py: raise memory.device": _DURING,
    "train/memory.py: set chunks.size": _DURING,
    "train/objective.py: , raise train.max_loss": _DURING,
    "train/objective.py: look at these": _DURING,
    "train/objective.py: set model.config": _DURING,
    "train/run_folder.py: the config of": "no change: what is required",
    "train/run_model.py: leave chunks.method": "a model that is counted by no description",
    "train/run_model.py: leave the longer": f"{_NEEDS}a checkpoint",
    "train/start.py: pip install": f"{_NEEDS}an environment without the package",
}
"""Beginnings of texts that no row meets, and why."""


def _marked() -> Iterator[Any]:
    for name in ROWS:
        marks = [pytest.mark.slow] if name in SLOW else []
        yield pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", _marked())
def test_the_change_that_is_offered_works(name: str, doors: Doors) -> None:
    followed = Followed(doors)
    followed.follow(ROWS[name])
    assert not followed.faults, "\n\n".join(followed.faults)
    for error in followed.errors:
        parts = (error.given, error.required, error.source, error.change)
        assert all(parts) and len(str(error)) < 2500, error
        assert not any(re.search(r"^(given|required|change): ", part, re.M) for part in parts), (
            error
        )


def _literals() -> Iterator[tuple[str, re.Pattern[str]]]:
    """The texts of the source that ask for a key of a run or for a flag, and what they match once
    their gaps are filled."""
    mentions = KEY.pattern.replace("?P<key>", "?:").replace("?P<flag>", "?:")
    asks = re.compile(rf"\b(?:{ASKING})\b[^.;:]*?(?:{mentions})")
    root = Path(furlong.__file__).parent
    for file in sorted(root.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        apart = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        joined = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        apart |= {id(part) for node in joined for part in node.values}
        for node in nodes:
            if id(node) in apart or not isinstance(node, ast.Constant | ast.JoinedStr):
                continue
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [str(part.value) if isinstance(part, ast.Constant) else "\0" for part in parts]
            text = "".join(texts)
            shown = text.replace("\0", "{}")
            if isinstance(getattr(parts[0], "value", ""), str) and asks.search(text):
                pattern = ".*?".join(map(re.escape, text.strip(" ,;").split("\0")))
                yield f"{file.relative_to(root)}: {shown}", re.compile(pattern, re.DOTALL)


def test_every_change_that_names_a_key_is_made_or_has_a_reason(doors: Doors) -> None:
    said = []
    for name, run in ROWS.items():
        if name not in SLOW:
            with pytest.raises(UserError) as caught:
                doors(run)
                pytest.fail(f"{name}: nothing is refused")
            said.append(caught.value.change)
    unmet = {text for text, known in _literals() if not any(map(known.search, said))}
    listed = {text: start for start in ELSEWHERE for text in unmet if text.startswith(start)}
    assert not unmet - listed.keys(), "\n".join(sorted(unmet - listed.keys()))
    unused = ELSEWHERE.keys() - listed.values()
    assert not unused

"""The proof that needs training runs: kill -9, `--resume`, the weights of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from furlong.config.schema import RunConfig, TrainConfig
from furlong.models.build import build_model, export_model
from furlong.models.shrink import LONGEST_TOKENS, VOCAB_SIZE
from furlong.train.run_folder import CHECKPOINTS, EXPORT, METRICS, REPORT
from furlong.verify.checks import CHUNK_SIZE, Finding

NUM_STEPS = 24
SAVE_EVERY_STEPS = 5
TIME_LIMIT_S = 300
FURLONG = "import sys; from furlong.cli.main import main; sys.exit(main(sys.argv[1:]))"


def check_resume(config: RunConfig, shrunk: Any, *, program: str = FURLONG) -> Finding:
    """Trains the shrunk model twice with the user's settings, once killed at a random step and
    resumed; the exported weights must be equal bit for bit.

    `program` is the Python text that takes the command line of furlong.
    """
    with TemporaryDirectory() as name:
        home = Path(name)
        file = _write_run(config, shrunk, home)
        whole, killed = home / "whole", home / "killed"
        kill_after = random.randint(SAVE_EVERY_STEPS, NUM_STEPS - SAVE_EVERY_STEPS)
        processes = {out: _start(program, file, out) for out in (whole, killed)}
        try:
            died_at = _kill(processes[killed], killed, kill_after)
            told = _failure(processes[whole], whole)
            if told is None:
                told = _failure(_start(program, file, killed, "--resume"), killed)
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
        if told is not None:
            return Finding("resume", told, False)
        if died_at is None:
            return Finding("resume", f"all {NUM_STEPS} steps were over before the kill", False)
        return _compare(whole / EXPORT, killed / EXPORT, died_at)


def _write_run(config: RunConfig, shrunk: Any, home: Path) -> Path:
    """A run file with the user's settings over the shrunk model and random tokens."""
    shrunk.save_pretrained(home / "config")
    model = build_model(str(home / "config"), init="random", dtype=torch.float32)
    export_model(model, _any_tokenizer(), home / "model", dtype=torch.float32)
    draw = random.Random(0)
    lines = (
        json.dumps({"input_ids": draw.choices(range(4, VOCAB_SIZE), k=draw.randint(2, length))})
        for length in (LONGEST_TOKENS, 20) * 16
    )
    (home / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    values = config.model_dump(mode="json")
    values["model"] |= {
        "name": str(home / "model"), "revision": None, "init": "pretrained", "dtype": "float32",
        "rope": None,
    }  # fmt: skip
    if config.model.lora is not None:
        values["model"]["lora"]["adapter"] = None
    values["data"] |= {
        "train": [str(home / "data.jsonl")], "eval": None, "format": "tokens",
        "max_seq_len": LONGEST_TOKENS, "cache_dir": str(home / "cache"),
    }  # fmt: skip
    values["chunks"] |= {"size": CHUNK_SIZE, "sample": _half_drawn(values["chunks"]["sample"])}
    # on a CPU its RAM is the device's, and the budgets are those of the whole model
    values["offload"] = _without_cpu(values["offload"])
    values["memory"] |= {"device": "auto", "cpu": "auto"}
    values["train"] |= {
        "steps": NUM_STEPS, "epochs": None, "sequences_per_step": 4, "tokens_per_step": None,
        "save_every_steps": SAVE_EVERY_STEPS, "eval_every_steps": 0, "eval_train_share": 0,
    }  # fmt: skip
    if config.train.loss != "sft":  # its data are pairs of texts, of which tokens make none
        own = TrainConfig().model_dump(mode="json")
        values["train"] |= {n: own[n] for n in ("loss", "beta", "loss_type", "label_smoothing")}
    values["log"] = {}
    file = home / "run.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    return file


def _half_drawn(sample: Any) -> Any:
    """A sample of the same rule, of sequences with few chunks and labels in all of them."""
    if sample is None:
        return None
    label_rate = 0.5 if sample["rule"] == "unbiased" else None
    return sample | {"rate": 0.5, "chunks": None, "label_rate": label_rate}


def _without_cpu(offload: Any) -> Any:
    if isinstance(offload, Mapping):
        return {kind: _without_cpu(target) for kind, target in offload.items()}
    return "none" if offload == "cpu" else offload


def _any_tokenizer() -> Any:
    """A run loads one, though its data are token ids."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<end>": 2, "word": 3}, unk_token="<end>"))
    )


def _start(program: str, file: Path, out: Path, *flags: str) -> subprocess.Popen[bytes]:
    # One thread each: the two runs share the machine, and sums keep their order.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", program, "train", str(file), f"--out={out}", *flags],
            stdout=log,
            stderr=log,
            env=environment,
        )


def _kill(process: subprocess.Popen[bytes], out: Path, step: int) -> int | None:
    """SIGKILL as soon as there are a checkpoint and a record of `step`; the step it died at.

    None if the run was over before.
    """
    limit_s = time.monotonic() + TIME_LIMIT_S
    while process.poll() is None and time.monotonic() < limit_s:
        # one that is being written is named .tmp
        if _last_step(out) >= step and any((out / CHECKPOINTS).glob("step-*[0-9]")):
            process.kill()
            break
        time.sleep(0.002)
    process.wait()
    return None if (out / REPORT).exists() else _last_step(out)


def _last_step(out: Path) -> int:
    """The last step of which a whole record is written."""
    file = out / METRICS
    if not file.exists():
        return 0
    lines = file.read_bytes().split(b"\n")[:-1]
    return max((json.loads(line)["step"] for line in lines), default=0)


def _failure(process: subprocess.Popen[bytes], out: Path) -> str | None:
    """The last words of a run that did not end well, else None."""
    try:
        code = process.wait(TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"a run of {NUM_STEPS} steps took more than {TIME_LIMIT_S} s"
    if code == 0:
        return None
    said = out.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip()
    return f"a run ended with exit code {code}: {' '.join(said.splitlines()[-4:])}"


def _compare(whole: Path, resumed: Path, died_at: int) -> Finding:
    expected, given = (
        {n: x for f in sorted(folder.glob("*.safetensors")) for n, x in load_file(f).items()}
        for folder in (whole, resumed)
    )
    differing = sorted(expected.keys() ^ given.keys()) or [
        name for name, x in expected.items() if not torch.equal(x, given[name])
    ]
    told = f"{len(differing)} differ, {differing[0]} first" if differing else "equal bit for bit"
    figure = f"killed after step {died_at} of {NUM_STEPS} and resumed: {len(expected)} weights"
    return Finding("resume", f"{figure} {told}", bool(expected) and not differing)

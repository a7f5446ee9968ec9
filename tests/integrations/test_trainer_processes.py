"""`furlong.integrations.Trainer` on two processes against plain `transformers.Trainer` on one, with
the same batches of 6 sequences; the last one of an epoch has 3."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils import DistributedType
from helpers.launched import Launched
from process_cases import SQUARED, UNLIKE, Found, Run, refused, take
from torch.distributed.fsdp import CPUOffloadPolicy
from trainers import wide_loss
from transformers import AutoModelForCausalLM
from trl import SFTTrainer

from furlong.errors import ConfigError
from furlong.integrations import Trainer
from furlong.integrations.transformers import refuse_settings, without_repeats

BOUND = 1e-9
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}


def on_processes(
    folder: Path, runs: dict[str, Run], function: Callable[..., None] = take
) -> list[dict[str, Any]]:
    """What each process finds in each run."""
    launched = Launched(folder / "said", function, folder, runs)
    for ended in launched.ended(180):
        assert ended.code == 0, ended.said
        assert "nobody adds them up" not in ended.said
    return found_in(folder)


def found_in(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{number}.pt", weights_only=False) for number in range(2)]


def difference(one: Found, other: Found) -> float:
    """The largest of two runs' weights, relative to the largest weight of each tensor."""
    assert one.weights.keys() == other.weights.keys()
    return max(
        float((x - other.weights[name]).abs().max() / other.weights[name].abs().max())
        for name, x in one.weights.items()
    )


def logged(found: Found, name: str) -> list[float]:
    return [log[name] for log in found.logs if name in log]


def by_update(found: Found, ends: list[int]) -> list[float]:
    """The losses of the updates, whose last batches are those before `ends`."""
    return [sum(found.losses[i:end]) for i, end in zip([0, *ends], ends, strict=False)]


STEPS = {"max_steps": 5} | EVALUATED
RUNS = {
    "incomplete last batch": Run(STEPS),
    "resumed": Run(STEPS, resumed="incomplete last batch/checkpoint-3"),
    "accumulation": Run({"max_steps": 3, "gradient_accumulation_steps": 2}, other_weights=True),
    "mostly without labels": Run({"max_steps": 4}, num_muted=18),
}
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
DIVIDED = {
    "divided": Run(STEPS | FSDP, other_weights=True),
    "resumed": Run(STEPS | FSDP, resumed="divided/checkpoint-3"),
    "mostly without labels": Run(
        {"max_steps": 2, "gradient_accumulation_steps": 2} | FSDP, num_muted=18
    ),
    "logits": Run({"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1} | FSDP, metrics=True),
    "a loss of one's own": Run({"max_steps": 3} | FSDP, loss=SQUARED),
}
LONG_RUNS = {
    "adapters": Run({"max_steps": 4, "gradient_accumulation_steps": 2}, lora=True, num_records=33),
    "packed": Run(
        {"max_steps": 8, "per_device_train_batch_size": 1, "packing": True},
        sft=True,
        num_records=30,
    ),
    "logits": Run({"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1}, metrics=True),
    "sft": Run({"max_steps": 3}, sft=True),
    "a loss of one's own": Run({"max_steps": 3}, loss=SQUARED),
}


@pytest.mark.parametrize(
    "runs",
    [RUNS, *(pytest.param(runs, marks=pytest.mark.slow) for runs in (DIVIDED, LONG_RUNS))],
    ids=["short", "divided", "long"],
)
def test_two_processes_train_as_one(tmp_path: Path, runs: dict[str, Run]) -> None:
    both = on_processes(tmp_path, runs)
    for name, run in runs.items():
        first, second = (found[name] for found in both)
        assert first.losses == second.losses, name
        assert all(torch.equal(x, second.weights[n]) for n, x in first.weights.items()), name
        if run.resumed:
            whole = both[0][run.resumed.split("/")[0]]
            assert first.losses == whole.losses[3:], name
            assert difference(first, whole) == 0, name
            continue
        own = {key: value for key, value in run.arguments.items() if key not in FSDP}
        if "packing" in own:
            own["per_device_train_batch_size"] = 2
        # the plain trainer's loss of a batch without labels is not a number
        plain = SFTTrainer if run.sft else transformers.Trainer
        alone = replace(run, arguments=own)
        trainer = alone.trainer(tmp_path / "plain", Trainer if run.num_muted else plain)
        truth = Found.of(trainer, tmp_path / "plain")
        assert difference(first, truth) < BOUND, name
        # several processes tell the loss of an update with its last batch
        ends = [i for i, loss in enumerate(first.losses, 1) if loss]
        assert len(first.losses) == len(truth.losses) and ends, name
        sums, true_sums = by_update(first, ends), by_update(truth, ends)
        assert sums == pytest.approx(true_sums, rel=BOUND), name
        # transformers adds it up in float32
        assert first.train_loss == pytest.approx(truth.train_loss, rel=1e-6), name
        for key in ("loss", "grad_norm", "eval_rows" if run.metrics else "eval_loss"):
            assert logged(first, key) == pytest.approx(logged(truth, key), rel=1e-6), (name, key)
        if not run.lora:
            exported = AutoModelForCausalLM.from_pretrained(tmp_path / name / "exported")
            weights = dict(exported.named_parameters())
            assert all(torch.equal(weights[n], x) for n, x in first.weights.items()), name


REFUSED = {
    "average_tokens_across_devices=False": Run({"average_tokens_across_devices": False}),
    "a compute_loss_func or compute_loss of": Run(loss=wide_loss),
}


def test_processes_refuse_by_name(tmp_path: Path) -> None:
    unlike = {name: Run(unlike=name) for name in UNLIKE}
    unlike |= {f"{name}, divided": Run(FSDP, unlike=name) for name in ("clip", "evaluate")}
    first, second = on_processes(tmp_path, REFUSED | unlike, refused)
    for name, run in unlike.items():
        said, other = first.pop(name), second.pop(name)
        assert "on process 1" in said and "Ranks" not in said, name
        assert "hooks on the whole" in other if run.unlike == "hook" else other == said, name
    assert first == second and first.keys() == REFUSED.keys()
    for name, said in first.items():
        assert re.match(rf"given: .*{re.escape(name)}", said), said
        assert all(f"\n{part}:" in said for part in ("required", "from", "change")), said


PLUGIN = {"fsdp_version": 2, "cpu_offload": None, "activation_checkpointing": False}


@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("DataParallel over 2 GPUs", "NO", {"n_gpu": 2}),
        ("DEEPSPEED", "DEEPSPEED", {}),
        ("MEGATRON_LM", "MEGATRON_LM", {}),
        ("parallelism_config", "MULTI_GPU", {"parallelism_config": object()}),
        ("version 1", "FSDP", {"fsdp_version": 1}),
        ("cpu_offload", "FSDP", {"cpu_offload": CPUOffloadPolicy()}),
        ("activation_checkpointing", "FSDP", {"activation_checkpointing": True}),
        ("torch_compile", "FSDP", {"torch_compile": True}),
        ("adapters", "FSDP", {"peft_config": {}}),
        ("one process", "FSDP", {"world_size": 1}),
    ],
)
def test_other_ways_to_several_devices_are_refused_by_name(
    name: str, kind: str, changes: dict[str, Any]
) -> None:
    """The trainer is a stand-in: most of these need packages or devices that are not here."""
    arguments = {
        "n_gpu": 1, "world_size": 2, "fsdp": kind == "FSDP", "torch_compile": False,
        "average_tokens_across_devices": True, "neftune_noise_alpha": None, "fp16": False,
        "optim": "adamw_torch",
    }  # fmt: skip
    arguments |= {key: value for key, value in changes.items() if key in arguments}
    plugin = PLUGIN | {key: value for key, value in changes.items() if key in PLUGIN}
    trainer = SimpleNamespace(
        args=SimpleNamespace(device=torch.device("cpu"), **arguments),
        accelerator=SimpleNamespace(
            distributed_type=DistributedType(kind),
            parallelism_config=changes.get("parallelism_config"),
            state=SimpleNamespace(fsdp_plugin=SimpleNamespace(**plugin)),
        ),
        model=SimpleNamespace(**{key: changes[key] for key in changes if key == "peft_config"}),
        is_fsdp_enabled=kind == "FSDP",
        model_init=None,
    )
    with pytest.raises(ConfigError, match=f"given: .*{name}") as error:
        refuse_settings(trainer)
    assert all(f"\n{part}:" in str(error.value) for part in ("required", "from", "change"))


def test_repeats_of_a_data_loader_lose_their_labels() -> None:
    ids = torch.arange(6).reshape(3, 2)
    rows = without_repeats({"input_ids": ids, "labels": ids}, 3, 1)
    assert rows["labels"].tolist() == [[0, 1], [-100, -100], [-100, -100]]
    joined = {
        "input_ids": ids.reshape(1, 6), "labels": ids.reshape(1, 6),
        "position_ids": torch.tensor([[0, 1, 2, 0, 0, 1]]),
    }  # fmt: skip
    assert without_repeats(joined, 3, 2)["labels"].tolist() == [[0, 1, 2, 3, -100, -100]]
    assert without_repeats(joined, 3, -4)["labels"].tolist() == [[-100] * 6]
    packed = without_repeats(joined, 2, 1)["labels"]  # two samples of three sequences: which?
    assert packed.tolist() == [list(range(6))]


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(
            ["torch.distributed.run", "--nproc-per-node=2", "--standalone"], marks=pytest.mark.slow
        ),
        # which calls torchrun's own
        pytest.param(
            ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2"],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["torchrun", "accelerate"],
)
def test_launchers(tmp_path: Path, launcher: list[str]) -> None:
    script = Path(__file__).with_name("process_cases.py")
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(script), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'train_loss'") == 2, "each run logs once"
    first, second = found_in(tmp_path)
    for name, plain in (("run", transformers.Trainer), ("sft", SFTTrainer)):
        run = Run({"max_steps": 4}, sft=name == "sft")
        truth = Found.of(run.trainer(tmp_path / "plain", plain), tmp_path / "plain")
        assert difference(first[name], truth) < BOUND
        assert difference(second[name], truth) < BOUND

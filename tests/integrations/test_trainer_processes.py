"""`furlong.integrations.Trainer` on two processes against plain `transformers.Trainer` on one, with
the same batches of 6 sequences; the last one of an epoch has 3."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from helpers.launched import Launched
from process_cases import Found, Run, take
from transformers import AutoModelForCausalLM

from furlong.integrations import Trainer

BOUND = 1e-9
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}


def on_processes(
    folder: Path, runs: dict[str, Run], num_processes: int = 2
) -> list[dict[str, Found]]:
    """What each process finds in each run."""
    launched = Launched(folder / "said", take, folder, runs, num_processes=num_processes)
    for ended in launched.ended(120):
        assert ended.code == 0, ended.said
        assert "nobody adds them up" not in ended.said
    return [
        torch.load(folder / f"{number}.pt", weights_only=False) for number in range(num_processes)
    ]


def difference(one: Found, other: Found) -> float:
    """The largest of two runs' weights, relative to the largest weight of each tensor."""
    assert one.weights.keys() == other.weights.keys()
    return max(
        float((x - other.weights[name]).abs().max() / other.weights[name].abs().max())
        for name, x in one.weights.items()
    )


def logged(found: Found, name: str) -> list[float]:
    return [log[name] for log in found.logs if name in log]


def by_update(found: Found, num_batches: int) -> list[float]:
    """The losses of the updates, of so many batches each."""
    return [
        sum(found.losses[i : i + num_batches]) for i in range(0, len(found.losses), num_batches)
    ]


STEPS = {"max_steps": 5} | EVALUATED
RUNS = {
    "incomplete last batch": Run(STEPS),
    "resumed": Run(STEPS, resumed="incomplete last batch/checkpoint-3"),
    "accumulation": Run({"max_steps": 3, "gradient_accumulation_steps": 2}, other_weights=True),
    "adapters": Run({"max_steps": 3}, lora=True),
    "mostly without labels": Run({"max_steps": 4}, num_muted=18),
}
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
DIVIDED = {
    "divided": Run(STEPS | FSDP, other_weights=True),
    "resumed": Run(STEPS | FSDP, resumed="divided/checkpoint-3"),
    "mostly without labels": Run(
        {"max_steps": 2, "gradient_accumulation_steps": 2} | FSDP, num_muted=18
    ),
}
LONG_RUNS = {
    "incomplete last batch": Run({"max_steps": 21} | EVALUATED, num_records=57),
    "accumulation": Run({"max_steps": 7, "gradient_accumulation_steps": 4}, num_records=57),
    "adapters": Run({"gradient_accumulation_steps": 2}, lora=True, num_records=57),
    "mostly without labels": Run(num_muted=50, num_records=57),
}


@pytest.mark.parametrize(
    "runs",
    [RUNS, DIVIDED, pytest.param(LONG_RUNS, marks=pytest.mark.slow)],
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
        alone = replace(run, arguments=own)
        # the plain trainer's loss of a batch without labels is not a number
        trainer_class = Trainer if run.num_muted else transformers.Trainer
        truth = Found.of(alone.trainer(tmp_path / "plain", trainer_class), tmp_path / "plain")
        assert difference(first, truth) < BOUND, name
        num_batches = run.arguments.get("gradient_accumulation_steps", 1)
        sums, true_sums = by_update(first, num_batches), by_update(truth, num_batches)
        assert sums == pytest.approx(true_sums, rel=BOUND), name
        assert first.train_loss == pytest.approx(truth.train_loss, rel=BOUND), name
        for key in ("loss", "eval_loss", "grad_norm"):
            assert logged(first, key) == pytest.approx(logged(truth, key), rel=1e-6), (name, key)
        if not run.lora:
            exported = AutoModelForCausalLM.from_pretrained(tmp_path / name / "exported")
            weights = dict(exported.named_parameters())
            assert all(torch.equal(weights[n], x) for n, x in first.weights.items()), name

"""Runs whose weights, gradients and optimizer lie in CPU memory, from start to export."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.test_replicas import records, stops_after, weights, worst
from helpers.launched import Launched
from helpers.tiny_runs import TinyRun, signal_after

from furlong.cli.main import main
from furlong.train import trainer
from furlong.train.checkpoints import load_tensors, stored_tensors

STEPS = (
    *("--train.epochs=null", "--train.steps=3", "--train.save_every_steps=1"),
    *("--train.eval_every_steps=0", "--chunks.stage_layers=1", "--model.dtype=float64"),
    *("--chunks.keep=attention", "--chunks.num_retained=1"),
)
OFFLOAD = "--offload={weights: cpu}"


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Let a run take the plans of weights that are freed, and have its own on the device: sums are
    then made in the same order."""
    chosen = trainer.choose_run_plan

    def choose(*given: Any) -> Any:
        decision = chosen(*given)
        return replace(decision, options=replace(decision.options, reshard=True))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainer, "choose_run_plan", choose)
        yield


def checkpoint(run: Path) -> dict[str, torch.Tensor]:
    """The tensors of the newest one."""
    newest = max((run / "checkpoints").iterdir())
    found = {name: torch.empty(s, dtype=d) for name, (s, d) in stored_tensors(newest).items()}
    load_tensors(newest, found)
    return {name: x for name, x in found.items() if not name.startswith("rng.")}


def require_equal(run: Path, other: Path) -> None:
    """The same losses, norms, samples, checkpoint and export, bit for bit."""
    for key in ("loss", "grad_norm", "eval_loss", "samples"):
        assert records(run, key) == records(other, key)
    for own, true in ((checkpoint(run), checkpoint(other)), (weights(run), weights(other))):
        assert own.keys() == true.keys()
        assert [name for name in true if not torch.equal(own[name], true[name])] == []


RUNS = {
    "all": ("--data.eval_share=0.5", "--train.eval_every_steps=1", "--train.keep_best=true",
            "--train.async_save=true", "--log.samples=[word1 word2]", "--log.sample_tokens=4"),
    "adapters": ("--model.lora.rank=4", "--model.lora.dropout=0.1", "--model.dtype=bfloat16"),
    "narrow moments": ("--train.state_dtype=bfloat16", "--model.kernels=none"),
    "muon": ("--train.optimizer=muon", "--chunks.sample.rate=0.5",
             "--chunks.sample.label_rate=0.5"),
    "adafactor": ("--train.optimizer=adafactor", "--model.dtype=float32"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.few(0, 3)
def test_one_process_trains_as_with_weights_on_the_device(
    kind: str, tiny_run: TinyRun, tmp_path: Path
) -> None:
    flags = (*STEPS, *RUNS[kind])
    with layer_by_layer():
        assert main(tiny_run.arguments(tmp_path / "plain", *flags)) == 0
    assert main(tiny_run.arguments(tmp_path / "run", *flags, OFFLOAD)) == 0
    assert json.loads((tmp_path / "run" / "options.json").read_text())["offload_weights"]
    require_equal(tmp_path / "run", tmp_path / "plain")
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_run_goes_on_wherever_its_weights_lie_and_on_how_many_processes(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    flags = (*STEPS, "--train.steps=4")
    assert main(tiny_run.arguments(whole, *flags)) == 0
    with signal_after(1):
        assert main(tiny_run.arguments(run, *flags)) == 0
    again = tiny_run.arguments(run, *flags, "--resume")
    ended = Launched(tmp_path / "said", stops_after, [*again, OFFLOAD], 0, 2).ended(120)
    assert [process.code for process in ended] == [0, 0], ended[0].said
    with signal_after(3, signal.SIGINT):
        assert main([*again, OFFLOAD]) == 0
    assert json.loads((run / "options.json").read_text())["offload_weights"]
    assert main(again) == 0
    assert "offload_weights" not in json.loads((run / "options.json").read_text())
    for key in ("loss", "grad_norm"):
        assert len(records(run, key)) == 4
        assert records(run, key) == pytest.approx(records(whole, key), rel=1e-12), key
    assert worst(checkpoint(run), checkpoint(whole)) <= 1e-12

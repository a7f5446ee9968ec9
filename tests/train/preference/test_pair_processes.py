"""`train.loss: dpo` on several processes, in any layout: the weights of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launched import Launched
from helpers.pair_runs import pair_flags
from helpers.tiny_runs import TinyRun, build_tiny_run, run_command
from transformers import GPT2Config, GPT2LMHeadModel

from furlong.cli.main import main

LIMIT_S = 300
STEPS = (
    "--model.dtype=float64", "--train.steps=2", "--train.epochs=null", "--chunks.size=32",
    "--chunks.num_retained=0", "--chunks.keep=kv",
)  # fmt: skip


def weights(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(next((run / "model").glob("*.safetensors")))


def figures(run: Path) -> list[dict[str, float]]:
    """Losses and metrics, but for accuracies: before the first step all margins are rounding."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        {
            name: value
            for name, value in line.items()
            if name in ("loss", "eval_loss", "grad_norm")
            or ("/" in name and "accuracies" not in name)
        }
        for line in lines
        if "predicted_step_s" not in line
    ]


@pytest.mark.parametrize("layout", ["--parallel.sp=2", "--parallel.dp=2", "--parallel.pp=2"])
@pytest.mark.few(0, 2)
def test_two_processes(tiny_run: TinyRun, tmp_path: Path, layout: str) -> None:
    adapters = ("--model.lora.rank=2",) if "dp" in layout else ()
    losses = ("--train.loss_type=apo_zero", "--train.sft_weight=0.5") if "sp" in layout else ()
    flags = (*pair_flags(tiny_run, tmp_path), *STEPS, *adapters, *losses)
    flags += (f"--data.eval={tmp_path / 'pairs.jsonl'}",)
    alone, together = tmp_path / "alone", tmp_path / "together"
    for run, more in ((alone, ()), (together, (layout,))):
        # a cache of its own: several processes compute the reference themselves
        own = f"--data.cache_dir={run}-cache"
        arguments = tiny_run.arguments(run, *flags, own, *more)
        if run == alone:
            assert main(arguments) == 0
            continue
        ended = Launched(tmp_path / "said", run_command, arguments).ended(LIMIT_S)
        assert [one.code for one in ended] == [0, 0], ended[0].said + ended[1].said
        assert "reference: 16 answers computed" in ended[0].said
    for ours, truth in zip(figures(together), figures(alone), strict=True):
        assert ours == pytest.approx(truth, rel=1e-9, abs=1e-11)
    found, expected = weights(together), weights(alone)
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        error = (weight - expected[name]).norm() / expected[name].norm().clamp(min=1e-300)
        assert error <= 1e-12, f"{name}: {error:.1e}"


def gpt2_run(folder: Path, dropout: float) -> TinyRun:
    """A run of a model whose norms round nothing to float32."""
    tiny = build_tiny_run(folder)
    config = GPT2Config(
        vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=512, attn_pdrop=0.0,
        resid_pdrop=dropout, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tiny.folder / "model")
    return tiny


def tell_trees(arguments: list[str]) -> None:
    """Run a command; say how many trees each plan has."""
    from furlong.train.batches import BatchPlanner

    make = BatchPlanner.joined

    def told(*args: Any) -> Any:
        planned = make(*args)
        print(f"{len(planned.plan.trees)} trees")
        return planned

    BatchPlanner.joined = told  # type: ignore[method-assign]
    run_command(arguments)


@pytest.mark.slow
def test_pairs_share_their_prompt(tmp_path: Path) -> None:
    tiny = gpt2_run(tmp_path / "tiny", 0.0)
    flags = (*pair_flags(tiny, tmp_path, 10), *STEPS, "--chunks.size=8")
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert main(tiny.arguments(alone, *flags)) == 0
    arguments = tiny.arguments(together, *flags, "--parallel.dp=2")
    ended = Launched(tmp_path / "said", tell_trees, arguments).ended(LIMIT_S)
    assert [one.code for one in ended] == [0, 0], ended[0].said + ended[1].said
    assert "3 trees" in ended[0].said  # of the three pairs of a step
    found, expected = weights(together), weights(alone)
    for name, weight in found.items():
        assert float((weight - expected[name]).norm() / expected[name].norm()) <= 1e-12, name


def test_dropout_of_the_model_is_refused(tmp_path: Path) -> None:
    """Its losses would be of other draws than the gradients."""
    tiny = gpt2_run(tmp_path / "tiny", 0.1)
    flags = (*pair_flags(tiny, tmp_path), "--train.steps=2", "--train.epochs=null")
    arguments = tiny.arguments(tmp_path / "run", *flags, "--parallel.dp=2")
    ended = Launched(tmp_path / "said", run_command, arguments).ended(LIMIT_S)
    assert [one.code for one in ended] == [2, 2], ended[0].said
    assert "2 processes and a model that draws random numbers" in ended[0].said
    assert ended[0].said.count("draws random numbers in train mode") == 1

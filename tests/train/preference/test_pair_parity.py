"""Two steps of `train.loss: dpo` against plain torch over transformers' own forward, in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pair_runs import pair_flags
from helpers.tiny_runs import TinyRun
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from furlong.cli.main import main
from furlong.config.schema import DataConfig, TrainConfig
from furlong.data.dataset import load_data
from furlong.data.loader import Epochs, iterate_batches, sequence_tensors
from furlong.data.tokenize import IGNORE_INDEX, Sequence
from furlong.models.build import build_model
from furlong.plan.lengths import StepSize
from furlong.train.optim import build_optimizer, build_schedule

LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": "all-linear"}
BETA = 0.3


def log_prob(model: Any, sequence: Sequence) -> Tensor:
    """The sum over the answer's tokens, by one forward of the whole sequence."""
    tensors = sequence_tensors(sequence)
    logits = model(input_ids=tensors["input_ids"][None], use_cache=False).logits[0, :-1]
    labels = tensors["labels"][1:]
    learnt = labels != IGNORE_INDEX
    log_probs = logits.log_softmax(-1)[learnt]
    return log_probs.gather(-1, labels[learnt][:, None]).sum()


def naive_loss(loss_type: str, smoothing: float, ratios: list[Tensor], counts: list[int]) -> Tensor:
    """A pair's loss, written out."""
    if loss_type in ("ipo", "sigmoid_norm"):
        ratios = [ratio / count for ratio, count in zip(ratios, counts, strict=True)]
    delta = ratios[0] - ratios[1]
    if loss_type == "apo_zero":
        return 1 - torch.sigmoid(BETA * ratios[0]) + torch.sigmoid(BETA * ratios[1])
    if loss_type == "apo_down":
        return torch.sigmoid(BETA * ratios[0]) + 1 - torch.sigmoid(BETA * delta)
    if loss_type == "ipo":
        return (delta - 1 / (2 * BETA)).square()
    right = -torch.log(torch.sigmoid(BETA * delta))
    wrong = -torch.log(torch.sigmoid(-BETA * delta))
    if loss_type == "robust":
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return (1 - smoothing) * right + smoothing * wrong


def plain_dpo(
    tiny: TinyRun,
    pairs: Path,
    cache: Path,
    *,
    lora: bool,
    loss_type: str,
    smoothing: float,
    sft_weight: float,
) -> tuple[Any, list[float], list[float]]:
    """The model after two steps, the losses and the margins, as a user of transformers would have
    them."""
    name = str(tiny.folder / "model")
    model = build_model(name, dtype=torch.float64, lora=LORA if lora else None)
    reference = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64)
    own = DataConfig(train=str(pairs), format="preference", max_seq_len=512, cache_dir=str(cache))
    data = load_data(own.train, AutoTokenizer.from_pretrained(name), own)
    settings = TrainConfig(lr=1e-2)
    optimizer = build_optimizer(model, settings)
    schedule = build_schedule(optimizer, settings, 2)
    epochs = Epochs(data.mixture, StepSize(3), 0, data.unit_lens)
    batches = iterate_batches(data, data.units, epochs)
    losses, margins = [], []
    for _ in range(2):
        optimizer.zero_grad()
        sequences = next(batches).sequences
        total, margin = torch.zeros((), dtype=torch.float64), 0.0
        num_chosen = sum(one.num_valid_tokens for one in sequences[::2])
        for pair in zip(sequences[::2], sequences[1::2], strict=True):
            with torch.no_grad():
                before = [log_prob(reference, one) for one in pair]
            after = [log_prob(model, one) for one in pair]
            ratios = [now - then for now, then in zip(after, before, strict=True)]
            counts = [one.num_valid_tokens for one in pair]
            total = total + naive_loss(loss_type, smoothing, ratios, counts) / 3
            total = total - sft_weight * after[0] / num_chosen
            margin += BETA * float((ratios[0] - ratios[1]).detach()) / 3
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(total.detach()))
        margins.append(margin)
    return model, losses, margins


@pytest.mark.parametrize(
    ("loss_type", "smoothing", "sft_weight", "keep", "size", "lora"),
    [
        ("sigmoid", 0.0, 0.7, "kv", 32, False),
        ("sigmoid", 0.1, 0.0, "attention", 25, True),
        ("sigmoid_norm", 0.0, 0.0, "input", 48, False),
        ("robust", 0.2, 0.0, "kv", 17, False),
        ("ipo", 0.0, 0.2, "attention", 400, False),
        ("apo_zero", 0.0, 0.0, "kv", 64, False),
        ("apo_down", 0.0, 0.3, "kv", 32, True),
    ],
)
@pytest.mark.few(2)
def test_two_steps(
    tiny_run: TinyRun, tmp_path: Path, loss_type: str, smoothing: float, sft_weight: float,
    keep: str, size: int, lora: bool,
) -> None:  # fmt: skip
    flags = pair_flags(tiny_run, tmp_path)
    pairs = tmp_path / "pairs.jsonl"
    options = (
        "--model.dtype=float64", f"--train.loss_type={loss_type}", f"--train.beta={BETA}",
        f"--train.label_smoothing={smoothing}", f"--train.sft_weight={sft_weight}",
        f"--chunks.keep={keep}", f"--chunks.size={size}",
        "--train.steps=2", "--train.epochs=null", "--train.eval_every_steps=0",
    )  # fmt: skip
    if lora:
        options += ("--model.lora.rank=4", "--model.lora.alpha=8")
    run = tmp_path / "run"
    assert main(tiny_run.arguments(run, *flags, *options)) == 0
    expected, losses, margins = plain_dpo(
        tiny_run, pairs, tmp_path / "cache", lora=lora, loss_type=loss_type, smoothing=smoothing,
        sft_weight=sft_weight,
    )  # fmt: skip
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "grad_norm" in line]
    assert [line["loss"] for line in steps] == pytest.approx(losses, rel=1e-12)
    assert [line["rewards/margins"] for line in steps] == pytest.approx(margins, abs=1e-11)
    assert math.isclose(steps[0]["rewards/margins"], 0, abs_tol=1e-12)
    ours = trained_weights(run)
    theirs = {n: p.detach() for n, p in expected.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        error = (weight - theirs[name]).norm() / theirs[name].norm()
        assert error <= 1e-12, f"{name}: {error:.1e}"


def trained_weights(run: Path) -> dict[str, Tensor]:
    """Those of the last checkpoint, which are as wide as they were trained."""
    from safetensors.torch import load_file

    folder = run / "checkpoints" / "step-00000002"
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return {n.removeprefix("model."): x for n, x in tensors.items() if n.startswith("model.")}

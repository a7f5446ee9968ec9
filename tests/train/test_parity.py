"""Steps of the loop against a plain loop over transformers' own forward, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bare_trainers import BareTrainer, Evaluating
from transformers import LlamaConfig, get_scheduler

from furlong.api import Engine
from furlong.data.loader import LoaderState, TrainBatch
from furlong.data.tokenize import IGNORE_INDEX, Sequence
from furlong.models.build import build_model, export_model
from furlong.planners.options import ChunkOptions
from furlong.train.evaluation import Evaluation, evaluate
from furlong.train.memory import Fitting

NUM_STEPS = 20
WARMUP_STEPS = 3
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": "all-linear"}
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
WEIGHT_DECAY = 0.1
MIN_LR = 1e-3
HF_SCHEDULES: dict[str, tuple[str, Any]] = {
    "cosine": ("cosine_with_min_lr", {"min_lr": MIN_LR}),
    "linear": ("polynomial", {"lr_end": MIN_LR, "power": 1.0}),
}


def make_batches() -> list[TrainBatch]:
    """Batches of short and long sequences with masked prompts; one chunk and more has no label."""
    draw = np.random.default_rng(5)
    batches = []
    for step in range(NUM_STEPS):
        sequences = []
        for seq_id, seq_len in enumerate(draw.integers(1, 40, size=4)):
            ids = draw.integers(0, SHAPE["vocab_size"], size=seq_len).astype(np.int32)
            labels = ids.copy()
            labels[: draw.integers(0, seq_len + 1)] = IGNORE_INDEX
            sequences.append(Sequence(seq_id, f"step {step}", ids, labels))
        batches.append(TrainBatch(tuple(sequences), LoaderState(0, step + 1)))
    assert all(batch.num_valid_tokens for batch in batches)
    return batches


def build(tmp_path: Path, family: str, lora: bool) -> Any:
    folder = tmp_path / family
    if not folder.exists():
        LlamaConfig(**SHAPE).save_pretrained(tmp_path / f"{family}-config")
        random = build_model(str(tmp_path / f"{family}-config"), init="random", dtype=torch.float64)
        export_model(random, None, folder, dtype=torch.float64)
    return build_model(str(folder), dtype=torch.float64, lora=LORA if lora else None)


def plain_loop(
    model: Any, batches: list[TrainBatch], max_grad_norm: float, schedule: str
) -> tuple[list[float], list[float]]:
    """What a user of transformers would write: losses before each update, gradient norms."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}]
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, **SETTINGS)
    name, floor = HF_SCHEDULES[schedule]
    scheduler = get_scheduler(name, optimizer, WARMUP_STEPS, NUM_STEPS + 1, floor)
    optimizer.step()  # without gradients: nothing but the order that torch wants
    scheduler.step()  # its first rate is zero
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for sequence in batch.tensors():
            logits = model(input_ids=sequence["input_ids"][None], use_cache=False).logits[0]
            loss_sum = torch.nn.functional.cross_entropy(
                logits[:-1], sequence["labels"][1:], ignore_index=IGNORE_INDEX, reduction="sum"
            )
            loss = loss_sum / batch.num_valid_tokens
            if len(sequence["labels"]) > 1:
                loss.backward()
            total += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(decayed + others, max_grad_norm)))
        optimizer.step()
        scheduler.step()
        losses.append(total)
    return losses, norms


@pytest.mark.parametrize(
    ("family", "lora", "size", "num_retained", "max_grad_norm", "schedule"),
    [
        ("llama", False, 16, 0, 1.0, "cosine"),
        ("llama", True, 8, 2, 0.4, "linear"),
    ],
    ids=["llama", "lora"],
)
@pytest.mark.few(1)
def test_steps_are_those_of_a_plain_loop(
    tmp_path: Path, family: str, lora: bool, size: int, num_retained: int, max_grad_norm: float,
    schedule: str,
) -> None:  # fmt: skip
    batches = make_batches()
    reference = build(tmp_path, family, lora)
    losses, norms = plain_loop(reference, batches, max_grad_norm, schedule)
    assert min(norms) < max_grad_norm < max(norms)  # some steps are clipped, some are not

    model = build(tmp_path, family, lora)
    engine = Engine(model, max_seq_len=64)
    fitting = Fitting(ChunkOptions(size=size, num_retained=num_retained))

    def held_out_loss(trainer: BareTrainer) -> Evaluation:
        evaluation = evaluate(trainer.engine, batches[:3], trainer.fitting, used=trainer.used)
        assert evaluation is not None
        return evaluation

    figures = Evaluating(
        held_out_loss, tmp_path, engine, model, batches, fitting, num_steps=NUM_STEPS,
        lr_schedule=schedule, warmup_steps=WARMUP_STEPS, max_grad_norm=max_grad_norm, min_lr=MIN_LR,
        weight_decay=WEIGHT_DECAY, say=lambda line: None, eval_every_steps=0, **SETTINGS,
    )  # fmt: skip
    report = figures.train()
    assert report is not None
    np.testing.assert_allclose(figures.losses, losses, rtol=1e-10)
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        error = (weight - theirs[name]).norm() / theirs[name].norm().clamp_min(1e-300)
        assert error <= 1e-10, name
    assert figures.progress.eval_loss_before != report.eval_loss_after
    held_out = sum(batch.num_valid_tokens for batch in batches[:3])
    expected = sum(_loss_sum(reference, batch) for batch in batches[:3]) / held_out
    assert report.eval_loss_after == pytest.approx(expected, rel=1e-10)


def _loss_sum(model: Any, batch: TrainBatch) -> float:
    total = 0.0
    with torch.no_grad():
        for sequence in batch.tensors():
            logits = model(input_ids=sequence["input_ids"][None], use_cache=False).logits[0]
            total += torch.nn.functional.cross_entropy(
                logits[:-1], sequence["labels"][1:], ignore_index=IGNORE_INDEX, reduction="sum"
            ).item()
    return total

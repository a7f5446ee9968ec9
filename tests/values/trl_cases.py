"""Runs of stock TRL trainers, with models as they are and behind the door, side by side.

TRL's head computes in float32 whatever the model is; both sides use it, on equal hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from helpers.byte_tokenizer import byte_tokenizer
from helpers.tiny_families import build
from helpers.wide_norms import widen_norms
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification

import furlong

BOUND = 1e-12
SIZE = 16
OPTIONS = furlong.ChunkOptions(size=SIZE, keep="kv")
LORA = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
# without the head, which TRL's own head does not call
LAYERS = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
_TIMES = ("time", "per_second", "runtime")


tokenizer = partial(byte_tokenizer, padding_side="left")


def small(seed: int = 0, **changes: Any) -> Any:
    """With float64 norms: where answers share a prompt, gradients are summed before them."""
    return widen_norms(build("llama", vocab_size=260, num_hidden_layers=2, seed=seed, **changes))


def adapted(model: Any) -> Any:
    """The model with adapters that were trained before."""
    torch.manual_seed(5)
    model = peft.get_peft_model(model, LAYERS).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def common(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": 5, "per_device_train_batch_size": 2,
        "learning_rate": 1e-2, "optim": "sgd", "use_cpu": True, "bf16": False, "report_to": [],
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "seed": 3,
        "gradient_checkpointing": False, **changes,
    }  # fmt: skip


def words(seed: int, num_words: int) -> str:
    return " ".join(f"w{(seed * 7 + i * i) % 23}" for i in range(num_words))


def small_rewarding() -> Any:
    """The same with a head of one score in the place of the language model's."""
    config = small().config
    config.num_labels = 1
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).double().train()
    return widen_norms(model)


def pairs(num_pairs: int = 16) -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": words(i, 8 + i % 5), "chosen": words(i + 1, 3 + i % 7),
             "rejected": words(i + 2, 2 + i % 9)}
            for i in range(num_pairs)
        ]
    )  # fmt: skip


def compare(make: Callable[[Callable[[Any], Any]], Any], *, divides: bool = False) -> None:
    """The trainer that `make(of)` builds, with models as they are and behind the door. `divides`:
    whether the weights are divided among all processes there."""
    torch.manual_seed(11)
    own, own_logs = _trained(make(lambda model: model))
    rows: list[int] = []

    def note_rows(_: nn.Module, given: Any) -> None:
        if torch.is_grad_enabled():
            rows.append(given[0].shape[1])

    def behind_the_door(model: Any) -> Any:
        more: Any = {"process_group": dist.group.WORLD, "reduction": "mean"} if divides else {}
        model = furlong.chunked(model, OPTIONS, **more)
        layer = model.get_decoder().layers[0]
        layer.register_forward_pre_hook(note_rows)
        return model

    torch.manual_seed(11)
    trainer = make(behind_the_door)
    found, logs = _trained(trainer)
    assert not divides or all(isinstance(p, DTensor) for p in trainer.model.parameters())
    assert len(rows) > 10 and max(rows) <= SIZE, "it did not go by the door"
    for name, x in own.items():
        assert float((found[name] - x).abs().max()) <= BOUND * max(1, float(x.abs().max())), name
    assert len(logs) == len(own_logs) > 0
    for mine, theirs in zip(logs, own_logs, strict=True):
        for key in (key for key in theirs if not any(time in key for time in _TIMES)):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-9, abs=1e-12), key


def squared_errors(make: Callable[[Callable[[Any], Any], bool], Any]) -> tuple[float, float]:
    """The squared distances of the weights of `make(of, bf16)` from those of a run in float64:
    behind the door, and without it."""

    def run(of: Callable[[Any], Any], bf16: bool) -> torch.Tensor:
        torch.manual_seed(11)
        dtype = torch.float32 if bf16 else torch.float64
        weights, _ = _trained(make(lambda model: of(model.to(dtype)), bf16))
        return torch.cat([x.double().flatten() for x in weights.values()])

    truth = run(lambda model: model, False)
    own = run(lambda model: model, True)
    found = run(lambda model: furlong.chunked(model, OPTIONS), True)
    return float((found - truth).norm() ** 2), float((own - truth).norm() ** 2)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    named = ((n, p.detach()) for n, p in trainer.model.named_parameters())
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.clone() for n, p in named}


def _trained(trainer: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    start = weights_of(trainer)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log or "eval_loss" in log]
    weights = weights_of(trainer)
    assert any(float((x - start[n]).abs().max()) > 1e-6 for n, x in weights.items())
    return weights, logs

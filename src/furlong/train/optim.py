"""Optimizers by name, and the course of their learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from furlong.config.schema import TrainConfig

_HF_NAMES = {"constant": "constant_with_warmup"}
"""Names of transformers' schedules that differ from the run's."""


class Kind(NamedTuple):
    """An optimizer."""

    build: Callable[[list[dict[str, Any]], TrainConfig, bool], torch.optim.Optimizer]
    """Gets groups of parameters, the settings, and whether they are on a GPU."""
    new_state: Callable[[Tensor, bool], dict[str, Tensor]]
    """The state of a parameter before its first step; the flag says whether one kernel updates
    all."""
    num_moments: int
    """Numbers that a checkpoint holds for each weight beside it."""


def _adamw(
    groups: list[dict[str, Any]], settings: TrainConfig, on_gpu: bool
) -> torch.optim.Optimizer:
    # on a GPU one kernel updates all, without temporaries of the size of the weights
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=on_gpu or None
    )


def _adamw_state(parameter: Tensor, is_fused: bool) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), device=parameter.device if is_fused else "cpu"),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


OPTIMIZERS: Mapping[str, Kind] = {"adamw": Kind(_adamw, _adamw_state, 2)}


def build_optimizer(
    parameters: Iterable[nn.Parameter], settings: TrainConfig, name: str = "adamw"
) -> torch.optim.Optimizer:
    """The optimizer of what requires a gradient. Norms and biases (one axis) do not decay. A
    process of a pipeline may hold none of one kind, or nothing that is trained."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    on_gpu = any(p.is_cuda for p in trained)
    return OPTIMIZERS[name].build(groups, settings, on_gpu)


def make_state(optimizer: torch.optim.Optimizer, name: str = "adamw") -> None:
    """Give the optimizer its state, as its first step would: what does not fit beside it fails in
    that step, and not in the second one. Trained weights become memory of this process's own."""
    is_fused = bool(optimizer.defaults.get("fused"))
    with torch.no_grad():
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            parameter.mul_(1)  # loaded weights lie in a mapped file until they are written
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = OPTIMIZERS[name].new_state(parameter, is_fused)


def build_schedule(
    optimizer: torch.optim.Optimizer, settings: TrainConfig, num_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate per step: that of transformers' `get_scheduler` for one step more, without
    its first step, whose rate is zero, and with a warm-up of at least one step. So no step is
    without effect: the rate would reach 0 one step after the last."""
    from transformers import get_scheduler

    schedule: torch.optim.lr_scheduler.LambdaLR = get_scheduler(
        _HF_NAMES.get(settings.schedule, settings.schedule),
        optimizer,
        max(1, math.ceil(num_steps * settings.warmup_ratio)),
        num_steps + 1,
    )
    schedule.lr_lambdas = [
        lambda step, factor=factor: factor(step + 1)  # type: ignore[misc]
        for factor in schedule.lr_lambdas
    ]
    set_rate(schedule)
    return schedule


def set_rate(schedule: torch.optim.lr_scheduler.LambdaLR, step: int = 0) -> None:
    """Put a schedule where it is after so many steps; its rates follow from their number alone."""
    schedule.last_epoch = step
    rates = [
        base * factor(step)
        for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates

"""The optimizer, and the course of its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from furlong.config.schema import TrainConfig

_HF_NAMES = {
    "constant": "constant_with_warmup",
    "cosine": "cosine_with_min_lr",
    "linear": "polynomial",  # to a floor, as its linear one does not
}
"""transformers' names of the schedules."""


def build_optimizer(
    parameters: Iterable[nn.Parameter], settings: TrainConfig
) -> torch.optim.Optimizer:
    """AdamW for what requires a gradient. Norms and biases (one axis) do not decay. A process of a
    pipeline may hold none of one kind, or nothing that is trained."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    # on a GPU one kernel updates all, without temporaries of the size of the weights
    fused = any(p.is_cuda for p in trained) or None
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused
    )


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW its state, as its first step would: what does not fit beside it fails in that
    step, and not in the second one. Trained weights become memory of this process's own."""
    is_fused = bool(optimizer.defaults.get("fused"))
    with torch.no_grad():
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            parameter.mul_(1)  # loaded weights lie in a mapped file until they are written
            if not (state := optimizer.state[parameter]):
                state["step"] = torch.zeros((), device=parameter.device if is_fused else "cpu")
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def warmup_steps_of(settings: TrainConfig, num_steps: int) -> int:
    """Steps of the warm-up, at least one; a number below 1 is a share of all, rounded up."""
    given = settings.warmup_steps
    return max(1, int(given) if given >= 1 else math.ceil(num_steps * given))


def build_schedule(
    optimizer: torch.optim.Optimizer, settings: TrainConfig, num_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate per step: that of transformers' `get_scheduler` for one step more, without
    its first step, whose rate is zero, and with a warm-up of at least one step. So no step is
    without effect: the rate would reach 0, or `min_lr`, one step after the last."""
    from transformers import get_scheduler

    floors: dict[str, Any] = {
        "cosine": {"min_lr": settings.min_lr},
        "linear": {"lr_end": settings.min_lr, "power": 1.0},
    }
    schedule: torch.optim.lr_scheduler.LambdaLR = get_scheduler(
        _HF_NAMES[settings.schedule],
        optimizer,
        warmup_steps_of(settings, num_steps),
        num_steps + 1,
        floors.get(settings.schedule),
    )
    schedule.lr_lambdas = [
        # no rate is taken behind the last step, where a warm-up of all steps has none
        lambda step, factor=factor: factor(min(step + 1, num_steps))  # type: ignore[misc]
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

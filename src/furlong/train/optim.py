"""The optimizer, and the course of its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from furlong.config.schema import TrainConfig

_HF_NAMES = {"constant": "constant_with_warmup"}
"""Names of transformers' schedules that differ from the run's."""


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

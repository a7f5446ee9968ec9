"""AdamW and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

LRSchedule = Literal["cosine", "linear", "constant"]


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """AdamW over what requires a gradient. Norms and biases (one axis) do not decay. A process of a
    pipeline may hold none of one kind, or nothing that is trained. On a GPU one kernel updates all,
    without temporaries of the size of the weights."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    on_gpu = any(p.is_cuda for p in trained)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=on_gpu or None)


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW its moments, as its first step would: what does not fit beside them fails in that
    step, and not in the second one. Trained weights become memory of this process's own."""
    is_fused = bool(optimizer.defaults.get("fused"))
    with torch.no_grad():
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            parameter.mul_(1)  # loaded weights lie in a mapped file until they are written
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device if is_fused else "cpu"),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }


def build_schedule(
    optimizer: torch.optim.Optimizer, schedule: LRSchedule, *, num_steps: int, warmup_ratio: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate per step: that of transformers' `get_scheduler` for one step more, without
    its first step, whose rate is zero, and with a warm-up of at least one step."""
    warmup_steps = max(1, math.ceil(num_steps * warmup_ratio))
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(schedule, step, warmup_steps, num_steps)
    )


def lr_factor(schedule: LRSchedule, step: int, warmup_steps: int, num_steps: int) -> float:
    """Share of the peak learning rate that step number `step` (from 0) uses.

    It rises in equal parts up to 1 in the last of `warmup_steps` (at least 1), and falls in equal
    parts towards 0, which it would reach one step after the last: no step is without effect.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step + 1 - warmup_steps) / (num_steps + 1 - warmup_steps)
    match schedule:
        case "cosine":
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
        case "linear":
            return max(0.0, 1.0 - progress)
        case "constant":
            return 1.0

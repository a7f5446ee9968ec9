"""Learning rates and decay."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import get_scheduler

from furlong.train.setup.optimizer import (
    LRSchedule,
    build_optimizer,
    build_schedule,
    lr_factor,
    make_state,
)

ADAMW = {"lr": 1.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.5}
HF_NAME = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(
    ("num_steps", "ratio", "warmup_steps"),
    [(30, 0.1, 3), (7, 0.03, 1), (5, 0.0, 1), (4, 1.0, 4), (2, 0.03, 1), (1, 0.03, 1)],
)
def test_the_schedule_is_that_of_transformers_without_its_step_of_zero(
    schedule: LRSchedule, num_steps: int, ratio: float, warmup_steps: int
) -> None:
    optimizers = [torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.7) for _ in range(2)]
    ours = build_schedule(optimizers[0], schedule, num_steps=num_steps, warmup_ratio=ratio)
    theirs = get_scheduler(HF_NAME[schedule], optimizers[1], warmup_steps, num_steps + 1)
    assert theirs.get_last_lr() == [0.0]
    for _ in range(num_steps):
        optimizers[1].step()
        theirs.step()
        assert ours.get_last_lr() == pytest.approx(theirs.get_last_lr(), rel=1e-14, abs=1e-16)
        assert ours.get_last_lr()[0] > 0
        optimizers[0].step()
        ours.step()


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_warm_up_rises_in_equal_parts_to_the_peak(schedule: LRSchedule) -> None:
    rates = [lr_factor(schedule, step, 4, 10) for step in range(10)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert [lr_factor(schedule, 0, 1, 1)] == [1.0]
    halves = {"cosine": 0.5, "linear": 0.5, "constant": 1.0}
    two = [lr_factor(schedule, step, 1, 2) for step in range(2)]
    assert two == pytest.approx([1.0, halves[schedule]])


def test_norms_biases_and_frozen_weights_do_not_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 2))
    model[2].requires_grad_(False)
    optimizer = build_optimizer(model.parameters(), **ADAMW)
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    expected = {id(model[0].weight): 0.5, id(model[0].bias): 0.0}
    expected |= {id(model[1].weight): 0.0, id(model[1].bias): 0.0}
    assert decays == expected


def test_on_a_gpu_one_kernel_updates_all():
    with FakeTensorMode():
        for device, is_fused in (("cuda", True), ("cpu", False)):
            weights = [nn.Parameter(torch.empty(shape, device=device)) for shape in ((2, 3), (3,))]
            optimizer = build_optimizer(weights, **ADAMW)
            make_state(optimizer)
            assert bool(optimizer.defaults["fused"]) is is_fused
            steps = [state["step"].device.type for state in optimizer.state.values()]
            assert steps == [device, device], "the fused kernel refuses steps on the CPU"

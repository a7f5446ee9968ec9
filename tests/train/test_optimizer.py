"""Learning rates and decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import get_scheduler

from furlong.config.schema import TrainConfig
from furlong.train.optim import (
    build_optimizer,
    build_schedule,
    make_state,
    set_rate,
)

ADAMW = TrainConfig(lr=1.0, weight_decay=0.5)
HF_NAME = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(
    ("num_steps", "ratio", "warmup_steps"),
    [(30, 0.1, 3), (7, 0.03, 1), (5, 0.0, 1), (4, 1.0, 4), (2, 0.03, 1), (1, 0.03, 1)],
)
def test_the_schedule_is_that_of_transformers_without_its_step_of_zero(
    schedule: Any, num_steps: int, ratio: float, warmup_steps: int
) -> None:
    settings = TrainConfig(schedule=schedule, warmup_ratio=ratio)
    optimizers = [torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.7) for _ in range(2)]
    ours = build_schedule(optimizers[0], settings, num_steps)
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
def test_warm_up_rises_in_equal_parts_to_the_peak(schedule: Any) -> None:
    def rates(num_steps: int, ratio: float) -> list[float]:
        settings = TrainConfig(schedule=schedule, warmup_ratio=ratio)
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        course = build_schedule(optimizer, settings, num_steps)
        found = []
        for _ in range(num_steps):
            found += course.get_last_lr()
            optimizer.step()
            course.step()
        return found

    ten = rates(10, 0.4)
    assert ten[:4] == [0.25, 0.5, 0.75, 1.0]
    assert ten[4:] == sorted(ten[4:], reverse=True)
    assert rates(1, 1.0) == [1.0]
    halves = {"cosine": 0.5, "linear": 0.5, "constant": 1.0}
    assert rates(2, 0.5) == pytest.approx([1.0, halves[schedule]])


def test_a_run_of_more_steps_goes_on_at_their_rate() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    settings = TrainConfig(schedule="linear", warmup_ratio=0.0)
    optimizer = torch.optim.AdamW([parameter], lr=1.0)
    long = build_schedule(optimizer, settings, 8)
    set_rate(long, 2)
    assert long.get_last_lr() == [optimizer.param_groups[0]["lr"]] == [pytest.approx(6 / 8)]


def test_norms_biases_and_frozen_weights_do_not_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 2))
    model[2].requires_grad_(False)
    optimizer = build_optimizer(model.parameters(), ADAMW)
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    expected = {id(model[0].weight): 0.5, id(model[0].bias): 0.0}
    expected |= {id(model[1].weight): 0.0, id(model[1].bias): 0.0}
    assert decays == expected


def test_on_a_gpu_one_kernel_updates_all():
    with FakeTensorMode():
        for device, is_fused in (("cuda", True), ("cpu", False)):
            weights = [nn.Parameter(torch.empty(shape, device=device)) for shape in ((2, 3), (3,))]
            optimizer = build_optimizer(weights, ADAMW)
            make_state(optimizer)
            assert bool(optimizer.defaults["fused"]) is is_fused
            steps = [state["step"].device.type for state in optimizer.state.values()]
            assert steps == [device, device], "the fused kernel refuses steps on the CPU"

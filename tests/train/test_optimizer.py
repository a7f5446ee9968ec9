"""Learning rates and decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import TrainingArguments, get_scheduler

from furlong.config.schema import RunConfig, TrainConfig
from furlong.train.optim import (
    build_optimizer,
    build_schedule,
    make_state,
    set_rate,
    warmup_steps_of,
)

ADAMW = TrainConfig(lr=1.0, weight_decay=0.5)
HF = {
    ("cosine", 0.0): ("cosine", None),
    ("cosine", 0.1): ("cosine_with_min_lr", {"min_lr": 0.1}),
    ("linear", 0.0): ("linear", None),
    ("linear", 0.1): ("polynomial", {"lr_end": 0.1, "power": 1.0}),
    ("constant", 0.0): ("constant_with_warmup", None),
}


@pytest.mark.parametrize(("schedule", "floor"), HF)
@pytest.mark.parametrize(
    ("num_steps", "given", "warmup_steps"),
    [(30, 0.1, 3), (7, 0.03, 1), (5, 0.0, 1), (4, 4, 4), (2, 1, 1), (1, 0.03, 1), (3, 7, 7),
     (3, 4, 4)],
)  # fmt: skip
def test_the_schedule_is_that_of_transformers_without_its_step_of_zero(
    schedule: Any, floor: float, num_steps: int, given: float, warmup_steps: int
) -> None:
    settings = TrainConfig(lr=0.7, min_lr=floor, schedule=schedule, warmup_steps=given)
    optimizers = [torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.7) for _ in range(2)]
    ours = build_schedule(optimizers[0], settings, num_steps)
    name, more = HF[schedule, floor]
    theirs = get_scheduler(name, optimizers[1], warmup_steps, num_steps + 1, more)
    assert theirs.get_last_lr() == [0.0]
    for _ in range(num_steps):
        optimizers[1].step()
        theirs.step()
        assert ours.get_last_lr() == pytest.approx(theirs.get_last_lr(), rel=1e-14, abs=1e-16)
        assert ours.get_last_lr()[0] > 0
        optimizers[0].step()
        ours.step()


def test_warm_up_has_the_two_meanings_of_transformers() -> None:
    for given in (0.03, 0.5, 0.999, 1, 7, 100):
        theirs = TrainingArguments(warmup_steps=given).get_warmup_steps(40)
        assert warmup_steps_of(TrainConfig(warmup_steps=given), 40) == theirs


@pytest.mark.parametrize(
    ("key", "flags"),
    [
        ("train.min_lr", {"min_lr": 1.0, "lr": 1.0}),
        ("train.min_lr", {"min_lr": 1e-6, "schedule": "constant"}),
        ("warmup_steps", {"warmup_steps": 2.5}),
    ],
)
def test_rates_that_cannot_be_are_refused(key: str, flags: dict[str, Any]) -> None:
    run = {"model": {"name": "m"}, "data": {"train": ["d"]}, "out": "o"}
    RunConfig.model_validate(run | {"train": {"steps": 1, "sequences_per_step": 1}})
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate(run | {"train": {"steps": 1, "sequences_per_step": 1} | flags})
    assert key in str(caught.value.errors())


def test_a_run_of_more_steps_goes_on_at_their_rate() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    settings = TrainConfig(schedule="linear", warmup_steps=0.0)
    optimizer = torch.optim.AdamW([parameter], lr=1.0)
    long = build_schedule(optimizer, settings, 8)
    set_rate(long, 2)
    assert long.get_last_lr() == [optimizer.param_groups[0]["lr"]] == [pytest.approx(6 / 8)]


def test_norms_biases_and_frozen_weights_do_not_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 2))
    model[2].requires_grad_(False)
    optimizer = build_optimizer(model, ADAMW)
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    expected = {id(model[0].weight): 0.5, id(model[0].bias): 0.0}
    expected |= {id(model[1].weight): 0.0, id(model[1].bias): 0.0}
    assert decays == expected


def test_on_a_gpu_one_kernel_updates_all():
    with FakeTensorMode():
        for device, is_fused in (("cuda", True), ("cpu", False)):
            weights = [nn.Parameter(torch.empty(shape, device=device)) for shape in ((2, 3), (3,))]
            optimizer = build_optimizer(nn.ParameterList(weights), ADAMW)
            make_state(optimizer)
            assert bool(optimizer.defaults["fused"]) is is_fused
            steps = [state["step"].device.type for state in optimizer.state.values()]
            assert steps == [device, device], "the fused kernel refuses steps on the CPU"

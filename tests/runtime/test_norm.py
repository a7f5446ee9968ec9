"""The norm of gradients, where there are none or infinite ones."""

from __future__ import annotations

import math
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from furlong.runtime.distributed.fsdp import clip_gradients


def test_without_a_bound_gradients_stay_as_they_are() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    weights[0].grad = torch.tensor([math.inf, 1.0])
    weights[1].grad = torch.tensor([1.0, 2.0])
    assert clip_gradients(weights, None) == math.inf
    assert weights[0].grad.tolist() == [math.inf, 1.0] and weights[1].grad.tolist() == [1.0, 2.0]


def test_a_stage_without_gradients_joins_the_sum_on_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's norm of no gradients lies on the CPU: there the other stages would wait for ever."""
    devices: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: devices.append(x.device.type))
    ranks: Any = SimpleNamespace(pp=2, mesh={"pp": SimpleNamespace(get_group=lambda: None)})
    with suppress(RuntimeError):  # a norm on meta has no value
        clip_gradients([nn.Parameter(torch.zeros(2, device="meta"))], None, ranks)
    assert devices == ["meta"]

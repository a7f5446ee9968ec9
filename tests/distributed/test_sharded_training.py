"""Updates of weights that several replicas share, and 16-bit computations on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed.sharded_cases import NUM_LAYERS, Step, llama, whole_grads
from helpers.gradients import (
    batch,
    num_labels,
    reference_loss,
    take_grads,
    total_norm,
    total_relative_error,
    worst_relative_error,
)
from helpers.ranks import run_ranks
from helpers.tiny_families import build
from torch import Tensor, nn

import furlong
from furlong.planners.orders.one_device import plan_on_device
from furlong.runtime.parallel.norm import clip_gradients
from furlong.runtime.parallel.ranks import Ranks, make_ranks

STEP = Step(((21, 4, 40), (17, 9)))
OPTIONS = furlong.ChunkOptions(size=8)
MAX_NORM = 0.5


def updated(
    model: nn.Module, ranks: Ranks | None, gradients: Callable[[], object]
) -> tuple[list[float], list[float]]:
    """Norms before clipping, and after it, of three steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    norms, clipped = [], []
    for max_norm in (None, MAX_NORM, MAX_NORM):
        optimizer.zero_grad()
        gradients()
        norms.append(clip_gradients(model.parameters(), max_norm, ranks))
        clipped.append(clip_gradients(model.parameters(), None, ranks))
        optimizer.step()
    return norms, clipped


def trains(rank: int) -> dict[str, Any]:
    """Three steps on both replicas, and the same in one process."""
    model, single, sequences = llama(), llama(), STEP.sequences()
    truth = updated(single, None, lambda: reference_loss(single, sequences))
    ranks = make_ranks(2, 1, 1, "cpu")
    engine = furlong.Engine(model, ranks=ranks)
    plan = STEP.plan(model)
    found = updated(model, ranks, lambda: engine.run(plan, sequences))
    weights = {n: p.detach().full_tensor() for n, p in model.named_parameters()}
    whole = {n: p.detach() for n, p in single.named_parameters()}
    return {
        "norms": found[0], "true norms": truth[0], "clipped": found[1],
        "weights": worst_relative_error(weights, whole),
        "moved": total_relative_error(whole, dict(llama().named_parameters())),
    }  # fmt: skip


def test_clipping_and_updates_are_those_of_one_process():
    first, second = run_ranks(trains, num_ranks=2)
    assert first == second
    assert first["norms"] == pytest.approx(first["true norms"], rel=1e-12)
    assert min(first["norms"]) > MAX_NORM
    assert first["clipped"][1:] == pytest.approx([MAX_NORM] * 2, rel=1e-5)  # torch adds 1e-6
    assert first["clipped"][0] == first["norms"][0]
    assert first["weights"] <= 1e-10 and first["moved"] > 0.1


LONG = Step(((128, 30), (70, 5, 20)))
"""With chunks of 4 tokens, 64 of them."""


def float32_model() -> nn.Module:
    return build("llama", torch.float32)


def bfloat16_model() -> nn.Module:
    return build("llama", torch.bfloat16)


def bfloat16_with_adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(bfloat16_model(), LoraConfig(r=4, target_modules=targets))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape) * 0.1
    return model


def rounds(rank: int, make: Callable[[], nn.Module], compute_dtype: torch.dtype | None) -> tuple:
    """The gradients' errors against float32 weights, on one process and on both replicas, and the
    dtypes that gradients have."""
    sequences, size = LONG.sequences(), furlong.ChunkOptions(size=4)
    torch.manual_seed(0)
    wide = make().float()
    reference_loss(wide, sequences)
    truth = take_grads(wide)
    torch.manual_seed(0)
    single = make()
    furlong.forward_backward(single, sequences, size, compute_dtype=compute_dtype)
    alone = total_relative_error(take_grads(single), truth)
    torch.manual_seed(0)
    model = make()
    ranks = make_ranks(2, 1, 1, "cpu")
    engine = furlong.Engine(model, ranks=ranks, compute_dtype=compute_dtype)
    plan = Step(LONG.lens, {"size": 4}).plan(model)
    assert len(plan.chunks) >= 60
    engine.run(plan, sequences)
    dtypes = {(p.dtype, p.grad.dtype) for p in model.parameters() if p.grad is not None}
    return alone, total_relative_error(whole_grads(model), truth), dtypes


@pytest.mark.parametrize(
    ("make", "compute_dtype"),
    [
        (float32_model, None),
        (float32_model, torch.bfloat16),
        (bfloat16_model, None),
        (bfloat16_with_adapters, torch.bfloat16),
    ],
)
def test_gradients_round_no_more_than_on_one_process(make, compute_dtype):
    for alone, shared, dtypes in run_ranks(rounds, make, compute_dtype, num_ranks=2):
        print(alone, shared, dtypes)
        assert shared <= 1.1 * alone
        assert all(weight == gradient for weight, gradient in dtypes)

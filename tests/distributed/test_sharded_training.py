"""Updates of weights that several replicas share, and 16-bit computations on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed.layout_cases import whole_grads
from distributed.sharded_cases import Step, llama
from helpers.ranks import run_all, run_ranks
from helpers.tiny_families import build
from torch import nn

import furlong
from furlong.runtime.distributed.fsdp import clip_gradients
from furlong.runtime.distributed.mesh import Ranks, make_ranks
from furlong.testing import reference_loss, take_grads, total_relative_error, worst_relative_error

STEP = Step(((21, 4, 40), (17, 9)))
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
        if ranks is not None:  # torch's own clipping works on the parts, too
            norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            assert norm.full_tensor() == clip_gradients(model.parameters(), None, ranks)
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
    (first, second), errors = run_all(trains, one_chunk, num_ranks=2, limit_s=120)
    assert max(errors) < 1e-2, "of a replica with one chunk"
    assert first == second
    assert first["norms"] == pytest.approx(first["true norms"], rel=1e-12)
    assert min(first["norms"]) > MAX_NORM
    assert first["clipped"][1:] == pytest.approx([MAX_NORM] * 2, rel=1e-5)  # torch adds 1e-6
    assert first["clipped"][0] == first["norms"][0]
    assert first["weights"] <= 1e-10 and first["moved"] > 0.1


LONG = Step(((64, 15), (35, 5, 8)), {"size": 4})
"""Of more than 30 chunks: sums in 16 bits would show."""


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


CASES = {
    "computes in bfloat16": (float32_model, torch.bfloat16),
    "is bfloat16": (bfloat16_model, None),
    "adapters": (bfloat16_with_adapters, torch.bfloat16),
}


def rounds(rank: int, ranks: Ranks, name: str) -> dict[str, Any]:
    """The gradients' errors against float32 weights, on one process and on both replicas, and the
    dtypes of weights and gradients."""
    make, compute_dtype = CASES[name]
    sequences, size = LONG.sequences(), furlong.ChunkOptions(**LONG.options)
    wide, single, model = (seeded(make) for _ in range(3))
    reference_loss(wide.float(), sequences)
    truth = take_grads(wide)
    furlong.forward_backward(single, sequences, size, compute_dtype=compute_dtype)
    engine = furlong.Engine(model, ranks=ranks, compute_dtype=compute_dtype)
    plan = LONG.plan(model)
    assert len(plan.chunks) > 30
    engine.run(plan, sequences)
    dtypes = {(p.dtype, p.grad.dtype) for p in model.parameters() if p.grad is not None}
    return {
        "alone": total_relative_error(take_grads(single), truth), "dtypes": dtypes,
        "shared": total_relative_error(whole_grads(model), truth),
    }  # fmt: skip


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def all_round(rank: int) -> dict[str, dict[str, Any]]:
    ranks = make_ranks(2, 1, 1, "cpu")
    return {name: rounds(rank, ranks, name) for name in CASES}


@pytest.mark.slow
def test_gradients_round_no_more_than_on_one_process():
    for found in run_ranks(all_round, num_ranks=2):
        for name, of in found.items():
            assert 1e-3 < of["shared"] <= 1.1 * of["alone"], (name, of)
            assert all(weight == gradient for weight, gradient in of["dtypes"]), name


def one_chunk(rank: int) -> float:
    """The error of replicas that compute in bfloat16, one of them in a single chunk: its head has a
    sum of tiles in float32, all else gradients in bfloat16."""
    sequences, size = SHORT.sequences(), furlong.ChunkOptions(size=8)
    single, model = float32_model(), float32_model()
    furlong.forward_backward(single, sequences, size, compute_dtype=torch.bfloat16)
    engine = furlong.Engine(model, ranks=make_ranks(2, 1, 1, "cpu"), compute_dtype=torch.bfloat16)
    engine.run(SHORT.plan(model), sequences)
    return total_relative_error(whole_grads(model), take_grads(single))


SHORT = Step(((21,), (7,)))

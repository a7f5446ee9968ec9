"""Pipelines of models as a run builds them: each process from the config, its own stage alone."""

from __future__ import annotations

import pytest
import torch
from helpers.batches import batch
from helpers.ranks import run_ranks
from helpers.tiny_families import config_of
from helpers.wide_norms import widen_norms

import furlong
from furlong.models.build import build_model, export_model
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import group_chunks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_1f1b
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import reference_loss, take_grads

LENS = (23, 4, 2, 17)
LORA = {"rank": 2, "alpha": 8.0, "dropout": 0.0, "target_modules": "all-linear"}


def planned(stages: tuple[int, ...]) -> ChunkPlan:
    return plan_1f1b(LENS, group_chunks(LENS, ChunkOptions(size=8)), stages=stages)


def built(folder: str, init: str, lora: bool, layers: range | None = None) -> torch.nn.Module:
    model = build_model(
        folder, init=init, dtype=torch.float64, lora=LORA if lora else None, seed=7, layers=layers
    )  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.01)
    return widen_norms(model)


HELD = (range(1), range(1, 3))
Grads = dict[str, torch.Tensor]


def step(rank: int, folder: str, init: str, lora: bool) -> Grads:
    model = built(folder, init, lora, HELD[rank])
    furlong.Engine(model, ranks=make_ranks(1, 1, 2, "cpu")).run(planned((1, 2)), batch(LENS))
    return take_grads(model)


@pytest.mark.parametrize(
    ("init", "lora"), [("random", False), ("pretrained", True)], ids=["random", "pretrained, lora"]
)
def test_stages_that_build_themselves_are_the_model_of_one_process(init, lora, tmp_path):
    config_of("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "config")
    folder = str(tmp_path / "config")
    if init == "pretrained":
        whole = build_model(folder, init="random", dtype=torch.float64, seed=1)
        folder = str(export_model(whole, None, tmp_path / "weights", dtype=torch.float64))
    model = built(folder, init, lora)
    reference_loss(model, batch(LENS))
    truth = take_grads(model)
    seen: set[str] = set()
    for grads in run_ranks(step, folder, init, lora, num_ranks=2):
        seen |= grads.keys()
        for name, grad in grads.items():
            assert float((grad - truth[name]).norm() / truth[name].norm()) <= 1e-10, name
    assert seen == truth.keys()


def step_in_bfloat16(rank: int, folder: str, is_cut: bool = False) -> Grads:
    ranks = make_ranks(1, 1, 2, "cpu") if is_cut else None
    model = build_model(folder, init="random", seed=7, layers=HELD[rank] if is_cut else None)
    engine = furlong.Engine(model, ranks=ranks, compute_dtype=torch.bfloat16)
    engine.run(planned((1, 2) if is_cut else (3,)), batch(LENS))
    return take_grads(model)


def test_a_pipeline_in_bfloat16_computes_what_one_process_does_bit_for_bit(tmp_path):
    """Weights and sums are float32, messages bfloat16: a cut rounds nothing once more."""
    config_of("llama").save_pretrained(tmp_path)
    truth = step_in_bfloat16(0, str(tmp_path))
    for grads in run_ranks(step_in_bfloat16, str(tmp_path), True, num_ranks=2):
        for name, grad in grads.items():
            assert torch.equal(grad, truth.pop(name)), name
    assert not truth

"""Pipelines of models as a run builds them: each process from the config, its own stage alone."""

from __future__ import annotations

import torch
from helpers.batches import batch
from helpers.ranks import run_ranks
from helpers.tiny_families import config_of

import furlong
from furlong.models.build import build_model
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import group_chunks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_1f1b
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import take_grads

LENS = (23, 4, 2, 17)


def planned(stages: tuple[int, ...]) -> ChunkPlan:
    return plan_1f1b(LENS, group_chunks(LENS, ChunkOptions(size=8)), stages=stages)


HELD = (range(1), range(1, 3))
Grads = dict[str, torch.Tensor]


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

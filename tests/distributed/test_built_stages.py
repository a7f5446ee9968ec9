"""Pipelines of models as a run builds them: each process from the config, its own stage alone."""

from __future__ import annotations

import pytest
import torch
from helpers.gradients import batch, num_labels, reference_loss, take_grads
from helpers.pipelines import CPU, GlooComms, Grads, stage_layers
from helpers.ranks import run_ranks
from helpers.tiny_families import config_of
from helpers.wide_norms import widen_norms

from furlong.kv.arena import Arena
from furlong.models.causal_lm import CausalLM
from furlong.models.folders.build import build_model, export_model
from furlong.ops.choose import ProbedBackend
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import group_chunks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_1f1b
from furlong.runtime.checks.self_check import self_check
from furlong.runtime.comms import Alone, Comms
from furlong.runtime.executor import Executor
from furlong.runtime.inputs import shift_labels
from furlong.runtime.memory.pools import Pools, Storage
from furlong.runtime.parallel.links import Parcel, open_links
from furlong.runtime.parallel.tied import open_tied
from furlong.runtime.precision import compute_parameters

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


def step(rank: int, folder: str, init: str, lora: bool) -> Grads:
    plan = planned((1, 2))
    model = built(folder, init, lora, stage_layers(plan, rank))
    whole = CausalLM(model)
    self_check(whole, ProbedBackend(), plan.stages)
    links = open_links([range(2)], CPU)
    tied = open_tied([range(2)], tied=whole.config.tie_word_embeddings)
    comms = GlooComms(links, rank, Parcel(32, torch.float64, CPU), model)
    execute(whole, plan, comms, rank)
    links.finish()
    tied.add_up(whole)
    return take_grads(model)


def execute(whole: CausalLM, plan: ChunkPlan, comms: Comms, rank: int) -> None:
    sequences = batch(LENS)
    with whole.installed():
        Executor(
            whole, plan, shift_labels(sequences), num_valid_tokens=num_labels(sequences),
            backend=ProbedBackend(), pools=Pools(Arena(CPU), Storage()), comms=comms, rank=rank,
        ).run()  # fmt: skip


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


def step_in_bfloat16(rank: int, folder: str) -> Grads:
    plan = planned((1, 2))
    model = build_model(folder, init="random", seed=7, layers=stage_layers(plan, rank))
    whole = CausalLM(model)
    links = open_links([range(2)], CPU)
    comms = GlooComms(links, rank, Parcel(32, torch.bfloat16, CPU), model)
    with compute_parameters(model, torch.bfloat16):
        execute(whole, plan, comms, rank)
    links.finish()
    return take_grads(model)


def test_a_pipeline_in_bfloat16_computes_what_one_process_does_bit_for_bit(tmp_path):
    """Weights and sums are float32, messages bfloat16: a cut rounds nothing once more."""
    config_of("llama").save_pretrained(tmp_path)
    model = build_model(str(tmp_path), init="random", seed=7)
    with compute_parameters(model, torch.bfloat16):
        execute(CausalLM(model), planned((3,)), Alone(), 0)
    truth = take_grads(model)
    for grads in run_ranks(step_in_bfloat16, str(tmp_path), num_ranks=2):
        for name, grad in grads.items():
            assert torch.equal(grad, truth.pop(name)), name
    assert not truth

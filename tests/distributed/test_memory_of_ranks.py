"""A process of a pipeline or a pool takes no more memory than the walk over its plan predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.batches import batch
from helpers.live_bytes import LiveBytes
from helpers.ranks import run_ranks
from helpers.tiny_families import build, config_of

import furlong
from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.training import Training
from furlong.models.describe import describe
from furlong.models.placeholders import hold, placeholders
from furlong.runtime.distributed.mesh import make_ranks

LENS = (768, 256, 300)
SETTINGS = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 4, "max_position_embeddings": 1024,
}  # fmt: skip


def measured(
    rank: int, sizes: tuple[int, int, int], options: list[dict[str, Any]], regathers: bool
) -> list[tuple[int, int]]:
    """For each: most bytes that the step's tensors take, and what is predicted for them."""
    ranks = make_ranks(*sizes, "cpu")
    model = build("llama", **SETTINGS).float()
    if ranks.pp > 1:
        hold(model, placeholders(model, range(2 * ranks.stage, 2 * ranks.stage + 2)))
    engine = furlong.Engine(model, ranks=ranks)
    shape = describe(config_of("llama", **SETTINGS))
    training = replace(Training.in_dtype("float32"), zero_stage=1, gathers=True)
    memory = CostModel(shape, Machine.named("A100-80"), training).memory()
    found = []
    for given in options:
        plan = engine.plan(LENS, furlong.ChunkOptions(size=128 * ranks.sp, **given))
        plan = replace(plan, regathers=regathers)
        sequences = batch(LENS)
        engine.run(plan, sequences)  # checked, and the arena is grown
        model.zero_grad()
        with LiveBytes() as live:
            engine.run(plan, sequences)
        model.zero_grad()
        curve = memory.curve(plan, ranks.plan_rank)
        held = plan.stages, frozenset({ranks.stage})
        weights = training.under(regathers).weights(shape, *held, ranks.sp)
        state = weights.state
        # weights that a pool shares are gathered within the step, from shards that are there
        is_kept = ranks.sp > 1 and not regathers
        whole_bytes = 4 * weights.all if is_kept else 0
        before_bytes = state.optimizer + state.weights - whole_bytes
        found.append((live.peak, max(curve.device_bytes) - before_bytes))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "regathers"), [((1, 1, 2), False), ((1, 2, 1), True)])
def test_no_process_takes_more_than_is_predicted(sizes, regathers):
    options: list[dict[str, Any]] = [{}, {"keep": "all"}, {"keep": "kv"}]
    for own in run_ranks(measured, sizes, options, regathers, num_ranks=2, limit_s=240):
        print(own)
        for took, predicted in own:
            assert 0.6 * predicted < took <= predicted

"""Processes that bring other things to a step they take together: refused, by name, by all.

Without a word it would train a mixture: half of the weights of one process and half of another's,
the tokens of one and the labels of another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from distributed.sharded_cases import Step, llama, message
from helpers.batches import batch
from helpers.ranks import run_ranks
from torch import nn

import furlong
from furlong.models.placeholders import hold, placeholders
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import group_chunks, shard
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_1f1b
from furlong.runtime.distributed.mesh import Ranks, make_ranks

STEP = Step(((19,), (4,)))
LENS = STEP.seq_lens
STAGES = (1, 2)


def pipeline(stages: tuple[int, ...] = STAGES) -> ChunkPlan:
    return plan_1f1b(LENS, group_chunks(LENS, ChunkOptions(size=8)), stages=stages)


def pool() -> ChunkPlan:
    groups = shard(group_chunks(LENS, ChunkOptions(size=8)), 2)
    return plan_1f1b(LENS, groups, stages=(3,), sp_size=2)


def stage_of(ranks: Ranks, **changes: Any) -> nn.Module:
    model = llama(**changes)
    hold(model, placeholders(model, (range(1), range(1, 3))[ranks.stage]))
    return model


def models(rank: int) -> dict[str, str]:
    """What is told when models differ, in the order in which all processes pass them."""
    two, four = make_ranks(2, 1, 1, "cpu"), make_ranks(1, 1, 2, "cpu")
    frozen = llama()
    frozen.model.layers[rank].requires_grad_(False)
    tied = stage_of(four, tie_word_embeddings=True, seed=rank)
    narrow = stage_of(four).float() if rank else stage_of(four)
    given = {
        "weights": (llama(seed=rank), two),
        "trained": (frozen, two),
        "dtype": (narrow, four),
        "config": (stage_of(four, rms_norm_eps=1e-5 * (1 + rank)), four),
        "tied": (tied, four),
    }
    return {
        name: message(lambda m=model, r=ranks: furlong.Engine(m, ranks=r))
        for name, (model, ranks) in given.items()
    }


def steps(rank: int) -> dict[str, str]:
    """What is told when steps differ."""
    dp, sp, pp = (make_ranks(*sizes, "cpu") for sizes in ((2, 1, 1), (1, 2, 1), (1, 1, 2)))
    sequences, others = batch(LENS), batch(LENS, seed=rank)
    found = {}
    for name, ranks, model, plan in (
        ("pool", sp, llama(), pool()),
        ("pipeline", pp, stage_of(pp), pipeline()),
    ):
        engine = furlong.Engine(model, ranks=ranks)
        found[f"tokens, {name}"] = message(lambda e=engine, p=plan: e.run(p, others))
        found[name] = message(lambda e=engine, p=plan: e.run(p, sequences))
    whole = furlong.Engine(llama(), ranks=pp)
    for name, stages in (("first", STAGES), ("heights", (2, 1)), ("again", STAGES)):
        found[name] = message(lambda s=stages: whole.run(pipeline(s), sequences))
    model = llama()
    replicas = furlong.Engine(model, ranks=dp)
    plan = STEP.plan(model)
    model.model.layers[1].requires_grad_(not rank)
    found["frozen since"] = message(lambda: replicas.run(plan, sequences))
    model.requires_grad_(True)
    try:
        found["other error"] = message(lambda: replicas.run(plan, broken() if rank else sequences))
    except ZeroDivisionError:
        found["other error"] = "an error on process 1"
    found["replicas"] = message(lambda: replicas.run(plan, sequences))
    return found


def broken() -> Iterator[Any]:
    yield 1 / 0


SAID = {
    "weights": r"embed_tokens.weight: float64 \(96, 32\) trained, checksum .* on process 1, ",
    "trained": r"model.layers.0.self_attn.q_proj.weight: .* trained, .* on process 1, .* frozen",
    "dtype": r"dtype of its passes: .*float32.* on process 1, .*float64.* on process 0",
    "config": "rms_norm_eps: 2e-05 on process 1, 1e-05 on process 0",
    "tied": "the tied embeddings: float64 .* on process 1, ",
    "tokens, pool": r"sequence 0: \d+ on process 1, \d+ on process 0",
    "tokens, pipeline": r"sequence 0: \d+ on process 1, \d+ on process 0",
    "pool": "accepted",
    "pipeline": "accepted",
    "first": "accepted",
    "heights": "of the layers here, where an earlier one has trained range",
    "again": "accepted",
    "frozen since": r"trained parameters of stage 0: \d+ on process 1",
    "other error": "an error on process 1",
    "replicas": "accepted",
}


@pytest.mark.slow
def test_what_differs_is_named_on_all_processes():
    told: list[dict[str, str]] = [{}, {}]
    for function in (models, steps):
        for rank, found in enumerate(run_ranks(function, num_ranks=2, limit_s=150)):
            told[rank] |= found
    for found in told:
        assert {n: text for n, text in found.items() if not re.search(SAID[n], text)} == {}
        assert found.keys() == SAID.keys()

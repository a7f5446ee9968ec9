"""Latent and chunked attention on several processes: sharded weights, and sequences on places."""

from __future__ import annotations

from functools import partial

import pytest
import torch.distributed as dist
from distributed.sharded_cases import NUM_LAYERS, Found, Step, run_steps
from helpers.attention_families import twin_of
from helpers.batches import batch
from helpers.placed import obey, plan_of
from helpers.placed_cases import gloo_exchange, over_pool
from helpers.ranks import run_ranks

from furlong.plan.plan import Chunk, Place, Slice
from furlong.planners.options import ChunkOptions
from furlong.testing import num_labels, reference_loss, take_grads, worst_relative_error

BOUND = 1e-9
OWN, HALF, ALL = Place(1, 1), Place(0, 2), Place(0, 4)
LENS = (30, 2, 17, 13)
CHUNKS = [
    Chunk((Slice(0, 0, 14, ALL), Slice(1, 0, 2, HALF), Slice(2, 0, 6, HALF), Slice(3, 0, 5, OWN))),
    Chunk((Slice(0, 14, 21, ALL), Slice(2, 6, 14, HALF), Slice(3, 5, 9, OWN))),
    Chunk((Slice(0, 21, 30, ALL), Slice(2, 14, 17, HALF), Slice(3, 9, 13, OWN))),
]  # fmt: skip
"""Each sequence stays on its place: on all processes, on two, on one, whose latents are stored."""


def on_places(rank: int, name: str, keep: str) -> float:
    """The error of the gradients of a pool of four processes."""
    model = twin_of(name, attention_chunk_size=8, floor_scale=4)
    sequences, options = batch(LENS), ChunkOptions(size=16, keep=keep)
    plan = plan_of(LENS, CHUNKS, 4, options, num_layers=model.config.num_hidden_layers)
    obey(model, plan, sequences, gloo_exchange(rank, 4), rank, over_pool)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    given = take_grads(model)
    if rank:
        return 0.0
    reference_loss(model, sequences)
    assert num_labels(sequences)
    return worst_relative_error(given, take_grads(model))


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("deepseek_v3", "kv"),
        pytest.param("deepseek_v3", "attention", marks=pytest.mark.slow),
        pytest.param("llama4", "kv", marks=pytest.mark.slow),
    ],
)
def test_sequences_on_places(name: str, keep: str) -> None:
    assert max(run_ranks(on_places, name, keep, num_ranks=4)) <= BOUND


def test_weights_that_expand_latents_are_shared() -> None:
    """What they get inside the backward of another layer's attention is summed over replicas."""
    steps = [
        Step(((21, 4), (17, 9, 5)), {"keep": keep, "num_retained": retained})
        for keep, retained in (("kv", 0), ("attention", 1))
    ]
    make = partial(twin_of, "deepseek_v3", num_hidden_layers=NUM_LAYERS)
    outcomes: list[list[Found]] = run_ranks(run_steps, steps, make, num_ranks=2)
    for found in outcomes:
        assert max(max(step.error, step.loss_error) for step in found) <= BOUND

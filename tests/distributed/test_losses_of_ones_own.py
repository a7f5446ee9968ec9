"""A loss of one's own and weights of tokens on replicas, a pool and a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.sharded_cases import llama
from helpers.ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

import furlong
from furlong.errors import ConfigError
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import take_grads, worst_relative_error

LAYOUTS = ((2, 1, 1), (1, 2, 1), (1, 1, 2))
LENS = (21, 9, 3)  # of a pool with chunks of 8, the last one leaves a process without a token
OPTIONS = furlong.ChunkOptions(size=8)


def sequences_of(seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 96, (n,), generator=generator) for n in LENS]
    return [
        {
            "input_ids": x, "labels": x.masked_fill(x % 5 == 0, -100),
            "token_weights": torch.randn(len(x), generator=generator),
            "targets": torch.randn(len(x), 2, generator=generator, dtype=torch.bfloat16),
        }
        for x in ids
    ]  # fmt: skip


def of_targets(logits: Tensor, labels: Tensor, extras: Any) -> Tensor:
    log_probs = furlong.values.log_prob()(logits, labels, extras)
    return -log_probs * extras["targets"][:, 0] + log_probs**2 * extras["targets"][:, 1]


def each_layout(rank: int) -> dict[str, list[float]]:
    """The errors of loss and gradients against one process, by layout and loss."""
    found = {}
    for name, loss in (("own", of_targets), ("cross-entropy", None)):
        for sizes in LAYOUTS:
            # replicas have sequences each, all other processes the same
            every = [sequences_of(replica) for replica in range(sizes[0])]
            whole = llama()
            flat = [own for sequences in every for own in sequences]
            truth = furlong.Engine(whole).forward_backward(flat, OPTIONS, token_loss=loss)
            grads = take_grads(whole)
            engine = furlong.Engine(whole, ranks=make_ranks(*sizes, "cpu"))
            own = every[engine.ranks.replica]
            result = engine.forward_backward(own, OPTIONS, token_loss=loss)
            held = {n: x.full_tensor() if isinstance(x, DTensor) else x
                    for n, x in take_grads(whole).items()}  # fmt: skip
            assert held and (sizes[2] > 1 or held.keys() == grads.keys())
            error = worst_relative_error(held, {name: grads[name] for name in held})
            evaluated = engine.forward_backward(own, OPTIONS, backward=False, token_loss=loss)
            plan = engine.plan([len(s["input_ids"]) for s in flat], OPTIONS, backward=False)
            ran = engine.run(plan, flat, token_loss=loss)
            losses = [result.loss, evaluated.loss, ran.loss]
            found[f"{name} {sizes}"] = [error, *(abs(x / truth.loss - 1) for x in losses)]
    own[0]["targets"] = own[0]["targets"] + rank  # of a pipeline: both read the same sequences
    with pytest.raises(ConfigError, match="checksum of sequence 0"):
        engine.run(engine.plan(LENS, OPTIONS), own, token_loss=of_targets)
    return found


@pytest.mark.slow
def test_sums_over_tokens_are_those_of_one_process() -> None:
    first, second = run_ranks(each_layout, num_ranks=2)
    assert first.keys() == second.keys()
    for found in (first, second):
        assert {name: of for name, of in found.items() if max(of) > 1e-10} == {}

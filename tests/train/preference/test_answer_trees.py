"""`train.loss: dpo` and `kto` on several processes: prompts are computed once, and three steps end
in the weights of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed.sharded_cases import llama
from helpers.batches import batch
from helpers.forked import Forked
from helpers.ranks import run_ranks
from torch.distributed.tensor import DTensor

import furlong
from furlong.data.loader import LoaderState, TrainBatch
from furlong.data.tokenize import Sequence
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import worst_relative_error
from furlong.train.batches import BatchEngine
from furlong.train.objective import KTOLoss, PairLoss
from furlong.train.processes import Launch, Processes

OPTIONS = furlong.ChunkOptions(size=16, num_retained=0, keep="kv")
PAIRS = [
    Forked((75, 37, 21), (None, 0, 0)),
    Forked((40, 20, 30, 11), (None, 0, 1, 1), seed=1),  # answers that begin alike
    Forked((90, 60, 50), (None, 0, 0), seed=2),  # a tree longer than any sequence
]
TREE_TOKENS = 150
TREES, APART = [133, 101], [150, 140, 11, 50]
"""Tokens of sequences of the plan: those of trees, and those of sequences by themselves."""


def batch_of_pairs() -> TrainBatch:
    rng, found = np.random.default_rng(0), []
    for number, own in enumerate([s for pair in PAIRS for s in pair.answers()] + batch([11, 50])):
        ids, labels = (own[name].numpy().astype(np.int32) for name in ("input_ids", "labels"))
        reference = rng.normal(-4.5, 0.2, np.count_nonzero(labels[1:] != -100))
        found.append(
            Sequence(number, "", ids, labels, reference=reference, desirable=number % 4 == 0)
        )
    return TrainBatch(tuple(found), LoaderState())


def trained(engine: BatchEngine, loss: Any) -> tuple[Any, Any]:
    """Take three steps. Return the results of an evaluation before, and of the last step."""
    optimizer = torch.optim.AdamW(engine.model.parameters(), lr=1e-2, weight_decay=0)
    whole = batch_of_pairs()
    evaluated = loss.compute(engine, whole, OPTIONS, backward=False)
    for _ in range(3):
        optimizer.zero_grad()
        engine.expect(loss.learnt(whole), OPTIONS)
        result = loss.compute(engine, whole, OPTIONS)
        optimizer.step()
    return evaluated, result


LAYOUTS = ((2, 1, 2), (2, 2, 1), (1, 2, 2))
"""dp, sp, pp."""


def steps(rank: int) -> dict[str, float]:
    """Return the distances of weights from those of one process, by loss and layout."""
    distances = {}
    for loss in (PairLoss(sft_weight=0.5), KTOLoss()):
        truth = llama()
        alone = trained(BatchEngine(furlong.Engine(truth)), loss)
        for sizes in LAYOUTS:
            model, results = trained_on_ranks(rank, sizes, loss)
            distances[f"{loss.name} {sizes}"] = distance(model, truth)
            for ours, theirs in zip(results, alone, strict=True):
                assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-9)
                assert ours.loss == pytest.approx(theirs.loss, rel=1e-12)
    return distances


def trained_on_ranks(rank: int, sizes: tuple[int, int, int], loss: Any) -> tuple[Any, Any]:
    """Train in a layout; return the model, and what `trained` returns."""
    model, number = llama(), dist.get_world_size()
    engine = BatchEngine(
        furlong.Engine(model, ranks=make_ranks(*sizes, "cpu")),
        Processes(Launch(rank, number, rank, number), dist.group.WORLD),
        stages=(1, 2) if sizes[2] > 1 else (), tree_tokens=TREE_TOKENS,
    )  # fmt: skip
    evaluated, result = trained(engine, loss)
    engine.close()
    # KTO trains on one of two sequences that begin alike
    of_step = TREES + APART if loss.name == "dpo" else [112, 90, 150, 11]
    assert sorted(evaluated.plan.seq_lens) == sorted(TREES + APART)
    assert sorted(result.plan.seq_lens) == sorted(of_step)
    return model, (evaluated, result)


def distance(model: Any, truth: Any) -> float:
    """Return the distance of those weights that this process trains; together the processes train
    all."""
    before = {name: p.detach() for name, p in llama().named_parameters()}
    own = {
        name: p.full_tensor() if isinstance(p, DTensor) else p
        for name, p in ((name, p.detach()) for name, p in model.named_parameters())
    }
    moved = {name for name, p in own.items() if not torch.equal(p, before[name])}
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, moved)
    assert set().union(*names) == set(own)
    expected = {name: p.detach() for name, p in truth.named_parameters() if name in moved}
    return worst_relative_error({name: own[name] for name in moved}, expected)


@pytest.mark.slow
def test_three_steps_end_in_the_weights_of_one_process() -> None:
    for distances in run_ranks(steps, num_ranks=4, limit_s=300):
        assert len(distances) == 2 * len(LAYOUTS)
        assert max(distances.values()) <= 1e-12, distances

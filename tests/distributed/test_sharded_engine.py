"""Engine on several replicas: who passes what, what all get, what is refused, and after errors."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.layout_cases import whole_grads
from distributed.sharded_cases import NUM_LAYERS, Step, llama, message
from helpers.batches import batch
from helpers.ranks import run_all
from torch import Tensor, nn

import furlong
from furlong.plan.plan import Backward, Chunk, Forward, Reduce
from furlong.planners.orders import plan_on_device
from furlong.runtime.distributed.mesh import make_ranks
from furlong.runtime.step import StepResult
from furlong.testing import (
    TokenSequences,
    num_labels,
    reference_loss,
    take_grads,
    worst_relative_error,
)

BOUND = 1e-10
STEP = Step(((21, 4), (17, 9, 5)))
OPTIONS = furlong.ChunkOptions(size=8)


def truth_of(model: nn.Module, sequences: TokenSequences) -> tuple[float, dict[str, Tensor]]:
    return reference_loss(model, sequences), take_grads(model)


def each_way(rank: int) -> dict[str, tuple[float, float]]:
    """The errors of loss and gradients of the same batch, however it is passed."""
    model, sequences = llama(), STEP.sequences()
    loss, grads = truth_of(model, sequences)
    engine = furlong.Engine(model, process_group=dist.group.WORLD)
    plan, labels = STEP.plan(model), num_labels(sequences)
    own = {i: sequences[i] for i in STEP.ids(rank)}

    def errors(*results: StepResult) -> tuple[float, float]:
        assert sum(result.num_valid_tokens for result in results) == labels
        found = sum(result.loss for result in results)
        return abs(found / loss - 1), worst_relative_error(whole_grads(model), grads)

    found = {
        "all": errors(engine.run(plan, sequences)),
        "own": errors(engine.run(plan, own, labels)),
        "dealt": errors(engine.run(engine.plan(STEP.seq_lens, OPTIONS), sequences)),
        "own lists": errors(engine.forward_backward(list(own.values()), OPTIONS)),
    }
    parts = [
        (Step(((21,), (17,))).plan(model), {0: sequences[0], 1: sequences[2]}),
        (Step(((4,), (9, 5))).plan(model), {0: sequences[1], 1: sequences[3], 2: sequences[4]}),
    ]
    found["two calls"] = errors(*[engine.run(plan, part, labels) for plan, part in parts])
    again = furlong.Engine(model, process_group=dist.group.WORLD)
    found["another engine"] = errors(again.run(plan, sequences))
    model.eval()  # which is checked anew, on weights that are divided by now
    evaluated = engine.forward_backward(list(own.values()), OPTIONS, backward=False)
    assert [len(losses) for losses in evaluated.token_losses] == STEP.seq_lens
    mean = sum(float(losses.sum()) for losses in evaluated.token_losses) / labels
    found["evaluated"] = abs(evaluated.loss / loss - 1), abs(mean / loss - 1)
    return found


def test_a_batch_may_be_passed_whole_or_in_parts(found):
    first, second = found["each way"]
    assert first == second, "all ranks get the same result"
    assert {name: of for name, of in first.items() if max(of) > BOUND} == {}


def idle(rank: int) -> float:
    """One replica has no sequence, and takes a dummy."""
    model, sequences = llama(), batch([21, 9])
    grads = truth_of(model, sequences)[1]
    engine = furlong.Engine(model, ranks=make_ranks(2, 1, 1, "cpu"))
    plan = plan_on_device([21, 9], OPTIONS, num_layers=NUM_LAYERS)
    own = len(plan.chunks)
    passes = Forward(own, 0, "all"), Backward(own, 0), Reduce(0)
    plan = replace(plan, chunks=(*plan.chunks, Chunk(())), actions=(*plan.actions, passes))
    engine.run(plan, {} if rank else dict(enumerate(sequences)), num_labels(sequences))
    return worst_relative_error(whole_grads(model), grads)


def test_a_replica_without_a_sequence(found):
    assert max(found["idle"]) <= BOUND


class Unread(list[dict[str, Tensor]]):
    """A lazy data set whose disk is gone."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        raise OSError("the disk is gone")


def refusals(rank: int) -> dict[str, str]:
    """What each mistake is told, in the order in which all ranks make it."""
    model, sequences = llama(), STEP.sequences()
    ranks = make_ranks(2, 1, 1, "cpu")
    hooked = llama()
    hooked.lm_head.weight.register_hook(lambda grad: None)
    shared = llama()
    first, second, *_ = shared.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    mixed = llama()
    mixed.lm_head.float()
    found = {
        "hook": message(lambda: furlong.Engine(hooked, ranks=ranks)),
        "shared": message(lambda: furlong.Engine(shared, ranks=ranks)),
        "dtypes": message(lambda: furlong.Engine(mixed, ranks=ranks, compute_dtype=torch.float64)),
        "stages": message(
            lambda: furlong.Engine(llama(num_hidden_layers=1), ranks=make_ranks(1, 1, 2, "cpu"))
        ),
        "both": message(lambda: furlong.Engine(model, ranks=ranks, process_group=dist.group.WORLD)),
    }
    engine = furlong.Engine(model, ranks=ranks)
    plan = STEP.plan(model)
    own = {i: sequences[i] for i in STEP.ids(rank)}
    alone = plan_on_device(STEP.seq_lens, OPTIONS, num_layers=NUM_LAYERS)
    other = STEP.plan(model) if rank else Step(STEP.lens, {"size": 5}).plan(model)
    found |= {
        "another plan": message(lambda: engine.run(other, sequences)),
        "another divisor": message(lambda: engine.run(plan, sequences, 40 + rank)),
        "one rank": message(lambda: engine.run(alone, sequences)),
        "pool": message(lambda: engine.run(replace(plan, sp_size=2), sequences)),
        "no divisor": message(lambda: engine.run(plan, own)),
        "missing": message(lambda: engine.run(plan, {9: sequences[0]}, 40)),
        "short": message(lambda: engine.run(plan, own | {min(own): sequences[4]}, 40)),
        "not read": message(
            lambda: engine.forward_backward(Unread(sequences) if rank else sequences, OPTIONS)
        ),
        "bad on one": message(lambda: engine.forward_backward(sequences if rank else [], OPTIONS)),
        "alone": message(lambda: furlong.Engine(model)),
        "compute dtype": message(
            lambda: furlong.Engine(model, ranks=ranks, compute_dtype=torch.float32)
        ),
    }
    model.lm_head.weight.register_hook(lambda grad: None)
    found["later hook"] = message(lambda: engine.run(plan, sequences))
    model.model.norm = nn.LayerNorm(32)
    found["new weight"] = message(lambda: engine.run(plan, sequences))
    return found


SAID = {
    "hook": "has a hook on lm_head.weight, which would see no gradient",
    "shared": "uses model.layers.1.mlp.up_proj.weight in more than one layer",
    "dtypes": "trains parameters of 2 dtypes",
    "stages": "pp 2 for a model of 1 layers",
    "both": "ranks and a process_group",
    "another plan": r"the plan's checksum: \d+ on process 1",
    "another divisor": "the divisor: 41 on process 1, 40 on process 0",
    "one rank": "1 lists of actions for 1 processes each, this run has dp 2 x pp 1 = 2, each for",
    "pool": "2 lists of actions for 2 processes each, this run",
    "no divisor": "a part of the batch's sequences, without num_valid_tokens",
    "missing": r"no sequence (0|2)\n.*at least those of list [01] of .* reads: (0, 1|2, 3, 4)",
    "short": "sequences of (5, 4|5, 9, 5) tokens",
    "not read": r"(^OSError: the disk is gone|on process 1 \(OSError: the disk is gone\))",
    "bad on one": "(no sequences|an error on process 0)",
    "alone": "weights divided among 2 processes for a compute_dtype of None",
    "compute dtype": "weights divided among 2 processes for a compute_dtype of None",
    "later hook": "has a hook on lm_head.weight: it would run once per chunk",
    "new weight": "model.norm.weight, put into a model whose weights are divided",
}


def test_mistakes_are_refused_by_name(found):
    for own in found["refusals"]:
        assert {n: text for n, text in own.items() if not re.search(SAID[n], text)} == {}
        assert own.keys() == SAID.keys()


def with_an_optimizer(rank: int) -> list[list[str]]:
    """The notes of engines that are made after an optimizer, and before."""
    ranks = make_ranks(2, 1, 1, "cpu")
    told = []
    for is_early in (True, False):
        model = llama()
        early = torch.optim.SGD(model.parameters()) if is_early else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            furlong.Engine(model, ranks=ranks)
        told.append([str(one.message) for one in caught if "optimizer" in str(one.message)])
        del early
    return told


def test_an_optimizer_that_would_train_nothing_is_noted(found):
    for early, late in found["optimizer"]:
        assert len(early) == 1 and "made before the engine trains nothing" in early[0]
        assert late == []


@pytest.fixture(scope="module")
def found(once: Callable[..., Any]) -> dict[str, list[Any]]:
    """What both replicas find, in one start."""
    each = each_way, idle, refusals, with_an_optimizer
    outcomes = once("sharded engine", lambda: run_all(*each, num_ranks=2, limit_s=100))
    return dict(zip(("each way", "idle", "refusals", "optimizer"), outcomes, strict=True))

"""Processes that bring other things to a step they take together: refused, by name, by all.

Without a word it would train a mixture: half of the weights of one process and half of another's,
the tokens of one and the labels of another.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from distributed.sharded_cases import Step, llama, message
from helpers.batches import batch
from helpers.ranks import run_ranks
from torch import nn

import furlong
from furlong.models.placeholders import hold, placeholders
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import group_chunks, shard_all
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_1f1b
from furlong.runtime.distributed.mesh import Ranks, make_ranks

STEP = Step(((19,), (4,)))
LENS = STEP.seq_lens
STAGES = (1, 2)


def pipeline(stages: tuple[int, ...] = STAGES) -> ChunkPlan:
    return plan_1f1b(LENS, group_chunks(LENS, ChunkOptions(size=8)), stages=stages)


def pool() -> ChunkPlan:
    groups = shard_all(group_chunks(LENS, ChunkOptions(size=8)), 2)
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


def calls(rank: int, sizes: tuple[int, int, int]) -> dict[str, str]:
    """What is told when the model or the call of process 1 is another one, and is so no more."""
    model, options = llama(), ChunkOptions(size=8)
    engine, layer = furlong.Engine(model, ranks=make_ranks(*sizes, "cpu")), model.model.layers[0]
    sequences, handles = batch(LENS), []
    plan = engine.plan(LENS, options)

    def step(**given: Any) -> Any:
        return engine.forward_backward(sequences, **{"options": options, **given})

    def hook(how: bool) -> None:
        if how:
            handles.append(layer.register_forward_hook(lambda *_: None))
        else:
            handles.pop().remove()

    def wrap(how: bool) -> None:
        forward = layer.forward
        if how:
            layer.forward = lambda *args, **named: forward(*args, **named)
        else:
            del layer.forward

    changed: dict[str, Any] = {
        "hook": hook, "forward": wrap,
        "mode": lambda how: model.train(not how),
        "config": lambda how: setattr(model.config, "use_cache", not how),
        "frozen": lambda how: layer.mlp.up_proj.requires_grad_(not how),
    }  # fmt: skip
    model.config.use_cache = True
    other = {
        "sample": {"sample": {"rate": 0.5}}, "offload": {"offload": "cpu"},
        "order": {"order": "layer-first"}, "stages": {"order": "layer-first", "stage_layers": 2},
    }  # fmt: skip
    called: dict[str, Any] = {
        name: lambda more=more: step(options=ChunkOptions(size=8, **(more if rank else {})))
        for name, more in other.items()
    }
    called["backward"] = lambda: step(backward=not rank)
    called["counts"] = lambda: engine.run(plan, sequences, weights=[1.0, 1.0 + rank])
    called["call"] = lambda: step() if rank else engine.plan(LENS, options)
    found = {"before": message(step)}
    for name, change in changed.items():
        if rank:
            change(True)
        found[name] = message(step)
        if rank:
            change(False)
    found |= {name: message(call) for name, call in called.items()}
    model.zero_grad()
    found["after"] = message(step)
    if rank:
        model.zero_grad()
    found["clip"] = message(lambda: engine.clip_gradients(1.0))
    found["sizes"] = message(lambda: make_ranks(*((2, 1, 1) if rank else (1, 2, 1)), "cpu"))
    return found


OF_CALLS = {
    "hook": r"hooks of model.layers.0: forward_hook .* on process 1, none on process 0",
    "forward": r"forward of model.layers.0: .* on process 1, .* on process 0",
    "mode": "mode: evaluation on process 1, training on process 0",
    "config": "use_cache: false on process 1, true on process 0",
    "frozen": r"layers.0.mlp.up_proj.weight: .* frozen on process 1, .* trained on process 0",
    "sample": r"chunks.sample: Sampling.* on process 1, None on process 0",
    "offload": "chunks.offload: cpu on process 1, none on process 0",
    "order": "chunks.order: layer-first on process 1, chunk-first on process 0",
    "stages": "chunks.order: layer-first on process 1, chunk-first on process 0",
    "backward": "backward: False on process 1, True on process 0",
    "counts": "weight of sequence 1: 2.0 on process 1, 1.0 on process 0",
    "call": "process 0 in a call of plan; process 1 in a call of forward_backward",
    "clip": r"gradient of .*: False on process 1, True on process 0",
    "sizes": r"replicate = \(2, 1, 1, 1\) on process 1, \(1, 2, 1, 1\) on process 0",
    "before": "accepted",
    "after": "accepted",
}
OF_STAGES = {"hook": "accepted", "forward": "accepted", "frozen": "accepted", "clip": "accepted"}
"""In a pipeline each stage has its own."""


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_a_call_that_differs_on_one_process_is_refused_on_all(sizes: Any) -> None:
    said = OF_CALLS | (OF_STAGES if sizes[2] > 1 else {})
    for found in run_ranks(calls, sizes, num_ranks=2):
        assert {n: text for n, text in found.items() if not re.search(said[n], text)} == {}
        assert found.keys() == said.keys()


def fused(rank: int) -> int:
    """The number of fused modules where those of process 1 alone compute something else."""
    model, factor = llama(), 1.01 if rank else 1.0
    norm: Any = model.model.layers[0].input_layernorm
    taken = [(vars(norm), "forward", lambda x: type(norm).forward(norm, x) * factor)]
    with patch("furlong.models.decoder.fused", lambda *_: taken), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return len(furlong.Engine(model, ranks=make_ranks(2, 1, 1, "cpu")).model.fused)


def test_fused_modules_that_fail_on_one_process_are_left_on_all() -> None:
    assert run_ranks(fused, num_ranks=2) == [0, 0]


SAID = {
    "weights": r"embed_tokens.weight: checksum .* on process 1, ",
    "trained": r"model.layers.0.self_attn.q_proj.weight: .* trained on process 1, .* frozen",
    "dtype": r"dtype of its passes: .*float32.* on process 1, .*float64.* on process 0",
    "config": "rms_norm_eps: 2e-05 on process 1, 1e-05 on process 0",
    "tied": "the tied embeddings: checksum .* on process 1, ",
    "tokens, pool": r"sequence 0: \d+ on process 1, \d+ on process 0",
    "tokens, pipeline": r"sequence 0: \d+ on process 1, \d+ on process 0",
    "pool": "accepted",
    "pipeline": "accepted",
    "first": "accepted",
    "heights": "of the layers here, where an earlier one has trained range",
    "again": "accepted",
    "frozen since": r"model.layers.1.*: float64 .* frozen on process 1, float64 .* trained on",
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

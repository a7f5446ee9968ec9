"""What the processes of a random step find, and what the step has in it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from unittest.mock import patch

from distributed.layout_cases import Found, read_by, whole_grads
from distributed.random_layouts import Drawn, Sizes, tokens_of
from helpers.tiny_families import config_of

import furlong
from furlong.plan.plan import Backward, Forward
from furlong.runtime.distributed.mesh import Ranks, make_ranks
from furlong.runtime.step import layers_of
from furlong.testing import num_labels


def run_drawn(rank: int, drawn: Sequence[Drawn]) -> list[Found]:
    """Each step, one after the other."""
    made: dict[tuple[Sizes, int], Ranks] = {}
    found = []
    for one in drawn:
        replicate = one.sizes[0] if one.case.plan.regathers else 1
        key = one.sizes, replicate
        if key not in made:
            made[key] = make_ranks(*one.sizes, "cpu", replicate)
        found.append(_run(one, made[key]))
        gc.collect()
    return found


def _run(one: Drawn, ranks: Ranks) -> Found:
    case = one.case
    layers = layers_of(case.plan, ranks.plan_rank) if ranks.pp > 1 else None
    engine = furlong.Engine(case.model(layers), ranks=ranks)
    sequences = case.sequences()
    own = read_by(case, engine, ranks, sequences) if one.gives_own_alone else sequences
    with ExitStack() as stack:
        if one.offload != "none":  # else what is so small stays where it is
            stack.enter_context(patch("furlong.runtime.cell._MIN_BYTES", 1))
            stack.enter_context(patch("furlong.kv.store.segment_tokens", lambda *_: 3))
        for _ in range(case.num_steps):
            result = engine.run(case.plan, own, num_labels(sequences))
            assert result.num_valid_tokens == num_labels(sequences)
    return Found(result.loss, whole_grads(engine.model.model), result.token_losses)


def features(one: Drawn) -> set[str]:
    """What is in a step, read from its plan and its labels."""
    plan, case = one.case.plan, one.case
    dp, sp, pp = one.sizes
    found = {f"dp {dp}", f"sp {sp}", f"pp {pp}", one.planner, one.model, one.offload}
    found |= {f"{plan.kind(chunk)} chunk" for chunk in range(len(plan.chunks))}
    for chunk in plan.chunks:
        sizes = {piece.place.size for piece in chunk.slices}
        found |= {"places of several sizes in a chunk"} if len(sizes) > 1 else set()
        found |= {"local and sharded in a chunk"} if {1, sp} <= sizes and sp > 1 else set()
        if any(piece.num_tokens < piece.place.size for piece in chunk.slices):
            found.add("fewer tokens than processes")
    for own in plan.actions:
        found |= {f"keep {a.keep}" for a in own if isinstance(a, Forward)}
        if any(getattr(a, "recompute_layers", 0) for a in own):
            found.add("recomputed layers")
    counts = [sum(isinstance(a, Forward) for a in own) for own in plan.actions]
    flags = {
        "three times the chunks": max(counts) >= 3 * min(counts),
        "masked labels": any(case.masked),
        "fewer K,V heads than processes": _heads(one)[1] < sp,
        "window": one.model in ("Mistral", "Gemma 3"),
        "weights gathered with every pass": plan.regathers,
        "stages without a backward": plan.frozen_stages > 0,
        "several stages on a rank": len(plan.stages) > pp,
        "whole model on each stage": case.holds_all,
        "gradients of two steps": case.num_steps > 1,
        "each is given what it reads": one.gives_own_alone,
    }
    found |= {name for name, is_so in flags.items() if is_so}
    return found | set(_idle_features(one))


def _heads(one: Drawn) -> tuple[int, int]:
    config = config_of(one.case.family, **one.case.settings)
    return config.num_attention_heads, config.num_key_value_heads


def _idle_features(one: Drawn) -> Iterator[str]:
    """What processes lack."""
    plan, (dp, sp, pp) = one.case.plan, one.sizes
    labels = [s["labels"] for s in one.case.sequences()]
    if len(plan.actions) != dp * pp:
        return
    for replica, process in product(range(dp), range(sp)):
        runs = tokens_of(plan, replica, process, _heads(one))
        if not any(isinstance(a, Backward) for a in plan.actions[replica * pp]):
            continue
        if not any((labels[i][a + 1 : b + 1] != -100).any() for i, a, b in runs):
            yield "a process without a label"
        if not runs:
            yield "a process without a token"
            if sp == 1:
                yield "a replica without work"
                yield f"{one.model} without work"

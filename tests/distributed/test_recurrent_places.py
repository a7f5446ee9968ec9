"""Recurrent layers on several processes of a sequence-parallel group: states and their gradients go
from the process of the tokens before to that of the tokens after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from distributed.layout_cases import whole_grads
from helpers.batches import batch
from helpers.hybrids import HYBRIDS, build
from helpers.placed import obey, plan_of
from helpers.placed_cases import gloo_exchange, over_pool, random_case
from helpers.ranks import run_ranks
from torch import Tensor, nn

import furlong
from furlong.families import family_of
from furlong.models.placeholders import hold, placeholders
from furlong.plan.plan import Chunk, ChunkPlan, Place, Slice
from furlong.planners.chunks import group_chunks, shard_all
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas, plan_1f1b, plan_on_device
from furlong.planners.spaco import Sampling, sampled
from furlong.runtime.cell import state_runs
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import num_labels, reference_loss, take_grads

BOUND = 1e-12
FLOOR = 1e-3
"""Errors of gradients smaller than this part of the whole gradient are measured against that."""
ALL, HALF, ONE = Place(0, 4), Place(0, 2), Place(1, 1)
LENS = (30, 2, 17, 13, 1, 3)
CHUNKS = [
    Chunk((
        Slice(0, 0, 14, ALL), Slice(4, 0, 1, ALL), Slice(1, 0, 2, HALF), Slice(2, 0, 6, HALF),
        Slice(3, 0, 5, ONE),
    )),
    Chunk((Slice(0, 14, 16, ALL), Slice(2, 6, 14, HALF), Slice(3, 5, 9, ONE))),
    Chunk((
        Slice(0, 16, 30, ALL), Slice(5, 0, 3, ALL), Slice(2, 14, 17, HALF), Slice(3, 9, 13, ONE),
    )),
]  # fmt: skip
"""Places of 4, 2 and 1; slices of fewer tokens than processes, shares shorter than a kernel, and
processes without tokens."""
ZIGZAG = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""Fewer heads than processes: each process has early and late tokens of a slice."""


@pytest.mark.parametrize("heads", [(4, 2), (2, 1)])
def test_each_run_begins_where_the_one_before_ended(heads: tuple[int, int]) -> None:
    """A recurrence that counts tokens, over four processes that take turns; all of them list the
    messages in one order."""
    num_messages, num_passed_on = 0, 0
    for seed in range(30):
        case = random_case(seed, 4, [heads])
        plan = plan_of(case.lens, case.placed, 4, case.options, num_layers=2)
        model: Any = SimpleNamespace(events=(), heads_for=lambda sp_size: heads, name="any")
        runs_of = [state_runs(model, plan, process) for process in range(4)]
        stored: dict[tuple[int, int], int] = {}  # (process, sequence) -> tokens before the boundary
        for number, chunk in enumerate(plan.chunks):
            each = [runs_of[process](number) for process in range(4)]
            ways = [[(r.index, r.process, r.behind) for r in own if r.behind is not None]
                    for own in each]  # fmt: skip
            assert ways == [ways[0]] * 4
            num_messages += len(ways[0])
            counts, sent, covered = [0] * len(chunk.slices), dict[tuple[int, int], int](), set()
            while any(each):
                # the first process whose next run is its own, and whose states have come
                process = next(
                    p for p, own in enumerate(each)
                    if own and (own[0].process != p or own[0].before is None
                                or (own[0].index, p) in sent)
                )  # fmt: skip
                run = each[process].pop(0)
                if run.process != process:
                    continue
                seq_id = chunk.slices[run.index].seq_id
                state = 0
                if run.continues:
                    state = stored.pop((process, seq_id))
                elif run.before is not None:
                    state = sent.pop((run.index, process))
                assert state == chunk.slices[run.index].start + counts[run.index]
                num_passed_on += not run.num_tokens
                rows = {(process, row) for row in range(run.rows.start, run.rows.stop)}
                assert not rows & covered
                covered |= rows
                counts[run.index] += run.num_tokens
                if run.behind is not None:
                    sent[run.index, run.behind] = state + run.num_tokens
                if run.is_continued:
                    stored[process, seq_id] = state + run.num_tokens
            assert not sent and counts == [s.num_tokens for s in chunk.slices]
        assert not stored
    assert num_messages > 50 and num_passed_on > 5


def error_of(given: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """The largest relative error over parameters, with a floor: some gradients cancel."""
    total = sum(float(x.norm()) ** 2 for x in truth.values()) ** 0.5
    assert given.keys() == truth.keys()
    return max(
        float((given[name] - x).norm()) / max(float(x.norm()), FLOOR * total)
        for name, x in truth.items()
    )


def on_places(
    rank: int, families: Sequence[str], changes: Mapping[str, Any], options: ChunkOptions
) -> dict[str, float]:
    """The error of each family's gradients, on a pool of four processes."""
    found = {}
    exchange = gloo_exchange(rank, 4)
    for family in families:
        model, sequences = build(family, twin=True, **changes), batch(LENS)
        plan = plan_of(LENS, CHUNKS, 4, options, num_layers=model.config.num_hidden_layers)
        obey(model, plan, sequences, exchange, rank, over_pool)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        given = take_grads(model)
        reference_loss(model, sequences)
        found[family] = error_of(given, take_grads(model))
    return found


FAMILIES = [*HYBRIDS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("families", "changes", "options"),
    [
        (FAMILIES[::3], {}, {}),
        (FAMILIES[1::3], {}, {"keep": "attention", "num_retained": 1}),
        (FAMILIES[2::3], {}, {"keep": "input", "num_retained": 0}),
        (["qwen3_next", "bamba", "lfm2"], ZIGZAG, {"recompute_layers": 2, "num_retained": 2}),
        (["mamba2"], {}, {"recompute_layers": 2, "num_retained": 2}),
    ],
)
def test_families_on_places(
    families: Sequence[str], changes: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    given = ChunkOptions(size=16, **options)
    for found in run_ranks(on_places, families, changes, given, num_ranks=4, limit_s=300):
        assert all(error <= BOUND for error in found.values()), found


SEQ_LENS, DEALT = (40, 9, 26, 5), ((0, 3), (1, 2))


LAYERS = {"lfm3": {"layer_types": ["conv", "conv", *["full_attention"] * 2, "sliding_attention"]}}
"""The second stage has no recurrent layer, and attention of two kinds."""


def model_of(family: str, *, lora: bool) -> nn.Module:
    model: Any = build(family, twin=True, **LAYERS.get(family, {}))
    if not lora:
        return model
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, config).double().train()


def layout_plan(
    sizes: tuple[int, int, int], num_layers: int, keep: str, size: int = 16
) -> ChunkPlan:
    dp, sp, pp = sizes
    options = ChunkOptions(size=size, num_retained=1, keep=keep)

    def sharded(lens: Sequence[int]) -> list[list[Chunk]]:
        return shard_all(group_chunks(lens, options), sp)

    if pp > 1:
        stages = (2, num_layers - 2)
        return plan_1f1b(SEQ_LENS, sharded(SEQ_LENS), stages=stages, sp_size=sp)
    dealt = [range(len(SEQ_LENS))] if dp == 1 else DEALT
    plans = []
    for ids in dealt:
        lens = [SEQ_LENS[i] for i in ids]
        plans.append(
            plan_on_device(lens, options, num_layers=num_layers, groups=sharded(lens), sp_size=sp)
        )
    return plans[0] if dp == 1 else join_replicas(plans, dealt, SEQ_LENS)


def step(
    rank: int, sizes: tuple[int, int, int], cases: Sequence[tuple[str, str, bool]]
) -> list[float]:
    """The error of an engine's gradients for each (family, keep, whether it trains adapters)."""
    ranks, sequences, found = make_ranks(*sizes, "cpu"), batch(SEQ_LENS), []
    for family, keep, lora in cases:
        model: Any = model_of(family, lora=lora)
        num_layers = model.config.num_hidden_layers
        if sizes[2] > 1:
            base = model.base_model.model if lora else model
            hold(base, placeholders(base, range(2, num_layers) if ranks.stage else range(2)))
        engine = furlong.Engine(model, ranks=ranks)
        plan = layout_plan(sizes, num_layers, keep)
        engine.run(plan, sequences, num_labels(sequences))
        given, whole = whole_grads(engine.model.model), model_of(family, lora=lora)
        reference_loss(whole, sequences)
        truth = take_grads(whole)
        assert given.keys() <= truth.keys() and (sizes[2] > 1 or given.keys() == truth.keys())
        found.append(error_of(given, {name: truth[name] for name in given}))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        ((1, 2, 1), [("qwen3_next", "kv", True), ("mamba", "kv", False)]),
        ((2, 2, 1), [("lfm2", "attention", True), ("kimi_linear", "kv", False)]),
        ((1, 2, 2), [("qwen3_next", "kv", False), ("nemotron_h", "kv", False),
                     ("lfm2", "kv", True), ("lfm3", "kv", False)]),
    ],
)  # fmt: skip
def test_states_in_any_layout(
    sizes: tuple[int, int, int], cases: Sequence[tuple[str, str, bool]]
) -> None:
    num_ranks = sizes[0] * sizes[1] * sizes[2]
    for errors in run_ranks(step, sizes, cases, num_ranks=num_ranks, limit_s=300):
        assert max(errors) <= BOUND, errors


def forked_step(rank: int) -> float:
    """The error of a pipeline's gradients for sequences that begin alike, one stage of which has no
    recurrent layer."""
    ranks, model = make_ranks(1, 1, 2, "cpu"), model_of("lfm3", lora=False)
    whole = model_of("lfm3", lora=False)
    hold(model, placeholders(model, range(2, 5) if ranks.stage else range(2)))
    sequences = batch((40, 33))
    sequences[1]["input_ids"][:24] = sequences[0]["input_ids"][:24]
    engine = furlong.Engine(model, ranks=ranks)
    result = engine.forward_backward(sequences, ChunkOptions(size=8), share_prompts=True)
    assert result.plan is not None and result.plan.seq_lens == (40, 33)
    reference_loss(whole, sequences)
    given, truth = whole_grads(engine.model.model), take_grads(whole)
    return error_of(given, {name: truth[name] for name in given})


@pytest.mark.slow
def test_no_stage_shares_prompts_if_one_has_states() -> None:
    for error in run_ranks(forked_step, num_ranks=2, limit_s=120):
        assert error <= BOUND


SAMPLING = Sampling(rate=0.5, label_rate=0.5, seed=3)


def sampled_step(rank: int, sizes: tuple[int, int, int], families: Sequence[str]) -> list[float]:
    """The error of each family's sampled gradient against that of the same draw on one process.

    Not for latent attention: one process stores latents, a group keys and values, so that other
    paths of a draw reach the weights between them, with the same expectation."""
    ranks, sequences, found = make_ranks(*sizes, "cpu"), batch(SEQ_LENS), []
    for family in families:
        model, alone = model_of(family, lora=False), model_of(family, lora=False)
        num_layers = model.config.num_hidden_layers
        if sizes[2] > 1:
            own = range(2, num_layers) if ranks.stage else range(2)
            hold(model, placeholders(model, own))
        engine, one = furlong.Engine(model, ranks=ranks), furlong.Engine(alone)
        for now, layout in ((engine, sizes), (one, (1, 1, 1))):
            plan = sampled(layout_plan(layout, num_layers, "kv", size=8), SAMPLING)
            assert 0 < len(plan.trained) < len(plan.chunks)
            now.run(plan, sequences, num_labels(sequences))
        given, truth = whole_grads(engine.model.model), take_grads(alone)
        found.append(error_of(given, {name: truth[name] for name in given}))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "families"),
    [
        ((1, 2, 1), ["qwen3_next", "mamba", "lfm2", "falcon_h1"]),
        ((1, 2, 2), ["nemotron_h", "lfm2"]),
    ],
)
def test_sampled_states(sizes: tuple[int, int, int], families: Sequence[str]) -> None:
    num_ranks = sizes[0] * sizes[1] * sizes[2]
    for errors in run_ranks(sampled_step, sizes, families, num_ranks=num_ranks, limit_s=300):
        assert max(errors) <= BOUND, errors


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)])
def test_every_family_in_every_layout(sizes: tuple[int, int, int]) -> None:
    """All families whose weights several processes may divide."""
    known = {family: family_of(family) for family in FAMILIES}
    families = [
        family
        for family, own in known.items()
        if not own.shares_block and not (own.whole and sizes[2] > 1)
    ]
    assert len(families) >= 12
    cases = [(family, "kv", False) for family in families]
    found = run_ranks(step, sizes, cases, num_ranks=sizes[0] * sizes[1] * sizes[2], limit_s=1500)
    worst = {family: max(own) for family, *own in zip(families, *found, strict=True)}
    assert max(worst.values()) <= BOUND, worst

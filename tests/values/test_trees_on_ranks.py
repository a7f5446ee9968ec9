"""Answers to one prompt on replicas, pools and pipelines: computed once, and those of one process
without sharing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.sharded_cases import llama, tied_llama
from helpers.batches import batch
from helpers.forked import FOUR, NESTED, PAIR
from helpers.ranks import run_ranks
from helpers.tiny_families import build
from helpers.wide_norms import widen_norms
from test_shared_prompts import loss_of
from test_values_on_ranks import BOTH, BOUND, whole
from torch import Tensor
from torch.nn.functional import logsigmoid

import furlong
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import TokenSequences, take_grads, worst_relative_error

OTHERS = batch([11, 50], seed=5)
SHARED = [OTHERS[0], *NESTED.answers(), *PAIR.answers(), OTHERS[1]]
"""Two trees, one of them with forks within forks, between two sequences that share nothing."""
REPLICAS = [[SHARED, OTHERS], [OTHERS, SHARED], [SHARED, FOUR.answers()]]
"""The sequences of each of two replicas."""
LENS = [sum(NESTED.lens), sum(PAIR.lens), 11, 50]
"""Tokens of SHARED that are computed, by sequence of the plan."""


def windowed() -> Any:
    """Windows back along the path, of heads that two processes cannot divide: keys and values are
    gathered."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}
    return widen_norms(build("mistral", sliding_window=12, **heads))


def errors(
    sizes: tuple[int, int, int], every: list[TokenSequences], model: Any, fn: Any = BOTH,
    **dials: Any,
) -> list[float]:  # fmt: skip
    """Return the errors of values and gradients against one process without sharing."""
    options, every = furlong.ChunkOptions(size=16, **dials), every[: sizes[0]]

    def values_of(engine: furlong.Engine, sequences: Any, **more: Any) -> list[Tensor]:
        if fn is None:
            bare = [{"input_ids": s["input_ids"]} for s in sequences]
            return engine.hidden_states(bare, options, **more)
        return engine.token_values(sequences, options, fn, **more)

    alone = furlong.Engine(model)
    truth = [values_of(alone, sequences, share_prompts=False) for sequences in every]
    sum(map(loss_of, truth)).backward()  # type: ignore[union-attr]
    grads = take_grads(model)
    engine = furlong.Engine(model, ranks=make_ranks(*sizes, "cpu"))
    own = engine.ranks.replica  # type: ignore[union-attr]
    values = values_of(engine, every[own])
    lens = values[0].grad_fn.run._plan.seq_lens  # type: ignore[union-attr]
    assert set(LENS) <= set(lens) and sum(map(len, every)) > len(lens)
    apart = zip(values, truth[own], strict=True)
    moved = max(float((a - b).detach().abs().max()) for a, b in apart)
    loss_of(values).backward()
    return [moved, error_of(model, grads, sizes)]


def error_of(model: Any, grads: dict[str, Tensor], sizes: tuple[int, int, int]) -> float:
    """Return the error of the gradients of this process's stage; all stages must have them all."""
    found = {name: whole(x) for name, x in take_grads(model).items()}
    if sizes[2] > 1:  # FSDP2 gives zeros to what another stage trains
        found = {name: x for name, x in found.items() if bool(x.any())}
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, set(found))
    assert set().union(*names) == grads.keys()
    return worst_relative_error(found, {name: grads[name] for name in found})


def summed_errors(sizes: tuple[int, int, int], every: list[TokenSequences]) -> list[float]:
    """Return the errors of the losses and gradients of `forward_backward`, and of token losses."""
    model, every = tied_llama(), every[: sizes[0]]
    options = furlong.ChunkOptions(size=16, num_retained=2)
    joined = [s for own in every for s in own]
    alone = furlong.Engine(model)
    truth, grads = alone.forward_backward(joined, options), take_grads(model)
    losses = alone.forward_backward(joined, options, backward=False).token_losses
    engine = furlong.Engine(model, ranks=make_ranks(*sizes, "cpu"))
    own = every[engine.ranks.replica]  # type: ignore[union-attr]
    found = engine.forward_backward(own, options, share_prompts=True)
    error = error_of(model, grads, sizes)
    again = engine.forward_backward(own, options, backward=False, share_prompts=True)
    plan = found.plan
    assert plan is not None and set(LENS) <= set(plan.seq_lens) and len(plan.trees) >= 2
    assert found.num_valid_tokens == truth.num_valid_tokens
    apart = zip(again.token_losses, losses, strict=True)
    return [abs(found.loss - truth.loss), error, max(float((a - b).abs().max()) for a, b in apart)]


def two_processes(rank: int) -> dict[str, list[float]]:
    return {
        "pipeline": errors((1, 1, 2), REPLICAS[0], tied_llama(), None, keep="attention"),
        "pool": errors((1, 2, 1), REPLICAS[0], windowed(), keep="input"),
    }


def more_of_two(rank: int) -> dict[str, list[float]]:
    return {
        "replicas": errors((2, 1, 1), REPLICAS[0], llama()),
        "replicas, states": errors((2, 1, 1), REPLICAS[1], tied_llama(), None, keep="input"),
        "pipeline": errors((1, 1, 2), REPLICAS[0], windowed(), keep="input"),
        "pool, states": errors((1, 2, 1), REPLICAS[0], tied_llama(), None),
        "pool, attention": errors((1, 2, 1), REPLICAS[0], windowed(), keep="attention"),
        **{f"{own} summed": summed_errors(own, REPLICAS[0])
           for own in [(2, 1, 1), (1, 1, 2), (1, 2, 1)]},
    }  # fmt: skip


def four_processes(rank: int) -> dict[str, list[float]]:
    sizes = [(2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)]
    found = {str(own): errors(own, REPLICAS[n % 3], tied_llama()) for n, own in enumerate(sizes)}
    return found | {f"{own} summed": summed_errors(own, REPLICAS[0]) for own in sizes[:3]}


SLOW = [pytest.param(cases, marks=pytest.mark.slow) for cases in (more_of_two, four_processes)]


@pytest.mark.parametrize("cases", [two_processes, *SLOW])
def test_values_and_gradients_are_those_of_one_process(cases: Any) -> None:
    for found in run_ranks(cases, num_ranks=4 if cases is four_processes else 2):
        assert {name: of for name, of in found.items() if max(of) > BOUND} == {}


def group_loss(values: list[Tensor], old: list[Tensor]) -> Tensor:
    """GRPO's: clipped ratios, with the advantages of the answers to one prompt."""
    rewards = torch.arange(len(values)).double() % 3
    advantages = (rewards - rewards.mean()) / rewards.std()
    terms = []
    for advantage, own, before in zip(advantages, values, old, strict=True):
        ratio = (own - before)[before != 0].exp()
        bounded = ratio.clamp(0.8, 1.2) * advantage
        terms.append(-torch.minimum(ratio * advantage, bounded).mean())
    return torch.stack(terms).mean()


def pair_loss(values: list[Tensor], old: list[Tensor]) -> Tensor:
    """DPO's, of the first two answers."""
    ratios = [(own - before).sum() for own, before in zip(values, old, strict=True)]
    return -logsigmoid(0.1 * (ratios[0] - ratios[1]))


def trained(engine: furlong.Engine, each: list[TokenSequences], loss: Any, **more: Any) -> None:
    """Take three steps on the sum of the losses of groups of sequences."""
    options = furlong.ChunkOptions(size=16)
    # without decay, weights stay that another stage trains
    optimizer = torch.optim.AdamW(engine.model.model.parameters(), lr=1e-2, weight_decay=0)
    with torch.no_grad():
        old = [engine.token_values(own, options, **more) for own in each]
    for _ in range(3):
        optimizer.zero_grad()
        for sequences, before in zip(each, old, strict=True):
            loss(engine.token_values(sequences, options, **more), before).backward()
        optimizer.step()


def steps(rank: int) -> dict[str, float]:
    """Return the distances of weights after three steps from those of one process."""
    found = {}
    groups = [[FOUR.answers(), PAIR.answers()], [NESTED.answers(), FOUR.answers()]]
    pairs = [[FOUR.answers()[:2]], [NESTED.answers()[:2]]]
    for name, each, loss, sizes in (
        ("groups", groups, group_loss, (2, 1, 2)), ("groups", groups[:1], group_loss, (1, 2, 2)),
        ("pairs", pairs, pair_loss, (2, 2, 1)), ("pairs", pairs[:1], pair_loss, (1, 2, 2)),
    ):  # fmt: skip
        truth, model = llama(), llama()
        before = {name: p.detach().clone() for name, p in truth.named_parameters()}
        trained(furlong.Engine(truth), [s for own in each for s in own], loss, share_prompts=False)
        engine = furlong.Engine(model, ranks=make_ranks(*sizes, "cpu"))
        trained(engine, each[engine.ranks.replica], loss)  # type: ignore[union-attr]
        own, whole_model = dict(model.named_parameters()), dict(truth.named_parameters())
        weights = {n: whole(p.detach()) for n, p in own.items()}
        moved = {n for n, x in weights.items() if not torch.equal(x, before[n])}
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, moved)
        assert set().union(*names) == set(whole_model)
        found[f"{name} {sizes}"] = worst_relative_error(
            {n: weights[n] for n in moved}, {n: whole_model[n].detach() for n in moved}
        )
    return found


@pytest.mark.slow
def test_three_steps_of_groups_and_pairs_end_in_the_weights_of_one_process() -> None:
    for found in run_ranks(steps, num_ranks=4, limit_s=120):
        assert {name: error for name, error in found.items() if error > BOUND} == {}

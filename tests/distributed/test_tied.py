"""A head that is tied to the input embeddings, in a pipeline: one weight on two stages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.gradients import reference_loss
from helpers.pipelines import CPU, Case, GlooComms, parcel_of, run_step, stage_layers
from helpers.ranks import run_ranks
from torch import Tensor, nn

from furlong.models.causal_lm import CausalLM
from furlong.planners.chunks import group_chunks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_1f1b
from furlong.runtime.parallel.links import open_links
from furlong.runtime.parallel.tied import open_tied

NUM_STEPS = 3
MAX_NORM = 0.1
LENS = (23, 4, 2, 17)


def case_of(num_stages: int, num_retained: int) -> Case:
    stages = {2: (1, 2), 4: (1, 2, 1, 1)}[num_stages]
    groups = group_chunks(LENS, ChunkOptions(size=8))
    plan = plan_1f1b(LENS, groups, stages=stages, num_retained=num_retained)
    settings = {"num_hidden_layers": sum(stages), "tie_word_embeddings": True}
    return Case(plan, settings=settings)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def clip(model: nn.Module, norm: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= min(1.0, MAX_NORM / norm)


def train(rank: int, case: Case) -> tuple[dict[str, Tensor], list[float]]:
    """The weights of this rank after some steps, and the norms of the whole gradient."""
    num_stages = len(case.plan.stages)
    links = open_links([range(num_stages)], CPU)
    tied = open_tied([range(num_stages)], tied=True)
    model = case.model(stage_layers(case.plan, rank))
    whole, optimizer, norms = CausalLM(model), optimizer_of(model), []
    comms = GlooComms(links, rank, parcel_of(model), model)
    for _ in range(NUM_STEPS):
        run_step(case, model, comms)
        tied.add_up(whole)
        elsewhere = {id(p) for p in tied.counted_elsewhere(whole)}
        own = [p.grad for p in model.parameters() if p.grad is not None and id(p) not in elsewhere]
        total = torch.stack([(grad**2).sum() for grad in own]).sum()
        dist.all_reduce(total)
        norms.append(float(total.sqrt()))
        clip(model, norms[-1])
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def train_alone(case: Case) -> tuple[dict[str, Tensor], list[float]]:
    model = case.model()
    optimizer, norms = optimizer_of(model), []
    for _ in range(NUM_STEPS):
        reference_loss(model, case.batch())
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        clip(model, norms[-1])
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


@pytest.mark.parametrize(
    ("num_stages", "num_retained"),
    [
        (2, 1),
        pytest.param(4, 2, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_both_copies_take_the_update_of_one_process(num_stages, num_retained):
    case = case_of(num_stages, num_retained)
    weights, norms = train_alone(case)
    ranks = run_ranks(train, case, num_ranks=num_stages)
    name = "model.embed_tokens.weight"
    assert "lm_head.weight" not in ranks[0][0] and "lm_head.weight" not in ranks[-1][0]
    assert torch.equal(ranks[0][0][name], ranks[-1][0][name]), "the copies drift apart"
    for own, own_norms in ranks:
        assert own_norms == pytest.approx(norms, rel=1e-10), "a copy counts once in the norm"
        for other, weight in own.items():
            error = float((weight - weights[other]).norm() / weights[other].norm())
            assert error <= 1e-10, (other, error)
    held = [set(own) for own, _ in ranks]
    assert set().union(*held) == weights.keys()
    assert [rank for rank, own in enumerate(held) if name in own] == [0, num_stages - 1]

"""Replicas that share their weights: gradients, losses and collectives against one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from distributed.layout_cases import read_grads, whole_grads
from distributed.sharded_cases import (
    NUM_LAYERS,
    Counted,
    Found,
    Step,
    adapted_llama,
    llama,
    llama_with_a_trained_head,
    llama_with_trained_upper_layers,
    run_steps,
    tied_llama,
)
from helpers.batches import batch
from helpers.ranks import run_all, run_ranks
from helpers.tiny_families import bound, build
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

import furlong
from furlong.plan.plan import Chunk, Place, Slice, Unshard
from furlong.planners.chunks import chunk_by_chunk
from furlong.planners.orders import plan_replica
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import reference_loss, take_grads, worst_relative_error
from furlong.train.checkpoints import model_size
from furlong.train.processes import Launch, Processes

BOUND = 1e-10
UNEQUAL = ((21, 4, 40, 7), (5, 9))
"""One replica has more than three times the chunks of the other."""
KEPT = {
    "chunk-first": Step(UNEQUAL),
    "split": Step(((23,), (40,)), {"keep": "input", "num_retained": 0}),
    "evaluation": Step(UNEQUAL, backward=False),
    "after it": Step(UNEQUAL, {"recompute_layers": 2}),
    "masked": Step(((29, 9), (12, 11)), {"hybrid": False}, (range(21), range(9))),
    "no label": Step(((29, 9), (12, 11)), {}, (range(0), range(0), range(12), range(11))),
    "on the CPU": Step(UNEQUAL, {"offload": "cpu", "num_retained": 2}),
    "layer-first": Step(UNEQUAL, {"order": "layer-first", "keep": "kv"}),
}
FEW = ("chunk-first", "evaluation", "no label", "layer-first")
RESHARD = {"order": "layer-first", "reshard": True}
RESHARDED = {
    "attention": Step(UNEQUAL, RESHARD),
    "K,V": Step(UNEQUAL, RESHARD | {"keep": "kv", "recompute_layers": 1}),
    "graphs": Step(UNEQUAL, RESHARD | {"keep": "all"}),
    "two layers": Step(((40,), (9, 9, 3)), RESHARD | {"keep": "input", "stage_layers": 2}),
    "evaluation": Step(UNEQUAL, RESHARD, backward=False),
    "no label": Step(
        ((29, 9), (12, 11)), RESHARD, (range(0), range(0), range(12), range(11))
    ),
    "on the CPU": Step(UNEQUAL, RESHARD | {"offload": "cpu"}),
    "kept again": Step(UNEQUAL),
}  # fmt: skip
NUM_GROUPS = NUM_LAYERS + 3
"""The layers, the embedding, the head, and what else there is."""


def tried(steps, make=llama, num_ranks=2):
    """What the ranks have found, by the name of the step; the same but for collectives."""
    (found,) = tried_all((steps, make), num_ranks=num_ranks)
    return found


def tried_all(*given, num_ranks=2):
    """The same of several steps with their models, in one start."""
    calls = [(run_steps, list(steps.values()), *more) for steps, *more in given]
    outcomes = run_all(*calls, num_ranks=num_ranks, limit_s=240)
    for answers in outcomes:
        assert all(own == answers[0] for own in answers), "ranks differ in results or collectives"
    return [
        dict(zip(steps, answers[0], strict=True))
        for (steps, *_), answers in zip(given, outcomes, strict=True)
    ]


def assert_exact(found: dict[str, Found]) -> None:
    assert {name: of for name, of in found.items() if of.error > BOUND} == {}
    assert {name: of for name, of in found.items() if of.loss_error > BOUND} == {}


def some(steps, *names):
    return {name: steps[name] for name in names}


@pytest.fixture(scope="module")
def replicas(once):
    """Steps of replicas in one start: kept weights, gathered ones, a tied and a trained head."""
    names = "kept", "gathered", "tied", "head", "upper", "offloaded"
    heads = some(KEPT, "chunk-first", "no label")
    upper = some(KEPT, "layer-first", "chunk-first") | some(RESHARDED, "attention", "no label")
    given = (
        (some(KEPT, *FEW, "after it"), llama),
        (some(RESHARDED, "attention", "evaluation", "no label", "kept again"), llama),
        (heads, tied_llama), (heads, llama_with_a_trained_head),
        (upper, llama_with_trained_upper_layers),
        (some(RESHARDED, "attention", "kept again", "no label"), adapted_llama, True),
    )  # fmt: skip
    return once("sharding", lambda: dict(zip(names, tried_all(*given), strict=True)))


@pytest.fixture(scope="module")
def more_replicas(once):
    """All of them."""
    given = (KEPT, llama), (RESHARDED, llama)
    make = lambda: dict(zip(("kept", "gathered"), tried_all(*given), strict=True))  # noqa: E731
    return once("more sharding", make)


SETS = ["replicas", pytest.param("more_replicas", marks=pytest.mark.slow)]


@pytest.mark.parametrize("steps", SETS)
def test_kept_weights_are_gathered_and_their_gradients_added_up_once(steps, request):
    found = request.getfixturevalue(steps)["kept"]
    assert_exact(found)
    for name, of in found.items():
        sums = NUM_GROUPS if KEPT[name].backward else 0
        assert (of.num_gathers, of.num_sums) == (NUM_GROUPS, sums), name
        assert of.num_ahead == NUM_GROUPS - 1, name
    assert found["chunk-first"].error > 0, "compared with itself"


@pytest.mark.parametrize("steps", SETS)
def test_weights_are_gathered_as_often_as_the_plan_says_however_many_chunks_there_are(
    steps, request
):
    found = request.getfixturevalue(steps)["gathered"]
    assert_exact(found)
    for name, of in found.items():
        plan = RESHARDED[name].plan(llama())
        for own in plan.actions:
            gathered = [action.stage for action in own if isinstance(action, Unshard)]
            ends = gathered.count(0) + gathered.count(len(plan.stages) - 1)
            planned = ends + sum(plan.stages[stage] for stage in gathered)
            assert (of.num_gathers, of.num_ahead) == (planned + 1, planned), name
        assert of.num_sums == (NUM_GROUPS if RESHARDED[name].backward else 0), name
    assert found["kept again"].num_gathers == NUM_GROUPS < found["attention"].num_gathers


def in_a_pool(rank: int) -> list[tuple[float, int, int]]:
    """Plans of a pool, each with the worst error and its collectives."""
    model, both, lens = llama(), Place(0, 2), (21, 13, 9)
    sequences = batch(lens)
    reference_loss(model, sequences)
    truth = take_grads(model)
    places = [
        Chunk((Slice(0, 0, 21, both), Slice(2, 0, 9, Place(1, 1)))),
        Chunk((Slice(1, 0, 13, Place(0, 1)),)),
    ]
    options = furlong.ChunkOptions(size=64, keep="kv", **RESHARD)
    layered = plan_replica(lens, options, num_layers=NUM_LAYERS, sp_size=2)
    plans = [
        chunk_by_chunk(lens, [places], num_layers=NUM_LAYERS, sp_size=2),
        layered,
    ]
    engine = furlong.Engine(model, ranks=make_ranks(1, 2, 1, "cpu"))
    evaluated = plan_replica(lens, options, num_layers=NUM_LAYERS, sp_size=2, backward=False)
    engine.run(evaluated, sequences)  # checks the model in these stages
    found = []
    for plan in plans:
        with Counted() as counted:
            engine.run(plan, sequences)
        error = worst_relative_error(whole_grads(model), truth)
        found.append((error, counted.num_gathers, counted.num_sums))
    return found


@pytest.mark.slow
def test_weights_of_a_pool():
    for places, layered in run_ranks(in_a_pool, num_ranks=2, limit_s=180):
        assert 0 < places[0] <= BOUND and 0 < layered[0] <= BOUND
        assert places[1:] == (NUM_GROUPS, NUM_GROUPS)
        assert layered[1:] == (NUM_GROUPS + NUM_LAYERS - 1, NUM_GROUPS)  # the first two again


@pytest.mark.parametrize("what", ["tied", "head", "upper", "offloaded"])
def test_models_of_which_a_part_is_trained(what, replicas):
    assert_exact(replicas[what])


@pytest.mark.slow
def test_a_process_that_is_alone_offloads_its_weights():
    steps = {name: Step(((21, 4, 40, 7),), o) for name, o in {"kept": {}, "again": RESHARD}.items()}
    assert_exact(tried_all((steps, tied_llama, True), num_ranks=1)[0])


def on_an_older_torch(rank: int, steps: Sequence[Step]) -> list[Found]:
    """The steps where FSDP2 leaves unused parameters out of its sums, and cannot be reset."""
    for name in ("set_reduce_scatter_unused_params", "reset_iter_state"):
        delattr(FSDPModule, name)
    return run_steps(rank, steps, llama)


@pytest.mark.slow
def test_a_head_without_a_label_on_one_process_before_torch_2_13():
    names = "no label", "masked", "no label", "layer-first"
    steps = [*(KEPT[name] for name in names), RESHARDED["no label"]]
    for found in run_ranks(on_an_older_torch, steps, num_ranks=2, limit_s=180):
        assert_exact(dict(zip(range(5), found, strict=True)))
        assert {of.num_sums for of in found} == {NUM_GROUPS}


@pytest.mark.slow
def test_adapters_and_other_families():
    families = "gemma3_text", "gpt2", "gpt_oss"
    few = some(KEPT, *FEW) | {"resharded": RESHARDED["no label"]}
    own = adapted_llama, tied_llama, llama_with_a_trained_head
    makes = *own, *(partial(build, family) for family in families)
    found = tried_all(*((few, make) for make in makes))
    for of_llama in found[: len(own)]:
        assert_exact(of_llama)
    others = found[len(own) :]
    for family, found in zip(families, others, strict=True):
        assert max(of.error for of in found.values()) <= max(BOUND, bound(family))


def of_groups(rank: int) -> list[tuple[float, float, float]]:
    """Layouts whose weights two groups hold, each with the worst error of two steps' gradients, of
    their norm, and what it says of the number of parameters."""
    found = []
    lens = (21, 4, 40, 7)
    for dp, sp, replicate in ((4, 1, 2), (2, 2, 2), (4, 1, 4)):
        model = tied_llama() if sp > 1 else llama()
        sequences = batch(lens)
        reference_loss(model, sequences)
        truth = take_grads(model)
        true_norm = sum(float(own.square().sum()) for own in truth.values()) ** 0.5
        num_parameters = sum(p.numel() for p in model.parameters())
        ranks = make_ranks(dp, sp, 1, "cpu", replicate)
        engine = furlong.Engine(model, ranks=ranks)
        dealt = [sequences[i] for i in range(len(lens)) if i % dp == ranks.replica]
        errors, norms = [], []
        for options in (RESHARD, {}) if sp == 1 else ({},):
            engine.forward_backward(dealt, options=furlong.ChunkOptions(size=8, **options))
            errors.append(worst_relative_error(read_grads(model), truth))
            norms.append(abs(engine.clip_gradients(1.0) / true_norm - 1))
            model.zero_grad()
        processes = Processes(Launch(rank, 4, rank), dist.group.WORLD)
        told = model_size(engine, processes).num_parameters / num_parameters
        found.append((max(errors), max(norms), told))
    return found


@pytest.mark.slow
def test_groups_that_hold_all_weights_give_the_gradients_of_one_process():
    for found in run_ranks(of_groups, num_ranks=4, limit_s=240):
        assert len(found) == 3
        for error, norm, told in found:
            assert 0 < error <= 1e-12 and norm <= 1e-12 and told == 1


@pytest.mark.slow
def test_four_replicas():
    lens = ((21, 4, 40, 7), (5, 9), (3,), (17, 30))
    steps = {"kept": Step(lens), "resharded": Step(lens, RESHARD)}
    assert_exact(tried(steps, num_ranks=4))

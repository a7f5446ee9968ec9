"""Every planner on thousands of random batches: a plan that passes the checker, runs on the clock
without a deadlock, and gives the gradient of the toy network, whatever its order and its keeps.

A planner joins by one entry of PLANNERS, or of SEARCHING: from a random source to a plan.
"""

import random
from dataclasses import replace
from typing import get_args

import pytest
from helpers.nightly import SEED
from helpers.toy_model import gradient, obey
from papers.chunkflow_plan import plan_chunkflow, recomputed_late
from papers.fpdt_plan import plan_fpdt
from papers.published.chunks import sliced_groups
from papers.seq1f1b_plan import plan_seq1f1b
from papers.unit_costs import UnitCosts
from papers.whole_sequences import plan_skrull, plan_ulysses

from furlong.cost.machine import Machine
from furlong.cost.memory import PARTS
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.plan.check import check
from furlong.plan.plan import Backward, Forward, Offload, OffloadTarget, Reduce
from furlong.plan.text import load_plan, save_plan
from furlong.planners.infinipipe import plan_infinipipe
from furlong.planners.layouts import cut_layers
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device, plan_replica, plan_two_phases
from furlong.planners.spaco import Sampling, sampled
from furlong.simulate.clock import time_actions

MODEL = CostModel(model_shape("Qwen2.5-0.5B"), Machine.named("A100-80"))
KEEPS = ("input", "kv", "attention", "all")
RULES = ("unbiased", "fixed", "paper")


def lengths(rng, longest=40, most=6):
    """A few sequences, short ones more often."""
    return [min(longest, 1 + int(rng.expovariate(0.15))) for _ in range(rng.randint(1, most))]


def heights(rng, most=4):
    return tuple(rng.randint(1, 3) for _ in range(rng.randint(1, most)))


def options(rng):
    return ChunkOptions(
        size=rng.randint(1, 12),
        num_retained=rng.randint(0, 3),
        keep=rng.choice(KEEPS),
        hybrid=rng.random() < 0.5,
    )


def offload(rng):
    return Offload(*(rng.choice(get_args(OffloadTarget)) for _ in range(4)))


def sampling(rng):
    rule, seed = rng.choice(RULES), rng.randrange(10**6)
    report_loss = rng.random() < 0.5
    if rng.random() < 0.5:
        return Sampling(chunks=rng.randint(2, 5), rule=rule, seed=seed, report_loss=report_loss)
    return Sampling(rate=rng.uniform(0.05, 1), rule=rule, seed=seed, report_loss=report_loss)


def chunkflow(rng):
    plan = plan_chunkflow(
        lengths(rng), options(rng), stages=heights(rng), backward=rng.random() < 0.9
    )
    return rng.choice((plan, recomputed_late(plan)))


def seq1f1b(rng):
    seq_lens = lengths(rng, most=4)
    work = {"quadratic": rng.random()} if rng.random() < 0.5 else {}
    groups = sliced_groups(seq_lens, num_slices=rng.randint(1, 5), **work)
    stages, num_chunks = heights(rng), sum(map(len, groups))
    layers = [[rng.randint(0, height) for _ in range(num_chunks)] for height in stages]
    recomputed = layers if rng.random() < 0.5 else ()
    return plan_seq1f1b(seq_lens, groups, stages=stages, recompute_layers=recomputed)


def fpdt(rng):
    num_layers = rng.randint(1, 6)
    return plan_fpdt(
        lengths(rng, most=4),
        num_layers=num_layers,
        stage_layers=rng.randint(1, num_layers),
        chunk_size=rng.randint(1, 12),
        keep=rng.choice(KEEPS),
        offload=offload(rng),
        sp_size=rng.choice((1, 1, 2, 4)),
        backward=rng.random() < 0.9,
    )


def one_device(rng):
    num_layers = rng.randint(1, 6)
    dials = {"offload": offload(rng), "recompute_layers": rng.choice((0, 0, 1, 2, 9))}
    if rng.random() < 0.7:
        dials |= {"order": "layer-first", "stage_layers": rng.randint(1, num_layers)}
    return plan_on_device(
        lengths(rng),
        replace(options(rng), **dials),
        num_layers=num_layers,
        backward=rng.random() < 0.9,
        frozen_layers=rng.choice((0, 0, rng.randint(0, num_layers))),
    )


def random_forks(rng):
    """The tokens of a sequence of some segments, and where they go on from an earlier one."""
    ends, path, forks = [0], [0], []
    for _ in range(rng.randint(1, 7)):
        del path[rng.randint(1, len(path)) :]
        if path[-1] != ends[-1] and path[-1] > 0:
            forks.append((ends[-1], path[-1]))
        ends.append(ends[-1] + rng.randint(1, 15))
        path.append(ends[-1])
    return ends[-1], forks


def trees(rng):
    """Sequences that branch, among others, in either order of one device, and on pools and in
    pipelines."""
    found = [random_forks(rng) for _ in range(rng.randint(1, 3))]
    lens = [n for n, _ in found] + lengths(rng, most=3)
    forks = {i: own for i, (_, own) in enumerate(found) if own}
    num_layers = rng.randint(1, 3)
    dials = {"offload": offload(rng)}
    if rng.random() < 0.4:
        dials |= {"order": "layer-first", "stage_layers": rng.randint(1, num_layers)}
    elif rng.random() < 0.5:
        dials["keep"] = rng.choice(KEEPS[:3])
        chosen = replace(options(rng), **dials)
        return plan_two_phases(lens, chosen, num_layers=num_layers, forks=forks)
    return plan_replica(
        lens, replace(options(rng), **dials),
        num_layers=num_layers, forks=forks, backward=rng.random() < 0.9,
        stages=rng.choice(((), (1,) * num_layers)), sp_size=rng.choice((1, 2)),
    )  # fmt: skip


def ulysses(rng):
    seq_lens = [*lengths(rng), 3, 5]
    return plan_ulysses(seq_lens, MODEL, dp_size=rng.choice((1, 2)), sp_size=rng.choice((1, 2)))


def skrull(rng):
    seq_lens = [*lengths(rng), 3, 5]
    sizes = {"dp_size": rng.choice((1, 2)), "sp_size": rng.choice((1, 2, 4))}
    return plan_skrull(seq_lens, MODEL, bucket_tokens=rng.randint(40, 80), **sizes)


def infinipipe(rng):
    sp_size, stages = rng.choice((1, 2)), cut_layers(MODEL, rng.randint(1, 3))
    return plan_infinipipe(lengths(rng), MODEL, stages=stages, sp_size=sp_size)


def drawn_from(planner):
    """SpaCO's draws inside the plans of another planner."""

    def plan(rng):
        whole = planner(rng)
        if not any(isinstance(a, Backward) for a in whole.actions[0]):
            return whole
        labelled = {c for c in range(len(whole.chunks)) if rng.random() < 0.3}
        return sampled(whole, sampling(rng), labelled)

    return plan


PLANNERS = {
    "chunkflow": chunkflow,
    "seq1f1b": seq1f1b,
    "fpdt": fpdt,
    "one device": one_device,
    "trees": trees,
    "sampled chunkflow": drawn_from(chunkflow),
    "sampled seq1f1b": drawn_from(seq1f1b),
    "sampled fpdt": drawn_from(fpdt),
    "sampled one device": drawn_from(one_device),
}
SEARCHING = {
    "ulysses": ulysses,
    "skrull": skrull,
    "infinipipe": infinipipe,
    "sampled skrull": drawn_from(skrull),
    "sampled infinipipe": drawn_from(infinipipe),
}
"""They try many plans for one: fewer cases."""
ALL = PLANNERS | SEARCHING


def hold(plan):
    """What every plan of every planner must do."""
    check(plan)
    duration_s = time_actions(plan, UnitCosts(plan)).duration_s
    every = [action for actions in plan.actions for action in actions]
    forwards = sum(plan.chunks[a.chunk].num_tokens for a in every if isinstance(a, Forward))
    assert not plan.report_loss or forwards == sum(plan.seq_lens) * len(plan.stages)
    assert duration_s * len(plan.actions) >= forwards * (1 - 1e-9)
    trains = any(isinstance(action, Backward) for action in every)
    expected = gradient(plan) if trains else [0.0] * len(plan.stages)
    assert obey(plan) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def hold_on_hardware(plan):
    """The cost model takes the plan, and nothing but the training's state is left at its end."""
    assert time_actions(plan, MODEL.costs(plan)).duration_s > 0
    for rank, actions in enumerate(plan.actions):
        curve = MODEL.memory().curve(plan, rank)
        assert (curve.device >= 0).all() and (curve.cpu >= 0).all()
        if isinstance(actions[-1], Reduce):
            assert curve.cpu[-1] == 0
            # of the CPU pool's buffers those that blocks of K,V are in count as K,V
            buffers = () if plan.offload.kv == "none" else ("kv", "kv_gradients", "buffers")
            for part in set(PARTS) - {"weights", "gradients", "optimizer", *buffers}:
                held = curve.device[:, PARTS.index(part)]
                # room for messages is counted as buffers all through the step
                assert held[-1] == (held.min() if part == "buffers" else 0), part


def run_cases(name, seeds):
    for seed in seeds:
        plan = ALL[name](random.Random(f"{name} {seed}"))
        try:
            hold(plan)
            if seed % 10 == 0:
                assert load_plan(save_plan(plan)) == plan
                hold_on_hardware(plan)
        except Exception as error:
            error.add_note(f"planner {name!r}, seed {seed}, lengths {plan.seq_lens}")
            raise


@pytest.mark.parametrize("name", ALL)
@pytest.mark.few(5)
def test_random_batches(name):
    run_cases(name, range(10 if name in SEARCHING else 100))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_more_random_batches(name):
    run_cases(name, range(100, 110) if name in SEARCHING else range(100, 200))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALL)
def test_many_random_batches(name):
    first = SEED * 10_000 + 400
    run_cases(name, range(first, first + (120 if name in SEARCHING else 3600)))

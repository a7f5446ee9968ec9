"""The draw of a step follows from the run's seed and the step's number."""

from dataclasses import asdict

from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device
from furlong.planners.spaco import Sampling, sampled
from furlong.train.batches import drawn_share, step_options


def options(seed):
    return ChunkOptions(size=8, sample=Sampling(rate=0.5, seed=seed))


def test_each_step_of_each_seed_has_its_own():
    seeds = {
        step_options(options(seed), step).sampling.seed
        for seed in (None, 1, 2**32 - 1)
        for step in (1, 2, 10**6)
    }
    assert len(seeds) == 9
    assert step_options(options(7), 5) == step_options(options(7), 5)
    assert step_options(options(None), 5) == step_options(options(0), 5)


def test_nothing_but_the_seed_changes():
    given = options(3)
    changed = step_options(given, 4)
    assert changed.sampling.seed == (3 << 32) + 4
    before, after = asdict(given), asdict(changed)
    before["sample"].pop("seed")
    after["sample"].pop("seed")
    assert before == after
    exact = ChunkOptions(size=8)
    assert step_options(exact, 4) is exact


def test_the_share_is_that_of_a_draw():
    plan = plan_on_device([80], ChunkOptions(size=8), num_layers=1)
    shares = set()
    for step in range(1, 9):
        sampling = step_options(options(0), step).sampling
        drawn = sampled(plan, sampling)
        assert drawn_share(drawn) == len(drawn.trained) / 10
        shares.add(drawn_share(drawn))
    assert len(shares) > 2
    assert drawn_share(plan) is None and drawn_share(None) is None

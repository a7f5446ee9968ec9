"""What `auto` decides: the fastest plan that fits, and of those alike the one that needs least."""

from dataclasses import replace
from itertools import product

import pytest

from furlong.cost.hardware import hardware, this_cpu
from furlong.cost.known_models import model_shape
from furlong.cost.model import CostModel
from furlong.cost.training import Training
from furlong.errors import ConfigError
from furlong.plan.lengths import count_lengths
from furlong.planners.auto import SLACK, decide
from furlong.planners.budget import fit
from furlong.planners.chunkflow import plan_chunkflow
from furlong.planners.options import ChunkOptions, fixed_options
from furlong.simulate.clock import time_actions

GIB = 2**30
SHAPE = model_shape("Qwen2.5-0.5B")
CPU = CostModel(SHAPE, this_cpu(measured=False), Training.in_dtype("float32"))
H100 = CostModel(SHAPE, hardware("H100"))
LENS = count_lengths([40_000, 9_000, 3_000, 3_000, 1_000, 700, 500, 300])


def choose(model=CPU, lengths=LENS, budget_bytes=1000 * GIB, **changes):
    values = {"sequences_per_step": 8} | changes
    return decide(lengths, model=model, budget_bytes=budget_bytes, **values)


def needs(options, lens, model=CPU):
    plan = plan_chunkflow(lens, options, num_layers=SHAPE.num_layers)
    return fit(plan, model, 10**15), time_actions(plan, model.costs(plan)).duration_s


def test_the_last_percents_of_speed_are_not_bought_with_memory():
    whole_bytes, whole_s = needs(ChunkOptions(size=65_536), [40_000])
    peak, step_s = needs(choose().options, [40_000])
    assert step_s <= (1 + SLACK) * whole_s * 1.001
    assert peak < 0.85 * whole_bytes
    found = choose().found
    assert found is not None
    alike = [o for o in found.others if o.step_s <= found.others[0].step_s * (1 + SLACK)]
    assert all(other.peak_bytes >= found.best.peak_bytes for other in alike)


def test_less_memory_takes_more_time():
    steps, peaks = [], []
    for budget in (1000 * GIB, 40 * GIB, 20 * GIB, 14 * GIB):
        decision = choose(budget_bytes=budget)
        peak, step_s = needs(decision.options, [40_000])
        assert peak <= budget
        steps.append(step_s)
        peaks.append(peak)
    assert peaks == sorted(peaks, reverse=True)
    assert steps == sorted(steps)
    assert steps[0] < steps[-1]


@pytest.mark.parametrize(
    ("lens", "budget_bytes"),
    [((9_000, 3_000, 700, 20), 12 * GIB), ((9_000, 3_000, 700, 20), 30 * GIB), ((800,), 60 * GIB)],
)
def test_nothing_that_is_left_out_is_better(lens, budget_bytes):
    """A plain loop over all dials with the executor's planner finds none that is faster by more
    than the slack, among those that fit with a longest sequence whose last chunk is full."""
    decision = choose(
        lengths=count_lengths(lens), budget_bytes=budget_bytes, sequences_per_step=len(lens)
    )
    assert decision.found is not None
    step_s = decision.found.best.step_s / (32 // len(lens))
    fastest_s = float("inf")
    for size, number, keep in product(
        (1024, 2048, 4096, 8192, 16384), (0, 1, 4), ("all", "attention", "kv", "input")
    ):
        options = ChunkOptions(size=size, num_retained=number, keep=keep)
        others = min(-lens[0] % size, (len(lens) - 1) * lens[0])
        full = [lens[0], others] if others else [lens[0]]
        peak, own_s = needs(options, lens)
        if max(peak, needs(options, full)[0]) <= budget_bytes:
            fastest_s = min(fastest_s, own_s)
    assert fastest_s < float("inf")
    assert step_s <= fastest_s * (1 + SLACK) * (1 + 1e-9)


def test_given_dials_hold():
    dials = {"size": 3000, "num_retained": 2, "keep": "kv"}
    for name, value in dials.items():
        assert getattr(choose(dials={name: value}).options, name) == value
    assert choose(dials=dials).options == ChunkOptions(**dials)


def test_two_decisions_are_equal():
    first, second = (choose(CostModel(SHAPE, this_cpu(measured=False))) for _ in range(2))
    assert (first.options, first.words) == (second.options, second.words)


def test_the_longest_sequence_of_the_data_must_fit_though_no_step_has_it():
    short = count_lengths([2_000] * 64)
    alone = choose(lengths=short, budget_bytes=20 * GIB)
    together = choose(lengths=short, budget_bytes=20 * GIB, longest=100_000)
    assert needs(alone.options, [100_000])[0] > 20 * GIB
    assert needs(together.options, [100_000])[0] <= 20 * GIB


def test_several_small_steps_are_not_packed_into_one():
    lengths = count_lengths([500] * 10)
    found = choose(lengths=lengths, sequences_per_step=1).found
    assert found is not None
    assert len(found.best.plan.chunks) == 32


def test_words_tell_why_and_what_the_next_best_would_have_cost():
    words = choose(budget_bytes=20 * GIB, budget_words="memory.device").words
    assert words.startswith("size ")
    assert "that fits 20 GiB (memory.device)" in words
    assert " predicted; next best of " in words and " that fit: size " in words
    assert words.endswith((" GiB", " MiB"))


def test_where_nothing_fits_the_smallest_is_taken_unless_the_budget_is_given():
    decision = choose(budget_bytes=1 * GIB)
    assert decision.found is None
    assert decision.options == ChunkOptions(size=1024, num_retained=0, keep="kv")
    assert "no plan is predicted to fit 1 GiB" in decision.words
    with pytest.raises(ConfigError) as caught:
        choose(budget_bytes=1 * GIB, must_fit=True)
    assert "lacks" in caught.value.required


def test_too_many_chunks_are_not_searched():
    decision = choose(dials={"size": 3})
    assert decision.options == replace(fixed_options(40_000), size=3)
    assert "by the fixed rule" in decision.words


def test_a_gpu_takes_larger_chunks_than_a_cpu():
    dials, lengths = {"num_retained": 0, "keep": "kv"}, count_lengths([60_000])
    sizes = [
        choose(
            model, lengths, budget_bytes=40 * GIB, sequences_per_step=1, dials=dials
        ).options.size
        for model in (H100, CPU)
    ]
    assert sizes[0] > sizes[1]


@pytest.mark.parametrize(("seq_len", "most"), [(100, 1024), (40_000, 104), (200_000, 32)])
def test_a_huge_batch_is_predicted_from_some_of_its_sequences(monkeypatch, seq_len, most):
    drawn = []

    def see(problem, methods):
        drawn.append(len(problem.seq_lens))
        raise ConfigError(given="", required="", source="", change="")

    monkeypatch.setattr("furlong.planners.auto.search", see)
    choose(lengths=count_lengths([seq_len] * 2000), sequences_per_step=10**12)
    assert drawn == [most]

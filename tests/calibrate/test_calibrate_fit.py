"""Fits: rates that made simulated timelines are found again; no clock is read here."""

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.shapes import shape_of_values

from furlong.calibrate.fit import (
    Sample,
    fit_memory,
    fit_rates,
    relative_fit,
    relative_line,
)
from furlong.calibrate.run import trials
from furlong.cost.machine import Efficiency, Machine, this_cpu
from furlong.cost.model import CostModel
from furlong.cost.training import Training
from furlong.planners.orders import plan_on_device

TRUE_RATES = {
    "linear": Efficiency(0.8, 40.0),
    "attention_forward": Efficiency(0.5, 0.0),
    "attention_backward": Efficiency(0.4, 0.0),
    "pass_launch_s": 1.5e-3,
    "layer_launch_s": 7e-4,
    "slice_launch_s": 2e-4,
    "activation_bytes_per_s": 9e9,
}


def shape_of(hidden, layers=2):
    config = {
        "model_type": "qwen2", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128,
        "intermediate_size": 4 * hidden, "vocab_size": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    return shape_of_values(config)


def simulated(spec, truth, noise=0.0, largest=1024, hidden=896):
    """Samples of a calibration's own trials, as `truth` would have timed them."""
    models = {
        name: CostModel(shape_of(width), spec, Training.in_dtype("float32"))
        for name, width in (("own", hidden), ("narrow", 256))
    }
    samples = []
    for number, trial in enumerate(t for t in trials(largest) if not t.held_out):
        model = models[trial.subject]
        plan = plan_on_device(trial.seq_lens, trial.options, num_layers=2)
        costs = replace(model, hardware=truth).costs(plan)
        seconds = tuple(
            costs.compute_s(action, 0) * (1 + noise * math.sin(7 * i + number))
            for i, action in enumerate(plan.actions[0])
        )
        samples.append(Sample(model, plan, seconds))
    return samples


def assert_close(found, rel):
    for name, value in TRUE_RATES.items():
        if isinstance(value, Efficiency):
            assert found[name].best == pytest.approx(value.best, rel=rel), name
            assert found[name].half_tokens == pytest.approx(value.half_tokens, rel=rel, abs=1e-6)
        else:
            assert found[name] == pytest.approx(value, rel=rel), name


def assert_steps(samples, machine, rel):
    """Steps take on `machine` what the samples took."""
    for sample in samples:
        predicted = replace(sample.model, hardware=machine).costs(sample.plan)
        step_s = sum(predicted.compute_s(action, 0) for action in sample.plan.actions[0])
        assert step_s == pytest.approx(sum(sample.seconds), rel=rel)


def test_rates_of_a_cpu_are_found_again():
    spec = this_cpu()
    assert_close(fit_rates(simulated(spec, replace(spec, **TRUE_RATES)), spec), 1e-6)


def test_no_fit_is_above_the_peak():
    """Which a file could not hold."""
    spec = this_cpu()
    truth = replace(spec, **TRUE_RATES | {"attention_backward": Efficiency(1.5, 0.0)})
    found = fit_rates(simulated(spec, truth), spec)
    assert found["attention_backward"].best == 1
    assert found["attention_forward"].best == pytest.approx(0.5)


def test_bytes_that_cost_nothing_replace_what_was_assumed(tmp_path):
    """Else an assumption that no measurement bears out comes on top of all that was fitted."""
    spec = this_cpu()
    truth = replace(spec, **TRUE_RATES | {"activation_bytes_per_s": math.inf})
    found = fit_rates(simulated(spec, truth, noise=-0.01), spec)
    file = tmp_path / "calibration.json"
    spec.measured(found).save(file, "float32")
    calibrated = spec.calibrated("float32", file)
    assert calibrated.activation_bytes_per_s > 1e15
    assert_steps(simulated(spec, truth), calibrated, 0.01)


def test_noise_of_five_percent_moves_what_a_step_takes_by_less():
    spec = this_cpu()
    truth = replace(spec, **TRUE_RATES)
    found = fit_rates(simulated(spec, truth, noise=0.05), spec)
    assert_steps(simulated(spec, truth), replace(spec, **found), 0.03)


def test_rates_are_found_where_launches_hide_behind_work():
    """On a GPU a pass takes the longer of its work and its launches."""
    spec = Machine.named("A100-80")
    truth = replace(
        spec, linear=Efficiency(0.7, 200.0), layer_launch_s=3e-4, pass_launch_s=2e-4,
        attention_forward=Efficiency(0.5, 100.0, square=0.85, packed=0.5),
        attention_backward=Efficiency(0.4, 150.0, square=0.85, packed=0.6),
        slice_launch_s=1e-4, activation_bytes_per_s=5e11,
    )  # fmt: skip
    samples = simulated(spec, truth, largest=8192, hidden=3584)
    found = fit_rates(samples, spec)
    assert_steps(samples, replace(spec, **found), 0.01)
    assert found["layer_launch_s"] == pytest.approx(3e-4, rel=0.01)
    for name in ("attention_forward", "attention_backward"):
        for share in ("square", "packed"):
            true = getattr(getattr(truth, name), share)
            assert getattr(found[name], share) == pytest.approx(true, rel=0.02)


def test_too_few_actions_are_refused():
    spec = this_cpu()
    samples = simulated(spec, replace(spec, **TRUE_RATES))
    with pytest.raises(ValueError, match="measured actions"):
        fit_rates([samples[3]], spec)


def test_memory_is_split_into_what_makes_it_up():
    columns = ((4e8, 2e7), (1e8, 2e7), (3e7, 1e6), (5e6, 8e6))
    rows = [(1e9 + a, 0.2 * a + 2.5 * b, a, b) for a, b in columns]
    assert fit_memory(rows) == pytest.approx([0.2, 2.5])


def test_more_counted_than_measured_takes_nothing_away():
    assert fit_memory([(1e9, -1e8, 1e8), (1e9, -2e8, 3e8)]) == [0.0]


def test_fits_are_of_the_relative_error_and_never_negative():
    slope, constant = relative_line([1, 2, 1000], [3, 5, 2001])
    assert slope == pytest.approx(2) and constant == pytest.approx(1)
    table = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    assert relative_fit(table, np.array([3.0, 2.0, 1.0]))[0] == 0

"""Trials, and what a calibration takes from them: peaks in the terms of `memory.device`."""

from __future__ import annotations

from dataclasses import replace

from furlong import ChunkOptions
from furlong.calibrate.run import MeasuredPlan, _fitted, trials
from furlong.cost.machine import this_cpu
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.planners.orders import plan_on_device
from furlong.simulate.clock import time_actions

PROCESS_BYTES = 400 * 2**20


def test_the_interpreter_and_its_libraries_are_no_part_of_a_prediction():
    """They are not in `memory.device` either, with a calibration as without one."""
    shape, spec = model_shape("Qwen2.5-0.5B"), this_cpu()
    model = CostModel(shape, spec, Training.in_dtype("float32"))
    weights_bytes = 4 * shape.num_parameters
    measured = {}
    for trial in trials(256):
        plan = plan_on_device(trial.seq_lens, trial.options, num_layers=shape.num_layers)
        times = time_actions(plan, model.costs(plan))
        seconds = [b - a for a, b in zip(times.start_s[0], times.stop_s[0], strict=True)]
        counted = sum(model.memory().curve(plan, 0).peak.values())
        measured[trial] = MeasuredPlan(
            plan, tuple(seconds), sum(seconds), before_bytes=weights_bytes + PROCESS_BYTES,
            peak_bytes=counted + PROCESS_BYTES,
        )  # fmt: skip
    models = {"own": model, "narrow": model}
    machine, results = _fitted(measured, models, spec, {"peak_flops_per_s": 1e11})
    assert machine.memory_error < 0.01
    for result in results:
        assert abs(result.memory_error) < 0.01
    plan = plan_on_device([600], ChunkOptions(size=256), num_layers=shape.num_layers)
    before, after = (
        sum(m.memory().curve(plan, 0).peak.values())
        for m in (model, replace(model, hardware=machine))
    )
    assert abs(after - before) < 0.01 * before


def test_held_out_trials_differ_in_how_chunks_are_cut():
    own = trials(1024)
    fitted = {(t.subject, t.options.size, t.options.keep, t.options.order) for t in own
              if not t.held_out}  # fmt: skip
    unseen = [t for t in own if t.held_out]
    assert {t.subject for t in unseen} == {"own", "narrow"}
    for trial in unseen:
        options = trial.options
        assert (trial.subject, options.size, options.keep, options.order) not in fitted

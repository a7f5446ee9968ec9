"""Trials, and what a calibration takes from them: peaks in the terms of `memory.device`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config

from furlong import ChunkOptions
from furlong.calibrate import run
from furlong.calibrate.run import Measured, _fitted, trials
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
        measured[trial] = Measured(
            plan, tuple(seconds), sum(seconds), before_bytes=weights_bytes + PROCESS_BYTES,
            peak_bytes=counted + PROCESS_BYTES,
        )  # fmt: skip
    outcome = _fitted(
        measured, {"own": model, "narrow": model}, spec, {"peak_flops_per_s": 1e11}, "a test"
    )  # fmt: skip
    assert outcome.machine.memory_error < 0.01
    for result in outcome.results:
        assert abs(result.memory_error) < 0.01
    plan = plan_on_device([600], ChunkOptions(size=256), num_layers=shape.num_layers)
    before, after = (
        sum(m.memory().curve(plan, 0).peak.values())
        for m in (model, replace(model, hardware=outcome.machine))
    )
    assert abs(after - before) < 0.01 * before


@pytest.mark.parametrize(("width", "told"), [(32, 1), (256, 0)])
def test_a_narrow_model_is_told_of_before_anything_is_measured(width, told, tmp_path, monkeypatch):
    class MeasuredError(Exception):
        pass

    def measured(*_):
        raise MeasuredError

    monkeypatch.setattr(run, "measured_peak", measured)
    lines = []
    config = Qwen2Config(hidden_size=width, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(MeasuredError):
        run.calibrate(
            config, dtype="float32", device=torch.device("cpu"), disk_dir=tmp_path,
            tell=lines.append,
        )  # fmt: skip
    assert len(lines) == told and all(f"a model {width} wide" in line for line in lines)


def test_held_out_trials_differ_in_how_chunks_are_cut():
    own = trials(1024)
    fitted = {(t.subject, t.options.size, t.options.keep, t.options.order) for t in own
              if not t.held_out}  # fmt: skip
    unseen = [t for t in own if t.held_out]
    assert {t.subject for t in unseen} == {"own", "narrow"}
    for trial in unseen:
        options = trial.options
        assert (trial.subject, options.size, options.keep, options.order) not in fitted

"""A calibration from the first trial to the value that is saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from furlong.calibrate.devices import copy_links, measured_peak, optimizer_rate
from furlong.calibrate.fit import Residuals, Sample, fit_memory, fit_rates, residuals
from furlong.calibrate.measure import Bench, Measured, merged, tidy
from furlong.calibrate.subject import build, narrow_config, own_config
from furlong.calibrate.trials import Subject, Trial, trials
from furlong.cost.calibration import Calibration
from furlong.cost.calibration_file import machine_of
from furlong.cost.device_names import nearest_hardware
from furlong.cost.hardware import THIS_CPU, HardwareSpec, hardware, this_cpu
from furlong.cost.model import CostModel
from furlong.cost.shape import ModelShape
from furlong.cost.training import Training
from furlong.errors import ConfigError
from furlong.simulate.clock import time_actions

Tell = Callable[[str], None]

_LARGEST_CHUNK = {"cpu": 1024, "cuda": 8192}
_SMALLEST_CHUNK = 256
_NUM_LAYERS = {"own": 2, "narrow": 2}
_ROUND_S = 30.0
"""About what one round of the user's widths may take."""
_MOST_S = 75.0
"""A further round begins only if it will be over by then."""
_NUM_ROUNDS = 3
_SLOW_SHARE = 0.6
"""Of the peak: what a step reaches, for the estimate of how long trials take."""


@dataclass(frozen=True)
class TrialResult:
    """A plan that was run, and what the calibrated model says of it."""

    trial: Trial
    measured: Measured
    predicted_s: float
    predicted_bytes: int

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.measured.step_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured.peak_bytes - 1


@dataclass(frozen=True)
class Outcome:
    calibration: Calibration
    results: tuple[TrialResult, ...]
    residuals: Residuals
    """Of the actions that were fitted."""


def calibrate(
    config: Any,
    *,
    dtype: str,
    device: torch.device,
    disk_dir: Path,
    tell: Tell = lambda words: None,
) -> Outcome:
    """Measures `device` with models of the widths of a transformers config. Raises UserError for a
    model that cannot be trained or counted."""
    started_s = time.monotonic()
    spec = spec_of(device)
    if device.type == "cpu":
        spec = replace(spec, peak_flops_per_s=measured_peak(device, getattr(torch, dtype)))
    training = replace(Training.in_dtype(dtype), optimizer="sgd")  # trials make no step
    runs: dict[Trial, list[Measured]] = {}
    models: dict[Subject, CostModel] = {}
    rate = 0.0
    shape = ModelShape.from_config(config.to_dict())
    for name in get_args(Subject):
        cut = (
            own_config(config, _NUM_LAYERS[name])
            if name == "own"
            else narrow_config(shape, _NUM_LAYERS[name])
        )
        model, cut_shape = build(cut, getattr(torch, dtype), device)
        models[name] = CostModel(cut_shape, spec, training)
        largest = largest_chunk(name, models[name], device)
        own = [trial for trial in trials(largest) if trial.subject == name]
        bench = Bench(model, compute_dtype=getattr(torch, dtype), vocab_size=cut_shape.vocab_size)
        tell(
            f"{name}: {len(own)} plans of {cut_shape.num_layers} layers of {cut_shape.hidden_size}"
        )
        _run_rounds(bench, own, runs, tell)
        if name == "own":
            rate = optimizer_rate(model, device)
        del model, bench
        tidy()
    tell("copies")
    links = copy_links(device, disk_dir)
    measured = {trial: merged(done) for trial, done in runs.items()}
    return _fitted(
        measured, models, spec, dtype, device,
        links=links, optimizer_parameters_per_s=rate, tell=tell, started_s=started_s,
    )  # fmt: skip


def device_of(name: str) -> torch.device:
    """Of `auto`, `cpu` or `cuda`. Raises ConfigError for CUDA where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            given="--device cuda, and no GPU that torch can use",
            required="a CUDA device, with a build of torch for it",
            source="the command line",
            change="leave --device out to measure the CPU, or check nvidia-smi and torch's build",
        )
    is_cuda = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if is_cuda else "cpu")


def spec_of(device: torch.device) -> HardwareSpec:
    """What is assumed of a device."""
    if device.type != "cuda":
        return this_cpu(measured=False)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return hardware(nearest_hardware(torch.cuda.get_device_name(device), total_bytes))


def largest_chunk(subject: Subject, model: CostModel, device: torch.device) -> int:
    """Tokens of the largest chunk of the trials, so that a round of them takes about `_ROUND_S`."""
    shape = model.shape
    per_token = 8 * (shape.num_active_parameters + shape.embedding_parameters)
    per_s = model.hardware.peak_flops_per_s * _SLOW_SHARE
    size = _LARGEST_CHUNK[device.type]
    while size > _SMALLEST_CHUNK:
        tokens = sum(trial.num_tokens for trial in trials(size) if trial.subject == subject)
        if tokens * per_token / per_s <= _ROUND_S:
            break
        size //= 2
    return size


def _run_rounds(
    bench: Bench, own: Sequence[Trial], runs: dict[Trial, list[Measured]], tell: Tell
) -> None:
    """All trials, and again as long as there is time."""
    smallest = min(own, key=lambda trial: trial.num_tokens)
    bench.run(smallest.seq_lens, smallest.options)  # the first run pays for buffers and kernels
    started_s = time.monotonic()
    for number in range(1, _NUM_ROUNDS + 1):
        for trial in own:
            runs.setdefault(trial, []).append(bench.run(trial.seq_lens, trial.options))
        took_s = time.monotonic() - started_s
        tell(f"round {number}: {took_s:.0f} s")
        if took_s * (number + 1) / number > _MOST_S / 2:
            return


def _fitted(
    measured: dict[Trial, Measured],
    models: dict[Subject, CostModel],
    spec: HardwareSpec,
    dtype: str,
    device: torch.device,
    *,
    links: dict[str, Any],
    optimizer_parameters_per_s: float,
    tell: Tell,
    started_s: float,
) -> Outcome:
    is_cpu = device.type == "cpu"
    if is_cpu:
        measured = _without_process(measured, models)
    fitted = {t: m for t, m in measured.items() if not t.held_out}
    samples = [Sample(models[t.subject], m.plan, m.seconds) for t, m in fitted.items()]
    rates = fit_rates(samples, spec)
    factor, blocks = fit_memory(_memory_rows(fitted, models))
    calibration = Calibration(
        hardware=spec.name,
        machine=machine_of(spec.name),
        dtype=dtype,
        measured_on=_measured_on(models["own"].shape, dtype, device),
        peak_flops_per_s=spec.peak_flops_per_s if spec.name == THIS_CPU else None,
        optimizer_parameters_per_s=optimizer_parameters_per_s,
        activation_factor=factor,
        heap_blocks=blocks if is_cpu else None,
        links=links,
        **rates,
    )
    after = {name: calibration.apply_to(model) for name, model in models.items()}
    results = tuple(_result(t, m, after[t.subject]) for t, m in measured.items())
    unseen = [result for result in results if result.trial.held_out]
    calibration = replace(
        calibration,
        time_error=max(abs(result.time_error) for result in unseen),
        memory_error=max(0.0, max(-result.memory_error for result in results)),
    )
    calibrated = [Sample(after[t.subject], m.plan, m.seconds) for t, m in fitted.items()]
    tell(f"fitted after {time.monotonic() - started_s:.0f} s")
    return Outcome(calibration, results, residuals(calibrated))


def _result(trial: Trial, measured: Measured, model: CostModel) -> TrialResult:
    step_s = time_actions(measured.plan, model.costs(measured.plan)).duration_s
    return TrialResult(trial, measured, step_s, _peak_bytes(model, measured))


def _without_process(
    measured: dict[Trial, Measured], models: dict[Subject, CostModel]
) -> dict[Trial, Measured]:
    """Peaks as `memory.device` bounds them: without the interpreter and its libraries, which is
    what is in use before a plan beside the weights."""
    found = [
        m.before_bytes - _resting_bytes(models[trial.subject]) for trial, m in measured.items()
    ]
    process_bytes = max(0, sorted(found)[len(found) // 2])
    return {
        trial: replace(m, peak_bytes=max(1, m.peak_bytes - process_bytes))
        for trial, m in measured.items()
    }


def _resting_bytes(model: CostModel) -> int:
    """Of the weights between steps."""
    training = model.training
    return model.shape.num_parameters * (training.master_bytes or training.compute_bytes)


def _memory_rows(
    measured: dict[Trial, Measured], models: dict[Subject, CostModel]
) -> list[tuple[float, float, float]]:
    """What `fit_memory` takes, with all that is counted but graphs taken away."""
    rows = []
    for trial, m in measured.items():
        model = models[trial.subject]
        counted = _peak_bytes(model, m)
        graphs = _peak_bytes(replace(model, activation_factor=2.0), m) - counted
        block = _peak_bytes(replace(model, heap_blocks=1.0), m) - counted
        rest = m.peak_bytes - (counted - graphs)
        rows.append((float(rest), float(graphs), float(block)))
    return rows


def _peak_bytes(model: CostModel, measured: Measured) -> int:
    return sum(model.memory().curve(measured.plan, 0).peak.values())


def _measured_on(shape: ModelShape, dtype: str, device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    return (
        f"{shape.family} {shape.hidden_size} wide in {dtype}, torch {torch.__version__},"
        f" {name}{threads}"
    )

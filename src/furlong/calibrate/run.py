"""Calibrate a machine: run trial plans on small models, and fit the cost model to them.

One model has the user's widths and few layers, another one is narrow. Together the fitted plans
determine every term of the cost model. Held-out plans, which test the fit, differ from fitted ones
in chunk size, kept tensors, order or sequence length.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from furlong.api import Engine
from furlong.calibrate.fit import Sample, fit_memory, fit_rates
from furlong.calibrate.measure import (
    clock_of,
    collective_links,
    copy_links,
    measured_peak,
    optimizer_rate,
)
from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import ModelShape, known_models
from furlong.cost.training import Training
from furlong.errors import ConfigError
from furlong.families import SPECIAL_TOKENS
from furlong.kv.pools import Storage
from furlong.models.build import build_model, read_config
from furlong.models.describe import describe
from furlong.models.folder import check_folder, check_folder_files
from furlong.models.shrink import keep_layers, with_text
from furlong.plan.plan import ChunkPlan
from furlong.planners.options import ChunkOptions
from furlong.report.patience import Tell
from furlong.runtime.distributed.mesh import gpu_of
from furlong.runtime.profile import machine_of, memory_bytes
from furlong.simulate.predict import predict

_LARGEST_CHUNK = {"cpu": 1024, "cuda": 8192}
_SMALLEST_CHUNK = 64
_NUM_LAYERS = 2
_LARGE_LAYER = 10**8
"""Parameters above which the trial model has one layer instead of `_NUM_LAYERS`."""
_ROUND_S = 30.0
"""Rough limit of one round of trials."""
_MOST_S = 75.0
"""Limit of the repeated rounds of both models together, half for each."""
_NUM_ROUNDS = 3
_SLOW_SHARE = 0.6
"""Assumed share of peak FLOP/s, to estimate how long trials take."""

TrialModel = Literal["own", "narrow"]
"""The trial models: "own" has the user's widths in few layers; "narrow" has the same head size, and
its passes are mostly launches and attention."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan to run on a trial model; `held_out`: whether it only tests the fit."""

    subject: TrialModel
    seq_lens: tuple[int, ...]
    options: ChunkOptions
    held_out: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.seq_lens)

    def __str__(self) -> str:
        options, lens = self.options, self.seq_lens
        order = f", layer-first {options.stage_layers}" if options.order == "layer-first" else ""
        return (
            f"{self.subject}: {len(lens)} x {lens[0]:,} tokens, chunks of {options.size:,}, keep"
            f" {options.keep}, {options.num_retained} retained{order}"
        )


def trials(largest: int) -> list[Trial]:
    """Return the trials, fitted ones before held-out ones; `largest`: the number of tokens in the
    largest chunk."""

    def trial(
        subject: TrialModel, lengths: tuple[float, ...], size: float, held_out: bool = False,
        **options: Any,
    ) -> Trial:  # fmt: skip
        lens = tuple(max(1, round(n * largest)) for n in lengths)
        chosen = ChunkOptions(size=max(1, round(size * largest)), **options)
        return Trial(subject, lens, chosen, held_out)

    layer_first: dict[str, Any] = {"order": "layer-first", "stage_layers": 1, "num_retained": 0}
    fitted = [
        trial("own", (2,), 1 / 2, keep="kv", num_retained=1),
        trial("own", (1,), 1 / 4, keep="attention", num_retained=0),
        trial("own", (1 / 2,), 1 / 16, keep="kv", num_retained=1),
        trial("own", (1,), 1, keep="all"),
        trial("own", (1,), 1 / 4, keep="input", **layer_first),
        trial("own", (1 / 10,) * 10, 1, keep="kv"),
        trial("narrow", (2,), 1 / 2, keep="kv", num_retained=1),
        trial("narrow", (4,), 1, keep="attention", num_retained=0),
        trial("narrow", (1 / 2,), 1 / 16, keep="kv", num_retained=0),
        trial("narrow", (1 / 10,) * 10, 1, keep="kv"),
        trial("narrow", (1,), 1 / 4, keep="input", **layer_first),
    ]
    held_out = [
        trial("own", (3 / 2,), 3 / 8, True, keep="kv", num_retained=0),
        trial("own", (3 / 4,), 1 / 8, True, keep="attention", **layer_first),
        trial("own", (1 / 7,) * 5 + (1,), 3 / 4, True, keep="attention", num_retained=1),
        trial("narrow", (3,), 3 / 4, True, keep="input", num_retained=1),
        trial("narrow", (3 / 2,), 1 / 8, True, keep="attention", **layer_first),
    ]
    return fitted + held_out


VOCABULARY = 4096
"""Largest vocabulary of a trial model: a head is a matrix like any other, but slow."""
_NARROW_HEADS = 4
_MAX_POSITIONS = 2**17


def default_config() -> Any:
    """Return the config of Qwen2.5-0.5B."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**known_models()["Qwen2.5-0.5B"]["config"])


def config_of(name: str, source: str = "model.name") -> Any:
    """Read the config of a config.json, of the folder that holds it, or of a model on the hub.

    Raises ConfigError if it cannot be read. `source`: the key or argument that held the name.
    """
    path = Path(name).expanduser()
    folder = path.parent if path.name == "config.json" else path
    if folder.is_dir():
        check_folder_files(folder, source)
    return read_config(check_folder(str(folder)))


def own_config(config: Any, num_layers: int) -> Any:
    """Return the config with few layers and a small vocabulary, without dropout."""
    if (text := config.get_text_config()) is not config:
        return with_text(config, own_config(text, num_layers))
    values = copy.deepcopy(config.to_dict())
    keep_layers(config, values, range(min(config.num_hidden_layers, num_layers)))
    for key, value in values.items():
        if ("dropout" in key or "pdrop" in key) and isinstance(value, float):
            values[key] = 0.0
    values["vocab_size"] = min(values["vocab_size"], VOCABULARY)
    for token_id, key in enumerate(SPECIAL_TOKENS):
        if values.get(key) is not None:
            values[key] = token_id
    for key in ("quantization_config", "architectures"):
        values.pop(key, None)
    return type(config).from_dict(values)


def narrow_config(shape: ModelShape, num_layers: int) -> Any:
    """Return the config of a narrow model with heads of the same size as those of `shape`."""
    from transformers import Qwen2Config

    hidden = _NARROW_HEADS * shape.head_dim
    return Qwen2Config(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=num_layers,
        num_attention_heads=_NARROW_HEADS, num_key_value_heads=_NARROW_HEADS // 2,
        vocab_size=VOCABULARY // 4, tie_word_embeddings=True,
        max_position_embeddings=_MAX_POSITIONS,
    )  # fmt: skip


def build(config: Any, dtype: torch.dtype, device: torch.device) -> tuple[Any, ModelShape]:
    """Build a model with random weights, and return the model with its shape. Raises UserError for
    a model that cannot be trained."""
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model = build_model(folder, init="random", dtype=dtype)
    return model.to(device), describe(config)


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """Measurements of one plan, run once or several times."""

    plan: ChunkPlan
    seconds: tuple[float, ...]
    """Seconds of each action, the minimum over runs."""
    step_s: float
    """Seconds of all actions in the fastest run."""
    before_bytes: int
    """Bytes in use before the plan."""
    peak_bytes: int
    """Peak bytes in use while the plan ran."""


class Bench:
    """Runs plans with random tokens on a model."""

    def __init__(
        self, model: Any, *, compute_dtype: torch.dtype, vocab_size: int,
        storage: Storage | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._engine = Engine(model, compute_dtype=compute_dtype, storage=storage)
        self._device = next(model.parameters()).device
        self._vocab_size = vocab_size
        clock, pools = clock_of(self._device), self._engine._session.state.opened
        # a thread's CPU time does not advance while it waits for a copy
        self._clock = clock if clock is time.perf_counter else lambda: clock() + pools.waited_s

    def run(self, seq_lens: Sequence[int], options: ChunkOptions) -> MeasuredPlan:
        """Run one step without an optimizer, drop its gradients, and return the measurements."""
        plan = self._engine.plan(seq_lens, options)
        self._model.zero_grad(set_to_none=True)
        tidy()
        before_bytes = memory_bytes(self._device)
        result = self._engine.run(
            plan, random_sequences(seq_lens, self._vocab_size), exact_peaks=True, clock=self._clock
        )
        self._model.zero_grad(set_to_none=True)
        seconds = tuple(r.stop_s - r.start_s for r in result.timeline.records)
        peak_bytes = result.timeline.peak_device_bytes
        return MeasuredPlan(plan, seconds, sum(seconds), before_bytes, peak_bytes)


def merged(runs: Sequence[MeasuredPlan]) -> MeasuredPlan:
    """Merge runs of one plan: the shortest seconds, the median bytes."""
    return MeasuredPlan(
        runs[0].plan,
        tuple(map(min, zip(*(run.seconds for run in runs), strict=True))),
        min(run.step_s for run in runs),
        round(statistics.median(run.before_bytes for run in runs)),
        round(statistics.median(run.peak_bytes for run in runs)),
    )


def random_sequences(seq_lens: Sequence[int], vocab_size: int) -> list[dict[str, Tensor]]:
    """Return random sequences of these lengths in which every token has a label."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(vocab_size, (n,), generator=generator) for n in seq_lens]
    return [{"input_ids": i, "labels": i} for i in ids]


def tidy() -> None:
    """Release unused memory to the operating system."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class TrialResult:
    """A measured plan and the calibrated cost model's prediction of it."""

    trial: Trial
    measured: MeasuredPlan
    predicted_s: float
    predicted_bytes: int

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.measured.step_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured.peak_bytes - 1


def calibrate(
    config: Any,
    *,
    dtype: str,
    device: torch.device,
    disk_dir: Path,
    tell: Tell = lambda words: None,
) -> tuple[Machine, tuple[TrialResult, ...]]:
    """Measure the machine of `device` with trial models of a transformers config.

    `dtype`: torch's name of the compute dtype, such as "bfloat16"; `disk_dir`: folder in which the
    disk is measured; `tell`: called with lines of progress. Return the calibrated machine and all
    trials. Raises UserError for a model that cannot be trained or described.
    """
    started_s = time.monotonic()
    shape = describe(config)
    spec, compute_dtype = machine_of(device), getattr(torch, dtype)
    figures: dict[str, Any] = {}
    if device.type == "cpu":
        figures["peak_flops_per_s"] = measured_peak(device, compute_dtype)
        spec = replace(spec, **figures)
    training = replace(Training.in_dtype(dtype), optimizer_bytes=0)  # trials make no step
    runs: dict[Trial, list[MeasuredPlan]] = {}
    models: dict[TrialModel, CostModel] = {}
    for name in get_args(TrialModel):
        if name == "own":
            is_large = shape.layers[0].parameters > _LARGE_LAYER
            cut = own_config(config, 1 if is_large else _NUM_LAYERS)
        else:
            cut = narrow_config(shape, _NUM_LAYERS)
        model, cut_shape = build(cut, compute_dtype, device)
        models[name] = CostModel(cut_shape, spec, training)
        largest = largest_chunk(name, models[name], device)
        if positions := getattr(cut.get_text_config(), "max_position_embeddings", None):
            # the longest sequence has 2 * largest tokens for "own", 4 * largest for "narrow"
            largest = min(largest, positions // (2 if name == "own" else 4))
        own = [trial for trial in trials(largest) if trial.subject == name]
        bench = Bench(model, compute_dtype=compute_dtype, vocab_size=cut_shape.vocab_size)
        tell(
            f"{name}: {len(own)} plans of {cut_shape.num_layers} layers of {cut_shape.hidden_size}"
        )
        _run_rounds(bench, own, runs, tell)
        if name == "own":
            figures["optimizer_parameters_per_s"] = optimizer_rate(model, device)
        del model, bench
        tidy()
    tell("copies")
    figures |= copy_links(device, disk_dir)
    if dist.is_initialized():
        tell(f"collectives of {dist.get_world_size()} processes")
        figures |= collective_links(device)
    measured = {trial: merged(done) for trial, done in runs.items()}
    found = _fitted(measured, models, spec, figures)
    tell(f"fitted after {time.monotonic() - started_s:.0f} s")
    return found


_OF_TORCHRUN = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def named_device(name: str) -> torch.device:
    """Return the device named `auto`, `cpu` or `cuda`.

    Raises ConfigError for `cuda` without a GPU, and for a process of torchrun that has none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            given="--device cuda, and no GPU that torch can use",
            required="a CUDA device, with a build of torch for it",
            source="the command line",
            change="leave --device out to measure the CPU, or check nvidia-smi and torch's build",
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    number, num_local = (int(os.environ.get(x, d)) for x, d in _OF_TORCHRUN.items())
    return gpu_of(number, num_local)


def largest_chunk(subject: TrialModel, model: CostModel, device: torch.device) -> int:
    """Return the number of tokens in the trials' largest chunk, chosen so that one round of trials
    takes at most about `_ROUND_S` seconds.

    `subject`: the model whose trials are counted. `model`: its cost model.
    """
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
    bench: Bench, own: Sequence[Trial], runs: dict[Trial, list[MeasuredPlan]], tell: Tell
) -> None:
    """Run all trials once, then again while there is time; append the results to `runs`."""
    smallest = min(own, key=lambda trial: trial.num_tokens)
    bench.run(smallest.seq_lens, smallest.options)  # warm-up: allocates buffers, loads kernels
    started_s = time.monotonic()
    for number in range(1, _NUM_ROUNDS + 1):
        for trial in own:
            runs.setdefault(trial, []).append(bench.run(trial.seq_lens, trial.options))
        took_s = time.monotonic() - started_s
        tell(f"round {number}: {took_s:.0f} s")
        if took_s * (number + 1) / number > _MOST_S / 2:
            return


def _fitted(
    measured: dict[Trial, MeasuredPlan],
    models: dict[TrialModel, CostModel],
    spec: Machine,
    figures: dict[str, Any],
) -> tuple[Machine, tuple[TrialResult, ...]]:
    """Fit the cost model's time rates and memory terms to the trials that are not held out.

    Return two values: the machine `spec` with the fitted values, the other measurements (`figures`)
    and the prediction errors; and the results of all trials.
    """
    is_cpu = spec.device_type == "cpu"
    if is_cpu:
        measured = _without_process(measured, models)
    fitted = {t: m for t, m in measured.items() if not t.held_out}
    samples = [Sample(models[t.subject], m.plan, m.seconds) for t, m in fitted.items()]
    try:
        rates = fit_rates(samples, spec)
    except ValueError as error:
        raise ConfigError(
            given=f"{error}: models {models['own'].shape.hidden_size} and"
            f" {models['narrow'].shape.hidden_size} wide are too small for this machine, or other"
            " work has disturbed the measurement",
            required="widths whose matrices and attention take longer than their launches",
            source="the model to calibrate with",
            change="leave the model out, or name a wider one; end other work before",
        ) from error
    bytes_held = _fit_memory(fitted, models, is_cpu=is_cpu)
    machine = spec.measured(figures | rates | bytes_held)
    after = {name: replace(model, hardware=machine) for name, model in models.items()}
    predicted = {t: predict(after[t.subject], m.plan) for t, m in measured.items()}
    results = tuple(
        TrialResult(t, m, predicted[t].step_s, predicted[t].device_bytes)
        for t, m in measured.items()
    )
    unseen = [result for result in results if result.trial.held_out]
    errors = {
        "time_error": max(abs(result.time_error) for result in unseen),
        "memory_error": max(0.0, max(-result.memory_error for result in results)),
    }
    return machine.measured(errors), results


def _without_process(
    measured: dict[Trial, MeasuredPlan], models: dict[TrialModel, CostModel]
) -> dict[Trial, MeasuredPlan]:
    """Return the measured plans, with the memory of the process itself subtracted from their peaks:
    the budget `memory.device` does not include this memory.

    The memory of the process is the bytes in use before a plan, minus the weights; the median of
    all plans is used.
    """
    found = []
    for trial, m in measured.items():
        training = models[trial.subject].training
        weight_bytes = training.master_bytes or training.compute_bytes
        found.append(m.before_bytes - models[trial.subject].shape.num_parameters * weight_bytes)
    process_bytes = max(0, sorted(found)[len(found) // 2])
    return {
        trial: replace(m, peak_bytes=max(1, m.peak_bytes - process_bytes))
        for trial, m in measured.items()
    }


def _fit_memory(
    measured: dict[Trial, MeasuredPlan],
    models: dict[TrialModel, CostModel],
    *,
    is_cpu: bool,
) -> dict[str, Any]:
    """Return fields of `Machine` about memory, fitted to the measured peaks.

    On a CPU, the cost model counts the bytes of graphs exactly, and two fields are fitted to the
    other bytes of the heap. On a GPU, a factor on the bytes of graphs is fitted, since torch
    allocates whole blocks.
    """
    terms = {"heap_blocks": 1.0, "heap_share": 1.0} if is_cpu else {"activation_factor": 2.0}
    nothing: dict[str, Any] = {name: value - 1 for name, value in terms.items()}
    rows = []
    for trial, m in measured.items():
        model = models[trial.subject]
        model = replace(model, hardware=replace(model.hardware, **nothing))
        counted = _peak_bytes(model, m)
        columns = []
        for name, value in terms.items():
            changed: dict[str, Any] = {name: value}
            other = replace(model, hardware=replace(model.hardware, **changed))
            columns.append(_peak_bytes(other, m) - counted)
        rows.append([m.peak_bytes, m.peak_bytes - counted, *columns])
    found = dict(zip(terms, fit_memory(rows), strict=True))
    return found if is_cpu else {"activation_factor": 1 + found["activation_factor"]}


def _peak_bytes(model: CostModel, measured: MeasuredPlan) -> int:
    return sum(model.memory().curve(measured.plan, 0).peak.values())

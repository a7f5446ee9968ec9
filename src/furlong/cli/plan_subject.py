"""What `furlong plan` plans for: a batch, a model, devices, and the dials that are given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import floor, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.cli.flag_types import refusal
from furlong.cli.plan_batch import Batch, batch_of
from furlong.cli.plan_flags import MAX_DEVICES
from furlong.cli.plan_sample import check_dials
from furlong.cost.calibration.file import Calibrated, calibrated, uncalibrated
from furlong.cost.devices.hardware import THIS_CPU, HardwareSpec, hardware, this_cpu
from furlong.cost.memory.training import ZeroStage
from furlong.cost.model import CostModel
from furlong.cost.shapes.known_models import MODELS, model_shape
from furlong.cost.shapes.shape import ModelShape
from furlong.errors import ConfigError
from furlong.plan.lengths import MAX_TOKENS
from furlong.plan.values import Tier
from furlong.planners.auto.decide import given_dials, training_of
from furlong.planners.auto.search import MARGIN as MARGIN_OF_ONE
from furlong.planners.budget import MARGIN
from furlong.planners.options import ChunkOptions, checked_tier
from furlong.planners.search.problem import Problem
from furlong.planners.tier_budgets import tier_budgets
from furlong.report.plan_text import line
from furlong.units import format_bytes, format_count

if TYPE_CHECKING:
    from furlong.config.schema import PlannedRun
    from furlong.config.sources import RunFlags

_SIZES = ("dp", "sp", "pp")
MAX_CHUNKS = 2048
"""Chunks of the longest sequence that a plan may have."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A problem, and the words for it."""

    problem: Problem
    dials: Mapping[str, Any]
    """Values that are given: size, num_retained, keep, tier, order, stage_layers, sample."""
    batch: Batch
    config: PlannedRun
    is_run: bool
    """Whether there is data, which `furlong train` could train on."""
    figures: Calibrated
    """Where the seconds and bytes of the problem's model come from."""
    host_bytes: int = 0
    """Budget of a device in its host's memory."""
    disk_bytes: int = 0
    num_idle: int = 0
    """Devices that are there and, with --runnable, not used."""

    @property
    def num_positions(self) -> int | None:
        """Positions of the model after the run's `model.rope`; None where they are unknown."""
        shape = self.problem.model.shape
        rope = self.config.model.rope
        if rope is None or shape.num_positions is None:
            return shape.num_positions
        original = rope.original_max_position_embeddings or shape.original_positions
        if rope.factor is not None:
            return floor(rope.factor * (original or shape.num_positions))
        return max(shape.num_positions, self.config.data.max_seq_len)

    def words(self) -> str:
        """The lines over an answer."""
        problem, model = self.problem, self.problem.model
        shape, training, spec = model.shape, model.training, model.hardware
        lora = f"LoRA of rank {training.lora.rank}" if training.lora else "all weights trained"
        counts = f"{format_count(shape.num_parameters)} parameters, {shape.num_layers} layers"
        guess = "" if shape.exact else "; an unknown family, read as if it were a Llama"
        name = "cpu (this machine)" if spec.name == THIS_CPU else spec.name
        budget = spec.budget_bytes if problem.budget_bytes is None else problem.budget_bytes
        host = f" and {format_bytes(self.host_bytes)} of the host's memory"
        budgets = f"{format_bytes(budget)}{host if self.host_bytes else ''} each"
        idle = f"; {self.num_idle} more idle" if self.num_idle else ""
        zero = "ZeRO-" + " or ".join(map(str, problem.zeros or (training.zero_stage,)))
        return "\n".join([
            line("batch", str(self.batch)),
            line("model", f"{self.config.model.name}: {counts}; {lora}, {zero}{guess}"),
            line("devices", f"{problem.num_devices} x {name}, a budget of {budgets}{idle}"),
            line("figures", self.figures.words),
        ])  # fmt: skip

    def made_for(self, model: CostModel) -> dict[str, Any]:
        """Plain values that are saved with a plan, to predict it again on its `model`."""
        run: dict[str, Any] = {"model": self.config.model.model_dump(mode="json")}
        if self.problem.budget_bytes is not None:
            run["memory"] = {"device": self.problem.budget_bytes}
        return {
            "run": run,
            "hardware": model.hardware.name,
            "zero": model.training.zero_stage,
            "num_tokens": sum(self.problem.seq_lens),
        }

    def to_json(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "batch": {
                "source": self.batch.source,
                "num_sequences": len(problem.seq_lens),
                "num_tokens": sum(problem.seq_lens),
                "longest_tokens": max(problem.seq_lens),
                "longest_of_data_tokens": self.batch.longest_tokens,
            },
            "model": self.config.model.name,
            "hardware": problem.model.hardware.name,
            "num_devices": problem.num_devices,
            "host_budget_bytes": self.host_bytes,
        }


def subject_of(flags: RunFlags) -> Subject:
    """The question that a command line asks. Raises ConfigError."""
    config, own = run_of(flags), flags.own
    is_run = own.subject is not None or "--data.train" in flags.names
    if own.hardware is None and not is_run:
        raise _missing("--hardware")
    batch = batch_of(flags, config)
    spec = spec_of(THIS_CPU if own.hardware is None else own.hardware)
    dials = _dials(config, batch)
    sizes, num_devices = _layout(flags, config)
    longest = batch.lengths.longest if batch.lengths is not None else max(batch.seq_lens)
    check_dials(own, dials, num_devices, longest)
    tier = dials.get("tier")
    host_bytes, disk_bytes = tier_budgets(
        tier, config.memory.host, config.memory.disk,
        on_cpu=spec.name == THIS_CPU, free_host_bytes=int(spec.host_bytes),
    )  # fmt: skip
    assert host_bytes is not None  # the hardware's is known
    spec = replace(spec, host_bytes=host_bytes)
    tiers: tuple[Tier, ...] = ("device", "host") if host_bytes else ("device",)
    if tier is not None:
        tiers = (ChunkOptions(tier=tier).tiers.kv,)
    figures = figures_of(config, spec, num_devices, own.zero, calibrate=not own.no_calibration)
    budget = config.memory.device
    problem = Problem(
        seq_lens=batch.seq_lens,
        model=figures.model,
        num_devices=num_devices,
        # ZeRO-2 only where it is asked for: a plan holds gradients whole until it reduces them, at
        # the end of a step, as under ZeRO-1
        zeros=(1, 3) if num_devices > 1 and own.zero is None else (),
        budget_bytes=None if budget == "auto" else budget,
        margin=figures.margin(MARGIN if num_devices > 1 else MARGIN_OF_ONE),
        tiers=tiers,
        dp=sizes["dp"],
        sp=sizes["sp"],
        pp=sizes["pp"],
    )
    return Subject(
        problem=problem, dials=dials, batch=batch, config=config, is_run=is_run, figures=figures,
        host_bytes=host_bytes, disk_bytes=disk_bytes,
        num_idle=(own.devices or 1) - 1 if own.runnable else 0,
    )  # fmt: skip


def run_of(flags: RunFlags, made_for: Mapping[str, Any] | None = None) -> PlannedRun:
    """The run that is planned: a run file's, or one of flags alone. `made_for`: values of a run
    that were saved with a plan. Raises ConfigError."""
    from furlong.config.run_file import read_run_file
    from furlong.config.schema import PlannedRun
    from furlong.config.sources import merge

    file = flags.own.subject
    if made_for is None and file is not None:
        return merge(PlannedRun, flags, read_run_file(file), file)
    values: dict[str, Any] = dict(made_for or {})
    if "--data.train" not in flags.names:
        # The schema asks for data; a plan needs no more of it than its lengths.
        if file is None and flags.own.lengths is None:
            raise _missing("--lengths")
        values["data"] = {"train": file or flags.own.lengths}
    if "model" not in values and not any(name.startswith("--model") for name in flags.names):
        raise _missing("--model.name")
    return merge(PlannedRun, flags, values, file or "no run file")


def model_shape_of(name: str) -> ModelShape:
    """The shape of a config.json, a folder that holds one, a known name, or a model of the hub.

    Raises ConfigError.
    """
    path = Path(name).expanduser()
    if os.path.exists(path) or path.suffix == ".json":
        return ModelShape.from_file(path)
    last = name.rpartition("/")[2].lower()
    if last in {known.lower() for known in MODELS}:
        return model_shape(last)
    if "/" not in name:
        return model_shape(name)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return ModelShape.from_file(hf_hub_download(name, "config.json"))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(
            given=f"{name}: {str(error).splitlines()[0]}",
            required=f"a config.json, a model on the hub, or one of {', '.join(sorted(MODELS))}",
            source="the model's name",
            change="check the name or the network, or give the path of a config.json",
        ) from error


def spec_of(name: str) -> HardwareSpec:
    """Hardware by name. This machine's rates are the assumed ones of `furlong train`, so that both
    decide alike."""
    return this_cpu(measured=False) if name == THIS_CPU else hardware(name)


def figures_of(
    config: PlannedRun,
    spec: HardwareSpec,
    num_devices: int,
    zero: ZeroStage | None,
    *,
    calibrate: bool,
) -> Calibrated:
    """The cost model of a run on a device, as it was calibrated if it was. Raises ConfigError."""
    stage: ZeroStage = zero if zero is not None else 1 if num_devices > 1 else 0
    training = replace(training_of(config.model), zero_stage=stage)
    model = CostModel(model_shape_of(config.model.name), spec, training)
    return calibrated(model, config.model.dtype) if calibrate else uncalibrated(model)


def check_num_devices(num_devices: int, source: str) -> None:
    """Raises ConfigError for more devices than can be planned for."""
    if num_devices > MAX_DEVICES:
        raise ConfigError(
            given=f"{num_devices:,} devices",
            required=f"at most {MAX_DEVICES:,}",
            source=source,
            change="use fewer devices",
        )


def _dials(config: PlannedRun, batch: Batch) -> dict[str, Any]:
    """The dials that are given. Raises ConfigError for more than can be planned for."""
    dials = given_dials(config.chunks)
    if "tier" in dials:
        dials["tier"] = checked_tier(dials["tier"])
    longest, size = max(batch.seq_lens), dials.get("size", MAX_TOKENS)
    if longest > size * MAX_CHUNKS:
        raise ConfigError(
            given=f"chunks of {size:,} tokens, {-(-longest // size):,} of them in the longest"
            f" sequence of {longest:,}",
            required=f"at most {MAX_CHUNKS:,} chunks of one sequence",
            source="chunks.size and the lengths",
            change=f"raise chunks.size to {-(-longest // MAX_CHUNKS):,}, or use shorter sequences",
        )
    return dials


def _layout(flags: RunFlags, config: PlannedRun) -> tuple[dict[str, int | None], int]:
    """Sizes of dp, sp and pp, where None is searched, and the number of devices.

    With devices or sizes among the flags a run file's sizes of 1, its defaults, are searched.
    """
    own, given = flags.own, {f"--parallel.{name}" for name in _SIZES} & flags.names
    sizes: dict[str, int | None] = {}
    for name in _SIZES:
        size = getattr(config.parallel, name)
        is_default = size == 1 and (given or own.devices) and f"--parallel.{name}" not in given
        sizes[name] = None if size == "auto" or is_default else size
    needed = prod(size or 1 for size in sizes.values())
    if own.runnable:
        if needed > 1:
            raise refusal(
                f"sizes of parallel that multiply to {needed:,}, with --runnable",
                "1: this release runs plans of one device",
                "leave --runnable out, or the sizes",
            )
        return dict.fromkeys(_SIZES, 1), 1
    check_num_devices(needed, "the product of dp, sp and pp")
    return sizes, own.devices or needed


def _missing(flag: str) -> ConfigError:
    return refusal(
        f"no {flag}",
        "RUN.yaml, PLAN.json or RUN_FOLDER; or --lengths, --model.name and --hardware",
        f"add {flag}, or see furlong plan --help",
    )

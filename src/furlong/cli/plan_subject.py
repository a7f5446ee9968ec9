"""What `furlong plan` searches a plan for: a batch, a model, devices, and the dials that are given.

Flags come first, then the run file, then defaults.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import floor, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.cli.plan_batch import Batch, batch_of_flags, batch_of_run
from furlong.cli.plan_flags import MAX_DEVICES
from furlong.cli.plan_sample import check_dials
from furlong.cost.calibration.file import Calibrated, calibrated, uncalibrated
from furlong.cost.devices.hardware import THIS_CPU, hardware
from furlong.cost.memory.training import Lora, Training, ZeroStage
from furlong.cost.model import CostModel
from furlong.cost.shapes.known_models import MODELS, model_shape
from furlong.cost.shapes.shape import ModelShape
from furlong.errors import ConfigError
from furlong.plan.values import Tier
from furlong.planners.auto.decide import given_dials
from furlong.planners.auto.decide import training_of as training_of_run
from furlong.planners.auto.search import MARGIN as MARGIN_OF_ONE
from furlong.planners.budget import MARGIN
from furlong.planners.options import ChunkOptions, checked_tier
from furlong.planners.search.problem import Problem
from furlong.planners.tier_budgets import tier_budgets
from furlong.report.plan_text import line
from furlong.units import format_bytes, format_count

if TYPE_CHECKING:
    from furlong.config.schema import RunConfig


_DIALS = ("size", "num_retained", "keep", "tier", "order", "stage_layers")
MAX_CHUNKS = 2048
"""Chunks of the longest sequence that a plan may have."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A problem, and the words for it."""

    problem: Problem
    dials: Mapping[str, Any]
    """Values that are given: size, num_retained, keep, tier, order, stage_layers, sample."""
    batch: Batch
    model_name: str
    config: RunConfig | None = None
    """Of a run file."""
    figures: Calibrated | None = None
    """Where the seconds and bytes of the problem's model come from."""
    host_bytes: int | None = 0
    """Budget of the host; None: no limit."""
    disk_bytes: int = 0

    @property
    def num_positions(self) -> int | None:
        """Positions of the model after the run's `model.rope`; None where they are unknown."""
        shape = self.problem.model.shape
        rope = self.config.model.rope if self.config is not None else None
        if rope is None or shape.num_positions is None:
            return shape.num_positions
        original = rope.original_max_position_embeddings or shape.original_positions
        if rope.factor is not None:
            return floor(rope.factor * (original or shape.num_positions))
        assert self.config is not None  # it has the rope
        return max(shape.num_positions, self.config.data.max_seq_len)

    def model_words(self) -> str:
        model = self.problem.model
        shape, training = model.shape, model.training
        lora = f"LoRA of rank {training.lora.rank}" if training.lora else "all weights trained"
        counts = f"{format_count(shape.num_parameters)} parameters, {shape.num_layers} layers"
        guess = "" if shape.exact else "; an unknown family, read as if it were a Llama"
        zeros = " or ".join(map(str, self.problem.zeros or (training.zero_stage,)))
        return f"{self.model_name}: {counts}; {lora}, ZeRO-{zeros}{guess}"

    def devices_words(self) -> str:
        problem = self.problem
        spec = problem.model.hardware
        budget = spec.budget_bytes if problem.budget_bytes is None else problem.budget_bytes
        name = "cpu (this machine)" if spec.name == THIS_CPU else spec.name
        return f"{problem.num_devices} x {name}, a budget of {format_bytes(budget)} each"

    def words(self) -> str:
        """The lines over an answer."""
        return "\n".join([
            line("batch", str(self.batch)),
            line("model", self.model_words()),
            line("devices", self.devices_words()),
            *([line("figures", self.figures.words)] if self.figures else []),
        ])  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "batch": {
                "source": self.batch.source,
                "num_sequences": len(problem.seq_lens),
                "num_tokens": sum(problem.seq_lens),
                "longest_tokens": max(problem.seq_lens),
            },
            "model": self.model_name,
            "hardware": problem.model.hardware.name,
            "num_devices": problem.num_devices,
        }


def subject_of(chosen: argparse.Namespace) -> Subject:
    """What a command line asks for. Raises ConfigError."""
    if chosen.subject is not None:
        return _of_run(chosen)
    for name in ("lengths", "model", "hardware"):
        if getattr(chosen, name) is None:
            raise ConfigError(
                given=f"no --{name}",
                required="RUN.yaml, PLAN.json or RUN_FOLDER; or --lengths, --model and --hardware",
                source="the command line",
                change=f"add --{name}, or see furlong plan --help",
            )
    dials = {name: getattr(chosen, name) for name in _DIALS}
    return _build(chosen, batch_of_flags(chosen), chosen.model, dials, None)


def model_shape_of(name: str) -> ModelShape:
    """Of a config.json, a folder that holds one, a known name, or a model of the Hugging Face hub.

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


def training_of(
    chosen: argparse.Namespace, num_devices: int, config: RunConfig | None = None
) -> Training:
    """What is trained and in which dtypes; `config`: the run's, if there is one."""
    dtype = dtype_of(chosen, config)
    zero: ZeroStage = chosen.zero if chosen.zero is not None else 1 if num_devices > 1 else 0
    training = training_of_run(config.model) if config else Training()
    if chosen.lora_rank is not None:
        training = replace(training, lora=Lora(chosen.lora_rank, attention=True, mlp=True))
    return replace(Training.in_dtype(dtype), zero_stage=zero, lora=training.lora)


def dtype_of(chosen: argparse.Namespace, config: RunConfig | None) -> str:
    """Of the compute: the flag's, the run's, or bfloat16."""
    return str(chosen.dtype or (config.model.dtype if config else "bfloat16"))


def _of_run(chosen: argparse.Namespace) -> Subject:
    from furlong.config.sources import load_run

    config = load_run(chosen.subject)
    dials = {
        name: getattr(config.chunks, name) if getattr(chosen, name) is None else
        getattr(chosen, name)
        for name in _DIALS
    }  # fmt: skip
    dials["sample"] = given_dials(config.chunks).get("sample")
    batch = batch_of_run(chosen.subject, config, chosen)
    return _build(chosen, batch, chosen.model or config.model.name, dials, config)


def _build(
    chosen: argparse.Namespace,
    batch: Batch,
    model_name: str,
    dials: Mapping[str, Any],
    config: RunConfig | None,
) -> Subject:
    sizes = _sizes(chosen, config)
    num_devices = chosen.devices or prod(size or 1 for size in sizes.values())
    check_num_devices(num_devices, "the product of dp, sp and pp")
    _check_chunks(max(batch.seq_lens), dials["size"])
    spec = hardware(THIS_CPU if chosen.hardware is None else chosen.hardware)
    fixed = {name: value for name, value in dials.items() if value not in (None, "auto")}
    if "tier" in fixed:
        fixed["tier"] = checked_tier(fixed["tier"])
    if "stage_layers" in fixed:
        fixed.setdefault("order", "layer-first")
    longest = batch.lengths.longest if batch.lengths is not None else max(batch.seq_lens)
    check_dials(chosen, fixed, num_devices, longest)
    tier = fixed.get("tier")
    host_bytes, disk_bytes = _tier_budgets(chosen, tier, spec.name == THIS_CPU, config)
    budget = chosen.memory
    if budget is None and config is not None and config.memory.device != "auto":
        budget = config.memory.device
    tiers: tuple[Tier, ...] = ("device",) if host_bytes == 0 else ("device", "host")
    if tier is not None:
        tiers = (ChunkOptions(tier=tier).tiers.kv,)
    model = CostModel(model_shape_of(model_name), spec, training_of(chosen, num_devices, config))
    figures = uncalibrated(model)
    if not chosen.no_calibration:
        figures = calibrated(model, dtype_of(chosen, config))
    problem = Problem(
        seq_lens=batch.seq_lens,
        model=figures.model,
        num_devices=num_devices,
        # ZeRO-2 only where it is asked for: gradients that are shards cannot wait for the end of a
        # step, as the cost model lets them
        zeros=(1, 3) if num_devices > 1 and chosen.zero is None else (),
        budget_bytes=budget,
        margin=figures.margin(MARGIN if num_devices > 1 else MARGIN_OF_ONE),
        tiers=tiers,
        dp=sizes["dp"],
        sp=sizes["sp"],
        pp=sizes["pp"],
    )
    return Subject(
        problem=problem, dials=fixed, batch=batch, model_name=model_name, config=config,
        host_bytes=host_bytes, disk_bytes=disk_bytes, figures=figures,
    )  # fmt: skip


def _tier_budgets(
    chosen: argparse.Namespace, tier: object, on_cpu: bool, config: RunConfig | None
) -> tuple[int | None, int]:
    """Of host and disk: flags, then the run file."""
    memory = config.memory if config is not None else None
    host = chosen.host if chosen.host is not None else memory.host if memory else "auto"
    disk = chosen.disk if chosen.disk is not None else memory.disk if memory else 0
    return tier_budgets(tier, host, disk, on_cpu=on_cpu)


def check_num_devices(num_devices: int, source: str) -> None:
    """Raises ConfigError for more devices than can be planned for."""
    if num_devices > MAX_DEVICES:
        raise ConfigError(
            given=f"{num_devices:,} devices",
            required=f"at most {MAX_DEVICES:,}",
            source=source,
            change="use fewer devices",
        )


def _check_chunks(longest: int, size: object) -> None:
    """Raises ConfigError for more chunks of a sequence than can be planned for."""
    if isinstance(size, int) and longest > size * MAX_CHUNKS:
        raise ConfigError(
            given=f"chunks of {size:,} tokens, {-(-longest // size):,} of them in the longest"
            f" sequence of {longest:,}",
            required=f"at most {MAX_CHUNKS:,} chunks of one sequence",
            source="chunks.size and the lengths",
            change=f"raise chunks.size to {-(-longest // MAX_CHUNKS):,}, or use shorter sequences",
        )


def _sizes(chosen: argparse.Namespace, config: RunConfig | None) -> dict[str, int | None]:
    """dp, sp and pp; None: searched. A run file's sp and pp of 1 are its defaults: with more
    devices than they take, what no flag gives is searched."""
    sizes: dict[str, int | None] = {name: getattr(chosen, name) for name in ("dp", "sp", "pp")}
    if config is not None and not any(sizes.values()) and not chosen.devices:
        given = config.parallel
        sizes = {"dp": None if given.dp == "auto" else given.dp, "sp": given.sp, "pp": given.pp}
    return sizes

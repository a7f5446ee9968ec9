"""The question of `furlong plan`: a batch, a model, devices, and the dials that are given."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import floor, prod
from typing import TYPE_CHECKING, Any

from furlong.cli.flag_types import check_num_devices, refusal
from furlong.cli.planning.batch import PlannedBatch, batch_of
from furlong.cli.planning.model import check_zero, figures_of, missing, run_of, spec_of
from furlong.cost.calibration import Calibrated
from furlong.cost.machine import (
    THIS_CPU,
    free_ram_budget_bytes,
)
from furlong.cost.model import CostModel
from furlong.cost.shape import ModelShape
from furlong.cost.training import Training, ZeroStage
from furlong.plan.lengths import MAX_TOKENS
from furlong.plan.plan import Tier
from furlong.planners.auto.decide import given_dials
from furlong.planners.budget import MARGIN
from furlong.planners.options import ChunkOptions, checked_tier
from furlong.planners.published.problem import Problem
from furlong.planners.spaco import check_sampling
from furlong.planners.tier_budgets import tier_budgets
from furlong.report.text import line
from furlong.units import count_words, format_bytes, format_count

if TYPE_CHECKING:
    from furlong.config.schema import RunConfig
    from furlong.config.sources import RunFlags

_SIZES = ("dp", "sp", "pp")
MAX_CHUNKS = 2048
"""Most chunks of the longest sequence of a plan."""


@dataclass(frozen=True, kw_only=True)
class PlanSubject:
    """A problem, and the words for it."""

    problem: Problem
    dials: Mapping[str, Any]
    """Values that are given: size, num_retained, keep, tier, order, stage_layers, sample."""
    given_sizes: Mapping[str, int]
    """Sizes of dp, sp and pp that are given, but for a run file's sizes of 1, its defaults."""
    batch: PlannedBatch
    config: RunConfig
    is_run: bool
    """Whether there is data, which `furlong train` could train on."""
    runs_here: bool
    """Whether it would train on this machine's CPU."""
    is_runnable: bool
    """Whether plans have to be those of a run on `num_devices` processes."""
    figures: Calibrated
    """The problem's model, and where its seconds and bytes come from."""
    host_bytes: int
    """Budget of a device in its host's memory."""
    disk_bytes: int
    num_idle: int
    """Devices that are there and, for one method's plans with --runnable, not used."""

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
        counts = f"{format_count(shape.num_parameters)} parameters,"
        counts += f" {count_words(shape.num_layers, 'layer')}{_kinds(shape, training)}"
        guess = "" if shape.exact else "; an unknown family, read as if it were a Llama"
        name = "cpu (this machine)" if spec.name == THIS_CPU else spec.name
        budget = spec.budget_bytes if problem.budget_bytes is None else problem.budget_bytes
        host = f" and {format_bytes(self.host_bytes)} of the host's memory"
        each = " each" if problem.num_devices > 1 else ""
        budgets = f"{format_bytes(budget)}{host if self.host_bytes else ''}{each}"
        idle = f"; {self.num_idle} more idle" if self.num_idle else ""
        zeros = " or ".join(map(str, problem.zeros or (training.zero_stage,)))
        zero = f", ZeRO-{zeros}" if problem.num_devices > 1 else ""
        texts = {
            "batch": str(self.batch),
            "model": f"{self.config.model.name}: {counts}; {lora}{zero}{guess}",
            "devices": f"{problem.num_devices} x {name}, a budget of {budgets}{idle}",
            "figures": self.figures.words,
        }
        return "\n".join(line(name, text) for name, text in texts.items())

    def made_for(self, model: CostModel) -> dict[str, Any]:
        """Plain values that are saved with a plan, to predict it again on its `model`."""
        device, host = self.problem.budget_bytes, self.config.memory.host
        given = {"device": "auto" if device is None else device, "host": host}
        run = {"model": self.config.model.model_dump(mode="json"), "memory": given}
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


def _kinds(shape: ModelShape, training: Training) -> str:
    """The layers of a model that are not attention with keys and values of its own."""
    kinds = []
    if count := sum(mixer.is_recurrent for mixer in shape.mixers):
        num_bytes = shape.state_bytes(range(shape.num_layers), training.compute_bytes)
        kinds.append(f"{count} recurrent, {format_bytes(num_bytes)} of states after each chunk")
    if shape.has_latents:
        count = sum(mixer.attends for mixer in shape.mixers)
        kinds.append(f"{count} with latent attention")
    return f" ({'; '.join(kinds)})" if kinds else ""


def subject_of(flags: RunFlags) -> PlanSubject:
    """The question that a command line asks. Raises ConfigError."""
    config, own = run_of(flags), flags.own
    is_run = own.subject is not None or "--data.train" in flags.names
    if own.hardware is None and not is_run:
        raise missing("--hardware")
    batch = batch_of(flags, config)
    sizes, num_devices = _layout(flags, config, is_run=is_run)
    spec = spec_of(THIS_CPU if own.hardware is None else own.hardware, num_devices)
    check_zero(own.zero, num_devices)
    dials = _dials(own, config, batch, num_devices)
    tier, budget = dials.get("tier"), config.memory.device
    host_bytes, disk_bytes = tier_budgets(
        tier, config.memory.host, config.memory.disk,
        on_cpu=spec.name == THIS_CPU, free_host_bytes=int(spec.host_bytes),
    )  # fmt: skip
    assert host_bytes is not None  # the hardware's is known
    tiers: tuple[Tier, ...] = ("device", "host") if host_bytes else ("device",)
    if tier is not None:
        tiers = (ChunkOptions(tier=tier).tiers.kv,)
    budget_bytes = None if budget == "auto" else budget
    runs_here = is_run and spec.name == THIS_CPU and (num_devices == 1 or own.runnable)
    if budget_bytes is None and runs_here:
        budget_bytes = free_ram_budget_bytes() // num_devices  # as furlong train takes it
    figures = figures_of(
        config, replace(spec, host_bytes=host_bytes), num_devices, own.zero,
        calibrate=not own.no_calibration,
    )  # fmt: skip
    # ZeRO-2 only where it is asked for: gradients that are shards cannot wait for the end of a
    # step, as the cost model lets them
    is_dial = num_devices > 1 and own.zero is None and not own.runnable
    zeros: tuple[ZeroStage, ...] = (1, 3) if is_dial else ()
    problem = Problem(
        seq_lens=batch.seq_lens, model=figures.model, num_devices=num_devices, zeros=zeros,
        budget_bytes=budget_bytes, tiers=tiers,
        margin=figures.margin(MARGIN), **sizes,
    )  # fmt: skip
    given_sizes = {
        name: size
        for name, size in sizes.items()
        if size is not None and (size > 1 or f"--parallel.{name}" in flags.names)
    }
    return PlanSubject(
        problem=problem, dials=dials, given_sizes=given_sizes, batch=batch, config=config,
        is_run=is_run, runs_here=runs_here, is_runnable=own.runnable, figures=figures,
        host_bytes=host_bytes, disk_bytes=disk_bytes,
        num_idle=(own.devices or 1) - num_devices if own.runnable else 0,
    )  # fmt: skip


def _dials(
    own: Namespace, config: RunConfig, batch: PlannedBatch, num_devices: int
) -> dict[str, Any]:
    """The dials that are given. Raises ConfigError for more than can be planned for, for a sample
    where exact plans are searched, and for a meaningless one."""
    dials = given_dials(config.chunks)
    if "tier" in dials:
        dials["tier"] = checked_tier(dials["tier"])
    longest, size = max(batch.seq_lens), dials.get("size", MAX_TOKENS)
    if longest > size * MAX_CHUNKS:
        raise refusal(
            f"chunks of {count_words(size, 'token')}, {-(-longest // size):,} of them in the"
            f" longest sequence of {longest:,}",
            f"at most {MAX_CHUNKS:,} chunks of one sequence",
            f"raise chunks.size to {-(-longest // MAX_CHUNKS):,}, or use shorter sequences",
            "chunks.size and the lengths",
        )
    if "sample" not in dials:
        return dials
    several = f"{num_devices} devices" if num_devices != 1 else ""
    for given in (several, own.compare and "--compare", own.method and "--method"):
        if given:
            raise refusal(
                f"{given}, and a run with chunks.sample",
                "one device and the search of furlong train: others are among exact plans",
                "plan the run as it is, or a copy of it without chunks.sample",
                "the command line and the run file's key chunks.sample",
            )
    longest = batch.lengths.longest if batch.lengths is not None else longest
    check_sampling(dials["sample"], size=dials["size"], longest=longest)
    return dials


def _layout(flags: RunFlags, config: RunConfig, *, is_run: bool) -> tuple[dict[str, Any], int]:
    """Sizes of dp, sp and pp, where None is searched, and the number of devices.

    With devices or sizes among the flags a run file's sizes of 1, its defaults, are searched; but
    with --runnable those of a run hold, as they do when it trains.
    """
    own, given = flags.own, {f"--parallel.{name}" for name in _SIZES} & flags.names
    may_be_default = (given or own.devices) and not (is_run and own.runnable)
    sizes: dict[str, Any] = {}
    for name in _SIZES:
        size = getattr(config.parallel, name)
        is_default = size == 1 and may_be_default and f"--parallel.{name}" not in given
        sizes[name] = None if size == "auto" or is_default else size
    needed = prod(size or 1 for size in sizes.values())
    if own.runnable and (own.method or own.compare):
        if needed > 1:
            raise refusal(
                f"sizes of parallel that multiply to {needed:,}, with --runnable and plans of"
                " methods", "1: furlong train has its own plans on several devices",
                "leave --runnable out, or the sizes, or --method",
            )  # fmt: skip
        return dict.fromkeys(_SIZES, 1), 1
    if own.runnable and own.zero not in (None, 1) and (own.devices or needed) > 1:
        raise refusal(
            f"--zero {own.zero} with --runnable on several devices",
            "1: furlong train gathers weights once in a step, and shards the optimizer's state",
            "leave --zero out, or --runnable",
        )
    check_num_devices(needed, "the product of dp, sp and pp")
    return sizes, own.devices or needed

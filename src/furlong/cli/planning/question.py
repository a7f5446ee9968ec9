"""The question of `furlong plan`: a batch, a model, devices, and the dials that are given."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from math import floor, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.cli.flag_types import MAX_BATCH, check_num_devices, check_replaced, refusal
from furlong.cost.calibration import Calibrated, calibrated, uncalibrated
from furlong.cost.machine import (
    THIS_CPU,
    HardwareSpec,
    free_ram_budget_bytes,
    hardware,
    one_of,
    this_cpu,
)
from furlong.cost.model import CostModel
from furlong.cost.shape import ModelShape, cached_shape, known_models, model_shape
from furlong.cost.training import Training, ZeroStage
from furlong.errors import UserError
from furlong.plan.lengths import (
    MAX_TOKENS,
    Lengths,
    count_lengths,
    draw_lengths,
    read_lengths,
    write_lengths,
)
from furlong.planners.decide import FREE_RAM, given_dials, training_of
from furlong.planners.options import checked_tier
from furlong.planners.question import MARGIN, SIZES, Limits, Question, tier_budgets
from furlong.planners.spaco import check_sampling
from furlong.report.text import line
from furlong.units import count_words, format_bytes, format_count, plural

if TYPE_CHECKING:
    from furlong.config.schema import RunConfig
    from furlong.config.sources import RunFlags

MAX_CHUNKS = 2048
"""Most chunks of the longest sequence of a plan."""


_OF_A_PRESET = 64
"""Sequences that are drawn from a preset, which has no end."""
_LIMIT, _PER_STEP = "--data.max_seq_len", "--train.sequences_per_step"


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The sequences of one step."""

    seq_lens: tuple[int, ...]
    source: str
    """The origin of the sequences, in words."""
    longest_tokens: int
    """Tokens of the longest sequence of the data, which the batch has unless they are a preset."""
    lengths: Lengths | None = None
    """Lengths of all of the data; None for a preset."""
    seed: int = 0
    """Seed of the draw."""

    def __str__(self) -> str:
        count = count_words(len(self.seq_lens), "sequence")
        total = sum(self.seq_lens)
        tokens = f"{format_count(total)} {plural(total, 'token')}"
        return f"{count}, {tokens}, longest {max(self.seq_lens):,}: {self.source}"


def batch_of(flags: RunFlags, config: RunConfig) -> PlannedBatch:
    """The batch of a run file, of --data.train, or of --lengths. Raises ConfigError."""
    own, seed, too_long = flags.own, config.train.seed, config.data.too_long
    is_run = own.subject is not None or "--data.train" in flags.names
    limit = config.data.max_seq_len if is_run or _LIMIT in flags.names else None
    count = own.sequences
    if count is None and (is_run or _PER_STEP in flags.names):
        count = config.train.sequences_per_step
    name = own.lengths
    if name is not None and not os.path.exists(name) and not name.endswith(".json"):
        batch = _of_preset(name, count or _OF_A_PRESET, seed, limit)
        lengths = count_lengths(batch.seq_lens)
        return batch if config.train.loss == "sft" else _of_pair(lengths, batch.source, limit)
    if name is None:
        name, lengths = _counted(own.subject, config)
    else:
        lengths = read_lengths(Path(name))
    if (
        is_run and limit and too_long == "error" and _LIMIT not in flags.names
        and lengths.longest > limit
    ):  # fmt: skip
        raise refusal(
            f"a sequence of {count_words(lengths.longest, 'token')} in {name}",
            f"at most data.max_seq_len = {count_words(limit, 'token')}, with data.too_long: error",
            "raise data.max_seq_len, or set data.too_long to truncate or drop",
            f"{own.subject or 'no run file'}, key data.max_seq_len",
        )
    if limit is not None and too_long == "truncate":
        counts: Counter[int] = Counter()
        for seq_len, times in lengths.counts:
            counts[min(seq_len, limit)] += times
        lengths = Lengths(tuple(sorted(counts.items())))
    if config.train.loss == "dpo":
        return _of_pair(lengths, name, limit)
    return _draw(lengths, name, count, seed, limit)


def _of_pair(lengths: Lengths, source: str, max_seq_len: int | None) -> PlannedBatch:
    """The most that a pair may have: both answers as long as the longest sequence."""
    longest = max(n for n, _ in lengths.counts if max_seq_len is None or n <= max_seq_len)
    words = f"a pair of the longest of {source}, the most that is in one call"
    return PlannedBatch((longest, longest), words, longest, lengths)


def _draw(
    lengths: Lengths, source: str, count: int | None, seed: int, max_seq_len: int | None
) -> PlannedBatch:
    """The longest sequence and others in a random order, `count` in all, each once unless there are
    fewer; all of them for None. Raises ConfigError."""
    kept = [(n, times) for n, times in lengths.counts if max_seq_len is None or n <= max_seq_len]
    if not kept:
        shortest = count_words(lengths.counts[0][0], "token")
        least = f"at least {shortest}, the shortest sequence of {source}"
        given = f"max_seq_len {max_seq_len:,}"
        raise refusal(given, least, "raise max_seq_len", "the batch to plan")
    some = Lengths(tuple(kept))
    number, longest = some.num_sequences, some.longest
    left_out = lengths.num_sequences - number
    longer = f", {left_out:,} longer ones left out" if left_out else ""
    _check_count(number if count is None else count, source)
    if count is None or count >= number:
        again = f", {count / number:.3g} times over" if count and count > number else ""
        words = f"all of {source}{longer}{again}, in the order of seed {seed}"
        seq_lens = draw_lengths(some, count or number, seed)
        return PlannedBatch(seq_lens, words, longest, some, seed)
    others = Lengths((*kept[:-1], *([(longest, kept[-1][1] - 1)] if kept[-1][1] > 1 else [])))
    drawn = draw_lengths(others, count - 1, seed) if count > 1 else ()
    words = f"the longest of the {number:,} of {source}{longer}"
    if drawn:
        words += f", and {count - 1:,} others drawn with seed {seed}"
    return PlannedBatch((longest, *drawn), words, longest, some, seed)


def _of_preset(name: str, count: int, seed: int, limit: int | None) -> PlannedBatch:
    from furlong.cost.lengths import length_preset, sample_lengths

    _check_count(count, name)
    seq_lens = sample_lengths(name, count, seed, max_seq_len=limit)
    words = f" of at most {count_words(limit, 'token')}" if limit else ""
    longest = min(limit or sys.maxsize, length_preset(name).longest_tokens)
    return PlannedBatch(seq_lens, f"drawn from the preset {name}{words} with seed {seed}", longest)


def _counted(file: str | None, config: RunConfig) -> tuple[str, Lengths]:
    """The name and the lengths of a run's data. They are counted where there is no file of them
    beside the run file, or an old one: that loads torch and the tokenizer."""
    if file is None:
        return "data.train", _count(config)
    counted = Path(file).with_name(f"{Path(file).stem}.lengths.json")
    named = (s if isinstance(s, str) else s.path for s in config.data.train)
    sources = [Path(file), *map(Path, named)]
    if counted.exists():
        written = counted.stat().st_mtime
        if all(not path.exists() or path.stat().st_mtime <= written for path in sources):
            return str(counted), read_lengths(counted)
    check_replaced(counted, f"the lengths of {file}", "lengths")
    print(f"counting the lengths of {file}'s sequences into {counted}", file=sys.stderr)
    lengths = _count(config)
    write_lengths(counted, lengths)
    return str(counted), lengths


def _count(config: RunConfig) -> Lengths:
    from furlong.cli.lengths import count_run

    with redirect_stdout(sys.stderr):
        return count_run(config)


def _check_count(count: int, source: str) -> None:
    if count > MAX_BATCH:
        raise refusal(
            f"{count:,} sequences of {source} in one step", f"at most {MAX_BATCH:,}",
            "say how many a step takes with --sequences N",
            "the batch to plan: all sequences of a file of lengths, else train.sequences_per_step",
        )  # fmt: skip


def run_of(flags: RunFlags, made_for: Mapping[str, Any] | None = None) -> RunConfig:
    """The run that is planned: a run file's, or one of flags alone. `made_for`: values of a run
    that were saved with a plan. Raises ConfigError."""
    from furlong.config.sources import merge, read_run_file

    file = flags.own.subject
    if made_for is None and file is not None:
        return merge(flags, read_run_file(file), file)
    values: dict[str, Any] = dict(made_for or {})
    if "--data.train" not in flags.names:
        # The schema asks for data; a plan needs no more of it than its lengths.
        if file is None and flags.own.lengths is None:
            raise missing("--lengths")
        values["data"] = {"train": file or flags.own.lengths}
    if "model" not in values and not any(name.startswith("--model") for name in flags.names):
        raise missing("--model.name")
    return merge(flags, values, file or "no run file")


def _measured_shape(path: Path) -> ModelShape:
    """The shape of a config.json, or of the folder that holds one: as it was measured before, else
    measured with transformers, which takes seconds. Raises UserError."""
    file = path / "config.json" if path.is_dir() else path
    found, cache = cached_shape(file)
    if found is None:
        from furlong.models.describe import describe_file

        found = describe_file(file)
        with suppress(OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
            cache.write_text(json.dumps(found.to_values()), encoding="utf-8")
    return found


def _model_shape_of(name: str) -> ModelShape:
    """The shape of a config.json, a folder that holds one, a known name, or a model of the hub.

    Raises ConfigError.
    """
    path = Path(name).expanduser()
    if os.path.exists(path) or path.suffix == ".json":
        return _measured_shape(path)
    last = name.rpartition("/")[2]
    if "/" not in name or last.lower() in {known.lower() for known in known_models()}:
        return model_shape(last)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return _measured_shape(Path(hf_hub_download(name, "config.json")))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise refusal(
            f"{name}: {str(error).splitlines()[0]}",
            f"a config.json, a model on the hub, or one of {', '.join(sorted(known_models()))}",
            "check the name or the network, or give the path of a config.json",
            "the model's name",
        ) from error


def spec_of(name: str, num_devices: int = 1) -> HardwareSpec:
    """Hardware by name. This machine's rates are the assumed ones of `furlong train`, so that both
    decide alike; several devices are so many processes on it."""
    if name != THIS_CPU:
        return hardware(name)
    return one_of(this_cpu(measured=False), num_devices)


def figures_of(
    config: RunConfig,
    spec: HardwareSpec,
    num_devices: int,
    *,
    calibrate: bool,
) -> Calibrated:
    """The cost model of a run on a device, as it was calibrated if it was. Raises ConfigError."""
    zero: ZeroStage = 1 if num_devices > 1 else 0
    training = replace(training_of(config.model), zero_stage=zero, gathers=num_devices > 1)
    model = CostModel(_model_shape_of(config.model.name), spec, training)
    return (calibrated if calibrate else uncalibrated)(model, config.model.dtype)


def missing(flag: str) -> UserError:
    """The error for a flag without which there is nothing to plan."""
    required = "RUN.yaml, PLAN.json or RUN_FOLDER; or --lengths, --model.name and --hardware"
    return refusal(f"no {flag}", required, f"add {flag}, or see furlong plan --help")


@dataclass(frozen=True, kw_only=True)
class PlanSubject:
    """A problem, and the words for it."""

    question: Question
    batch: PlannedBatch
    config: RunConfig
    is_run: bool
    """Whether there is data, which `furlong train` could train on."""
    figures: Calibrated
    """The problem's model, and where its seconds and bytes come from."""
    budget_words: str
    """The origin of the device's budget."""

    @property
    def num_positions(self) -> int | None:
        """Positions of the model after the run's `model.rope`; None where they are unknown."""
        shape = self.question.model.shape
        rope = self.config.model.rope
        if rope is None or shape.num_positions is None:
            return shape.num_positions
        original = rope.original_max_position_embeddings or shape.original_positions
        if rope.factor is not None:
            return floor(rope.factor * (original or shape.num_positions))
        return max(shape.num_positions, self.config.data.max_seq_len)

    def words(self) -> str:
        """The lines over an answer."""
        question, model, limits = self.question, self.question.model, self.question.limits
        shape, training, spec = model.shape, model.training, model.hardware
        lora = f"LoRA of rank {training.lora.rank}" if training.lora else "all weights trained"
        counts = f"{format_count(shape.num_parameters)} parameters,"
        counts += f" {count_words(shape.num_layers, 'layer')}{_kinds(shape, training)}"
        name = "cpu (this machine)" if spec.name == THIS_CPU else spec.name
        host = (
            f" and {format_bytes(limits.host_bytes)} of the host's memory"
            if limits.host_bytes
            else ""
        )
        each = " each" if question.num_devices > 1 else ""
        budgets = f"{format_bytes(limits.device_bytes)}{host}{each}"
        zero = ", ZeRO-1" if question.num_devices > 1 else ""
        texts = {
            "batch": str(self.batch),
            "model": f"{self.config.model.name}: {counts}; {lora}{zero}",
            "devices": f"{question.num_devices} x {name}, a budget of {budgets}",
            "figures": self.figures.words,
        }
        return "\n".join(line(name, text) for name, text in texts.items())

    def made_for(self, model: CostModel) -> dict[str, Any]:
        """Plain values that are saved with a plan, to predict it again on its `model`."""
        given = {"device": self.config.memory.device, "host": self.config.memory.host}
        run = {"model": self.config.model.model_dump(mode="json"), "memory": given}
        return {
            "run": run,
            "hardware": model.hardware.name,
            "num_tokens": sum(self.question.seq_lens),
        }

    def to_json(self) -> dict[str, Any]:
        question = self.question
        return {
            "batch": {
                "source": self.batch.source,
                "num_sequences": len(question.seq_lens),
                "num_tokens": sum(question.seq_lens),
                "longest_tokens": max(question.seq_lens),
                "longest_of_data_tokens": self.batch.longest_tokens,
            },
            "model": self.config.model.name,
            "hardware": question.model.hardware.name,
            "num_devices": question.num_devices,
            "host_budget_bytes": question.limits.host_bytes,
        }


def _kinds(shape: ModelShape, training: Training) -> str:
    """The layers of a model that are not attention with keys and values of its own."""
    kinds = []
    if count := sum(layer.is_recurrent for layer in shape.layers):
        num_bytes = shape.state_bytes(range(shape.num_layers), training.compute_bytes)
        kinds.append(f"{count} recurrent, {format_bytes(num_bytes)} of states after each chunk")
    if shape.has_latents:
        count = sum(layer.attends for layer in shape.layers)
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
    dials = _dials(own, config, batch, num_devices)
    tier, budget = dials.get("tier"), config.memory.device
    host_bytes, disk_bytes = tier_budgets(
        tier, config.memory.host, config.memory.disk,
        on_cpu=spec.name == THIS_CPU, free_host_bytes=int(spec.host_bytes),
    )  # fmt: skip
    assert host_bytes is not None  # the hardware's is known
    budget_words = "memory.device"
    if budget == "auto":
        budget, budget_words = spec.budget_bytes, f"of one {spec.name}"
        if is_run and spec.name == THIS_CPU:  # as furlong train takes it
            budget, budget_words = free_ram_budget_bytes() // num_devices, FREE_RAM
            budget_words += f" over {num_devices} processes" if num_devices > 1 else ""
    figures = figures_of(
        config, replace(spec, host_bytes=host_bytes), num_devices, calibrate=not own.no_calibration
    )
    if config.train.loss == "dpo":
        sizes = {}
    question = Question(
        batch.seq_lens, figures.model,
        Limits(budget, host_bytes, disk_bytes, figures.margin(MARGIN)), num_devices,
        given=dials | sizes,
        method=config.chunks.method, seed=batch.seed,
    )  # fmt: skip
    return PlanSubject(
        question=question, batch=batch, config=config, is_run=is_run, figures=figures,
        budget_words=budget_words,
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
    for given in (several, own.compare and "--compare"):
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


def _layout(flags: RunFlags, config: RunConfig, *, is_run: bool) -> tuple[dict[str, int], int]:
    """The sizes of dp, sp and pp that are given, and the number of devices. Those of a run hold, as
    they do when it trains; without one what no flag gives is searched."""
    sizes: dict[str, int] = {}
    for name in SIZES:
        size = getattr(config.parallel, name)
        if size != "auto" and (is_run or f"--parallel.{name}" in flags.names):
            sizes[name] = size
    needed = prod(sizes.values())
    check_num_devices(needed, "the product of dp, sp and pp")
    return sizes, flags.own.devices or needed

"""The input of `furlong plan`: a batch, a model, devices, and the options that the user has
given."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.cli.output import check_replaced
from furlong.cost.machine import THIS_CPU, Machine, one_of
from furlong.cost.model import CostModel
from furlong.cost.shape import (
    ModelShape,
    cached_shape,
    is_known_model,
    known_models,
    known_name,
    model_shape,
)
from furlong.data.sources import walk
from furlong.errors import UserError, refusal
from furlong.files import read_object
from furlong.models.folder import check_floats, is_in_4_bits
from furlong.plan.lengths import (
    MAX_TOKENS,
    Lengths,
    StepSize,
    count_lengths,
    draw_lengths,
    read_lengths,
    write_lengths,
)
from furlong.planners.decide import MAX_CHUNKS
from furlong.planners.question import SIZES, Question
from furlong.planners.setup import cost_model_of, given_options, limits_of, offload_budgets
from furlong.planners.spaco import check_sampling
from furlong.units import count_words, format_bytes, format_count, plural

if TYPE_CHECKING:
    from furlong.config.schema import RunConfig
    from furlong.config.sources import RunFlags

MAX_DEVICES = 65_536
MAX_BATCH = 16_384
"""Most sequences of one step's batch."""
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files: without any of them torch finds no GPU."""
_OF_A_PRESET = 64
"""Default number of sequences drawn from a preset."""
_IN_ONE_STEP = "sequences in one step (--sequences)"
_LIMIT, _PER_STEP = "--data.max_seq_len", "--train.sequences_per_step"
_TOKENS_PER_STEP = "--train.tokens_per_step"
_OF_A_RUN = ("--train.steps", "--train.epochs")
_NOT_OF_LENGTHS = frozenset(("--data.max_seq_len", "--data.cache_dir", "--data.eval"))


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The sequences of one step."""

    seq_lens: tuple[int, ...]
    source: str
    """The origin of the sequences, in words."""
    lengths: Lengths
    """Lengths of all data; for a preset, of the drawn sequences."""
    longest_tokens: int
    """Tokens of the longest sequence of the data; the batch contains it."""
    tokens_per_step: int | None = None
    """Maximum number of tokens in a step; None: a step is a number of sequences."""
    longest_left_out: int = 0
    """Tokens of the longest sequence that was left out; 0 if none was."""

    @property
    def size(self) -> StepSize:
        """Size of a step, in sequences or in tokens."""
        is_counted = self.tokens_per_step is None
        return StepSize(len(self.seq_lens) if is_counted else None, self.tokens_per_step)

    def __str__(self) -> str:
        count = count_words(len(self.seq_lens), "sequence")
        total = sum(self.seq_lens)
        tokens = f"{format_count(total)} {plural(total, 'token')}"
        return f"{count}, {tokens}, longest {max(self.seq_lens):,}: {self.source}"


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """The input of `furlong plan` as its command line gives it: a batch, a model, devices and
    options."""

    config: RunConfig
    is_run: bool
    """Whether there is data that `furlong train` could train on."""
    batch: PlannedBatch
    asked: Question
    """The question as the search takes it, with the batch as its only step."""
    budget_words: str
    """The origin of the device's budget."""
    is_long: bool
    """Whether the length of the run is known: `train.steps` or `train.epochs` is not a default."""
    refused: str
    """Reason for which `furlong train` refuses the lengths or the weights; empty if none."""

    def lines(self) -> dict[str, str]:
        """Return the lines to print above the chosen plan, {label: text}. Lines with an empty text
        are not printed."""
        model, limits, count = self.asked.model, self.asked.limits, self.asked.num_devices
        shape, lora, machine = model.shape, model.training.lora, model.hardware
        trained = f"LoRA of rank {lora.rank}" if lora else "all weights trained"
        trained += " over linear layers in 4 bits" * (model.training.packed_bytes is not None)
        name = "cpu (this machine)" if machine.name == THIS_CPU else machine.name
        budgets = format_bytes(limits.device_bytes)
        if limits.cpu_bytes:
            budgets += f" and {format_bytes(limits.cpu_bytes)} of CPU memory"
        return {
            "batch": str(self.batch),
            "model": f"{self.config.model.name}: {format_count(shape.num_parameters)} parameters,"
            f" {count_words(shape.num_layers, 'layer')}{_kinds(model)}; {trained}",
            "devices": f"{count} x {name}, a budget of {budgets}" + " each" * (count > 1),
            "figures": machine.origin,
            "warning": self.budget_words if limits.device_bytes > machine.memory_bytes else "",
        }

    def made_for(self) -> dict[str, Any]:
        """Return the JSON values that are saved with a plan, so that it can be predicted again."""
        return {
            "run": self.config.model_dump(
                mode="json", include={"model": True, "memory": {"device", "cpu", "disk"}}
            ),
            "hardware": self.asked.model.hardware.name,
        }

    def to_json(self) -> dict[str, Any]:
        seq_lens, asked = self.batch.seq_lens, self.asked
        return {
            "batch": {
                "source": self.batch.source,
                "num_sequences": len(seq_lens),
                "num_tokens": sum(seq_lens),
                "longest_tokens": max(seq_lens),
                "longest_of_data_tokens": self.batch.longest_tokens,
            },
            "model": self.config.model.name,
            "hardware": asked.model.hardware.name,
            "num_devices": asked.num_devices,
            "device_memory_bytes": asked.model.hardware.memory_bytes,
            "cpu_budget_bytes": asked.limits.cpu_bytes,
        }


def _kinds(model: CostModel) -> str:
    """Return words about special layers, such as ` (24 recurrent, ...; 8 with latent attention)`.
    Return "" if the model has no such layers."""
    shape, kinds = model.shape, []
    if count := sum(layer.is_recurrent for layer in shape.layers):
        num_bytes = sum(n.state_bytes(model.training.compute_bytes) for n in shape.layers)
        kinds.append(f"{count} recurrent, {format_bytes(num_bytes)} of states after each chunk")
    if shape.has_latents:
        count = sum(layer.attends for layer in shape.layers)
        kinds.append(f"{count} with latent attention")
    return f" ({'; '.join(kinds)})" if kinds else ""


def question_of(flags: RunFlags, batch: PlannedBatch | None = None) -> PlanQuestion:
    """Return the input of `furlong plan` that the flags describe. `batch`: used instead of the
    batch in the flags. Raises ConfigError if flags are missing or do not fit together."""
    config, own = run_of(flags), flags.own
    is_run = own.subject is not None or "--data.train" in flags.names
    if own.hardware is None and not is_run:
        raise missing("--hardware")
    # sizes of a run are fixed, as in training; without a run only sizes given by flags are
    sizes = {name: getattr(config.parallel, name) for name in SIZES}
    sizes = {
        name: size for name, size in sizes.items()
        if size != "auto" and (is_run or f"--parallel.{name}" in flags.names)
    }  # fmt: skip
    check_num_devices(prod(sizes.values()), "the product of dp, sp and pp")
    num_devices: int = prod(sizes.values()) if own.devices is None else own.devices
    check_num_devices(num_devices, "--devices")
    if is_run:
        from furlong.train.start import check_run

        check_run(config, 1 if config.train.is_of_pairs else num_devices)
    batch = batch or planned_batch(flags, config)
    if config.train.is_of_pairs:
        changes = {
            f"{num_devices} devices": ("give --devices=1", num_devices > 1),
            "--compare": ("leave --compare out", own.compare),
            "--sequences": ("leave --sequences out", own.sequences is not None),
        }
        if wrong := {given: change for given, (change, is_wrong) in changes.items() if is_wrong}:
            raise refusal(
                f"{' and '.join(wrong)} with train.loss: {config.train.loss}",
                "one device, and one call of a step, which takes a pair or an answer in two phases",
                " and ".join(wrong.values()),
            )
        sizes = {}
    if own.hardware is None:
        spec, free_bytes = _here(num_devices)
    else:
        spec, free_bytes = spec_of(own.hardware, num_devices), None
    options = given_options(config)
    longest, size = max(batch.seq_lens), options.get("size", sys.maxsize)
    if longest > size * MAX_CHUNKS:
        raise refusal(
            f"chunks.size = {size:,} with a sequence of {longest:,} tokens",
            f"at most {MAX_CHUNKS:,} chunks of one sequence",
            f"raise chunks.size to {-(-longest // MAX_CHUNKS):,}, or use shorter sequences",
        )
    if "sample" in options:
        check_sampling(options["sample"], size=size, longest=batch.lengths.longest)
    cpu_bytes, disk_bytes = offload_budgets(
        config.offload, config.memory.cpu, config.memory.disk,
        on_cpu=spec.name == THIS_CPU, free_cpu_bytes=int(spec.host_bytes),
    )  # fmt: skip
    assert cpu_bytes is not None  # `free_cpu_bytes` is given
    budget, budget_words = spec.budget(config.memory.device, num_devices, free_bytes)
    spec = replace(spec, host_bytes=cpu_bytes)
    model, refused = planned_model(
        config, spec, num_devices, config.data.max_seq_len if is_run else batch.longest_tokens,
        calibrate=not own.no_calibration,
    )  # fmt: skip
    if is_run and not refused and batch.longest_left_out:
        refused = f"a sequence of {count_words(batch.longest_left_out, 'token')}; raise"
        refused += " data.max_seq_len, or set data.too_long to truncate, drop or split"
    limits = limits_of(model.hardware, budget, cpu_bytes, disk_bytes)
    asked = Question([batch.seq_lens], model, limits, num_devices, given=options | sizes)
    return PlanQuestion(
        config=config, is_run=is_run, batch=batch, asked=asked, budget_words=budget_words,
        is_long=is_run or not flags.names.isdisjoint(_OF_A_RUN), refused=refused,
    )  # fmt: skip


def planned_batch(flags: RunFlags, config: RunConfig) -> PlannedBatch:
    """Return the batch to plan, from a run file, --data.train or --lengths. A preference loss has
    one pair as its batch (kto: one answer), where each sequence is as long as the longest in the
    data. Raises ConfigError."""
    own, seed = flags.own, config.train.seed
    is_run = own.subject is not None or "--data.train" in flags.names
    limit = config.data.max_seq_len if is_run or _LIMIT in flags.names else sys.maxsize
    count, name, is_pair = own.sequences, own.lengths, config.train.is_of_pairs
    tokens, left_out = None, 0
    if count is None and (is_run or {_PER_STEP, _TOKENS_PER_STEP} & flags.names):
        count, tokens = config.train.sequences_per_step, config.train.tokens_per_step
    length = int(name) if name is not None and name.isdecimal() else 0
    is_file = name is not None and (os.path.exists(name) or name.endswith(".json"))
    if name is not None and not length and not is_file:
        default = _OF_A_PRESET if tokens is None else MAX_BATCH
        batch = _of_preset(name, default if count is None else count, seed, limit)
    else:
        if name is None:
            name, lengths = _counted(flags, config)
        elif is_file:
            lengths = read_lengths(Path(name))
        else:
            _check_at_most(MAX_TOKENS, length, "tokens of a sequence", "--lengths")
            name, lengths = f"--lengths {name}", count_lengths([length])
        too_long = config.data.too_long
        if too_long == "error" and (not is_run or _LIMIT in flags.names):
            too_long = "drop"
        if own.lengths is None and own.sequences is None and not config.data.streaming:
            unit = 2 if is_pair else 1
            StepSize(count, tokens).check(
                lengths.num_sequences // unit, "pair" * is_pair or "sequence"
            )
        kept = _limited(lengths, name, limit, too_long)
        if config.data.too_long == "error" and lengths.longest > limit:
            left_out = lengths.longest
        if is_pair:
            count = 1
        elif tokens is not None:
            count = min(MAX_BATCH, kept.num_sequences)
        batch = _draw(kept, name, count, seed, lengths.num_sequences - kept.num_sequences)
    seq_lens, source, longest = [*batch.seq_lens], batch.source, batch.longest_tokens
    if config.data.streaming and own.lengths is None:
        seq_lens[seq_lens.index(max(seq_lens))] = longest = limit
        source += ", the first ones that are read; the longest stands for one of"
        source += f" {count_words(limit, 'token')} (data.max_seq_len), which may come"
    if is_pair:
        longest, is_single = batch.lengths.longest, config.train.loss == "kto"
        seq_lens = [longest] * (2 - is_single)
        source = f"{'the longest' if is_single else 'a pair'} of {name}, the most that is in one"
        source += " call" + " that shares nothing" * (not (is_single or batch.lengths.calls))
    elif tokens is not None:
        if longest in seq_lens:  # first, then others up to the size of a step
            seq_lens.insert(0, seq_lens.pop(seq_lens.index(longest)))
        seq_lens = seq_lens[: StepSize(tokens=tokens).stops(seq_lens)[0]]
        source = f"as many as have at most {count_words(tokens, 'token')} of {source}"
    return PlannedBatch(
        tuple(seq_lens), source, batch.lengths, longest, None if is_pair else tokens, left_out
    )


def _limited(lengths: Lengths, name: str, limit: int, too_long: str) -> Lengths:
    """Return the lengths after sequences longer than `limit` are refused, truncated, split or
    dropped, as in a run. Raises ConfigError if a sequence is refused or none is left."""
    if too_long == "error" and lengths.longest > limit:
        raise refusal(
            f"a sequence of {count_words(lengths.longest, 'token')} in {name}",
            f"at most data.max_seq_len = {count_words(limit, 'token')}, with data.too_long: error",
            "raise data.max_seq_len, or set data.too_long to truncate, drop or split",
            "the run's data.max_seq_len",
        )
    if lengths.longest <= limit:
        return lengths
    counts: Counter[int] = Counter()
    for seq_len, times in lengths.counts:
        if too_long == "split" and seq_len > limit:
            counts[limit] += seq_len // limit * times
            seq_len %= limit
        if 0 < seq_len <= limit or too_long == "truncate":
            counts[min(seq_len, limit)] += times
    if not counts:
        shortest = count_words(lengths.counts[0][0], "token")
        raise refusal(
            f"data.max_seq_len = {limit:,}", f"at least {shortest}, the shortest of {name}",
            "raise data.max_seq_len", "the batch to plan",
        )  # fmt: skip
    return Lengths(tuple(sorted(counts.items())))


def _draw(
    lengths: Lengths, source: str, count: int | None, seed: int, left_out: int
) -> PlannedBatch:
    """Return a batch of `count` sequences (None: all): the longest, and others in random order. No
    sequence is repeated unless there are fewer than `count`. Raises ConfigError."""
    number, longest = lengths.num_sequences, lengths.longest
    longer = f", {left_out:,} longer ones left out" if left_out else ""
    _check_at_most(MAX_BATCH, number if count is None else count, _IN_ONE_STEP, source)
    if count is None or count >= number:
        again = f", {count / number:.3g} times over" if count and count > number else ""
        words = f"all of {source}{longer}{again}, in the order of seed {seed}"
        return PlannedBatch(draw_lengths(lengths, count or number, seed), words, lengths, longest)
    *shorter, (_, times) = lengths.counts
    others = Lengths((*shorter, *([(longest, times - 1)] if times > 1 else [])))
    drawn = draw_lengths(others, count - 1, seed) if count > 1 else ()
    words = f"the {number:,} of {source}{longer}"
    return _with_longest(longest, drawn, lengths, words, seed)


def _of_preset(name: str, count: int, seed: int, limit: int) -> PlannedBatch:
    """Return `count` lengths of a preset, its longest included, as a batch. Raises ConfigError."""
    from furlong.cost.lengths import draw_with_longest

    _check_at_most(MAX_BATCH, count, _IN_ONE_STEP, name)
    longest, *drawn = seq_lens = draw_with_longest(name, count, seed, max_seq_len=limit)
    most = f" of at most {count_words(limit, 'token')}" if limit < sys.maxsize else ""
    words = f"the preset {name}{most}"
    return _with_longest(longest, drawn, count_lengths(seq_lens), words, seed)


def _with_longest(
    longest: int, drawn: Sequence[int], lengths: Lengths, words: str, seed: int
) -> PlannedBatch:
    """Return a batch of the longest sequence (length `longest`) and the `drawn` lengths. `words`:
    source of the sequences, for the description. `lengths`: all lengths of the data."""
    others = f", and {len(drawn):,} others drawn with seed {seed}" if drawn else ""
    source = f"the longest of {words}{others}"
    return PlannedBatch((longest, *drawn), source, lengths, longest)


def _counted(flags: RunFlags, config: RunConfig) -> tuple[str, Lengths]:
    """Return the name and the sequence lengths of a run's data.

    The lengths are read from NAME.lengths.json beside the run file. If this file is missing, or
    older than the run file or the data, count the lengths (this loads torch and the tokenizer) and
    write the file. If there is no run file, or flags change the data, count the lengths without
    this file.
    """
    file, is_cut = flags.own.subject, config.data.too_long != "error" or config.data.join
    changed = {flag for flag in flags.names if flag.startswith("--data")} - _NOT_OF_LENGTHS
    changed |= flags.names & {"--train.loss"}
    if config.train.is_of_pairs:
        changed |= flags.names & {_LIMIT, "--chunks.size"}
    if config.data.eval_share:
        changed |= flags.names & {"--train.seed"}
    if file is None or changed or (is_cut and _LIMIT in flags.names):
        return "data.train", _count(config)
    counted = Path(file).with_name(f"{Path(file).stem}.lengths.json")
    sources = [Path(file), *(Path(source.path).expanduser() for source in config.data.train)]
    if counted.exists():
        written = counted.stat().st_mtime
        if all(_written(path) <= written for path in sources if path.exists()):
            return str(counted), read_lengths(counted)
    check_replaced(counted, f"the lengths of {file}", "lengths")
    print(f"counting the lengths of {file}'s sequences into {counted}", file=sys.stderr)
    lengths = _count(config)
    write_lengths(counted, lengths)
    return str(counted), lengths


def _written(path: Path) -> float:
    """Return the time of the last change of a file, or of a folder and its files."""
    files = walk(path)[0] if path.is_dir() else []
    return max(file.stat().st_mtime for file in (path, *files))


def _count(config: RunConfig) -> Lengths:
    from furlong.cli.lengths import count_run

    with redirect_stdout(sys.stderr):
        return count_run(config)


def check_num_devices(num_devices: int, source: str) -> None:
    """Raise ConfigError unless `num_devices` is from 1 to `MAX_DEVICES`."""
    _check_at_most(MAX_DEVICES, num_devices, "devices", source)


def _check_at_most(most: int, number: int, noun: str, source: str) -> None:
    if not 1 <= number <= most:
        required = f"at least 1 and at most {most:,}"
        raise refusal(f"{number:,} {noun}", required, "use another number of them", source)


def run_of(flags: RunFlags, made_for: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the run to plan, from a run file or from flags alone. `made_for`: the run's values
    that were saved with a plan. Raises ConfigError."""
    from furlong.config.sources import build_run, read_run_file

    file = flags.own.subject
    if made_for is None and file is not None:
        return build_run(read_run_file(file), file, flags)
    values: dict[str, Any] = dict(made_for or {})
    if "--data.train" not in flags.names:
        # The schema requires data; a plan needs only its lengths.
        if file is None and flags.own.lengths is None:
            raise missing("--lengths")
        values["data"] = {"train": file or flags.own.lengths}
    if "model" not in values and not any(name.startswith("--model") for name in flags.names):
        raise missing("--model.name")
    return build_run(values, file or "no run file", flags)


def missing(flag: str) -> UserError:
    """Return the error for a flag that a plan needs and that was not given."""
    required = "RUN.yaml, PLAN.json or RUN_FOLDER; or --lengths, --model.name and --hardware"
    return refusal(f"no {flag}", required, f"add {flag}, or see furlong plan --help")


def spec_of(name: str, num_devices: int = 1) -> Machine:
    """Return the specification of one device among `num_devices` of the hardware `name`. `cpu`
    means processes on this machine, which share its RAM. A card has its share of the RAM of a full
    node, also if fewer cards are used, since machines with fewer cards have less RAM."""
    machine = Machine.named(name)
    found = one_of(machine, _num_local(machine, num_devices))
    return found if machine.name == THIS_CPU else replace(found, host_bytes=machine.host_bytes)


def _num_local(machine: Machine, num_devices: int) -> int:
    """Return how many of the `num_devices` devices are on one node."""
    is_cpu = machine.name == THIS_CPU
    return num_devices if is_cpu else min(num_devices, machine.links.devices_per_node)


def _here(num_devices: int) -> tuple[Machine, int | None]:
    """Return the specification of one of `num_devices` devices of this machine, and the free bytes
    of its GPU. The free bytes are None for a CPU."""
    if not any(map(os.path.exists, _DRIVERS)):
        return spec_of(THIS_CPU, num_devices), None
    import torch  # takes seconds

    from furlong.runtime.profile import machine_of

    if not torch.cuda.is_available():
        return spec_of(THIS_CPU, num_devices), None
    device, num_local = torch.device("cuda"), min(num_devices, torch.cuda.device_count())
    return one_of(machine_of(device), num_local), torch.cuda.mem_get_info(device)[0]


def planned_model(
    config: RunConfig, spec: Machine, num_devices: int, longest: int, *, calibrate: bool
) -> tuple[CostModel, str]:
    """Return the cost model of a run on a device and, as text, the reason why `furlong train` would
    refuse the longest sequence or the weights. The text is "" if the run is not refused.

    Args:
        spec: The device.
        longest: Number of tokens of the longest sequence.
        calibrate: Whether to use this machine's calibration, if there is one.

    Raises:
        UserError: For a model that `furlong train` refuses for other reasons.
    """
    model, known, name = config.model, None, config.model.name.rpartition("/")[2]
    file = _config_file(model.name, model.revision)
    if file is None:
        values = known = known_models()[known_name(name)]["config"]
    else:
        change = "give a model's config.json, or a folder that holds it"
        values = read_object(file, source="the model's name", change=change)
    source, packed = str(file or name), values.get("quantization_config")
    asked = model.model_dump(mode="json", include={"config", "rope", "quantize", "new_tokens"})
    asked |= {"longest": longest if model.rope else 0, "lora": model.lora is not None}

    def measure() -> ModelShape:
        from furlong.train.run_model import planned_config, planned_shape  # torch takes seconds

        return planned_shape(model, planned_config(model, source, known, longest), source, longest)

    if known is not None and not (model.config or model.rope or model.new_tokens):
        shape = model_shape(name)
    else:
        shape = cached_shape({"file": values, **asked}, measure)
    refused = ""
    try:
        if longest > (shape.num_positions or longest):
            from furlong.models.rope import check_length
            from furlong.train.run_model import planned_config

            check_length(
                planned_config(model, source, known, longest), longest,
                has_rope=model.rope is not None, source=None if file is None else str(file.parent),
            )  # fmt: skip
        check_floats(values, source)
    except UserError as error:
        refused = f"{error.given}; {error.change}"
    packed = packed if is_in_4_bits(packed) else None  # others are read as floats, or refused
    return cost_model_of(config, shape, spec, num_devices, packed, calibrate=calibrate), refused


def _config_file(name: str, revision: str | None) -> Path | None:
    """Return the path of a config.json: `name` itself, in the folder `name`, or downloaded from the
    Hub; None for a known model.

    Raises ConfigError.
    """
    path = Path(name).expanduser()
    if os.path.exists(path) or path.suffix == ".json" or name.startswith((".", "/", "~")):
        return path / "config.json" if path.is_dir() else path
    if "/" not in name or (revision is None and is_known_model(name)):
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise refusal(
            f"{name}: {str(error).splitlines()[0]}",
            f"a config.json, a model on the hub, or one of {', '.join(sorted(known_models()))}",
            "check the name or the network, or give the path of a config.json",
            "the model's name",
        ) from error

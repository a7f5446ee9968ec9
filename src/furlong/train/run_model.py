"""The model config and machine of a run, and the choice of its options and layout."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from furlong.config.schema import (
    DataConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    kept_offload,
    offloads_to,
    offloads_weights,
)
from furlong.cost.machine import Machine, free_ram_budget_bytes, one_of
from furlong.cost.model import CostModel
from furlong.cost.shape import ModelShape
from furlong.data.dataset import DataSet
from furlong.data.stream import StreamSet
from furlong.data.tokenize import NoTokenizer, tokenizer_of
from furlong.errors import ConfigError, difference_words, differing
from furlong.kv.disk import NamelessFile
from furlong.kv.pools import Storage
from furlong.models.build import apply_changes, check_decoder, read_config
from furlong.models.describe import describe
from furlong.models.folder import check_folder
from furlong.models.new_tokens import grow_config
from furlong.models.quantized import check_packed
from furlong.models.rope import apply_rope, goes_beyond, num_positions, switching_lengths
from furlong.plan.lengths import StepSize, count_lengths
from furlong.plan.plan import Layout
from furlong.planners.decide import Decision, decide, model_of_run
from furlong.planners.layouts import layouts
from furlong.planners.options import ChunkOptions, fixed_options
from furlong.planners.orders import even_heights
from furlong.planners.question import Question, Space
from furlong.planners.search import BatchPlans
from furlong.planners.setup import (
    SEARCHED_OPTIONS,
    cost_model_of,
    given_options,
    limits_of,
    offload_budgets,
)
from furlong.planners.spaco import check_sampling
from furlong.runtime.check import check_twin
from furlong.runtime.profile import machine_of
from furlong.train.objective import objective_of
from furlong.train.processes import Launch, layout_of, sizes_of
from furlong.train.run_folder import Checkpoint

OPTION_NAMES = (*SEARCHED_OPTIONS, "stage_layers")
_NO_BOUND_BYTES = 2**62
# Keys about a config's origin, and about how transformers runs the model.
_VOLATILE = (
    "transformers_version", "_name_or_path", "_commit_hash", "architectures", "auto_map", "dtype",
    "torch_dtype", "attn_implementation", "_attn_implementation", "use_cache",
)  # fmt: skip


@dataclass(frozen=True)
class RunModel:
    """The model of a run: its transformers config, and its cost model on this process's device."""

    name: str
    config: Any
    """transformers' config, with the run's `model.config` and `model.rope` applied."""
    launch: Launch
    device: torch.device
    machine: Machine
    cost: CostModel | None
    """Cost model of one process; None if the model's work cannot be counted."""
    uncounted: str = ""
    """Why the model's work cannot be counted; "" if it can."""

    @classmethod
    def read(cls, config: RunConfig, device: torch.device, launch: Launch) -> RunModel:
        """Read the model's config and the machine's calibration. Raises UserError if the config
        cannot be read or the calibration is damaged."""
        whole = read_model_config(config)
        machine = one_of(machine_of(device), launch.num_local)
        known = (config.model.name, whole, launch, device, machine)
        try:
            packed, shape = getattr(whole, "quantization_config", None), describe(whole)
        except ConfigError as error:
            return cls(*known, None, error.given)
        return cls(*known, cost_model_of(config, shape, machine, launch.num_processes, packed))

    def decided(self, decision: Decision) -> RunModel:
        """Return a copy with the cost model of the options and layout of `decision`."""
        if self.cost is None:
            return self
        return replace(self, cost=model_of_run(self.cost, decision))

    @property
    def architecture(self) -> dict[str, Any]:
        """The config's keys that affect what the model computes, as JSON values."""
        return _architecture_of(self.config)

    def even_stages(self, layout: Layout) -> tuple[int, ...]:
        """Return the number of layers of each pipeline stage, as equal as possible; () without a
        pipeline. Used only if the work of layers is unknown.

        Raises ConfigError if there are fewer layers than stages.
        """
        if layout.pp == 1:
            return ()
        num_layers = int(self.config.get_text_config().num_hidden_layers)
        if layout.pp > num_layers:
            raise ConfigError(
                given=f"parallel.pp = {layout.pp} for a model of {num_layers} layers",
                required=f"at most {num_layers}: a stage has a layer at least",
                source=f"parallel.pp, and {self.name}, config.json",
                change=f"set parallel.pp to {num_layers} or less",
            )
        return even_heights(num_layers, layout.pp)

    def budget(self, config: RunConfig) -> tuple[int, str]:
        """Return the bytes of device memory that plans may use, and a text that describes this
        budget. Call it before the model is on the device."""
        on_card = self.device.type == "cuda"
        free_bytes = torch.cuda.mem_get_info(self.device)[0] if on_card else None
        return self.machine.budget(config.memory.device, self.launch.num_local, free_bytes)


def rope_of(config: RunConfig) -> dict[str, Any] | None:
    """Return `model.rope` as JSON values; None if it is not set."""
    return None if config.model.rope is None else config.model.rope.model_dump(mode="json")


def has_other_base(config: RunConfig) -> bool:
    """Whether `model.rope` or `model.config` changes what the weights compute. Dropout does not
    count: it is off when an exported model is used."""
    return rope_of(config) is not None or any("drop" not in key for key in config.model.config)


def read_architecture(config: RunConfig) -> dict[str, Any]:
    """Return the architecture of the run's model, from its current files."""
    return _architecture_of(read_model_config(config))


def check_architecture(checkpoint: Checkpoint, present: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless `present`, the current architecture of the run's model, equals
    that of the checkpoint."""
    if found := differing(present, checkpoint.state["architecture"]):
        name = checkpoint.state["config"]["model"]["name"]
        raise checkpoint.refusal(
            difference_words(found, "trained with"),
            f"the config.json of {name} with which the weights were trained",
            f"restore the config.json of {name} (a hub id may have a new revision), or start anew"
            " with another out",
            also=f"{name}, config.json, and ",
        )


def longest_of(
    config: RunConfig, model: RunModel, data: Mapping[str, DataSet | StreamSet],
    checkpoint: Checkpoint | None,
) -> int:  # fmt: skip
    """Return the maximum number of tokens in a sequence to train on or to evaluate or, for a model
    with RoPE of type longrope, the length of the longest sequence. Longrope has two sets of factors
    and chooses by this length; print the choice. Warn of evaluations beyond the model's positions.

    Raises CheckpointError if the run to resume has used the other factors.
    """
    if not (lengths := switching_lengths(model.config)):
        longest = config.data.longest_tokens
        positions = num_positions(model.config, longest)
        if positions is not None and longest > positions:
            print(f"warning: data.eval has sequences of up to {longest:,} tokens, and the model's"
                  f" config {positions:,} positions: beyond them it may be untrained")  # fmt: skip
        return longest
    longest = max(split.longest for split in data.values())
    if checkpoint is not None:
        before = checkpoint.state.get("longest_tokens", config.data.max_seq_len)
        if longest > before and any(before <= length < longest for length in lengths):
            raise checkpoint.refusal(
                f"a sequence of {longest:,} tokens, where the longest one had {before:,}",
                f"at most {min(n for n in lengths if n >= before):,} tokens: beyond it the model"
                " has other factors of RoPE than those with which it was trained",
                "leave the longer sequences out of data.eval, or start anew with another out",
            )
        longest = max(longest, before)
    kind = "long" if longest > min(lengths) else "short"
    by = "the most that may come (data.max_seq_len)" if config.data.streaming else "the longest"
    print(
        f"RoPE of type longrope: the {kind} factors, for sequences of"
        f" {'more than' if kind == 'long' else 'at most'} {min(lengths):,} tokens:"
        f" {by} has {longest:,}"
    )
    return longest


def planned_config(
    model: ModelConfig, source: str, known: Mapping[str, Any] | None, longest: int
) -> Any:
    """Return the transformers config of a model, with the changes in `model.config` and
    `model.rope`. Raises UserError if the config cannot be used.

    Args:
        source: File or name to read the config from.
        known: Values of the config; used instead of `source` unless None.
        longest: Tokens of the longest sequence, for which `model.rope` is set.
    """
    if known is None:
        config = read_config(source, changes=model.config, as_floats=True)
    else:
        config = AutoConfig.for_model(**known)
        apply_changes(config, model.config)
    if model.new_tokens:  # without the tokenizer: as if none of the model's rows were spare
        first = config.get_text_config().vocab_size
        grow_config(config, range(first, first + len(model.new_tokens)), source)
    if model.rope is not None:
        apply_rope(config, model.rope.model_dump(mode="json"), max_seq_len=longest)
    return config


def planned_shape(model: ModelConfig, config: Any, source: str, longest: int) -> ModelShape:
    """Return the layer sizes of a model that is only planned. Raises UserError for a model that
    `furlong train` always refuses, with any weights and data."""
    check_packed(config, source, model.quantize, has_adapters=model.lora is not None)
    check_twin(check_decoder(config, source, model.quantize, max_seq_len=longest))
    return describe(config, source)


def step_size(settings: TrainConfig) -> StepSize:
    """Return the size of a run's global batches: a number of tokens, or of sequences or pairs."""
    return StepSize(settings.sequences_per_step, settings.tokens_per_step)


def choose_run_plan(
    config: RunConfig, model: RunModel, train: DataSet | StreamSet, storage: Storage
) -> Decision:
    """Return the options and the layout of a run over `train`. For pp > 1 or sp > 1, the result
    also has the memory budget, since a plan is chosen for each batch during the run.

    Raises ConfigError if a budget, offload or method is given and no plan is predicted to fit, if
    no layout has the given sizes, or if `chunks.sample` would leave out no chunk of the data.
    """
    given, budget = _given(config, train, model), model.budget(config)
    if model.cost is None:
        decision = _uncounted(config, train, given, model)
    else:
        decision = _searched(config, train, given, model, model.cost, storage, budget)
    if decision.layout.sp == decision.layout.pp == 1:
        return decision
    return replace(decision, budget_bytes=budget[0])


def _searched(
    config: RunConfig,
    train: DataSet | StreamSet,
    given: dict[str, Any],
    model: RunModel,
    cost: CostModel,
    storage: Storage,
    budget: tuple[int, str],
) -> Decision:
    num_processes, sizes = model.launch.num_processes, sizes_of(config.parallel)
    some = layouts(
        num_processes, cost.shape, dp=sizes["dp"], sp=sizes["sp"], pp=sizes["pp"],
        replicate=config.parallel.replicate,
    )  # fmt: skip
    has_budget, (budget_bytes, budget_words) = config.memory.device != "auto", budget
    offloads = bool(ChunkOptions(offload=given.get("offload", "none")).offloading.targets)
    offloads |= bool(cost.training.offload_weights)
    is_free = config.chunks.method == "auto"
    whole = {"order": "chunk-first"} | given if all(one.pp > 1 for one in some) else given
    all_given = is_free and _are_all(whole)
    if num_processes > 1 and whole.get("order") == "layer-first":
        all_given = all_given and "reshard" in whole
    if all_given and not has_budget and len(some) == 1:
        if not offloads:
            limits = limits_of(cost.hardware, budget_bytes)
            stages = Question([train.seq_lens.tolist()], cost, limits).stages_of(some[0])
            return Decision(
                ChunkOptions(**whole), "", model=cost, layout=some[0], stages=stages,
                offload_weights=bool(cost.training.offload_weights),
            )  # fmt: skip
        budget_bytes = _NO_BOUND_BYTES  # but CPU memory and disk must hold it
    objective = objective_of(config.train)
    is_in_calls = objective.in_two_phases(num_processes)
    lens, size = train.epoch_lens(config.train.seed), step_size(config.train)
    question = Question(
        (), cost, limits_of(cost.hardware, budget_bytes, storage.cpu_bytes, storage.disk_bytes),
        num_processes, method=config.chunks.method,
        given=given | {name: size for name, size in sizes.items() if size is not None},
        calls=tuple(objective.calls(train, config.chunks.size)) if is_in_calls else (),
    )  # fmt: skip
    decision = decide(
        question, count_lengths(lens),
        size=replace(size, sequences=size.sequences and size.sequences * objective.unit_size),
        budget_words=budget_words, seed=config.train.seed, longest=train.longest,
        must_fit=offloads or has_budget or not is_free,
    )  # fmt: skip
    words = "" if all_given else decision.words
    return replace(decision, words=words, figures=cost.hardware.origin)


def _uncounted(
    config: RunConfig, train: DataSet | StreamSet, given: dict[str, Any], model: RunModel
) -> Decision:
    """Return options and layout by fixed rules, without a search. They are for a model whose FLOPs
    and bytes cannot be counted. Raises ConfigError if `chunks.method` names a method, since methods
    need a cost model."""
    if config.chunks.method != "auto":
        raise ConfigError(
            given=f"chunks.method = {config.chunks.method} and {model.uncounted}",
            required="a model whose work can be counted, which every method plans by",
            source="chunks.method",
            change="leave chunks.method out",
        )
    if objective_of(config.train).in_two_phases(model.launch.num_processes):
        given.setdefault("keep", "kv")
    words = f"by the fixed rule, for the model's work cannot be counted: {model.uncounted}"
    decision = fixed_decision(config, given, model, config.data.max_seq_len)
    if _are_all(given) and config.memory.device == "auto":
        return decision
    return replace(decision, words=words)


def fixed_decision(
    config: RunConfig, given: dict[str, Any], model: RunModel, longest: int
) -> Decision:
    """Return options and layout for sequences of at most `longest` tokens, without a search. A
    pipeline sets the order in `given`."""
    layout = layout_of(config.parallel, model.launch.num_processes)
    if layout.pp > 1:
        given.setdefault("order", "chunk-first")
    options, away = fixed_options(longest, given), bool(offloads_weights(config.offload))
    stages = model.even_stages(layout)
    return Decision(options, "", layout=layout, stages=stages, offload_weights=away)


def _are_all(given: Mapping[str, Any]) -> bool:
    """Whether `given` sets all chunk options, so that there is nothing to choose. With order
    chunk-first, `stage_layers` may be missing."""
    options = SEARCHED_OPTIONS if given.get("order") == "chunk-first" else OPTION_NAMES
    return all(name in given for name in options)


def _given(config: RunConfig, train: DataSet | StreamSet, model: RunModel) -> dict[str, Any]:
    """Return the chunk options that are fixed: those in the run file and those that the loss
    requires (see `Objective.in_two_phases`). Sampling gets the run's seed."""
    given = given_options(config)
    if objective_of(config.train).in_two_phases(model.launch.num_processes):
        return given | {"order": "chunk-first", "num_retained": 0}
    if "sample" in given:
        is_cut = train.seq_lens > given["size"]
        # the first token of a sequence is predicted from nothing
        unlabelled = (train.seq_lens - 1 - train.valid_tokens)[is_cut]
        has_unlabelled = bool((unlabelled >= given["size"]).any())
        check_sampling(
            given["sample"], size=given["size"], longest=train.longest,
            has_unlabelled=has_unlabelled,
        )  # fmt: skip
        given["sample"] = replace(given["sample"], seed=config.train.seed)
    return given


def batch_plans_of(config: RunConfig, model: RunModel, decision: Decision) -> BatchPlans | None:
    """Return the planners that make a new plan for each batch of a run with sp > 1 or pp > 1.
    Return None for other runs, and if there is no cost model."""
    if decision.budget_bytes is None or model.cost is None:
        return None
    layout = decision.layout
    limits = limits_of(model.cost.hardware, decision.budget_bytes)
    passes = layout.pp > 1 and decision.options.reshard
    question = Question(
        (), model.cost, limits, layout.num_devices,
        given=given_options(config) | ({"reshard": True} if passes else {}),
        method=config.chunks.method, stages=decision.stages,
    )  # fmt: skip
    return BatchPlans(Space(question, layout), decision.options, decision.has_shrunk)


def storage_of(config: RunConfig, device: torch.device, *, num_local: int = 1) -> Storage:
    """Return the byte limits and the folder for offloaded tensors of one of `num_local` processes
    on this machine. The default folder is the run's folder.

    Raises ConfigError if `memory.cpu` or an offload to CPU memory is given on a CPU device, if an
    offload target has a budget of 0, or if no file can be created in the folder.
    """
    offload = config.offload
    cpu_bytes, disk_bytes = offload_budgets(
        offload, config.memory.cpu, config.memory.disk,
        on_cpu=device.type != "cuda", free_cpu_bytes=free_ram_budget_bytes() // num_local,
    )  # fmt: skip
    named = config.memory.disk_dir
    folder = Path(config.out if named is None else named).expanduser()
    if disk_bytes and (kept_offload(offload) == "auto" or offloads_to(offload, "disk")):
        # The run's folder is created later: test its nearest existing parent.
        above = (folder, *folder.absolute().parents)
        existing = next(place for place in above if os.path.isdir(place))
        NamelessFile(existing if named is None else folder).close()
    return Storage(cpu_bytes, disk_bytes, folder)


def read_model_config(config: RunConfig) -> Any:
    """Return the transformers config of the run's model, with `model.config` and `model.rope`
    applied. Raises UserError."""
    model, limit = config.model, config.data.max_seq_len
    source = check_folder(model.name, model.revision)
    read = read_config(
        source, revision=model.revision, changes=model.config, rope=rope_of(config),
        max_seq_len=limit, new_rows=new_rows_of(config),
    )  # fmt: skip
    check_beyond(config.data, read)
    return read


def check_beyond(data: DataConfig, config: Any) -> None:
    """Raise ConfigError if sequences of `data.eval` that are longer than those to train on would
    have more positions than the model, or choose the factors of its RoPE for training too."""
    longest = data.longest_tokens
    if longest == data.max_seq_len:
        return
    positions, chooses = num_positions(config, longest), bool(switching_lengths(config))
    if not chooses and (positions is None or longest <= positions or goes_beyond(config)):
        return
    required = f"at most {positions:,}: each position has an entry in a table, or RoPE depends on"
    required += " the length of each call"
    if chooses:
        required = f"at most data.max_seq_len = {data.max_seq_len:,}: by its longest sequence a run"
        required += " of this model chooses the factors of RoPE (longrope), for training too"
    raise ConfigError(
        given=f"a source with max_seq_len = {longest:,}, for a model of {positions or 0:,}"
        " positions",
        required=required,
        source="data.eval",
        change="lower max_seq_len of the source",
    )


def new_rows_of(config: RunConfig) -> range | None:
    """Return the ids of tokens that are new to the run's model: those of `model.new_tokens`, and
    those of `model.tokenizer` beyond the model's vocabulary. None if there are none."""
    model = config.model
    if not model.new_tokens and model.tokenizer is None:
        return None
    with redirect_stdout(StringIO()):  # the trainer says it
        tokenizer = tokenizer_of(config)
    if isinstance(tokenizer, NoTokenizer):
        return None
    source = check_folder(model.name, model.revision)
    known = read_config(source, revision=model.revision, as_floats=True).get_text_config()
    new = tokenizer.new_ids
    return range(min(new.start, known.vocab_size), new.stop) or None


def _architecture_of(whole: Any) -> dict[str, Any]:
    return _without_volatile(json.loads(json.dumps(whole.to_diff_dict(), default=str)))


def _without_volatile(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_volatile(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if key not in _VOLATILE
    }

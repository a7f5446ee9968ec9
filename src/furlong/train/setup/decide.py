"""The dials of a run: what the user gave, and the search's choice for each `auto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from furlong.config.schema import RunConfig
from furlong.cost.calibration import calibrated
from furlong.cost.machine import (
    HardwareSpec,
    free_ram_budget_bytes,
    one_of,
    rounded_budget,
    spec_of_card,
    this_cpu,
)
from furlong.cost.model import CostModel
from furlong.data.dataset import DataSet
from furlong.errors import ConfigError
from furlong.models.describe import describe
from furlong.models.folders.build import read_config
from furlong.models.folders.folder import check_folder
from furlong.plan.lengths import count_lengths
from furlong.planners.decide import (
    FREE_RAM,
    SEARCHED_DIALS,
    Decision,
    decide,
    given_dials,
    training_of,
)
from furlong.planners.layouts import layouts
from furlong.planners.options import ChunkOptions, fixed_options
from furlong.planners.pairs import decide_pairs
from furlong.planners.question import MARGIN, Limits, Question
from furlong.planners.search import BatchPlans
from furlong.planners.spaco import check_sampling
from furlong.runtime.memory.pools import Storage
from furlong.train.processes.launch import layout_of, sizes_of
from furlong.train.setup.stages import stages_of_run
from furlong.units import format_bytes

DIALS = (*SEARCHED_DIALS, "stage_layers")
_NO_BOUND_BYTES = 2**62


def decide_options(
    config: RunConfig,
    train: DataSet,
    device: torch.device,
    storage: Storage,
    *,
    rope: dict[str, Any] | None = None,
    num_processes: int = 1,
    num_local: int = 1,
) -> Decision:
    """The options of a run over `train`, and the layout of its processes, `num_local` of which
    share this machine. Call it before the model takes memory.

    Raises ConfigError where a budget or a lower tier is given and no plan is predicted to fit, for
    sizes that no layout has, and for a sample that would leave no chunk of the data out.
    """
    if config.train.loss == "dpo" and num_processes == 1:
        return _of_pairs(config, train, device, storage, rope)
    given, budget = _given(config, train), config.memory.device
    tiers = asdict(ChunkOptions(tier=given.get("tier", "device")).tiers).values()
    is_lowered = set(tiers) != {"device"}
    try:
        model = _model(config, device, rope=rope, num_local=num_local)
    except ConfigError as error:
        return _uncounted(config, train, given, num_processes, error, rope=rope)
    sizes, method = sizes_of(config.parallel), config.chunks.method
    some = layouts(num_processes, model.shape, dp=sizes["dp"], sp=sizes["sp"], pp=sizes["pp"])
    whole = given
    if all(layout.pp > 1 for layout in some):
        whole = {"order": "chunk-first"} | given
    is_free = method == "auto"
    nothing_left = is_free and _are_all(whole) and budget == "auto" and len(some) == 1
    figures = calibrated(model, config.model.dtype)
    if nothing_left and not is_lowered:
        stages = stages_of_run(config, train, some[0], rope=rope)
        return Decision(
            ChunkOptions(**whole), "", model=figures.model, layout=some[0], stages=stages
        )
    _, free_bytes, free_words = _device(device, num_local)
    if nothing_left:  # but the lower tiers must hold it
        free_bytes = _NO_BOUND_BYTES
    seed = config.train.seed
    decision = decide(
        count_lengths(train.epoch_lens(seed)),
        sequences_per_step=config.train.sequences_per_step * train.rows_per_record,
        model=figures.model,
        limits=Limits(
            free_bytes if budget == "auto" else budget, storage.host_bytes, storage.disk_bytes,
            figures.margin(MARGIN),
        ),
        budget_words=free_words if budget == "auto" else "memory.device",
        num_devices=num_processes,
        seed=seed,
        longest=train.longest,
        given=given | {name: size for name, size in sizes.items() if size is not None},
        method=method,
        must_fit=is_lowered or budget != "auto" or not is_free,
    )  # fmt: skip
    words = "" if is_free and _are_all(whole) else decision.words
    return replace(decision, words=words, figures=figures.words)


def _of_pairs(
    config: RunConfig, train: DataSet, device: torch.device, storage: Storage, rope: Any
) -> Decision:
    """The options of a run on pairs, on one device; see `decide_options`."""
    given = given_dials(config.chunks) | {"order": "chunk-first", "num_retained": 0}
    budget = config.memory.device
    small = {"keep": "kv", **given}
    try:
        figures = calibrated(_model(config, device, rope=rope, num_local=1), config.model.dtype)
    except ConfigError as error:
        words = f"by the fixed rule, for the model's work cannot be counted: {error.given}"
        return Decision(fixed_options(config.data.max_seq_len, small), words)
    if {"size", "keep", "tier"} <= given.keys() and budget == "auto":
        return Decision(ChunkOptions(**given), "", model=figures.model)
    _, free_bytes, free_words = _device(device)
    budgets = Limits(
        free_bytes if budget == "auto" else budget, storage.host_bytes, storage.disk_bytes,
        figures.margin(MARGIN),
    )  # fmt: skip
    words = free_words if budget == "auto" else "memory.device"
    lens = train.seq_lens.reshape(-1, 2).tolist()
    found = decide_pairs(
        [(a, b) for a, b in lens], model=figures.model, budgets=budgets, budget_words=words,
        dials=given,
    )  # fmt: skip
    if found is not None:
        return replace(found, figures=figures.words)
    if budget != "auto":
        raise ConfigError(
            given=f"a pair of {' and '.join(f'{n:,}' for n in max(lens, key=sum))} tokens, of which"
            " no plan is predicted to fit",
            required=f"memory for what both keep between forward and backward, within"
            f" {format_bytes(budgets.limit_bytes)}",
            source="memory.device",
            change="raise it, set chunks.keep: input, lower data.max_seq_len, or use model.lora",
        )
    options = ChunkOptions(**({"size": 1024} | small))
    return Decision(options, "small chunks, for no plan is predicted to fit", model=figures.model)


def _uncounted(
    config: RunConfig,
    train: DataSet,
    given: dict[str, Any],
    num_processes: int,
    error: ConfigError,
    *,
    rope: dict[str, Any] | None,
) -> Decision:
    """The decision for a model whose work cannot be counted, by fixed rules. Raises ConfigError for
    a method by name, which only a search finds plans of."""
    if config.chunks.method != "auto":
        raise ConfigError(
            given=f"chunks.method = {config.chunks.method} and {error.given}",
            required="a model whose work can be counted, which every method plans by",
            source="chunks.method",
            change="leave chunks.method out",
        )
    layout = layout_of(config.parallel, num_processes)
    if layout.pp > 1:
        given.setdefault("order", "chunk-first")
    words = f"by the fixed rule, for the model's work cannot be counted: {error.given}"
    if _are_all(given) and config.memory.device == "auto":
        words = ""
    options = fixed_options(config.data.max_seq_len, given)
    stages = stages_of_run(config, train, layout, rope=rope)
    return Decision(options, words, layout=layout, stages=stages)


def _are_all(given: Mapping[str, Any]) -> bool:
    """Whether no dial is left to choose."""
    dials = SEARCHED_DIALS if given.get("order") == "chunk-first" else DIALS
    return all(name in given for name in dials)


def _given(config: RunConfig, train: DataSet) -> dict[str, Any]:
    """The dials of the run file; a sample draws by the run's own seed."""
    given = given_dials(config.chunks)
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


def cost_model(
    config: RunConfig,
    device: torch.device,
    *,
    rope: dict[str, Any] | None = None,
    num_processes: int = 1,
    num_local: int = 1,
) -> CostModel | None:
    """The cost model of a run's plans, which list all processes; None where the model's work cannot
    be counted."""
    try:
        model = _model(config, device, rope=rope, num_local=num_local)
    except ConfigError:
        return None
    if num_processes > 1:
        model = replace(model, training=replace(model.training, zero_stage=1, gathers=True))
    return calibrated(model, config.model.dtype).model


def with_budget(
    decision: Decision, config: RunConfig, device: torch.device, num_local: int
) -> Decision:
    """The decision with the bytes that planners of single batches may use, where there are any.
    Call it before the model takes memory."""
    if decision.layout.sp == decision.layout.pp == 1:
        return decision
    budget = config.memory.device
    budget_bytes = _device(device, num_local)[1] if budget == "auto" else budget
    return replace(decision, budget_bytes=budget_bytes)


def batch_plans_of(
    config: RunConfig,
    device: torch.device,
    decision: Decision,
    *,
    rope: dict[str, Any] | None = None,
    num_local: int = 1,
) -> BatchPlans | None:
    """The planners of single batches, for a run with pools or a pipeline; None where there are
    none, or where the model's work cannot be counted."""
    if decision.budget_bytes is None:
        return None
    try:
        model = _model(config, device, rope=rope, num_local=num_local)
    except ConfigError:
        return None
    figures, layout = calibrated(model, config.model.dtype), decision.layout
    question = Question(
        (), figures.model, Limits(decision.budget_bytes, margin=figures.margin(MARGIN)),
        layout.num_devices, given=given_dials(config.chunks), method=config.chunks.method,
        stages=decision.stages,
    )  # fmt: skip
    return BatchPlans(question, layout, decision.options, decision.has_shrunk)


def _model(
    config: RunConfig, device: torch.device, *, rope: dict[str, Any] | None, num_local: int
) -> CostModel:
    """The cost model without a calibration. Raises ConfigError where work cannot be counted."""
    source, limit = check_folder(config.model.name), config.data.max_seq_len
    whole = read_config(source, rope=rope, max_seq_len=limit)
    shape = describe(whole)
    spec = one_of(_device(device)[0], num_local)
    return CostModel(shape, spec, training_of(config.model))


def _device(device: torch.device, num_local: int = 1) -> tuple[HardwareSpec, int, str]:
    """A device's figures, the bytes that its free memory allows, and the words for that budget."""
    if device.type != "cuda":
        words = FREE_RAM if num_local == 1 else f"{FREE_RAM} over {num_local} processes"
        return this_cpu(measured=False), free_ram_budget_bytes() // num_local, words
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    spec = spec_of_card(torch.cuda.get_device_name(device), total_bytes)
    # gaps between the allocator's blocks
    budget_bytes = rounded_budget(free_bytes * 19 // 20)
    return spec, budget_bytes, f"95% of what is free, as {spec.name}"

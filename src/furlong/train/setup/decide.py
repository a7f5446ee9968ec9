"""The dials of a run: what the user gave, and the search's choice for each `auto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from furlong.config.schema import RunConfig
from furlong.cost.machine import Machine, free_ram_budget_bytes, one_of, rounded_budget, this_cpu
from furlong.cost.model import CostModel
from furlong.data.dataset import DataSet
from furlong.errors import ConfigError
from furlong.kv.storage import Storage
from furlong.models.build import read_config
from furlong.models.describe import describe
from furlong.models.folder import check_folder
from furlong.plan.lengths import count_lengths
from furlong.planners.decide import (
    FREE_RAM,
    SEARCHED_DIALS,
    Decision,
    decide,
    decide_pairs,
    given_dials,
    training_of,
)
from furlong.planners.layouts import layouts
from furlong.planners.options import ChunkOptions, fixed_options
from furlong.planners.question import MARGIN, Limits, Question
from furlong.planners.search import BatchPlans
from furlong.planners.spaco import check_sampling
from furlong.train.processes.launch import layout_of, sizes_of
from furlong.train.setup.stages import stages_of_run

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
    share this machine; with the bytes that planners of single batches may use, where there are any.
    Call it before the model takes memory.

    Raises ConfigError where a budget or a lower tier is given and no plan is predicted to fit, for
    sizes that no layout has, and for a sample that would leave no chunk of the data out.
    """
    given = _given(config, train, num_processes)
    budget = _budget(config, device, num_local)
    try:
        model = _model(config, device, rope=rope, num_local=num_local)
    except ConfigError as error:
        decision = _uncounted(config, train, given, num_processes, error, rope=rope)
    else:
        model = model.calibrated(config.model.dtype)
        decision = _searched(
            config, train, model, storage, given, budget, num_processes=num_processes, rope=rope
        )
    if decision.layout.sp == decision.layout.pp == 1:
        return decision
    return replace(decision, budget_bytes=budget[0])


def _searched(
    config: RunConfig,
    train: DataSet,
    model: CostModel,
    storage: Storage,
    given: dict[str, Any],
    budget: tuple[int, str],
    *,
    num_processes: int,
    rope: dict[str, Any] | None,
) -> Decision:
    method, sizes = config.chunks.method, sizes_of(config.parallel)
    some = layouts(num_processes, model.shape, dp=sizes["dp"], sp=sizes["sp"], pp=sizes["pp"])
    has_budget, (budget_bytes, budget_words) = config.memory.device != "auto", budget
    tiers = asdict(ChunkOptions(tier=given.get("tier", "device")).tiers).values()
    is_lowered, is_free = set(tiers) != {"device"}, method == "auto"
    whole = {"order": "chunk-first"} | given if all(one.pp > 1 for one in some) else given
    all_given = is_free and _are_all(whole)
    if all_given and not has_budget and len(some) == 1:
        if not is_lowered:
            stages = stages_of_run(config, train, some[0], rope=rope)
            return Decision(ChunkOptions(**whole), "", model=model, layout=some[0], stages=stages)
        budget_bytes = _NO_BOUND_BYTES  # but the lower tiers must hold it
    limits = Limits(
        budget_bytes, storage.host_bytes, storage.disk_bytes, model.hardware.margin(MARGIN)
    )
    must_fit = is_lowered or has_budget or not is_free
    if _is_of_pairs(config, num_processes):
        pairs = [(a, b) for a, b in train.seq_lens.reshape(-1, 2).tolist()]
        decision = decide_pairs(
            pairs, model=model, budgets=limits, budget_words=budget_words, dials=given,
            must_fit=must_fit,
        )  # fmt: skip
    else:
        decision = decide(
            count_lengths(train.epoch_lens(config.train.seed)),
            sequences_per_step=config.train.sequences_per_step * train.rows_per_record,
            model=model,
            limits=limits,
            budget_words=budget_words,
            num_devices=num_processes,
            seed=config.train.seed,
            longest=train.longest,
            given=given | {name: size for name, size in sizes.items() if size is not None},
            method=method,
            must_fit=must_fit,
        )
    return replace(
        decision, words="" if all_given else decision.words, figures=model.hardware.origin
    )


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
    if _is_of_pairs(config, num_processes):
        given.setdefault("keep", "kv")
    words = f"by the fixed rule, for the model's work cannot be counted: {error.given}"
    if _are_all(given) and config.memory.device == "auto":
        words = ""
    options = fixed_options(config.data.max_seq_len, given)
    stages = stages_of_run(config, train, layout, rope=rope)
    return Decision(options, words, layout=layout, stages=stages)


def _is_of_pairs(config: RunConfig, num_processes: int) -> bool:
    """Whether each call of a step takes a pair of sequences, in two phases."""
    return config.train.loss == "dpo" and num_processes == 1


def _are_all(given: Mapping[str, Any]) -> bool:
    """Whether no dial is left to choose."""
    dials = SEARCHED_DIALS if given.get("order") == "chunk-first" else DIALS
    return all(name in given for name in dials)


def _given(config: RunConfig, train: DataSet, num_processes: int) -> dict[str, Any]:
    """The dials of the run file; a sample draws by the run's own seed."""
    given = given_dials(config.chunks)
    if _is_of_pairs(config, num_processes):
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
    return model.calibrated(config.model.dtype)


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
    model, layout = model.calibrated(config.model.dtype), decision.layout
    question = Question(
        (), model, Limits(decision.budget_bytes, margin=model.hardware.margin(MARGIN)),
        layout.num_devices, given=given_dials(config.chunks), method=config.chunks.method,
        stages=decision.stages,
    )  # fmt: skip
    return BatchPlans(question, layout, decision.options, decision.has_shrunk)


def _model(
    config: RunConfig, device: torch.device, *, rope: dict[str, Any] | None, num_local: int
) -> CostModel:
    """The cost model without a calibration. Raises ConfigError where work cannot be counted."""
    source, limit = check_folder(config.model.name), config.data.max_seq_len
    shape = describe(read_config(source, rope=rope, max_seq_len=limit))
    return CostModel(shape, one_of(_machine(device), num_local), training_of(config.model))


def _machine(device: torch.device) -> Machine:
    if device.type != "cuda":
        return this_cpu()
    total_bytes = torch.cuda.mem_get_info(device)[1]
    return Machine.of_card(torch.cuda.get_device_name(device), total_bytes)


def _budget(config: RunConfig, device: torch.device, num_local: int) -> tuple[int, str]:
    """Bytes of a device that plans may use: the given ones, or those that its free memory allows;
    and the words for them."""
    if config.memory.device != "auto":
        return config.memory.device, _machine(device).budget_words(config.memory.device)
    if device.type != "cuda":
        words = FREE_RAM if num_local == 1 else f"{FREE_RAM} over {num_local} processes"
        return free_ram_budget_bytes() // num_local, words
    free_bytes = torch.cuda.mem_get_info(device)[0]
    # gaps between the allocator's blocks
    words = f"95% of what is free, as {_machine(device).name}"
    return rounded_budget(free_bytes * 19 // 20), words

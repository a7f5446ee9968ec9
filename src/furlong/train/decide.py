"""The dials of a run: what the user gave, and the search's choice for each `auto`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from furlong.config.schema import RunConfig
from furlong.cost.calibration_file import calibrated
from furlong.cost.device_names import nearest_hardware
from furlong.cost.hardware import (
    HardwareSpec,
    free_ram_budget_bytes,
    hardware,
    rounded_budget,
    this_cpu,
)
from furlong.cost.model import CostModel
from furlong.cost.shape import ModelShape
from furlong.data.dataset import DataSet
from furlong.errors import ConfigError
from furlong.models.build import read_config
from furlong.models.folder import check_folder
from furlong.plan.lengths import count_lengths
from furlong.planners.auto import (
    FREE_RAM,
    SEARCHED_DIALS,
    Decision,
    decide,
    given_dials,
    training_of,
)
from furlong.planners.auto_search import MARGIN
from furlong.planners.options import ChunkOptions, fixed_options
from furlong.planners.tier_budgets import tier_budgets


def decide_options(
    config: RunConfig, train: DataSet, device: torch.device, *, rope: dict[str, Any] | None = None
) -> Decision:
    """The options of a run over `train`. Call it before the model takes memory.

    Raises ConfigError where a budget is given and no plan is predicted to fit.
    """
    given, budget = given_dials(config.chunks), config.memory.device
    spec, free_bytes, free_words = _device(device)
    host_bytes, disk_bytes = tier_budgets(
        given.get("tier"), config.memory.host, config.memory.disk,
        on_cpu=device.type != "cuda", free_host_bytes=free_ram_budget_bytes(),
    )  # fmt: skip
    is_given = all(name in given for name in SEARCHED_DIALS) and (
        given["order"] == "chunk-first" or "stage_layers" in given
    )
    nothing_left = is_given and budget == "auto"
    limit = config.data.max_seq_len
    try:
        whole = read_config(check_folder(config.model.name), rope=rope, max_seq_len=limit)
        shape = ModelShape.from_config(whole.to_dict())
    except ConfigError as error:
        if nothing_left:
            return Decision(ChunkOptions(**given), "")
        words = f"by the fixed rule, for the model's work cannot be counted: {error.given}"
        return Decision(fixed_options(limit, given), words)
    figures = calibrated(CostModel(shape, spec, training_of(config.model)), config.model.dtype)
    if figures.calibration is not None:
        free_words = f"{free_words}, beside this process"
    if nothing_left:
        return Decision(ChunkOptions(**given), "", model=figures.model)
    seed = config.train.seed
    decision = decide(
        count_lengths(train.seq_lens[train.mixture.order(seed, 0)]),
        sequences_per_step=config.train.sequences_per_step,
        seed=seed,
        longest=train.longest,
        model=figures.model,
        budget_bytes=free_bytes + figures.process_bytes if budget == "auto" else budget,
        budget_words=free_words if budget == "auto" else "memory.device",
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        margin=figures.margin(MARGIN),
        must_fit=budget != "auto",
        dials=given,
    )
    return replace(decision, figures=figures.words)


def _device(device: torch.device) -> tuple[HardwareSpec, int, str]:
    """Of a device: its figures, the budget that its free memory gives, and the words for it."""
    if device.type != "cuda":
        return this_cpu(measured=False), free_ram_budget_bytes(), FREE_RAM
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    name = nearest_hardware(torch.cuda.get_device_name(device), total_bytes)
    # gaps between the allocator's blocks
    return hardware(name), rounded_budget(free_bytes * 19 // 20), f"95% of what is free, as {name}"

"""The parts of a run on pairs before its first step, read from the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from furlong.api import Engine
from furlong.config.schema import RunConfig
from furlong.data.cache import cache_folder
from furlong.data.dataset import DataSet
from furlong.planners.decide import Decision
from furlong.planners.search import BatchPlans
from furlong.train.batches.engines import Engines
from furlong.train.batches.fitting import Fitting
from furlong.train.preference.engines import PairEngines
from furlong.train.preference.losses import PairLoss
from furlong.train.preference.reference import reference_fingerprint, referenced
from furlong.train.processes import Processes


def engines_of(
    config: RunConfig,
    engine: Engine,
    processes: Processes,
    work: Callable[[Sequence[int]], Sequence[float]],
    stages: Sequence[int],
    rivals: BatchPlans | None,
) -> Engines:
    """The engines of a run, for global batches of sequences or of pairs."""
    settings = config.train
    if settings.loss == "sft":
        return Engines(engine, processes, work, stages, rivals)
    loss = PairLoss(settings.loss_type, settings.beta, settings.label_smoothing)
    return PairEngines(engine, loss, processes, work, stages)


def reference_of(
    config: RunConfig, model: Any, architecture: Mapping[str, Any], processes: Processes
) -> str | None:
    """The fingerprint of the model that the run begins with, before its weights are divided; None
    without a loss of pairs. A collective."""
    if config.train.loss == "sft":
        return None
    return reference_fingerprint(
        model, architecture, dtype=config.model.dtype, max_seq_len=config.data.max_seq_len,
        processes=processes,
    )  # fmt: skip


def with_references(
    config: RunConfig,
    data: dict[str, DataSet],
    engines: Engines,
    decision: Decision,
    fingerprint: str | None,
) -> tuple[dict[str, DataSet], Decision]:
    """The data sets with log-probabilities of the model as it is now, before its first step; and
    the decision, with the chunks that fit. Without a loss of pairs all is as it was."""
    if fingerprint is None or not isinstance(engines, PairEngines):
        return data, decision
    fitting = Fitting(decision.options, alike=engines.processes.alike)
    folder = cache_folder(config.data.cache_dir)
    found = {
        name: referenced(
            split, engines, fitting, folder=folder, fingerprint=fingerprint, key=f"data.{name}"
        )
        for name, split in data.items()
    }
    return found, replace(decision, options=fitting.options)

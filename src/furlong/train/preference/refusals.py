"""Refusals of what a run on pairs has not, before anything is read. Loads no torch."""

from __future__ import annotations

from furlong.config.schema import RunConfig
from furlong.errors import ConfigError
from furlong.planners.auto.pairs import check_dials


def check_pairs(config: RunConfig, num_processes: int) -> None:
    """Raises ConfigError for what a loss of pairs cannot have, on so many processes."""
    if config.train.loss == "sft":
        return
    if num_processes == 1:
        check_dials(config.chunks)
        return
    if config.model.lora is not None and config.model.lora.dropout:
        raise ConfigError(
            given=f"train.loss: dpo with {num_processes} processes and model.lora.dropout ="
            f" {config.model.lora.dropout}",
            required="no dropout: losses are made of one forward, gradients of another",
            source="model.lora.dropout, and the number of processes that were started",
            change="set model.lora.dropout to 0, or start one process",
        )

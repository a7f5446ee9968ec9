"""Refusals of what a run on pairs has not, before anything is read. Loads no torch."""

from __future__ import annotations

from furlong.config.schema import RunConfig
from furlong.errors import ConfigError
from furlong.planners.decide import check_pair_dials


def check_pairs(config: RunConfig, num_processes: int) -> None:
    """Raises ConfigError for what a loss of pairs cannot have, on so many processes."""
    if config.train.loss == "sft":
        return
    if num_processes == 1:
        check_pair_dials(config.chunks)
        return
    if config.chunks.sample is not None:
        raise ConfigError(
            given="chunks.sample with train.loss: dpo",
            required="exact gradients",
            source="chunks.sample and train.loss",
            change="remove chunks.sample",
        )
    if config.model.lora is not None and config.model.lora.dropout:
        raise ConfigError(
            given=f"train.loss: dpo with {num_processes} processes and model.lora.dropout ="
            f" {config.model.lora.dropout}",
            required="no dropout: losses are made of one forward, gradients of another",
            source="model.lora.dropout, and the number of processes that were started",
            change="set model.lora.dropout to 0, or start one process",
        )


def draws_twice(num_processes: int) -> ConfigError:
    """The error for a model with dropout, whose losses and gradients would be of other draws."""
    return ConfigError(
        given=f"train.loss: dpo with {num_processes} processes and a model that draws random"
        " numbers in train mode (dropout, jitter or sampling)",
        required="no draws: losses are made of one forward, gradients of another",
        source="the model's config.json, and the number of processes that were started",
        change="set its dropouts, such as resid_pdrop, to 0, or start one process",
    )

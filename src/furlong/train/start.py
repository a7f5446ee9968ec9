"""The beginning of a run: all that can be checked in an instant, before torch is loaded."""

from __future__ import annotations

import os
from contextlib import ExitStack

from furlong.config.data import SourceConfig
from furlong.config.schema import RunConfig
from furlong.data.sources import Source, list_files
from furlong.errors import ConfigError
from furlong.models.folder import check_files
from furlong.planners.auto.decide import given_dials
from furlong.train.run_folder import RunFolder, open_run_folder
from furlong.train.trackers import check_packages

# What launchers (torchrun, accelerate; mpirun) tell each of the processes that they start.
_NUM_PROCESSES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")


def open_run(stack: ExitStack, config: RunConfig, *, resume: bool) -> RunFolder:
    """The run folder of `config`, locked until `stack` ends if there is a run to resume.

    Raises UserError for launchers, packages, paths and run folders that cannot be.
    """
    _check_processes()
    given_dials(config.chunks)  # what contradicts itself there
    check_packages(tensorboard=config.log.tensorboard, wandb=config.log.wandb)
    check_files(config.model.name)
    for key, named in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        for source in map(source_of, named or ()):
            # Folders are listed when they are read: that may take its time.
            if not os.path.isdir(os.path.expanduser(source.path)):
                list_files(source, key)
    return open_run_folder(stack, config, resume=resume)


def source_of(named: str | SourceConfig) -> Source:
    """The source that an entry of `data.train` or `data.eval` names."""
    return Source(named) if isinstance(named, str) else Source(**named.model_dump())


def _check_processes() -> None:
    for name in _NUM_PROCESSES:
        number = os.environ.get(name, "")
        if number.isdecimal() and int(number) > 1:
            raise ConfigError(
                given=f"{number} processes",
                required="one process: several devices are not in this release",
                source=f"the environment variable {name}, which launchers such as torchrun set",
                change=f"start furlong train without a launcher, or unset {name}",
            )

"""The beginning of a run: all that can be checked in an instant, before torch is loaded."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from furlong.config.schema import RunConfig, offloads_weights
from furlong.data.sources import list_files
from furlong.errors import ConfigError
from furlong.families import versions
from furlong.models.folder import check_files
from furlong.planners.layouts import no_pools, refuse_reshard_alone, require_replicate
from furlong.planners.setup import given_options
from furlong.train.objective import objective_of
from furlong.train.processes import ALONE, Processes, layout_of, require_equal
from furlong.train.run_folder import RunFolder, open_run_folder

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Packages by the name of the key below `log` that asks for one."""


def open_run(
    stack: ExitStack, config: RunConfig, *, resume: bool, processes: Processes = ALONE
) -> RunFolder:
    """The run folder of `config`, locked until `stack` ends if there is a run to resume.

    A launcher that has started the processes again after one of them had ended resumes their run.
    Raises UserError, on all processes, for launches, packages, paths and run folders that cannot
    be.
    """
    launch = processes.launch
    if launch.num_processes > 1:
        facts = config.model_dump(mode="json") | versions()
        require_equal(
            processes, facts, "the command lines, run files and packages of the processes"
        )
    processes.together(partial(_check, config, launch.num_processes))

    return processes.from_first(
        lambda: open_run_folder(
            stack, config, resume=resume or launch.attempt > 0, num_processes=launch.num_processes
        )
    )


def check_run(config: RunConfig, num_processes: int) -> None:
    """Raise ConfigError for keys of a run file that so many processes cannot obey together,
    whatever machine they run on."""
    objective_of(config.train).check(config, num_processes)
    if _has_packed_states(config) and num_processes > 1 and config.parallel.pp != num_processes:
        raise ConfigError(
            given=f"train.optimizer: {config.train.optimizer} with {num_processes} processes that"
            " divide the weights",
            required="whole weights: states as that library packs them cannot be divided, as a"
            " checkpoint of divided ones must be",
            source="train.optimizer, parallel and the number of processes that were started",
            change=f"set parallel.pp to {num_processes}, or train.optimizer to adamw or adafactor"
            " (and train.state_dtype to bfloat16, which halves the moments)",
        )
    for source in config.data.train:
        if os.path.isdir(os.path.expanduser(source.path)):
            _check_apart(source.path, config)


def _check(config: RunConfig, num_processes: int) -> None:
    layout = layout_of(config.parallel, num_processes)
    require_replicate(layout.dp, config.parallel.replicate)
    check_run(config, num_processes)
    options = given_options(config)  # refuses what contradicts itself there
    if options.get("reshard"):
        away = bool(offloads_weights(config.offload))
        replicate = config.parallel.replicate
        refuse_reshard_alone(num_processes, replicate, offloads=away)
        is_given = "auto" not in (config.parallel.sp, config.parallel.pp)
        has_pools = layout.sp > 1 and replicate in (1, layout.dp)
        if is_given and layout.pp > 1 and not has_pools:
            raise no_pools(layout, replicate)
    if layout.pp > 1 and options.get("order") == "layer-first":
        raise ConfigError(
            given=f"{'chunks.order' if config.chunks.order != 'auto' else 'chunks.stage_layers'}"
            f" for layer-first, with parallel.pp = {layout.pp}",
            required="chunk-first: the stages of a pipeline are those of its processes",
            source="chunks, and parallel.pp",
            change="remove chunks.order and chunks.stage_layers, or set parallel.pp to 1",
        )
    for package in TRACKERS:
        if getattr(config.log, package) and find_spec(package) is None:
            raise ConfigError(
                given=f"log.{package} without the package {package}",
                required=f"the package {package}",
                source=f"log.{package}",
                change=f"pip install 'furlong[{package}]', or remove log.{package}",
            )
    _check_optimizer(config)
    check_files(config.model.name, config.model.revision)
    for key, named in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        for source in named or ():
            # Folders are listed when they are read: that may take its time.
            if not os.path.isdir(os.path.expanduser(source.path)):
                is_streamed = config.data.streaming and key == "data.train"
                list_files(source, key, fetch=not is_streamed)


def _has_packed_states(config: RunConfig) -> bool:
    """Whether the optimizer's states are quantised by a library."""
    return config.train.optimizer.endswith(("bit", "fp8"))


def _check_optimizer(config: RunConfig) -> None:
    """Raises ConfigError for an optimizer of a package that is not there."""
    name = config.train.optimizer
    if not _has_packed_states(config):
        return
    package = "torchao" if "torch_" in name else "bitsandbytes"
    if find_spec(package) is None:
        raise ConfigError(
            given=f"train.optimizer: {name} without the package {package}",
            required=f"the package {package}",
            source="train.optimizer",
            change=f"pip install 'furlong[{package}]', or set train.optimizer to adamw",
        )


def _check_apart(data: str, config: RunConfig) -> None:
    """Raises ConfigError for a folder of data in which the run writes: with its files the data
    would be others when it is resumed."""
    folder = Path(data).expanduser().resolve()
    for key, written in (("out", config.out), ("data.cache_dir", config.data.cache_dir)):
        path = Path(written or os.devnull).expanduser().resolve()
        # what is hidden in a folder is no data
        if path.is_relative_to(folder) and "/." not in f"/{path.relative_to(folder)}":
            raise ConfigError(
                given=f"{key} = {written}, within {data} of data.train",
                required="a folder outside the data, whose files the run's own would join",
                source=key,
                change=f"set {key} to a folder elsewhere, or name the files of data.train",
            )

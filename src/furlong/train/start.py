"""The start of a run: quick checks, before torch is imported."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from furlong.config.schema import ParallelConfig, RunConfig, offloads_weights
from furlong.data.sources import list_files
from furlong.errors import ConfigError
from furlong.families import versions
from furlong.models.folder import check_files
from furlong.planners.layouts import no_pools, refuse_reshard_alone, require_replicate
from furlong.planners.setup import given_options
from furlong.train.objective import objective_of
from furlong.train.processes import ALONE, Processes, layout_of, read_launch, require_equal
from furlong.train.run_folder import RunFolder, open_run_folder

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Tracker packages, each named like its key in `log`."""


def open_run(
    stack: ExitStack, config: RunConfig, *, resume: bool, processes: Processes = ALONE
) -> RunFolder:
    """Check a run and open its folder, which is locked until `stack` closes if there is a run to
    resume.

    A run that the launcher has restarted is resumed. Raises UserError, on all processes, if the
    launch, a package, a path or the run folder is invalid.
    """
    launch = processes.launch
    check_start(config, processes)
    return processes.from_first(
        lambda: open_run_folder(
            stack, config, resume=resume or launch.attempt > 0, num_processes=launch.num_processes
        )
    )


def check_start(config: RunConfig, processes: Processes) -> None:
    """Check a run before torch is imported. Raises UserError, on all processes, if the launch, a
    package or a path is invalid."""
    num_processes = processes.launch.num_processes
    if num_processes > 1:
        facts = config.model_dump(mode="json") | versions()
        require_equal(
            processes, facts, "the command lines, run files and packages of the processes"
        )
    processes.together(partial(_check, config, num_processes))


def check_alone() -> None:
    """Raise ConfigError if this is one of several processes, as each would train by itself."""
    if (count := read_launch().num_processes) > 1:
        raise ConfigError(
            given=f"a Trainer without processes, in one of {count} that were started together",
            required="the processes of the run, which train one model together",
            source="processes of Trainer, and the environment variable WORLD_SIZE",
            change="with joined(read_launch()) as processes: Trainer(..., processes=processes),"
            " both of furlong.train.processes; where each is a run of its own set WORLD_SIZE=1",
        )


def check_run(config: RunConfig, num_processes: int) -> None:
    """Raise ConfigError for settings that cannot work with this number of processes, whatever the
    machine."""
    objective_of(config.train).check(config, num_processes)
    if _has_packed_states(config) and num_processes > 1 and config.parallel.pp != num_processes:
        raise ConfigError(
            given=f"train.optimizer: {config.train.optimizer} with {num_processes} processes that"
            " divide the weights",
            required="whole weights: states as that library packs them cannot be divided, as a"
            " checkpoint of divided ones must be",
            source="train.optimizer, parallel and the number of processes that were started",
            change=f"{_whole_weights(config, num_processes)}set train.optimizer to adamw or"
            " adafactor (and train.state_dtype to bfloat16, which halves the moments)",
        )
    for source in config.data.train:
        if os.path.isdir(os.path.expanduser(source.path)):
            _check_apart(source.path, config)


def _whole_weights(config: RunConfig, num_processes: int) -> str:
    """Return the beginning of an error message's advice: set `parallel.pp`, so that each process
    has the whole weights of its stage. Return "" if weights are offloaded, as pipelines cannot
    offload them."""
    if offloads_weights(config.offload):
        return ""
    others = config.parallel.model_dump(exclude={"pp"})
    if others == ParallelConfig().model_dump(exclude={"pp"}):
        return f"set parallel.pp to {num_processes}, or "
    return f"write parallel: {{pp: {num_processes}}}, or "


def _check(config: RunConfig, num_processes: int) -> None:
    layout = layout_of(config.parallel, num_processes)
    require_replicate(layout.dp, config.parallel.replicate)
    check_run(config, num_processes)
    options = given_options(config)  # refuses contradictory options
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
            # Folders are listed only when they are read, as that may take long.
            if not os.path.isdir(os.path.expanduser(source.path)):
                is_streamed = config.data.streaming and key == "data.train"
                list_files(source, key, fetch=not is_streamed)


def _has_packed_states(config: RunConfig) -> bool:
    """Whether a library quantizes the optimizer's states."""
    return config.train.optimizer.endswith(("bit", "fp8"))


def _check_optimizer(config: RunConfig) -> None:
    """Raise ConfigError if the package of the optimizer is not installed."""
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
    """Raise ConfigError if the run writes into the data folder `data`: a resume would read the
    written files as data."""
    folder = Path(data).expanduser().resolve()
    for key, written in (("out", config.out), ("data.cache_dir", config.data.cache_dir)):
        path = Path(written or os.devnull).expanduser().resolve()
        # hidden files are not read as data
        if path.is_relative_to(folder) and "/." not in f"/{path.relative_to(folder)}":
            raise ConfigError(
                given=f"{key} = {written}, within {data} of data.train",
                required="a folder outside the data, whose files the run's own would join",
                source=key,
                change=f"set {key} to a folder elsewhere, or name the files of data.train",
            )

"""`furlong train`: trains a model with the settings of a run file and of flags."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from furlong.cli.output import speaker_only, tell_loading
from furlong.config.schema import RunConfig
from furlong.config.sources import parse_run
from furlong.errors import ConfigError, UserError
from furlong.families import versions_in_words

if TYPE_CHECKING:
    from furlong.train.processes import Processes

_RESUME = "--resume"
# oneDNN, which computes bfloat16 on a CPU, compiles a kernel for every new length of a chunk. It
# caches 1,024 of them, and so does torch, unless these variables are set before their first use.
# `furlong.cost.model` counts the bytes of cached kernels.
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_NUM_KERNELS = "64"
# Chunks of changing length leave gaps in a GPU's memory that segments of fixed size never fill.
# Several threads register host memory concurrently; cudaHostAlloc pins it in one (not measured).
_GPU_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_GPU_SETTINGS = (
    "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
)


def set_allocators() -> None:
    """Set environment variables that torch reads when it is imported, unless the user has set
    them."""
    for cache in _KERNEL_CACHES:
        os.environ.setdefault(cache, _NUM_KERNELS)
    if not any(name in os.environ for name in _GPU_ALLOCATOR):
        os.environ[_GPU_ALLOCATOR[0]] = _GPU_SETTINGS


def run(arguments: Sequence[str]) -> int:
    return run_together(partial(_train, arguments))


def run_together(act: Callable[[Processes], int]) -> int:
    """Return the exit code of `act`, which gets the processes that were started together; only the
    first one prints."""
    from furlong.train.processes import Processes, read_launch

    set_allocators()
    launch = read_launch()
    if launch.num_processes == 1:
        return act(Processes(launch))
    # Processes exchange errors, so that a common one is printed once; this needs torch at once.
    if launch.is_first:
        tell_loading()
    from furlong.train.processes import joined

    processes = None
    try:
        with speaker_only(launch.is_first), joined(launch) as processes:
            return act(processes)
    except UserError as error:
        if launch.is_first or processes is None or not error.is_common:
            raise
        return 2


def _train(arguments: Sequence[str], processes: Processes) -> int:
    config = processes.together(partial(_parse, arguments))
    print(versions_in_words())
    from furlong.train.start import open_run

    with ExitStack() as stack:
        resume = _RESUME in arguments
        opened = open_run(stack, config, resume=resume, processes=processes)
        if opened.report is not None:
            return 0
        # All checks that do not need torch and transformers come before their imports.
        tell_loading()
        gc.disable()  # scanning new modules for garbage would take a sixth of the imports' time
        try:
            from furlong.train.trainer import Trainer
        finally:
            gc.enable()
            gc.freeze()

        with Trainer(config, processes=processes, run=opened) as trainer:
            trainer.train()
    return 0


def _parse(arguments: Sequence[str]) -> RunConfig:
    config = parse_run(
        arguments,
        switches={_RESUME: "go on with the run in out, from its newest whole checkpoint"},
    )
    if _RESUME in arguments:
        _check_place(config.out, arguments)
    return config


def _check_place(out: str, arguments: Sequence[str]) -> None:
    """Raise ConfigError if a run folder's config.json is given, and names another folder as `out`.
    Otherwise a new run would begin in that folder. This happens if the run was moved or copied, or
    if the command is called in another folder."""
    from furlong.train.run_folder import CONFIG, holds_run

    if any(argument.split("=")[0] == "--out" for argument in arguments):
        return
    for file in (Path(argument).expanduser() for argument in arguments if argument[:1] != "-"):
        folder = file.parent
        is_elsewhere = folder.resolve() != Path(out).expanduser().resolve()
        if file.name == CONFIG and is_elsewhere and holds_run(folder):
            raise ConfigError(
                given=f"{folder}, a run whose config says out = {out}",
                required="the run's own folder as out",
                source=str(file),
                change=f"add --out={folder} to go on with this run",
            )

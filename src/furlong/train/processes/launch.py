"""How this process was started: alone, or by a launcher as one of several. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from furlong.config.schema import ParallelConfig
from furlong.errors import ConfigError
from furlong.plan.plan import Layout

_NUMBERS = ("RANK", "LOCAL_RANK", "MASTER_PORT")
_COMMAND = "torchrun --nproc-per-node {} -m furlong train RUN.yaml"
_MACHINES = "--nnodes {} --rdzv-backend c10d --rdzv-endpoint HOST:29500 "

_OTHERS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",  # the script of a job has SLURM_NTASKS too, and is one process
    "PMI_SIZE": "mpiexec (MPICH, Intel MPI)",
    "PALS_SIZE": "mpiexec (Cray)",
}
"""Launchers by the variable in which they tell the number of processes."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The place of this process among those that a launcher has started together."""

    number: int = 0
    """From 0; torchrun calls it the rank."""
    num_processes: int = 1
    local_number: int = 0
    """Number among the processes of its machine, and of its device."""
    num_local: int = 1
    """Processes of its machine: they share its memory."""
    attempt: int = 0
    """How many times the launcher has started all processes before, after one of them ended."""

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all: it prints, and writes what is written once."""
        return self.number == 0


def command_like(launch: Launch, arguments: str) -> str:
    """The command line that starts `furlong` with these arguments on as many processes, on each
    machine."""
    if launch.num_processes == 1:
        return f"furlong {arguments}"
    num_machines = -(-launch.num_processes // launch.num_local)
    machines = _MACHINES.format(num_machines) if num_machines > 1 else ""
    return f"torchrun {machines}--nproc-per-node {launch.num_local} -m furlong {arguments}"


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """The launch that torchrun, or a launcher with its variables, describes; else one process.

    Raises ConfigError for launchers with other variables and for variables that are missing.
    """
    count = environment.get("WORLD_SIZE", "")
    if count and not (count.isdecimal() and int(count)):
        raise ConfigError(
            given=f"WORLD_SIZE = {count}",
            required="a number of processes, as torchrun sets it",
            source="the environment",
            change=f"unset WORLD_SIZE, or start the processes by {_COMMAND.format(2)}",
        )
    if not count:
        _refuse_others(environment)
    if count in ("", "1"):
        return Launch()
    missing = [name for name in _NUMBERS if not environment.get(name, "").isdecimal()]
    missing += [] if environment.get("MASTER_ADDR") else ["MASTER_ADDR"]
    if missing:
        raise ConfigError(
            given=f"WORLD_SIZE = {count} without a number in {', '.join(missing)}",
            required="all variables that torchrun sets",
            source="the environment",
            change=f"start the processes by {_COMMAND.format(count)}, or unset WORLD_SIZE",
        )
    if int(environment["MASTER_PORT"]) == 0:
        raise ConfigError(
            given="MASTER_PORT = 0, where each process would look for the others on its own port",
            required="one port that all processes know",
            source="the environment, or --master-port of torchrun",
            change="start torchrun with --standalone, or name a port that is free",
        )
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    num_local = environment.get("LOCAL_WORLD_SIZE", count)
    return Launch(
        number=int(environment["RANK"]),
        num_processes=int(count),
        local_number=int(environment["LOCAL_RANK"]),
        num_local=int(num_local) if num_local.isdecimal() else int(count),
        attempt=int(attempt) if attempt.isdecimal() else 0,
    )


def _refuse_others(environment: Mapping[str, str]) -> None:
    """Raise ConfigError where a launcher without torchrun's variables has started several processes
    as one: each would train by itself."""
    for name, launcher in _OTHERS.items():
        size = environment.get(name, "")
        if size.isdecimal() and int(size) > 1:
            raise ConfigError(
                given=f"{size} processes of {launcher}",
                required="processes that torchrun has started, or that have its variables",
                source=f"the environment variable {name}",
                change=f"start them by {_COMMAND.format(size)}, on several machines by one torchrun"
                " on each (docs/many-devices.md); where each is a run of its own set WORLD_SIZE=1",
            )


def sizes_of(parallel: ParallelConfig) -> dict[str, int | None]:
    """The sizes of `parallel` by name; None where it is auto."""
    sizes = {name: getattr(parallel, name) for name in ("dp", "sp", "pp")}
    return {name: None if size == "auto" else size for name, size in sizes.items()}


def layout_of(parallel: ParallelConfig, num_processes: int) -> Layout:
    """The division of the processes by the sizes of `parallel` without a search: the first size
    that is auto takes what the others leave, dp before sp before pp; further ones are 1.

    Raises ConfigError unless the sizes multiply to the number of processes.
    """
    sizes = sizes_of(parallel)
    free = [name for name, size in sizes.items() if size is None]
    product = prod(size or 1 for size in sizes.values())
    found = {name: size or 1 for name, size in sizes.items()}
    if free and num_processes % product == 0:
        found[free[0]] = num_processes // product
    layout = Layout(**found)
    if layout.num_devices == num_processes:
        return layout
    started = f"{num_processes} process{'' if num_processes == 1 else 'es'}"
    shown = " x ".join(f"{name} {size or 'auto'}" for name, size in sizes.items())
    shown += f" = {f'a multiple of {product}' if free else product}"
    or_else = "set parallel.dp to auto"
    if free:
        or_else = "set the sizes of parallel to such that divide it"
    raise ConfigError(
        given=f"{shown}, and {started}",
        required="sizes that multiply to the number of processes",
        source="parallel, and the number of processes that were started",
        change=f"start {product}: {_COMMAND.format(product)}; or {or_else}",
    )

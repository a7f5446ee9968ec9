"""How this process was started: alone, or by a launcher as one of several. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from furlong.config.parallel import ParallelConfig
from furlong.errors import ConfigError
from furlong.planners.layout import Layout

_NUMBERS = ("RANK", "LOCAL_RANK", "MASTER_PORT")
_COMMAND = "torchrun --nproc-per-node {} -m furlong train RUN.yaml"


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


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """The launch that torchrun, or a launcher with its variables, describes; else one process.

    Raises ConfigError for launchers with other variables and for variables that are missing.
    """
    others = environment.get("OMPI_COMM_WORLD_SIZE", "")
    count = environment.get("WORLD_SIZE", "")
    if not (count.isdecimal() and int(count) > 1):
        if others.isdecimal() and int(others) > 1:
            raise ConfigError(
                given=f"{others} processes of mpirun",
                required="processes that torchrun has started, or that have its variables",
                source="the environment variable OMPI_COMM_WORLD_SIZE",
                change=f"start them by {_COMMAND.format(others)}",
            )
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
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    num_local = environment.get("LOCAL_WORLD_SIZE", count)
    return Launch(
        number=int(environment["RANK"]),
        num_processes=int(count),
        local_number=int(environment["LOCAL_RANK"]),
        num_local=int(num_local) if num_local.isdecimal() else int(count),
        attempt=int(attempt) if attempt.isdecimal() else 0,
    )


def layout_of(parallel: ParallelConfig, num_processes: int) -> Layout:
    """The division of the processes by the sizes of `parallel`: `auto` is as many replicas as the
    other sizes leave processes for, and one process to a sequence and to a pipeline.

    Raises ConfigError unless the sizes multiply to the number of processes.
    """
    sp, pp = (1 if size == "auto" else size for size in (parallel.sp, parallel.pp))
    dp = num_processes // (sp * pp) if parallel.dp == "auto" else parallel.dp
    layout = Layout(dp, sp, pp)
    if layout.num_devices == num_processes:
        return layout
    started = f"{num_processes} process{'' if num_processes == 1 else 'es'}"
    if parallel.dp == "auto":
        product, shown = sp * pp, f"dp auto x sp {sp} x pp {pp} = a multiple of {sp * pp}"
        or_else = "set parallel.sp and parallel.pp to sizes that divide it"
    else:
        product, shown = layout.num_devices, f"{layout} = {layout.num_devices}"
        or_else = "set parallel.dp to auto"
    raise ConfigError(
        given=f"{shown}, and {started}",
        required="sizes that multiply to the number of processes",
        source="parallel, and the number of processes that were started",
        change=f"start {product}: {_COMMAND.format(product)}; or {or_else}",
    )

"""The processes of a run: how they are started, agree, and end together.

Torch is imported only for several processes, which agree by collectives over gloo. A process that
fails alone writes the reason to the launcher's store and exits. The others lose their connection to
it, print that reason and exit, too. Hanging collectives end after the timeouts below.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from socket import gethostname
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from furlong.config.schema import ParallelConfig
from furlong.errors import (
    ConfigError,
    ElsewhereError,
    UserError,
    difference_words,
    differing,
    first_line,
)
from furlong.plan.plan import Layout

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup

_T = TypeVar("_T")
_START_LIMIT = timedelta(minutes=10)
_COLLECTIVE_LIMIT = timedelta(minutes=30)
"""Timeout of collectives within steps, where a replica may wait for another one's longer sequences.
Steps that are predicted to take long get more; see `limit_of_step`."""
_STEP_FACTOR = 4
_AGREEMENT_LIMIT = timedelta(hours=12)
"""Timeout of agreements, where others wait while one process tokenizes, saves or exports."""
_COMMAND = "torchrun --nproc-per-node {} -m furlong train RUN.yaml"
_MACHINES = "--nnodes {} --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
_NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")
_OTHERS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",  # SLURM_NTASKS is also set in a job's script, a single process
    "PMI_SIZE": "mpiexec",
}
"""Variable with the number of processes -> launcher that sets it."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The rank of this process among those that a launcher started together."""

    number: int = 0
    """The global rank (torchrun's RANK)."""
    num_processes: int = 1
    local_number: int = 0
    """Rank within the machine, and index of its device (LOCAL_RANK)."""
    num_local: int = 1
    """Number of processes on the machine, which share its memory."""
    attempt: int = 0
    """Number of earlier restarts of all processes by the launcher."""

    @property
    def is_first(self) -> bool:
        """Whether this process prints, and writes files of the whole run."""
        return self.number == 0


def command_like(launch: Launch, arguments: str) -> str:
    """Return the command line that runs `furlong` with these arguments on as many processes as
    `launch` has. With several machines, the command must be entered on each machine."""
    if launch.num_processes == 1:
        return f"furlong {arguments}"
    num_machines = -(-launch.num_processes // launch.num_local)
    machines = _MACHINES.format(num_machines) if num_machines > 1 else ""
    return f"torchrun {machines}--nproc-per-node {launch.num_local} -m furlong {arguments}"


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Read the launch from torchrun's environment variables. Without them, return a single process.

    Raises ConfigError if variables are missing, or if another launcher started several processes,
    as each would train by itself.
    """
    size = environment.get("WORLD_SIZE")
    if not size:
        for name, launcher in _OTHERS.items():
            count = environment.get(name, "")
            if count.isdecimal() and int(count) > 1:
                raise _launch_error(f"{count} processes of {launcher}", name, count)
    if size in (None, "", "1"):
        return Launch()
    wrong = [name for name in _NUMBERS if not environment.get(name, "").isdecimal()]
    if wrong or not environment.get("MASTER_ADDR") or size == "0":
        names = ", ".join(wrong) or "WORLD_SIZE and MASTER_ADDR"
        raise _launch_error(f"WORLD_SIZE = {size}, and no use in {names}", "WORLD_SIZE", "2")
    num_processes, number, local_number, _ = (int(environment[name]) for name in _NUMBERS)
    num_local = int(environment.get("LOCAL_WORLD_SIZE", num_processes))
    attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
    return Launch(number, num_processes, local_number, num_local, attempt)


def _launch_error(given: str, name: str, count: str) -> ConfigError:
    return ConfigError(
        given=given,
        required=f"the variables of torchrun: {', '.join(_NUMBERS)}, MASTER_ADDR",
        source=f"the environment variable {name}",
        change=f"start the processes by {_COMMAND.format(count)}, on several machines by one"
        " torchrun on each (docs/many-devices.md); where each is a run of its own set WORLD_SIZE=1",
    )


def sizes_of(parallel: ParallelConfig) -> dict[str, int | None]:
    """Return the sizes dp, sp and pp of `parallel`; None for auto."""
    sizes = {name: getattr(parallel, name) for name in ("dp", "sp", "pp")}
    return {name: None if size == "auto" else size for name, size in sizes.items()}


def layout_of(parallel: ParallelConfig, num_processes: int) -> Layout:
    """Return the layout of the sizes in `parallel`, without a search: the first auto size of dp,
    sp, pp takes the remaining factor of `num_processes`, and further auto sizes are 1.

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
    shown = " x ".join(f"{name} {size or 'auto'}" for name, size in sizes.items())
    shown += f" = {'a multiple of ' * bool(free)}{product}"
    raise ConfigError(
        given=f"{shown}, and {num_processes} process{'es' * (num_processes > 1)}",
        required="sizes that multiply to the number of processes",
        source="parallel, and the number of processes that were started",
        change=f"start {product}: {_COMMAND.format(product)}; or remove parallel: each process is"
        " then a replica",
    )


class Processes:
    """Collectives of the processes of a run; also for a single process. All processes must call the
    same methods in the same order."""

    def __init__(self, launch: Launch, group: ProcessGroup | None = None) -> None:
        """`group`: all processes, over gloo; None for a single process."""
        self.launch, self.group = launch, group

    def apart(self) -> Processes:
        """Return the same processes with a new group, for use in a thread. A collective."""
        if self.group is None:
            return self
        from torch import distributed as dist

        return Processes(self.launch, dist.new_group(backend="gloo", timeout=_AGREEMENT_LIMIT))

    @property
    def is_first(self) -> bool:
        return self.launch.is_first

    @property
    def num_processes(self) -> int:
        return self.launch.num_processes

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all processes."""
        return [sum(column) for column in zip(*self.each(values), strict=True)]

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any process."""
        return any(self.each(flag))

    def each(self, value: _T) -> list[_T]:
        """Return the values that all processes have passed, by rank."""
        if self.group is None:
            return [value]
        from torch import distributed as dist

        found = [value] * self.num_processes
        dist.all_gather_object(found, value, group=self.group)
        return found

    def together(self, work: Callable[[], _T]) -> _T:
        """Return the result of `work` on this process. If it raises a UserError on any process, all
        raise the error of the lowest rank."""
        return self._agreed(work, shares=False)[0]

    def from_first(self, work: Callable[[], _T]) -> _T:
        """Run `work` on the first process only; return its result on all."""
        own: Any = work if self.is_first else lambda: None
        return self._agreed(own, shares=True)[1][0]  # type: ignore[no-any-return]

    def _agreed(self, work: Callable[[], _T], *, shares: bool) -> tuple[_T, list[_T]]:
        """Run `work`. Return its result on this process, and a list of the results of all processes
        (a list of None unless `shares`). If it fails on a process, raise the error that `together`
        raises."""
        failure: UserError | ElsewhereError | None = None
        result: Any = None
        try:
            result = work()
        except (UserError, ElsewhereError) as error:
            failure = error
        each: list[tuple[Any, Any]] = self.each((failure, result if shares else None))
        failures = [(number, own) for number, (own, _) in enumerate(each) if own is not None]
        if not failures:
            return result, [shared for _, shared in each]
        told = [(number, own) for number, own in failures if isinstance(own, UserError)]
        if not told:
            raise failure or failures[0][1]
        number, first = told[0]
        if number == self.launch.number and isinstance(failure, UserError):
            first = failure  # with its traceback
        elif number:
            first.given = f"process {number}: {first.given}"
        raise first.on_all()

    def from_first_of_machine(self, value: _T) -> _T:
        """Return the value that this machine's first process has passed. A collective."""
        here, launch = gethostname(), self.launch
        told = self.each((here, launch.local_number, value))
        # host names may be equal: take the nearest lower rank with local rank 0
        before = reversed(told[: launch.number + 1])
        return next((own for name, local, own in before if (name, local) == (here, 0)), value)

    def first_of_each_machine(self, work: Callable[[], _T]) -> _T:
        """Run `work` on the first process of each machine, then on the other processes, which find
        the first one's files (such as downloads) on disk. Return the result on this process."""
        is_sooner = self.launch.local_number == 0
        result: Any = self.together(work if is_sooner else lambda: None)
        return self.together(lambda: result if is_sooner else work())  # type: ignore[no-any-return]


ALONE = Processes(Launch())
"""A single process."""


def limit_of_step(step_s: float) -> timedelta:
    """Return the timeout for collectives of a step predicted to take `step_s`. The margin is large
    because predictions for uncalibrated devices are off by factors of 2 and more."""
    return timedelta(seconds=_STEP_FACTOR * step_s)


def require_equal(
    processes: Processes,
    facts: Mapping[str, Any],
    source: str,
    change: str = "start all processes by one command, in equal environments",
) -> None:
    """Raise ConfigError, on all processes, unless `facts` are equal on all of them.

    `facts`: JSON values by name. `source`, `change`: parts of the error's message.
    """
    first, *others = processes.each(json.loads(json.dumps(dict(facts))))
    for number, own in enumerate(others, 1):
        if found := differing(own, first):
            raise ConfigError(
                given=f"process {number}: {difference_words(found, 'on process 0')}",
                required="the same on all processes of a run",
                source=source,
                change=change,
            ).on_all()


@contextmanager
def joined(launch: Launch, *, limit: timedelta = _COLLECTIVE_LIMIT) -> Iterator[Processes]:
    """Context manager: join the processes of a launch into a group. On exit, wait for all
    processes, then leave the group.

    If this process alone raises an error, it ends. The other processes print the error and end,
    too. `limit`: timeout of collectives within a step.
    """
    if launch.num_processes == 1:
        yield Processes(launch)
        return
    import torch
    from torch import distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if launch.local_number < torch.cuda.device_count():  # else `device_of` raises an error
        torch.cuda.set_device(launch.local_number)
    try:
        root, _, _ = next(rendezvous("env://", timeout=_START_LIMIT))
        # torchrun keeps its store over restarts, with the addresses of the attempt before
        store = PrefixStore(f"furlong/{launch.attempt}", root)
        dist.init_process_group(
            _backends(), store=PrefixStore("group", store),
            rank=launch.number, world_size=launch.num_processes, timeout=limit,
        )  # fmt: skip
        processes = Processes(launch, dist.new_group(backend="gloo", timeout=_AGREEMENT_LIMIT))
    except RuntimeError as error:  # of torch's store, of sockets or of gloo
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        said = f"process {launch.number} ends before the start: it cannot join the others at"
        said += f" {place}, or one of them has ended, whose own output says why"
        _end(f"{said}: {first_line(error)}", 1)
    try:
        yield processes
        processes.each(None)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):  # a signal has ended this process
            raise
        is_common = isinstance(error, SystemExit)  # --help
        is_common |= isinstance(error, UserError) and error.is_common
        if not is_common:
            _end_alone(error, launch)
        _leave(processes)
        raise
    _leave(processes)


@contextmanager
def group_of_one() -> Iterator[None]:
    """Context manager: a process group of this process only, which FSDP2 needs to offload weights.
    Does nothing if a group exists."""
    from torch import distributed as dist
    from torch._C._distributed_c10d import HashStore

    if dist.is_initialized():
        yield
        return
    dist.init_process_group(_backends(), store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _backends() -> str:
    """Return the backends of the process group: gloo for the CPU and, with GPUs, nccl for GPUs."""
    import torch

    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _leave(processes: Processes) -> None:
    """Wait for all processes, then leave the group: the first process may host the store."""
    from torch import distributed as dist

    processes.any(False)
    dist.destroy_process_group()


def _end_alone(error: BaseException, launch: Launch) -> NoReturn:
    """End this process and report its error to the other processes. If the error is that another
    process was lost, print the reason that the lost process had reported."""
    from furlong.runtime.distributed.failures import is_lost, tell, who_left

    here, code = f"process {launch.number}", 1
    if is_lost(error) or isinstance(error, ElsewhereError):
        said = f"{here} ends, for another process has ended or does not answer"
        said += f": {first_line(error)}"
        told, silent = "", ""
        if not isinstance(error, ElsewhereError):  # its text names the process already
            told, silent = who_left(range(launch.num_processes))
        if silent and not told:
            told = f"process {silent}: its own output says why, or the launcher's; py-spy shows"
            told += " where one hangs"
        said += f"\n{told}\n--resume goes on from the newest checkpoint"
    else:
        said, cause = "".join(traceback.format_exception(error)).strip(), str(error)
        if isinstance(error, UserError):
            said, cause, code = str(error), error.given, 2  # this process says the rest
        said += f"\n{here} ends, and the others with it"
        tell(f"ended by {type(error).__name__}: {cause}")
    _end(said, code)


def _end(said: str, code: int) -> NoReturn:
    """Print `said` and exit at once: the process group is broken, so exit handlers could hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, f"{said}\n".encode())
    os._exit(code)

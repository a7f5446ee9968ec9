"""The processes of a run: how they were started, agree, are watched, and end together.

Torch is loaded where there are several. They agree by collectives over gloo with no limit of time:
who has died meanwhile is found by heartbeats. Each second a thread of each process writes into the
launcher's store that it lives and where it is; the first process reads all and the others its
verdict, so that the work grows with the number of processes only.

Time is counted in rounds of the threads: a machine that was asleep, or a process that was stopped
and goes on, does not take its own pause for the silence of others. Processes that live may wait for
each other for ever. All are ended when none has gone on for long: a new position is progress, and
so is work, of the processor or on files, but not where a process that waits for another one spins
on its processor, as it does for a GPU.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from itertools import takewhile
from math import inf, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from furlong.config.schema import ParallelConfig
from furlong.errors import ConfigError, UserError, difference_words, differing, in_four_parts
from furlong.plan.plan import Layout
from furlong.version import __version__

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup, Store

_T = TypeVar("_T")
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
    if not count:
        _refuse_others(environment)
    if count in ("", "1"):
        return Launch()
    missing = [name for name in _NUMBERS if not environment.get(name, "").isdecimal()]
    missing += [] if environment.get("MASTER_ADDR") else ["MASTER_ADDR"]
    if not (count.isdecimal() and int(count)):
        given, required = f"WORLD_SIZE = {count}", "a number of processes, as torchrun sets it"
    elif missing:
        given = f"WORLD_SIZE = {count} without a number in {', '.join(missing)}"
        required = "all variables that torchrun sets"
    elif int(environment["MASTER_PORT"]) == 0:
        given = "MASTER_PORT = 0, where each process would look for the others on its own port"
        required = "one port that all processes know: torchrun --standalone, or one that is free"
    else:
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        num_local = environment.get("LOCAL_WORLD_SIZE", count)
        return Launch(
            number=int(environment["RANK"]),
            num_processes=int(count),
            local_number=int(environment["LOCAL_RANK"]),
            num_local=int(num_local) if num_local.isdecimal() else int(count),
            attempt=int(attempt) if attempt.isdecimal() else 0,
        )
    start = _COMMAND.format(int(count) if count.isdecimal() and int(count) else 2)
    change = f"start the processes by {start}, or unset WORLD_SIZE"
    raise ConfigError(given=given, required=required, source="the environment", change=change)


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
    shown = " x ".join(f"{name} {size or 'auto'}" for name, size in sizes.items())
    shown += f" = {f'a multiple of {product}' if free else product}"
    or_else = "set the sizes of parallel to such that divide it" if free else (
        "set parallel.dp to auto"
    )  # fmt: skip
    raise ConfigError(
        given=f"{shown}, and {num_processes} process{'es' * (num_processes > 1)}",
        required="sizes that multiply to the number of processes",
        source="parallel, and the number of processes that were started",
        change=f"start {product}: {_COMMAND.format(product)}; or {or_else}",
    )


STEP, EVALUATION, REFERENCE = "step", "evaluation", "the reference"
"""How a position within a plan begins."""
AFTER = "after "
"""How the position behind a step begins."""
PLAN = " plan"
"""How a position ends in which a plan is made, or waited for."""


class Processes:
    """A process among all of a run; alone it agrees with itself. All call the same methods in
    the same order, but for `at`, `alike` and what is done in the store."""

    def __init__(
        self, launch: Launch, group: ProcessGroup | None = None, store: Store | None = None, *,
        patience_s: float = 20.0,
    ) -> None:  # fmt: skip
        """`group`: of all, over gloo; None where there is one process. `store`: shared by all.
        `patience_s`: how long a process that has failed waits for others, which may be in another
        collective, where it is missing."""
        self.launch, self.group, self._store = launch, group, store
        self._patience_s = patience_s
        self.position = "its start"
        self.num_positions = 0
        self.has_stepped = False
        self.common: UserError | None = None
        """The error that every process is raising."""

    def apart(self) -> Processes:
        """The same processes in a group of their own, for a thread."""
        if self.group is None:
            return self
        from torch import distributed as dist

        group = dist.new_group(backend="gloo", timeout=_AGREEMENT_LIMIT)
        return Processes(self.launch, group, patience_s=self._patience_s)

    @property
    def is_first(self) -> bool:
        return self.launch.is_first

    @property
    def num_processes(self) -> int:
        return self.launch.num_processes

    def sums(self, values: Sequence[float], limit_s: float | None = None) -> list[float]:
        """Sums of each value over all processes, in float64. Raises TimeoutError when others do
        not come within `limit_s`."""
        if self.group is None:
            return list(values)
        import torch
        from torch import distributed as dist

        added = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(added, group=self.group, async_op=True)
        if limit_s is None:
            work.wait()
            return added.tolist()
        started_s = time.monotonic()
        try:
            work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            if time.monotonic() - started_s < limit_s / 2:  # a wait may end a little early
                raise
            raise TimeoutError from error
        return added.tolist()

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any process."""
        return self.sums([float(flag)])[0] > 0

    def each(self, value: _T) -> list[_T]:
        """The value of each process, on all of them."""
        if self.group is None:
            return [value]
        from torch import distributed as dist

        found = [value] * self.num_processes
        dist.all_gather_object(found, value, group=self.group)
        return found

    def together(self, work: Callable[[], _T]) -> _T:
        """The outcome of `work` on this process. Where it raises a UserError on any process, all
        raise it: the first process's own if it has one."""
        failure: UserError | None = None
        result: Any = None
        try:
            result = work()
        except UserError as error:
            failure = error
        if self.group is None and failure is not None:
            raise failure
        patience_s = None if failure is None else self._patience_s
        try:
            has_failed = self.sums([float(failure is not None)], patience_s)[0]
        except TimeoutError:
            assert failure is not None
            raise failure from None  # of this process alone: the heartbeats tell the others
        if has_failed:
            raise self.alike(self._first_of(self.each(failure), failure))
        return result  # type: ignore[no-any-return]

    def _first_of(self, failures: Sequence[UserError | None], own: UserError | None) -> UserError:
        number, error = next((n, error) for n, error in enumerate(failures) if error is not None)
        if number == self.launch.number:
            return own or error
        if number:
            error.given = f"process {number}: {error.given}"
            parts = {
                name: getattr(error, name) for name in ("given", "required", "source", "change")
            }
            error.args = (in_four_parts(**parts),)
        return error

    def from_first(self, work: Callable[[], _T]) -> _T:
        """The outcome of `work` on the first process, which alone does it."""
        result: Any = self.together(work if self.is_first else lambda: None)
        return self.each(result)[0]  # type: ignore[no-any-return]

    def first_of_each_machine(self, work: Callable[[], _T]) -> _T:
        """The outcome of `work`; the first process of each machine does it before the others, who
        then find on disk what it took its time for."""
        is_sooner = self.launch.local_number == 0
        result: Any = self.together(work if is_sooner else lambda: None)
        return self.together(lambda: result if is_sooner else work())  # type: ignore[no-any-return]

    def alike(self, error: UserError) -> UserError:
        """The error, which every process has made of the same figures and is about to raise."""
        if self.group is not None:
            self.common = error
        return error

    def at(self, text: str) -> None:
        """This process begins what `text` says; the others tell it where this one stops."""
        self.position = text
        self.num_positions += 1
        self.has_stepped |= text.startswith(AFTER)

    def publish(self, key: str, text: str) -> None:
        """Write a text into the store, that others fetch."""
        if self._store is not None:
            self._store.set(key, text)

    def fetch(self, key: str, is_over: Callable[[], bool] = lambda: False) -> str:
        """The text of a key, as soon as it is there. Raises TimeoutError when nobody waits for it
        any more. To block in the store would let no other thread use the connection."""
        assert self._store is not None
        started_s = time.monotonic()
        while not self._store.check([key]):
            if is_over():
                raise TimeoutError(key)
            time.sleep(min(max((time.monotonic() - started_s) / 10, 0.01), 0.5))
        return self._store.get(key).decode()

    def forget(self, *keys: str) -> None:
        """Let go of texts that nobody fetches any more."""
        for key in keys:
            if self._store is not None:
                self._store.delete_key(key)


ALONE = Processes(Launch())
"""One process, which keeps no position and agrees with itself."""


def require_equal(processes: Processes, facts: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError, on all processes, unless every one has the facts of the first one.

    `facts`: plain values by name; `source`: where they come from.
    """
    if processes.num_processes == 1:
        return
    own = json.loads(json.dumps(dict(facts)))
    first = processes.from_first(lambda: own)

    def compare() -> None:
        if found := differing(own, first):
            raise ConfigError(
                given=difference_words(found, "on process 0"),
                required="the same on all processes of a run",
                source=source,
                change="start all processes by one command, in equal environments",
            )

    processes.together(compare)


def versions() -> dict[str, str]:
    """Versions of what computes, by package; nothing is imported."""
    return {"furlong": __version__} | {name: version(name) for name in ("torch", "transformers")}


@dataclass(frozen=True, slots=True)
class Limits:
    """After how many rounds processes are given up, and the seconds of a round.

    `silent`: without a beat; `stuck`: without progress of any process within a step, beside ten
    times the longest action so far; `idle`: the same outside of steps, and until the first one is
    over: a disk may take its time to write, a first action to load and compile its kernels.
    """

    round_s: float = 1.0
    silent_rounds: int = 20
    stuck_rounds: int = 60
    idle_rounds: int = 300


class _Beat(NamedTuple):
    """A line of a process to the others, each round: its number of beats and of positions, the last
    position, its work (see `_work_s`), and where its main thread is in the code."""

    number: int
    num_positions: int
    position: str
    has_stepped: bool
    work_s: float
    place: str

    @property
    def is_action(self) -> bool:
        """True within a plan, where waiting for others may look like work."""
        of_plan = self.position.startswith((STEP, EVALUATION, REFERENCE))
        return of_plan and not self.position.endswith(PLAN)


def _beat_of(board: Store, number: int) -> _Beat:
    return _Beat(*json.loads(board.get(f"beat/{number}")))


@dataclass(slots=True)
class _Peer:
    """A process as the others know it."""

    last: _Beat
    progress: _Beat
    """That of its last progress."""
    silent_rounds: int = 0
    still_rounds: int = 0
    longest_rounds: int = 0
    """Those of its longest action."""


_LEAST_WORK = 0.02
"""Share of a processor that counts as work: threads that only look use less."""


class _Watch:
    """The two threads, from `start` to `stop`."""

    def __init__(self, board: Store, processes: Processes, limits: Limits, *, spins: bool) -> None:
        """`board`: a connection to the store that nobody else uses; `spins`: whether a process that
        waits for another one within a plan keeps its processor busy."""
        self.board, self.limits = board, limits
        self._processes, self._launch, self._spins = processes, processes.launch, spins
        self._stopping = threading.Event()
        self._rounds = 0
        self._threads: list[threading.Thread] = []
        self._peers: dict[int, _Peer] = {}

    def start(self) -> None:
        """Begin to beat. All processes must have begun before one of them may be missed: call it
        between two barriers."""
        self._beat()
        for work in (self._keep_beating, self._watch_the_other_thread):
            self._threads.append(threading.Thread(target=work, daemon=True, name=work.__name__))
            self._threads[-1].start()

    def stop(self) -> None:
        """End both threads: one inside the store at the interpreter's exit would abort."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(5 * self.limits.round_s)

    def accuse(self, verdict: str) -> str:
        """Tell all others why they have to leave; returns the first verdict that anyone gave."""
        return self.board.compare_set("verdict", "", verdict).decode()

    def linger(self) -> None:
        """Let the others read the verdict: without torchrun the first process holds the store."""
        if self._launch.is_first:
            time.sleep(2.5 * self.limits.round_s)

    def blame(self) -> str:
        """Who has stopped: by a verdict, or by who has no heartbeat any more. Takes some seconds,
        in which torchrun can see that process end first, and name it as well."""
        numbers = range(self._launch.num_processes)
        try:
            before = [self._told(number) for number in numbers]
            time.sleep(3.5 * self.limits.round_s)
            silent = [number for number in numbers if self._told(number) == before[number]]
            if verdict := self._verdict():
                return verdict
            if silent:
                return self.accuse(self._words(silent, " stopped"))
            where = "; ".join(
                f"process {number} at {self._told(number).position}" for number in numbers
            )
        except RuntimeError as error:
            return f"the launcher's store is gone too ({error})"
        return f"a connection failed, and all processes are alive: {where}"

    def _words(self, silent: Sequence[int], what: str) -> str:
        names = ", ".join(f"process {number}" for number in silent)
        said = "; ".join(f"its last action was {self._told(number).position}" for number in silent)
        return f"{names}{what}; {said}"

    def _verdict(self) -> str | None:
        """The reason why all have to leave, if there is one."""
        return self.board.get("verdict").decode() if self.board.check(["verdict"]) else None

    def _told(self, number: int) -> _Beat:
        return _beat_of(self.board, number)

    def _beat(self) -> None:
        self._rounds += 1
        of = self._processes
        own = _Beat(
            self._rounds, of.num_positions, of.position, of.has_stepped, _work_s(), _place()
        )
        self.board.set(f"beat/{self._launch.number}", json.dumps(own))

    def _keep_beating(self) -> None:
        looked_at = range(self._launch.num_processes) if self._launch.is_first else (0,)
        while not self._stopping.wait(self.limits.round_s):
            try:
                self._beat()
                for number in looked_at:
                    self._look_at(number)
                verdict = self._verdict() or self._judge()
            except RuntimeError as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                self._end(f"{self._here()}: the launcher's store is gone ({reason})")
                return
            if verdict:
                self.linger()
                self._end(f"{verdict}\n{self._here()}")

    def _look_at(self, number: int) -> None:
        beat = self._told(number)
        peer = self._peers.setdefault(number, _Peer(beat, beat))
        peer.silent_rounds = 0 if beat.number != peer.last.number else peer.silent_rounds + 1
        peer.last = beat
        does_tell = not (self._spins and peer.progress.is_action)
        limit_s = self._limit_of(peer) * self.limits.round_s
        work_s = _LEAST_WORK * limit_s if does_tell else inf
        is_there = beat.num_positions == peer.progress.num_positions
        if is_there and beat.work_s - peer.progress.work_s < work_s:
            peer.still_rounds += 1
            return
        if peer.progress.is_action:
            peer.longest_rounds = max(peer.longest_rounds, peer.still_rounds)
        peer.progress, peer.still_rounds = beat, 0

    def _limit_of(self, peer: _Peer) -> int:
        """The rounds after which a process counts as stuck."""
        if not (peer.progress.is_action and peer.progress.has_stepped):
            return self.limits.idle_rounds
        return self.limits.stuck_rounds + 10 * max(p.longest_rounds for p in self._peers.values())

    def _judge(self) -> str | None:
        """The verdict that this round leads to."""
        peers, round_s = self._peers, self.limits.round_s
        silent = [n for n, p in peers.items() if p.silent_rounds >= self.limits.silent_rounds]
        if silent:
            why = "it is stopped or swapped out, or one call in C keeps all its threads waiting"
            seconds = self.limits.silent_rounds * round_s
            return self.accuse(self._words(silent, f": silent for {seconds:.0f} s ({why})"))
        is_stuck = all(p.still_rounds >= self._limit_of(p) for p in peers.values())
        if not (self._launch.is_first and is_stuck):
            return None
        where = "; ".join(
            f"process {n} at {peer.last.position}, in {peer.last.place}"
            for n, peer in peers.items()
        )
        seconds = min(peer.still_rounds for peer in peers.values()) * round_s
        return self.accuse(f"no process has gone on for {seconds:.0f} s: {where}")

    def _watch_the_other_thread(self) -> None:
        before, still_rounds = self._rounds, 0
        while not self._stopping.wait(self.limits.round_s):
            still_rounds = 0 if self._rounds != before else still_rounds + 1
            before = self._rounds
            if still_rounds > self.limits.silent_rounds:
                seconds = still_rounds * self.limits.round_s
                what = f"no answer from the launcher's store for {seconds:.0f} s"
                self._end(f"{self._here()}: {what}")

    def _here(self) -> str:
        return f"process {self._launch.number} ends; it was at {self._processes.position}"

    def _end(self, message: str) -> None:
        """End this process at once: its main thread may wait for a process that is no more."""
        if not self._stopping.is_set():
            _end(message, 1)


def _work_s() -> float:
    """Seconds of the processor that this process has used, but for the calling thread, and one for
    every MiB that it has read from disks or written to them (Linux alone tells these)."""
    used_s = time.process_time() - time.thread_time()
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/io").read_text().splitlines()
        figures = dict(line.split(": ") for line in lines)
        used_s += (int(figures["read_bytes"]) + int(figures["write_bytes"])) / 2**20
    return used_s


def _place() -> str:
    """The innermost function of the main thread, with its file and line."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "no code"
    code = frame.f_code
    return f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"


_START_LIMIT = timedelta(minutes=10)
_COLLECTIVE_LIMIT = timedelta(minutes=30)
_AGREEMENT_LIMIT = timedelta(days=30)
_LEAVE_LIMIT_S = 10.0
# By text: gloo's own errors are plain RuntimeErrors, and autograd passes them on.
_CONNECTION = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|Socket|Timed out waiting", re.I
)


@contextmanager
def joined(launch: Launch, *, limits: Limits = Limits()) -> Iterator[Processes]:
    """This process among those that were launched with it, until all are done.

    An error that only this process raises ends the others too, with its text; where a connection
    fails, the message names the process that stopped and not the one whose socket closed.
    """
    if launch.num_processes == 1:
        yield Processes(launch)
        return
    import torch
    from torch import distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    def connect() -> Store:
        store, _, _ = next(rendezvous("env://", timeout=_START_LIMIT))
        return store

    def watch_store(attempt: int) -> Store:
        return PrefixStore(f"furlong/{attempt}/watch", board)

    root, board = connect(), connect()
    # torchrun keeps its store over restarts: addresses of the attempt before would be found there
    store = PrefixStore(f"furlong/{launch.attempt}", root)
    if launch.attempt and launch.is_first:
        _tell_positions(watch_store(launch.attempt - 1))
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(launch.local_number)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpus else "gloo", store=PrefixStore("group", store),
        rank=launch.number, world_size=launch.num_processes, timeout=_COLLECTIVE_LIMIT,
    )  # fmt: skip
    group = dist.new_group(backend="gloo", timeout=_AGREEMENT_LIMIT)
    patience_s = limits.silent_rounds * limits.round_s
    run_store = PrefixStore("run", store)
    processes = Processes(launch, group, run_store, patience_s=patience_s)
    watch = _Watch(watch_store(launch.attempt), processes, limits, spins=has_gpus)
    processes.each(None)
    watch.start()
    processes.each(None)
    try:
        yield processes
        processes.at("its end")
        processes.each(None)
    except BaseException as error:
        _leave_by(error, processes, watch)
        raise
    _leave(processes, watch)


def _tell_positions(board: Store) -> None:
    """Print where the processes of the attempt before were at their last beats, if all ended."""
    numbers = takewhile(lambda number: board.check([f"beat/{number}"]), range(2**20))
    if ended := [f"process {n} at {_beat_of(board, n).position}" for n in numbers]:
        print(f"the attempt before ended with {', '.join(ended)}")


def _leave_by(error: BaseException, processes: Processes, watch: _Watch) -> None:
    """Returns where every process leaves in the same way, or where a signal has ended this one;
    else tells the others why they end, and ends this process."""
    if error is processes.common or isinstance(error, SystemExit):  # --help, on all of them
        _leave(processes, watch)
        return
    here, where = f"process {processes.launch.number}", f"it was at {processes.position}"
    if isinstance(error, RuntimeError) and _CONNECTION.search(str(error)):
        told = watch.blame()
        watch.linger()
        _end(f"{here} ends; {where}; {told}", 1)
    watch.stop()  # or it would find the verdict before this process has told its own error
    if isinstance(error, KeyboardInterrupt):
        with suppress(RuntimeError):
            watch.accuse(f"{here} was ended by a signal")
        return
    is_of_user = isinstance(error, UserError)
    said = str(error) if is_of_user else "".join(traceback.format_exception(error)).strip()
    cause = error.given if isinstance(error, UserError) else error  # this process says the rest
    with suppress(RuntimeError):
        watch.accuse(f"{here} ended by {type(error).__name__}: {cause}; {where}")
        watch.linger()
    _end(f"{said}\n{here} ends; {where}", 2 if is_of_user else 1)


def _leave(processes: Processes, watch: _Watch) -> None:
    """Leave with all others: the first process, which without torchrun holds the store, when no
    thread of another one asks it for anything any more."""
    from torch import distributed as dist

    watch.stop()
    with suppress(RuntimeError, TimeoutError):
        processes.sums([0.0], _LEAVE_LIMIT_S)
    dist.destroy_process_group()


def _end(message: str, code: int) -> NoReturn:
    """End this process; the group is broken: nothing that waits for it may run any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, f"{message}\n".encode())
    os._exit(code)

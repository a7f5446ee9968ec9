"""The beginning and the end of several processes: one group, heartbeats, and who is to blame."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from furlong.errors import UserError
from furlong.train.processes.launch import Launch
from furlong.train.processes.together import Processes
from furlong.train.processes.watch import LIMITS, Heartbeat, Limits

_START_LIMIT = timedelta(minutes=10)
_COLLECTIVE_LIMIT = timedelta(minutes=30)
_LEAVE_LIMIT_S = 10.0
# By text: gloo's own errors are plain RuntimeErrors, and autograd passes them on.
_CONNECTION = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|Socket|Timed out waiting", re.I
)


@contextmanager
def joined(launch: Launch, *, limits: Limits = LIMITS) -> Iterator[Processes]:
    """This process among those that were launched with it, until all are done.

    An error that only this process raises ends the others too, with its text; where a connection
    fails, the message names the process that stopped and not the one whose socket closed.
    """
    if launch.num_processes == 1:
        yield Processes(launch)
        return
    # torchrun keeps its store over restarts: addresses of the attempt before would be found there.
    name = f"furlong/{launch.attempt}"
    store = PrefixStore(name, _connect())
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(launch.local_number)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpus else "gloo", store=PrefixStore("group", store),
        rank=launch.number, world_size=launch.num_processes, timeout=_COLLECTIVE_LIMIT,
    )  # fmt: skip
    patience_s = limits.silent_rounds * limits.round_s
    processes = Processes(launch, PrefixStore("run", store), patience_s=patience_s)
    board = PrefixStore(f"{name}/watch", _connect())
    heartbeat = Heartbeat(
        board, launch.number, launch.num_processes, processes.flight, limits,  # type: ignore[arg-type]
        spins=has_gpus,
    )  # fmt: skip
    dist.barrier()
    heartbeat.start()
    dist.barrier()
    try:
        yield processes
        processes.at("its end")
        dist.barrier()
    except BaseException as error:
        _leave_by(error, processes, heartbeat)
        raise
    _part(processes, heartbeat)


def _connect() -> Store:
    store, _, _ = next(rendezvous("env://", timeout=_START_LIMIT))
    return store


def _leave_by(error: BaseException, processes: Processes, heartbeat: Heartbeat) -> None:
    """Returns where every process leaves in the same way, or where a signal has ended this one;
    else tells the others why they end, and ends this process."""
    if error is processes.common or isinstance(error, SystemExit):  # --help, on all of them
        _part(processes, heartbeat)
        return
    here = f"process {processes.launch.number}"
    if isinstance(error, KeyboardInterrupt):
        heartbeat.stop()
        with suppress(RuntimeError):
            heartbeat.accuse(f"{here} was ended by a signal")
        return
    if _is_of_a_connection(error):
        told = _blame(heartbeat)
        heartbeat.linger()
        _end(f"{here} ends; it was at {processes.flight.text}; {told}", 1)
    is_of_user = isinstance(error, UserError)
    said = str(error) if is_of_user else "".join(traceback.format_exception(error)).strip()
    cause = error.given if isinstance(error, UserError) else error  # this process says the rest
    where = f"it was at {processes.flight.text}"
    heartbeat.stop()  # or it would find the verdict before this process has told its own error
    with suppress(RuntimeError):
        heartbeat.accuse(f"{here} ended by {type(error).__name__}: {cause}; {where}")
        heartbeat.linger()
    _end(f"{said}\n{here} ends; {where}", 2 if is_of_user else 1)


def _part(processes: Processes, heartbeat: Heartbeat) -> None:
    """Leave, with all others."""
    heartbeat.stop()
    processes.part(_LEAVE_LIMIT_S)
    dist.destroy_process_group()


def _is_of_a_connection(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and _CONNECTION.search(str(error)) is not None
    )


def _blame(heartbeat: Heartbeat) -> str:
    """Who has stopped: found by a verdict, or by who has no heartbeat any more. Takes some seconds,
    in which torchrun can see that process end first, and name it as well."""
    try:
        silent = heartbeat.silent_since(3.5 * heartbeat.limits.round_s)
        if verdict := heartbeat.verdict():
            return verdict
        positions = heartbeat.positions()
    except RuntimeError as error:
        return f"the launcher's store is gone too ({error})"
    if not silent:
        where = "; ".join(f"process {n} at {text}" for n, text in positions.items())
        return f"a connection failed, and all processes are alive: {where}"
    names = ", ".join(f"process {number}" for number in silent)
    said = "; ".join(f"its last action was {positions[number]}" for number in silent)
    return heartbeat.accuse(f"{names} stopped; {said}")


def _end(message: str, code: int) -> NoReturn:
    """The group is broken: nothing that waits for it may run any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, f"{message}\n".encode())
    os._exit(code)

"""Run a function on several gloo ranks, each in its own process, with a time limit."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from helpers.load import slowed

PRELOADED = [
    "furlong.train.trainer", "peft", "pytest", "torch.distributed.fsdp", "transformers",
    "transformers.models.llama.modeling_llama",
]  # fmt: skip
"""Modules that the fork server imports once for all tests of a session: a group of two then starts
in 0.1 s of CPU. Keeping groups for several tests would save little more, and would pass the state
that one test leaves to the next."""


class RankError(AssertionError):
    """A rank that raised, died or did not end in time."""


def server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    num_ranks: int,
    limit_s: float = 60,
    enter: Callable[[int], None] | None = None,
) -> list[Any]:
    """Return the results of `function(rank, *args)`, by rank, in a gloo group of `num_ranks`.

    `function` must be defined in a module; its arguments and result must be picklable. The first
    rank that raises ends all others; RankError has its traceback. `limit_s`: see `slowed`. `enter`
    is called with the rank before the group is created.
    """
    context = server()
    with tempfile.TemporaryDirectory() as folder:
        ours: dict[Connection, int] = {}
        children: list[BaseProcess] = []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            call = pickle.dumps((function, args, enter))
            child = context.Process(
                target=_of_rank, args=(sender, folder, rank, num_ranks, limit_s, call), daemon=True
            )
            child.start()
            sender.close()
            ours[receiver] = rank
            children.append(child)
        try:
            return _answers(ours, children, limit_s)
        finally:
            for child in children:
                child.kill()
                child.join()


def run_all(
    *calls: tuple[Any, ...] | Callable[..., Any], num_ranks: int, limit_s: float = 60
) -> list[list[Any]]:
    """Return the results, by function and then by rank, of several functions (or tuples of a
    function and arguments) that the same ranks call in turn: starting ranks costs more."""
    given = [call if isinstance(call, tuple) else (call,) for call in calls]
    by_rank = run_ranks(_call_all, given, num_ranks=num_ranks, limit_s=limit_s)
    return [list(found) for found in zip(*by_rank, strict=True)]


def _call_all(rank: int, calls: list[tuple[Any, ...]]) -> list[Any]:
    return [function(rank, *args) for function, *args in calls]


def _answers(ours: dict[Connection, int], children: list[BaseProcess], limit_s: float) -> list[Any]:
    found: dict[int, Any] = {}
    started_s = time.monotonic()
    while len(found) < len(children):
        left = [receiver for receiver, rank in ours.items() if rank not in found]
        ready = wait(left, timeout=0.5)
        if not ready:
            waited_s = time.monotonic() - started_s
            if waited_s < slowed(limit_s):
                continue
            late = sorted(ours[receiver] for receiver in left)
            raise RankError(f"ranks {late} gave no answer within {waited_s:.0f} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = ours[receiver]
            try:
                failed, answer = pickle.loads(receiver.recv_bytes())
            except EOFError:
                children[rank].join(5)
                code = children[rank].exitcode
                raise RankError(f"rank {rank} died, exit code {code}") from None
            if failed:
                raise RankError(f"rank {rank} raised\n{answer}")
            found[rank] = answer
    return [found[rank] for rank in sorted(found)]


def _of_rank(
    sender: Connection, folder: str, rank: int, num_ranks: int, limit_s: float, call: bytes
) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # objects of the server's imports are no garbage
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        function, args, enter = pickle.loads(call)
        if enter is not None:
            enter(rank)
        store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks,
            timeout=timedelta(seconds=slowed(limit_s)),
        )  # fmt: skip
        answer: tuple[bool, Any] = False, function(rank, *args)
    except BaseException:
        answer = True, traceback.format_exc()
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    if not answer[0]:
        # suppressed: the test has all answers and killed the others, or the function left the group
        with suppress(RuntimeError, ValueError):
            dist.barrier()  # no rank closes its sockets while another still reads from them
            dist.destroy_process_group()

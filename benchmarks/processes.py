"""Several gloo processes on this machine, each with one thread, that call one function together."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_PRELOADED = ["furlong.api", "transformers", "torch.distributed.fsdp"]
"""Imported once, by the server that all processes are forked from."""


_ENDING_S = 10.0
"""How long processes that have answered may take to close their sockets."""


class ProcessError(RuntimeError):
    """A process raised, died or did not end in time."""


def run_together(
    function: Callable[..., Any],
    *args: Any,
    world: int,
    limit_s: float,
    enter: Callable[[int], None] | None = None,
) -> list[Any]:
    """The outcomes of `function(process, *args)`, inside a gloo group of `world` processes.

    `function` stands in a module of its own; its arguments and outcomes can be pickled. Each
    process calls `enter` with its number before it joins the group. The first one that fails ends
    all others, with ProcessError.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        call = pickle.dumps((function, args, enter))
        pairs = [context.Pipe(duplex=False) for _ in range(world)]
        children = [
            context.Process(
                target=_of_process, args=(sender, folder, number, world, limit_s, call), daemon=True
            )
            for number, (_, sender) in enumerate(pairs)
        ]
        try:
            for child, (_, sender) in zip(children, pairs, strict=True):
                child.start()
                sender.close()
            answers = _answers([receiver for receiver, _ in pairs], limit_s)
            for child in children:
                child.join(_ENDING_S)
            return answers
        finally:
            for child in children:
                if child.pid is not None:
                    child.kill()
                    child.join()


def _answers(receivers: list[Connection], limit_s: float) -> list[Any]:
    found: dict[int, Any] = {}
    deadline_s = time.monotonic() + limit_s
    while len(found) < len(receivers):
        left = {id(r): number for number, r in enumerate(receivers) if number not in found}
        ready = wait([receivers[n] for n in left.values()], max(0, deadline_s - time.monotonic()))
        if not ready:
            raise ProcessError(f"processes {[*left.values()]} gave no answer within {limit_s:g} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            number = left[id(receiver)]
            try:
                failed, answer = pickle.loads(receiver.recv_bytes())
            except EOFError:
                raise ProcessError(f"process {number} died") from None
            if failed:
                raise ProcessError(f"process {number} raised\n{answer}")
            found[number] = answer
    return [found[number] for number in sorted(found)]


def _of_process(
    sender: Connection, folder: str, number: int, world: int, limit_s: float, call: bytes
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        function, args, enter = pickle.loads(call)
        if enter is not None:
            enter(number)
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(Path(folder) / "store"), world), rank=number,
            world_size=world, timeout=timedelta(seconds=limit_s),
        )  # fmt: skip
        answer: tuple[bool, Any] = False, function(number, *args)
    except BaseException:
        answer = True, traceback.format_exc()
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    if not answer[0]:
        dist.barrier()  # nobody closes its sockets while another still reads from them
        dist.destroy_process_group()

"""Start processes as torchrun does, with its variables but without its imports, and report how each
one ended."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from helpers.load import slowed
from helpers.ranks import server


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int | None
    """Exit code; None: it did not end within the limit."""
    said: str
    """All output, of both streams."""


def free_port() -> int:
    """Return a port that is free, below those that the system gives to connections (from 32,768
    on), since one of these could be taken before it is used."""
    for port in random.SystemRandom().sample(range(15_000, 32_000), 1_000):
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port from 15,000 to 31,999")


class Launched:
    """Processes that call `function(*args)`, each with another rank in its environment."""

    def __init__(
        self, folder: Path, function: Callable[..., Any], *args: Any, num_processes: int = 2,
        attempt: int = 0, environment: Mapping[str, str] = {},
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self._outputs = [folder / f"{number}.txt" for number in range(num_processes)]
        port = free_port()
        self.processes: list[BaseProcess] = []
        for number, output in enumerate(self._outputs):
            variables = {
                "RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": num_processes,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                "TORCHELASTIC_RESTART_COUNT": attempt, **environment,
            }  # fmt: skip
            call = pickle.dumps((function, args))
            texts = {name: str(value) for name, value in variables.items()}
            process = server().Process(target=_begin, args=(texts, str(output), call), daemon=True)
            process.start()
            self.processes.append(process)

    def said(self, number: int) -> str:
        """Return the output of a process so far."""
        output = self._outputs[number]
        return output.read_text() if output.exists() else ""

    def ended(self, limit_s: float = 60) -> list[Ended]:
        """Wait for all processes; kill those that take longer than `slowed(limit_s)`."""
        started_s = time.monotonic()
        while any(process.is_alive() for process in self.processes):
            if time.monotonic() - started_s > slowed(limit_s):
                break
            time.sleep(0.01)
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return [Ended(code, self.said(number)) for number, code in enumerate(codes)]


def _begin(variables: dict[str, str], output: str, call: bytes) -> None:
    import torch

    gc.freeze()  # objects of the server's imports are no garbage
    os.environ |= variables
    # it ends with the tests, yet may have child processes, as torchrun's processes may
    vars(multiprocessing.current_process())["_config"]["daemon"] = False
    opened = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    torch.set_num_threads(1)
    function, args = pickle.loads(call)
    function(*args)

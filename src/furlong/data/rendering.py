"""Conversations rendered in a process of its own, whose time and memory the system bounds.

A chat template is a program that came with a tokenizer: it may loop for ever or ask for all memory,
and within this process nothing could stop it, whatever thread it runs in. The process may also wait
for a lock that another thread of this one held when it was forked, and which nobody gives free.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil

from furlong.data.chat import ChatTemplate, Turns
from furlong.data.tokenize import Rendered
from furlong.errors import DataError
from furlong.units import format_bytes

LIMIT_S = 5.0
"""Seconds of computing for a template over one conversation, or over a prompt within it."""
LIMIT_BYTES = 2**30
"""Memory that rendering may take beside what the process begins with."""

_LOOK_S = 1.0
_MOST_LOOKS = 60
"""After so many looks in a row at a process that sleeps and has not computed it is given up. On a
busy machine one that could go on is waiting for a core, and does not sleep."""


@contextmanager
def rendering(
    tokenizer: Any, eot_tokens: Iterable[str] = ()
) -> Iterator[Callable[[Turns], Rendered]]:
    """A function that renders by the tokenizer's chat template, within `LIMIT_S` and
    `LIMIT_BYTES`. `eot_tokens`: see `ChatTemplate`."""
    # Loaded here, so that the new process finds it there.
    import transformers.utils.chat_template_utils  # noqa: F401

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(theirs, ours, tokenizer, tuple(eot_tokens)), daemon=True
    )
    with _quiet_fork():
        process.start()
    theirs.close()

    is_ready = False

    def received() -> Any:
        """The next message; raises TimeoutError where the process stands still."""
        looks, before = 0, -1.0
        while not ours.poll(_LOOK_S):
            if not process.is_alive() and not ours.poll():
                raise EOFError
            now = _computed_s(process.pid)
            looks, before = looks + 1 if now == before else 0, now
            if looks == _MOST_LOOKS:
                process.kill()
                raise TimeoutError
        return ours.recv()

    def ask(turns: Turns) -> Rendered:
        nonlocal is_ready
        try:
            if not is_ready:  # a long conversation is sent to one that reads it
                is_ready = received()
            ours.send(turns)
            answer = received()
        except (EOFError, OSError) as error:
            process.join()
            code = None if isinstance(error, TimeoutError) else process.exitcode
            raise _ended(code, tokenizer.name_or_path, turns.origin) from error
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    try:
        yield ask
    finally:
        ours.close()
        process.kill()
        process.join()
        process.close()


def _serve(
    connection: Connection, other_end: Connection, tokenizer: Any, eot_tokens: tuple[str, ...]
) -> None:
    """The life of the process: conversations in, rendered ones or errors out."""
    # Otherwise the pipe would never end for this process.
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit_bytes = psutil.Process().memory_info().vms + LIMIT_BYTES
    _, hardest = resource.getrlimit(resource.RLIMIT_AS)
    if hardest != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, hardest)
    with suppress(ValueError, OSError):  # some systems know no such limit
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, hardest))
    # Without a handler the signal ends the process, also in the midst of one long operation.
    wind_up = partial(signal.setitimer, signal.ITIMER_PROF, LIMIT_S)
    template = ChatTemplate(tokenizer, wind_up, eot_tokens)
    connection.send(True)
    answer: Any
    while True:
        try:
            turns = connection.recv()
        except EOFError:
            return
        try:
            answer = template.render(turns)
        except Exception as error:  # goes on in the process that asked
            answer = error
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(answer)


def _computed_s(pid: int | None) -> float:
    """Seconds that a process has computed, if it sleeps; else not a number, equal to none."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_SLEEPING:
            times = process.cpu_times()
            return times.user + times.system
    return math.nan


def _ended(exit_code: int | None, tokenizer: str, origin: str) -> DataError:
    """The error of a process that has ended, or, without a code, of one that stood still."""
    if exit_code is None:
        return DataError(
            given=f"a conversation at which the process that renders it, by {tokenizer}, stands"
            f" still: it sleeps, and has not computed for {_MOST_LOOKS * _LOOK_S:g} s",
            required="a process that renders or ends",
            source=origin,
            change="start again: it waits for what another thread held when it was forked; in a"
            " program of your own render before it starts threads",
        )
    is_late = exit_code == -signal.SIGPROF
    reason = f"takes more than {LIMIT_S:g} s" if is_late else f"ends its process with {exit_code}"
    return DataError(
        given=f"a conversation for which the chat template of {tokenizer} {reason}",
        required=f"a template that renders a conversation within {LIMIT_S:g} s and"
        f" {format_bytes(LIMIT_BYTES)}",
        source=origin,
        change="use another tokenizer or mend its chat template, if its author can be trusted",
    )


@contextmanager
def _quiet_fork() -> Iterator[None]:
    """Without the remarks of Python and tokenizers: the new process uses no thread of this one."""
    name = "TOKENIZERS_PARALLELISM"
    is_set = name in os.environ
    try:
        os.environ.setdefault(name, "true")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if not is_set:
            del os.environ[name]

"""Report to other processes that this one fails while they wait for it.

A gloo collective waits until a peer's connection closes, or until the timeout. A process that fails
inside a collective may catch its error and keep running. So a failing process writes the reason to
the process group's store and closes its connections. The others then fail, too, read the store, and
do the same. A process that was killed has written nothing: it is the one without an entry.

NCCL does not report a closed connection. Its processes notice at their next agreement, which uses
gloo, or after the timeout.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from furlong.errors import LinkError, in_four_parts, reason_of

# By text: gloo's own errors are plain RuntimeErrors, and autograd passes them on.
_CONNECTION = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|Socket|Timed out waiting"
    r"|pair closure",
    re.I,
)
_WAIT_S = 5.0
"""Seconds to wait for the reasons of other processes."""
_POLL_S = 0.02
_TAG = 2**20
"""Tag that no message carries."""
_LOST = "has lost another process"


def is_lost(error: BaseException) -> bool:
    """Whether an error means that the connection to another process was lost."""
    if isinstance(error, LinkError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and bool(_CONNECTION.search(str(error)))


def tell(word: str) -> None:
    """Write the reason why this process fails, `word`, to the store of the process group. If this
    process has written a reason before, it is not replaced."""
    with suppress(RuntimeError, ValueError):  # the store ends with the process that holds it
        store = dist.distributed_c10d._get_default_store()
        if not store.check([key := _key(dist.get_rank())]):
            store.set(key, word)
            store.check([key])  # waits for the write, before connections close


def leave(word: str, groups: Iterable[dist.ProcessGroup]) -> None:
    """Report the reason `word` why this process stops, and close its connections in `groups`."""
    tell(word)
    for group in groups:
        if group.size() == 1:
            continue
        with suppress(RuntimeError, ValueError):
            x, peer = torch.empty(1, device="cpu"), (group.rank() + 1) % group.size()
            # gloo closes all connections of a group when a receive times out
            group.recv([x], peer, _TAG).wait(timedelta(milliseconds=1))


def lost(groups: Sequence[dist.ProcessGroup], error: BaseException, place: str) -> LinkError:
    """Write to the store that this process has lost a connection, and close its connections in
    `groups`. Return a LinkError for the caller to raise, with the reasons that other processes have
    written to the store.

    Args:
        groups: Groups of this process, the group of all processes first.
        error: The backend's error.
        place: See `consensus.agree`.
    """
    leave(_LOST, groups)
    told, silent = who_left(dist.get_process_group_ranks(groups[0]))
    told = told or f"process {silent} has ended, or does not answer ({reason_of(error)})"
    return LinkError(
        in_four_parts(
            given=f"process {dist.get_rank()} in {place}, where another one does not go on: {told}",
            required="the same calls and backwards on all processes, within the timeout of their "
            "group",
            source="the code that calls furlong, on each process",
            change="mend what the other process tells, end all processes and start them again",
        )
    )


def who_left(numbers: Sequence[int]) -> tuple[str, str]:
    """Return the reasons that other processes have reported, and the numbers of silent processes.
    Waits for some seconds, until one has reported an error or at most one is silent."""
    words = {number: "" for number in numbers if number != dist.get_rank()}
    stop_s = time.monotonic() + _WAIT_S
    try:
        store = dist.distributed_c10d._get_default_store()
        while True:
            for number in words:
                if not words[number] and store.check([_key(number)]):
                    words[number] = store.get(_key(number)).decode()
            told = [f"process {n} {word}" for n, word in words.items() if word not in ("", _LOST)]
            silent = [str(number) for number, word in words.items() if not word]
            if told or len(silent) <= 1 or time.monotonic() > stop_s:
                return "; ".join(told), ", ".join(silent)
            time.sleep(_POLL_S)
    except (RuntimeError, ValueError):
        return "process 0 has ended, and the store of the process group with it", "0"


def _key(number: int) -> str:
    return f"furlong/left/{number}"

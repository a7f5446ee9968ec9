"""Tell the other processes of one that ends, or leaves a call, in which they wait for it.

Gloo's collectives wait until their peers are gone, or until the timeout. So a process that fails
where nobody can make up for it, and may catch its error and live on, leaves the reason in the store
of the process group and closes its connections. The others then fail as well, look into the store,
and do the same. One that was killed has left no word: it is whoever is silent.

NCCL tells nobody of a connection that is closed; its processes notice in their next agreement,
which goes over gloo, or after the timeout.
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
"""Seconds for which a process waits for the word of others."""
_POLL_S = 0.02
_TAG = 2**20
"""Tag of a message that nobody sends."""
_LOST = "has lost another process"


def is_lost(error: BaseException) -> bool:
    """Whether an error is that the connection to another process is gone."""
    if isinstance(error, LinkError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and bool(_CONNECTION.search(str(error)))


def tell(word: str) -> None:
    """Leave a word about this process in the store, unless it has left one before."""
    with suppress(RuntimeError, ValueError):  # the store ends with the process that holds it
        store = dist.distributed_c10d._get_default_store()
        if not store.check([key := _key(dist.get_rank())]):
            store.set(key, word)
            store.check([key])  # it is there before a connection closes


def leave(word: str, groups: Iterable[dist.ProcessGroup]) -> None:
    """Tell the others why this process takes no further part, and close its connections."""
    tell(word)
    for group in groups:
        if group.size() == 1:
            continue
        with suppress(RuntimeError, ValueError):
            x, peer = torch.empty(1, device="cpu"), (group.rank() + 1) % group.size()
            # gloo closes all of a group's when a receive is not answered in time
            group.recv([x], peer, _TAG).wait(timedelta(milliseconds=1))


def lost(groups: Sequence[dist.ProcessGroup], error: BaseException, place: str) -> LinkError:
    """Return the error of a process that waits for others in vain, as `error` tells, and tell them
    that it leaves. `groups`: of this process, that of all processes first. `place`: see
    `consensus.together`."""
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
    """Return what other processes have told of their ends, and which of them are silent. It waits
    until one has told of an error, or all but one that they have lost another."""
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

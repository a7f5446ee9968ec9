"""Messages that need both ends, as Megatron-LM's pipeline sends them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from typing import Any

from furlong.plan.plan import Action, Recv, Send
from furlong.simulate.clock import Clock


class FusedPairs(Clock):
    """The clock where a message starts when both of its ends have come. A Send and the Recv from
    the same peer that stands next to it are issued together (Megatron-LM's fused pairs)."""

    def __init__(self, *what: Any) -> None:
        super().__init__(*what)
        self._offered: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        """Per channel, when each message was offered, and for how long it takes the channel."""
        self._wanted: dict[tuple[int, int], list[float]] = defaultdict(list)
        """Per channel, when each message was first waited for."""

    def _exchange(
        self, rank: int, index: int, now: float
    ) -> Generator[Any, None, tuple[int, float]]:
        waits = []
        count = _fused(self._plan.actions[rank], index)
        for at in range(index, index + count):
            action = self._plan.actions[rank][at]
            if isinstance(action, Send):
                channel, ends = (rank, action.peer), self._offered[rank, action.peer]
                waits.append((at, channel, len(ends)))
                ends.append((now, self._costs.transfer_s(action, rank)))
            else:
                assert isinstance(action, Recv)
                channel = action.peer, rank
                waits.append((at, channel, len(self._wanted[channel])))
                self._wanted[channel].append(now)
            self._settle(channel)
        free = now
        for at, channel, message in waits:
            spans = self._spans[channel]
            while len(spans) <= message:
                yield channel, message
            start, stop = spans[message]
            if channel[1] == rank:
                stop = max(stop, now)
                start = min(max(start, now), stop)
            self._start_s[rank][at], self._stop_s[rank][at] = start, stop
            free = max(free, stop)
        return count, free

    def _settle(self, channel: tuple[int, int]) -> None:
        """Give times to the messages of a channel whose ends have come."""
        spans, offered, wanted = self._spans[channel], self._offered[channel], self._wanted[channel]
        while len(spans) < min(len(offered), len(wanted)):
            since, transfer_s = offered[len(spans)]
            start = max(since, wanted[len(spans)], spans[-1][1] if spans else since)
            spans.append((start, start + transfer_s))


def _fused(actions: tuple[Action, ...], index: int) -> int:
    """How many messages from `index` on are issued together."""
    first, second = actions[index], actions[index + 1] if index + 1 < len(actions) else None
    if not isinstance(first, (Send, Recv)) or not isinstance(second, (Send, Recv)):
        return 1
    return 2 if type(first) is not type(second) and first.peer == second.peer else 1

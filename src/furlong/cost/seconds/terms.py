"""Seconds of parts of passes as sums of products: what a table says times what a stage takes.

The table may be of a plan's chunks, or of anything whose sums a planner knows: a process of a pool
before and after each of many moves, all in one call.

    P parts, C chunks, S processes of a pool
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from furlong.cost.seconds.chunks import Array, ChunkTable


@dataclass(frozen=True)
class Terms:
    """Factors of the sums of a table: arrays of (P,)."""

    token_s: Array
    process_s: Array
    """On each process that has a token."""
    idle_s: Mapping[float, Array]
    """share of experts that a token does not visit -> of a process with so many tokens that some
    visit each of these experts, too."""
    key_s: Mapping[int | None, Array]
    """window -> per attended key, at the best efficiency."""
    half_tokens: Array
    """Tokens at which attention is half as efficient."""
    exchanges: Array
    """Layers whose attention runs."""
    launch_s: Array
    """On each process that has a token."""
    call_s: Array
    """Per call of attention."""
    exchange_s: Mapping[int, tuple[float, float]]
    """size of a place -> the all-to-alls of one layer: what does not grow, and what each token of
    its slices adds."""
    hides_launches: bool

    def seconds(self, table: ChunkTable, waits_s: Array | float = 0.0) -> Array:
        """(P, S, C) every part on every process; `waits_s` alike: for streamed K,V."""
        tokens, busy = table.tokens, table.tokens > 0

        def over(values: Array) -> Array:
            return values.reshape(-1, *(1,) * tokens.ndim)

        nothing = np.zeros((1,) * (tokens.ndim + 1))
        local, shared = (
            sum((over(each) * keys[window] for window, each in self.key_s.items()), nothing)
            for keys in (table.local_keys, table.shared_keys)
        )
        slower = 1 + over(self.half_tokens) / np.maximum(tokens, 1e-9)
        seconds: Array = over(self.token_s) * tokens + over(self.process_s) * busy
        for unvisited, each in self.idle_s.items():
            # E experts of which a token visits k: n tokens visit E (1 - (1 - k/E)^n) on average
            visited = 1 - unvisited ** np.maximum(tokens - 1, 0)
            seconds += over(each) * visited
        seconds += shared * slower
        seconds += np.maximum(local * slower, over(self.exchanges) * self._exchanges_s(table))
        seconds += waits_s
        launched = over(self.launch_s) * busy + over(self.call_s) * table.num_slices
        if self.hides_launches:
            return np.maximum(seconds, launched, out=seconds)
        return np.add(seconds, launched, out=seconds)

    def _exchanges_s(self, table: ChunkTable) -> Array:
        """(S, C) the all-to-alls of one layer, those of all sizes of the process's places."""
        total = np.zeros_like(table.tokens)
        for size, tokens in table.exchanged_tokens.items():
            once_s, token_s = self.exchange_s[size]
            total += once_s * (tokens > 0) + token_s * tokens
        return total

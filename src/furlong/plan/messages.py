"""Messages between two ranks: which travel from one to the other, in which order, how large.

Both ends read them here. So a message carries no header and no tag: the backends of several devices
have none, and a receive that is posted early needs a buffer of the right size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from furlong.plan.plan import Chunk, ChunkPlan, Payload, Recv, Send


@dataclass(frozen=True, slots=True)
class Message:
    """Hidden states, or their gradient, (num_rows, D) of one chunk."""

    payload: Payload
    chunk: int
    stage: int
    """The stage whose output (activation) or whose input's gradient (gradient) travels."""
    num_rows: int

    def is_of(self, action: Send | Recv) -> bool:
        """Whether an action sends or receives this message."""
        own = self.payload, self.chunk, self.stage
        return own == (action.payload, action.chunk, action.stage)


def all_rows(chunk: Chunk) -> int:
    """Rows of a chunk in a pool of one process: its tokens, or the one token of a dummy."""
    return max(1, chunk.num_tokens)


def messages(
    plan: ChunkPlan, sender: int, receiver: int, num_rows: Callable[[Chunk], int] = all_rows
) -> tuple[Message, ...]:
    """Messages from one rank to another, in the order of a checked plan's lists.

    `num_rows`: rows of a chunk that the process holds at either end.
    """
    return tuple(
        Message(a.payload, a.chunk, a.stage, num_rows(plan.chunks[a.chunk]))
        for a in plan.actions[sender]
        if isinstance(a, Send) and a.peer == receiver
    )

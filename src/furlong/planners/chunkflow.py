"""ChunkFlow: chunks of equal tokens, and pipelines that respect the dependencies between them.

Yuan et al., ICML 2025 (arXiv 2503.02356).

Chunks (Algorithm 1: `chunks.group_chunks`, `.pack`): a sequence longer than a chunk is cut into
pieces of `size` tokens. Shorter sequences are packed whole.

Order (Algorithm 2: `orders.schedule_group`): forwards of a cut sequence ascend. All pieces drop
their graphs but the last `num_retained` (the paper's K). Backwards descend. A piece that has
dropped its graph is recomputed right before its backward. K,V and dK,dV are kept for the sequence.
A recomputed piece takes 4 units of time, a retained one 3 (forward 1, backward 2).

Pipelines (state-aware 1F1B: `orders.state_aware_lists`): all backwards of a sequence run in the
slot of its last piece. Stage s of P runs P - 1 - s forwards ahead, and holds at most P - 1 - s + K
graphs.

Errata: the listing of Algorithm 2 retains about N - K pieces; the text says K of N, which is right.
The listing also recomputes in ascending order. Then dK,dV of a piece would be incomplete, and
gradients would err by 28 to 40 %. Algorithm 1 puts a sequence of exactly `size` tokens into no
list; here it counts as short. In Figure 5 chunks 4 to 6 run twice, not 3.

The paper gives no algorithm for state-aware 1F1B. The rule here gives exactly the bubbles of
Figures 2 and 7, 57.14 and 60 % (Eq. 1, where recomputation counts as bubble). For Figure 6 it gives
45.45 % (K = 1) and 42.86 % (K = 2), where 54.1 and 47.8 are printed. It leaves less idle time, as
the longest sequences come first, and a stage recomputes once it is free.

Differences to the paper: `size` and `num_retained` are searched with the cost model, where the
paper runs a grid of them; the order of Figure 6 (above). As in the paper, the last piece of a
sequence shares no chunk with short sequences.
"""

from __future__ import annotations

from collections.abc import Iterator

from furlong.planners.candidates import chunks
from furlong.planners.question import Candidate, Space


def candidates(space: Space) -> Iterator[Candidate]:
    """Yield candidates of all chunk sizes and numbers of retained chunks, by estimated time."""
    yield from chunks(space, "chunkflow", keep="kv", order="chunk-first", hybrid=False)

"""ChunkFlow: chunks of equal tokens, and pipelines that respect the dependencies between them.

Yuan et al., ICML 2025 (arXiv 2503.02356). A sequence longer than a chunk is cut into pieces of
`size` tokens, shorter ones are packed whole (Algorithm 1: `chunks.group_chunks`, `.pack`). Forwards
of a cut sequence ascend, and all but the last `num_retained` pieces (the paper's K) drop their
graphs. Backwards descend, each after the recompute of a dropped graph, with K,V and dK,dV kept for
the sequence (Algorithm 2: `orders.schedule_group`). In a pipeline all backwards of a sequence run
in the slot of its last piece, and stage s of P runs P - 1 - s forwards ahead (state-aware 1F1B:
`orders.state_aware_lists`); it holds at most P - 1 - s + K graphs. A recomputed piece takes 4 units
of time, a retained one 3 (forward 1, backward 2).

Errata: the listing of Algorithm 2 retains about N - K pieces (the text, K of N, is right), and
recomputes ascending, where dK,dV of a piece would be incomplete: gradients then err by 28 to 40 %.
Algorithm 1 puts a sequence of exactly `size` tokens into no list; here it is short. In Figure 5
chunks 4 to 6 run twice, not 3. The paper gives no algorithm for state-aware 1F1B; the rule here
gives the bubbles of its Figures 2 and 7 exactly (Eq. 1, where recomputation counts as bubble),
57.14 and 60 %. For Figure 6 it gives 45.45 % (K = 1) and 42.86 % (K = 2), where 54.1 and 47.8 are
printed: it leaves less idle time, as the longest sequences come first, and a stage recomputes once
it is free.

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

"""SeCO: a forward of all chunks without gradients, then each again with its backward, descending.

Li et al., Findings of ACL 2025 (arXiv 2505.16710), Algorithm 1 for Eqs. 1 to 3. The first pass
keeps only the K,V of each chunk. Then chunk i is recomputed, with K,V of chunks 1..i-1 as leaves of
its graph. Later chunks have already sent gradients to the K,V of chunk i. The backward of chunk i
adds to gradients of the weights, and of the K,V of earlier chunks.

This is ChunkFlow's order without a retained chunk: even the last chunk is recomputed. It takes
1 + 1 + 2 units of time, where a whole sequence takes 3. Memory holds one chunk's graph at a time.

Errata of the code: its loss is divided by all tokens, though the last one has no label.

Differences to the paper: the chunk size is searched. K,V can be in CPU memory, and are fetched by
layer. On several processes each slice is sharded over all of them (Ulysses); the paper has one
device. SeCO has no plans in pipelines: ChunkFlow has the same order there, and also retains the
graph of one chunk, at no cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from furlong.planners.candidates import chunks
from furlong.planners.question import Candidate, Space


def candidates(space: Space) -> Iterator[Candidate]:
    """Yield candidates of all chunk sizes, by estimated time; none for pipelines."""
    if space.layout.pp == 1:
        yield from chunks(
            space, "seco", keep="kv", order="chunk-first", num_retained=0, hybrid=False
        )


def sampled_candidates(space: Space) -> Iterator[Candidate]:
    """Yield SpaCO's candidates (planners/spaco.py) if `chunks.sample` is given. They are SeCO's,
    but only drawn chunks have a backward."""
    if "sample" in space.question.given:
        for candidate in candidates(space):
            yield replace(candidate, method="spaco")

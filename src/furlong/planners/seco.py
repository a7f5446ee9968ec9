"""SeCO: a forward of all chunks without gradients, then each again with its backward, descending.

Li et al., Findings of ACL 2025 (arXiv 2505.16710), Algorithm 1 for Eqs. 1 to 3. The first pass
keeps the K,V of every chunk and nothing else; then chunk i is rebuilt with K,V of 1..i-1 as leaves,
its own K,V take the gradients that later chunks sent, and its backward adds to the weights'
gradients and to those of earlier K,V. That is ChunkFlow's walk with no chunk retained, the last one
included: 1 + 1 + 2 units of time where a whole sequence takes 3, and the graph of one chunk at a
time in memory.

Errata of the code: its loss is divided by all tokens, though the last one has no label.

Ours: the chunk's size is searched. K,V may lie in CPU memory, and are fetched by layer. On several
processes every slice is shared by all of them (Ulysses); the paper has one device. Pipelines have
none of these plans: there ChunkFlow's order is the same, with a retained chunk for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from furlong.plan.plan import Layout
from furlong.planners.candidates import chunks
from furlong.planners.question import Candidate, Question


def candidates(question: Question, layout: Layout) -> Iterator[Candidate]:
    """Plans of every chunk size, the fastest by estimate first; none of pipelines."""
    if layout.pp == 1:
        yield from chunks(
            question, layout, "seco", keep="kv", order="chunk-first", num_retained=0, hybrid=False
        )


def sampled_candidates(question: Question, layout: Layout) -> Iterator[Candidate]:
    """SpaCO's plans (planners/spaco.py): the same with a backward of those chunks that
    `chunks.sample` draws; none without it."""
    if "sample" in question.given:
        for candidate in candidates(question, layout):
            yield replace(candidate, method="spaco")

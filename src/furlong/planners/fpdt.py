"""FPDT (Ulysses-Offload): a layer over all chunks of a sequence, then the next layer.

Yao et al., arXiv 2408.16978, and its code in DeepSpeed. Sequences are shared by all devices of a
group (Ulysses) and cut into u chunks; a layer runs forward over all of them, chunk i attending to
chunks 0..i whose K,V come back from CPU memory while chunk j computes, before the next layer
begins. The backward goes layer by layer in reverse. A layer's tensors are those of one chunk on
the device, and what crosses layers, the chunks' inputs, lies in CPU memory. Here the order is
`orders.walk_groups` with stages of one layer.

A copy is hidden where a chunk has at least e g Phi / (2 B) tokens (e bytes an element, g the
share of K,V heads, Phi FLOP/s, B bytes/s of the link): about 8,000 for bfloat16 on an A100 with 25
GB/s, twice as many so that diagonal blocks hide it too. The paper takes 64K tokens of all devices
together without a reason; here the size is searched by the cost model's seconds.

Ours: the published backward walks K,V chunks outside, ascending, and queries inside. Here chunks
descend, as everywhere: the same gradients, and grouped heads spare the backward's loads too. One
forward of a layer is computed again in its backward, from its input. Offloading is a choice of
what has no room, not a rule. The FFN runs in the chunks of attention, where the paper has twice as
many: of 4M tokens of an 8B model on eight A100, in chunks of 64K, a layer's graph is 1.9 of 68 GiB
(predicted), so halves of the FFN would spare a hundredth at most; chunks of 32K spare as much for 3
% of the time. Errata of the code: its path without offloading gives dK,dV the shape
of q, which breaks grouped heads; its loss takes log(softmax).
"""

from __future__ import annotations

from collections.abc import Iterator

from furlong.plan.plan import Layout
from furlong.planners.candidates import chunks
from furlong.planners.question import Candidate, Question


def candidates(question: Question, layout: Layout) -> Iterator[Candidate]:
    """Plans of every chunk size and way to offload, the fastest by estimate first; none of
    pipelines."""
    if layout.pp == 1:
        yield from chunks(
            question, layout, "fpdt", keep="input", order="layer-first", stage_layers=1,
            num_retained=0, hybrid=False,
        )  # fmt: skip

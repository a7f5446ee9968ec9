"""FPDT (Ulysses-Offload): a layer over all chunks of a sequence, then the next layer.

Yao et al., arXiv 2408.16978, and its code in DeepSpeed. Sequences are sharded over all devices of a
group (Ulysses) and cut into u chunks. A layer runs forward over all chunks before the next layer
begins. Chunk i attends to chunks 0..i, whose K,V are loaded from CPU memory during computation. The
backward runs layer by layer in reverse. The device holds a layer's tensors of one chunk; CPU memory
holds the input of each chunk to each layer. Here the order is `orders.walk_groups` with stages of
one layer.

A copy of K,V is hidden behind computation if a chunk has at least e g Phi / (2 B) tokens. Here e is
bytes per element, g the share of K,V heads, Phi the device's FLOP/s, and B the bytes/s of the link.
For bfloat16 on an A100 with 25 GB/s these are about 8,000 tokens. Where a chunk attends to its own
K,V, which takes half the FLOPs, they are twice as many. The paper uses 64K tokens over all devices,
without a reason; here the size is searched with the cost model.

Differences to the paper. Its backward has an outer loop over K,V chunks, ascending, and an inner
loop over queries. Here chunks descend, as everywhere in this package: gradients are the same, and
with grouped heads (few K,V heads) the backward loads less. In its backward, a layer's forward is
computed once more from the layer's input. Offload is chosen only for tensors that do not fit. The
FFN runs in the chunks of attention, where the paper has twice as many chunks. That would save
little: with 4M tokens of an 8B model on eight A100, in chunks of 64K, a layer's graph is 1.9 of 68
GiB (predicted), so halving the FFN would save a hundredth at most. Chunks of 32K save as much, for
3 % of the time.

Errata of the code: its path without offloading gives dK,dV the shape of q, which breaks grouped
heads; its loss takes log(softmax).
"""

from __future__ import annotations

from collections.abc import Iterator

from furlong.planners.candidates import chunks
from furlong.planners.question import Candidate, Space


def candidates(space: Space) -> Iterator[Candidate]:
    """Yield candidates of all chunk sizes and offloads, by estimated time; none for pipelines."""
    if space.layout.pp == 1:
        yield from chunks(
            space, "fpdt", keep="input", order="layer-first", stage_layers=1, num_retained=0,
            hybrid=False,
        )  # fmt: skip

"""InfiniPipe's sequence processor: chunks that take equal time and hold about equal tokens.

Wang et al. (arXiv 2509.21275), Algorithm 1. The longest sequence is cut into slices of equal time,
the mesh; longer ones than its first slice are cut by the same mesh, and what is left of each is its
tail. Short sequences are packed with each other or behind a tail. Three rules are not the paper's:
the threshold of time is only raised over buckets that have room (as printed it can fall, and the
loop never ends); it is raised by a tenth at most, then a new bucket is opened (as printed buckets
of tails grow until their tokens are full, to half as much time again; steps that take 1 to 2.5 %
less in simulation); and the last slice of a sequence counts as its tail also where the mesh fits
exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from furlong.plan.values import Chunk, Slice
from furlong.planners.chunks.groups import refuse_unusable
from furlong.planners.chunks.split import split_equal_work


@dataclass(frozen=True, slots=True)
class SliceWork:
    """Coefficients of work: tokens up to x of a sequence take quadratic * x^2 + linear * x (Eq. 1,
    one stage)."""

    quadratic: float
    linear: float

    def of(self, start: int, stop: int) -> float:
        """Work of the tokens [start, stop) of a sequence."""
        return self.quadratic * (stop**2 - start**2) + self.linear * (stop - start)


EQUAL_TOKENS = SliceWork(0.0, 1.0)
"""Work that balances tokens alone: the ablation without workload-balanced chunking."""


MAX_GROWTH = 1.1
"""Multiple of its first value to which the threshold of time may grow; infinite in the paper."""


def cut_and_pack(
    seq_lens: Sequence[int],
    num_slices: int,
    work: SliceWork,
) -> list[list[Chunk]]:
    """Groups of chunks, those of most chunks first, then those of most tokens.

    A group is the pieces of one sequence longer than the mesh's first slice, the last of them with
    short sequences behind it where they fit, or one chunk of short sequences. The longest sequence
    becomes `num_slices` chunks (fewer if it has fewer tokens).
    """
    refuse_unusable(seq_lens)
    longest = max(seq_lens)
    mesh = [
        s.num_tokens
        for s in split_equal_work(
            0, longest, num_slices, quadratic=work.quadratic, linear=work.linear
        )
    ]
    most_tokens = max(mesh)
    pieces = {
        seq_id: cut(seq_id, seq_len, mesh)
        for seq_id, seq_len in enumerate(seq_lens)
        if seq_len > most_tokens
    }
    tails = [own[-1] for own in pieces.values()]
    buckets = pack_balanced(
        {seq_id: seq_len for seq_id, seq_len in enumerate(seq_lens) if seq_id not in pieces},
        [(tail.num_tokens, work.of(tail.start, tail.stop)) for tail in tails],
        work,
        most_tokens=most_tokens,
        most_work=max(work.of(0, longest) / len(mesh), work.of(0, most_tokens)),
    )
    packed = [
        tuple(Slice(seq_id, 0, seq_lens[seq_id]) for seq_id in seq_ids) for seq_ids in buckets
    ]
    groups = [
        [*(Chunk((piece,)) for piece in own[:-1]), Chunk((own[-1], *behind))]
        for own, behind in zip(pieces.values(), packed, strict=False)
    ]
    groups += [[Chunk(slices)] for slices in packed[len(tails) :]]
    return sorted(groups, key=lambda own: (-len(own), -sum(chunk.num_tokens for chunk in own)))


def cut(seq_id: int, seq_len: int, mesh: Sequence[int]) -> list[Slice]:
    """Slices of the mesh's sizes while tokens remain behind them, and the tail."""
    pieces: list[Slice] = []
    start = 0
    for size in mesh:
        if start + size >= seq_len:
            break
        pieces.append(Slice(seq_id, start, start + size))
        start += size
    return [*pieces, Slice(seq_id, start, seq_len)]


def pack_balanced(
    short: dict[int, int],
    tails: Sequence[tuple[int, float]],
    work: SliceWork,
    *,
    most_tokens: int,
    most_work: float,
    max_growth: float = MAX_GROWTH,
) -> list[list[int]]:
    """The seq_ids of the short sequences behind each tail, then of those in each new bucket.

    `short`: tokens by seq_id, none above `most_tokens`; `tails`: (tokens, work) of buckets that are
    begun. Longest first, each goes to the bucket of least work per token that has room for its
    tokens and for its work; where none has, `most_work` grows by as little as one needs, up to
    `max_growth` times its first value, beyond which a bucket is opened.
    """
    limit = max_growth * most_work
    tokens, loads = [n for n, _ in tails], [own for _, own in tails]
    found: list[list[int]] = [[] for _ in tails]
    for seq_id in sorted(short, key=lambda seq_id: (-short[seq_id], seq_id)):
        own = work.of(0, short[seq_id])
        roomy = [i for i, n in enumerate(tokens) if n + short[seq_id] <= most_tokens]
        least_work = min((loads[i] for i in roomy), default=0.0) + own
        if not roomy or least_work > limit:
            chosen = len(found)
            found.append([])
            tokens.append(0)
            loads.append(0.0)
        else:
            most_work = max(most_work, least_work)
            open_ones = [i for i in roomy if loads[i] + own <= most_work]
            chosen = min(open_ones, key=lambda i: (loads[i] / tokens[i], i))
        found[chosen].append(seq_id)
        tokens[chosen] += short[seq_id]
        loads[chosen] += own
    return found

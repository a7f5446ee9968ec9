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

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from furlong.plan.values import Chunk, Slice
from furlong.planners.chunks.groups import refuse_unusable
from furlong.planners.chunks.split import split_equal_work


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens up to x of a sequence take quadratic * x^2 + linear * x (Eq. 1, one stage)."""

    quadratic: float
    linear: float

    def of(self, start: int, stop: int) -> float:
        """Of the tokens [start, stop) of a sequence."""
        return self.quadratic * (stop**2 - start**2) + self.linear * (stop - start)


EQUAL_TOKENS = Work(0.0, 1.0)
"""Balances tokens alone: the ablation without workload-balanced chunking."""


MAX_GROWTH = 1.1
"""To how much of its first value the threshold of time may grow; infinite in the paper."""


@dataclass(order=True)
class Bucket:
    """A chunk in the making."""

    rate: float = field(init=False)
    """Work per token: high where long sequences are; buckets are ordered by it."""
    index: int
    work: float = field(compare=False)
    tokens: int = field(compare=False)
    seq_ids: list[int] = field(compare=False, default_factory=list)
    """Of the short sequences in it."""

    def __post_init__(self) -> None:
        self.rate = self.work / self.tokens

    def add(self, seq_id: int, tokens: int, work: float) -> None:
        self.seq_ids.append(seq_id)
        self.tokens += tokens
        self.work += work
        self.rate = self.work / self.tokens


def cut_and_pack(
    seq_lens: Sequence[int],
    num_slices: int,
    work: Work,
    *,
    max_growth: float = MAX_GROWTH,
) -> list[list[Chunk]]:
    """Groups of chunks, those of most chunks first, then those of most tokens.

    A group is the pieces of one sequence longer than the mesh's first slice, the last of them with
    short sequences behind it where they fit, or one chunk of short sequences. The longest sequence
    becomes `num_slices` chunks (fewer if it has fewer tokens).
    """
    refuse_unusable(seq_lens)
    longest = max(seq_lens)
    mesh = [s.num_tokens for s in split_equal_work(0, longest, num_slices, **_keywords(work))]
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
        max_growth=max_growth,
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
    work: Work,
    *,
    most_tokens: int,
    most_work: float,
    max_growth: float = MAX_GROWTH,
) -> list[list[int]]:
    """For each tail, then for each new bucket, the seq_ids of the short sequences in it.

    `short`: tokens by seq_id, none above `most_tokens`; `tails`: (tokens, work) of buckets that are
    begun. Longest first, each goes to the bucket of least work per token that has room for its
    tokens and for its work; where none has, `most_work` grows by as little as one needs, up to
    `max_growth` times its first value, beyond which a bucket is opened.
    """
    limit = max_growth * most_work
    buckets = [Bucket(i, own_work, tokens) for i, (tokens, own_work) in enumerate(tails)]
    ordered = sorted(buckets)
    for seq_id in sorted(short, key=lambda seq_id: (-short[seq_id], seq_id)):
        tokens = short[seq_id]
        own_work = work.of(0, tokens)
        roomy = [bucket for bucket in ordered if bucket.tokens + tokens <= most_tokens]
        least_work = min((bucket.work for bucket in roomy), default=0.0) + own_work
        if not roomy or least_work > limit:
            fresh = Bucket(len(buckets), own_work, tokens, [seq_id])
            buckets.append(fresh)
            insort(ordered, fresh)
            continue
        most_work = max(most_work, least_work)
        chosen = next(bucket for bucket in roomy if bucket.work + own_work <= most_work)
        ordered.remove(chosen)
        chosen.add(seq_id, tokens, own_work)
        insort(ordered, chosen)
    return [bucket.seq_ids for bucket in buckets]


def _keywords(work: Work) -> dict[str, float]:
    return {"quadratic": work.quadratic, "linear": work.linear}

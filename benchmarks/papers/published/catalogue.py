"""Published methods and baselines, each as the dials that its paper or its public code has.

Every one has every way to deal sequences to replicas and every ZeRO stage: both come with the room.
Those that share whole sequences also have groups larger than the heads allow, which gather K,V
(InfiniPipe runs Ulysses' groups of 16 and 32 devices on a model of 40 heads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from furlong.plan.plan import Keep
from papers.published.dials import Cut, Dials, Ladder
from papers.published.room import Room

Method = Callable[[Room], Iterator[Ladder]]

_KEPT: tuple[Keep, ...] = ("attention", "kv")
_CUTS: tuple[tuple[bool, Cut], ...] = (
    (False, "tokens"), (True, "tokens"), (False, "time"), (True, "time"),
)  # fmt: skip
"""Whether short sequences stay on one sp rank, and what chunks have equal."""
_SLICES = (2, 4, 8, 16)


def chunkflow(room: Room) -> Iterator[Ladder]:
    """ChunkFlow: equal chunks, never mixed, K and ChunkSize by grid search (its section 5)."""
    for size in room.sizes:
        dials = room.in_any_order(room.dials("ChunkFlow", size=size, keep="kv"))
        yield room.retaining(dials, least=1)


def seco(room: Room) -> Iterator[Ladder]:
    """SeCO: no chunk is retained; one stage."""
    if room.layout.pp == 1:
        for size in room.sizes:
            yield (room.dials("SeCO", size=size, keep="kv", num_retained=0),)


def infinipipe(room: Room) -> Iterator[Ladder]:
    """InfiniPipe: pipelines of equal-time chunks, checkpointing by integer program."""
    yield from _elastic(room, "InfiniPipe")


def infinipipe_equal_tokens(room: Room) -> Iterator[Ladder]:
    """InfiniPipe without workload-balanced chunking (its ablation)."""
    yield from _elastic(room, "InfiniPipe, equal tokens", cut="tokens")


def infinipipe_no_recompute(room: Room) -> Iterator[Ladder]:
    """InfiniPipe without checkpointing (its ablation)."""
    yield from _elastic(room, "InfiniPipe, no checkpointing", checkpointing="none")


def infinipipe_full_recompute(room: Room) -> Iterator[Ladder]:
    """InfiniPipe with every layer checkpointed (its ablation)."""
    yield from _elastic(room, "InfiniPipe, full checkpointing", checkpointing="full")


def _elastic(room: Room, method: str, **changes: Any) -> Iterator[Ladder]:
    if room.layout.pp > 1:
        # to deal by the time of plans, each of which is searched, takes too long
        room = replace(room, balance="flops") if room.balance == "time" else room
        yield (room.dials(method, walk="elastic", **({"cut": "time"} | changes)),)


def fpdt(room: Room) -> Iterator[Ladder]:
    """FPDT: layer after layer, chunks of every size (the paper settles on 64K), offloading as its
    code has it: K,V on the host or on the device."""
    if room.layout.pp == 1:
        for tier, size in product(room.tiers, room.sizes):
            yield (
                room.dials("FPDT", walk="layer-first", size=size, stage_layers=1, keep="input",
                           tier=tier),
            )  # fmt: skip


def skrull(room: Room) -> Iterator[Ladder]:
    """Skrull: whole sequences, sharded or local; one stage."""
    yield from room.at_capacity(room.dials("Skrull", walk="token-level", cut="placed"))


def flexsp(room: Room) -> Iterator[Ladder]:
    """FlexSP: disjoint places of different sizes, anew for every micro-batch; one stage."""
    if room.is_pool:
        yield (room.dials("FlexSP", walk="token-level", cut="disjoint places"),)


def hybrid_cp(room: Room) -> Iterator[Ladder]:
    """Megatron-Core's hybrid context parallelism: places by the length of a sequence; one stage."""
    if room.is_pool:
        yield (room.dials("Hybrid CP", walk="token-level", cut="places by length"),)


def ulysses(room: Room) -> Iterator[Ladder]:
    """DeepSpeed-Ulysses: whole sequences, packed, sharded over one static group; one stage."""
    if room.layout.sp > 1:
        yield from room.at_capacity(room.dials("Ulysses", walk="token-level", cut="packed"))


def data_parallel(room: Room) -> Iterator[Ladder]:
    """Data parallelism: whole sequences, packed, on replicas of one device."""
    if room.layout.sp == 1:
        yield from room.at_capacity(room.dials("Data parallel", walk="token-level", cut="packed"))


def packed_1f1b(room: Room) -> Iterator[Ladder]:
    """Megatron-LM: whole sequences packed up to the longest one of the batch."""
    yield from _whole_sequences(room, "1F1B packed", cut="packed")


def padded_1f1b(room: Room) -> Iterator[Ladder]:
    """Megatron-LM: every sequence padded to the longest one of the batch."""
    yield from _whole_sequences(room, "1F1B padded", cut="padded")


def _whole_sequences(room: Room, method: str, **changes: Any) -> Iterator[Ladder]:
    dials = room.dials(method, walk="token-level", size=room.longest_tokens, **changes)
    yield room.checkpointing(room.in_any_order(dials))


def seq1f1b(room: Room) -> Iterator[Ladder]:
    """Seq1F1B: every sequence in as many slices, of equal tokens or of equal work."""
    for count, by_work in product(_SLICES, (False, True)):
        dials = room.dials("Seq1F1B", walk="token-level", cut="slices")
        yield (replace(room.in_any_order(dials), slices=count, by_work=by_work),)


def seq1f1b_packed(room: Room) -> Iterator[Ladder]:
    """Seq1F1B over chunks of one size: pieces of long sequences, packed short ones."""
    for size in room.sizes:
        dials = room.dials("Seq1F1B packed", walk="token-level", size=size)
        yield (room.in_any_order(dials),)


def combined(room: Room) -> Iterator[Ladder]:
    """Combinations of no paper: state-aware 1F1B over chunks of equal time or equal tokens that mix
    tails and short sequences, short sequences that stay on one sp rank, attention that is
    remembered, any tier and stage height, replicas dealt by the time of their own plans; and whole
    sequences on nested places of one pool."""
    if room.is_pool:
        yield (room.dials("furlong", walk="token-level", cut="places"),)
        return
    if room.balance in ("none", "tokens") and room.layout.dp > 1:
        return
    for tier, size, (local, cut) in product(room.tiers, room.sizes, _CUTS):
        if (local and room.layout.sp == 1) or (cut == "time" and size >= room.longest_tokens):
            continue
        for keep in _KEPT:
            # where all chunks are retained it does not matter what the others keep
            dials = _chunked(room, size=size, keep=keep, tier=tier, local=local, cut=cut)
            yield room.retaining(dials, all_too=keep == _KEPT[0])
    if room.layout.pp == 1:
        for tier, height, size in product(room.tiers, room.heights, room.sizes):
            yield (
                room.dials("furlong", walk="layer-first", size=size, stage_layers=height,
                           keep="attention", tier=tier),
            )  # fmt: skip


def _chunked(room: Room, **values: Any) -> Dials:
    return room.in_any_order(room.dials("furlong", hybrid=True, **values))


PUBLISHED: dict[str, Method] = {
    "ChunkFlow": chunkflow,
    "InfiniPipe": infinipipe,
    "Skrull": skrull,
    "FlexSP": flexsp,
    "Hybrid CP": hybrid_cp,
    "SeCO": seco,
    "FPDT": fpdt,
    "Ulysses": ulysses,
    "Data parallel": data_parallel,
    "1F1B padded": padded_1f1b,
    "1F1B packed": packed_1f1b,
    "Seq1F1B": seq1f1b,
    "Seq1F1B packed": seq1f1b_packed,
}

SHARING_WHOLE = (skrull, flexsp, hybrid_cp, ulysses, packed_1f1b, padded_1f1b)
"""Methods of whole sequences in groups: of layouts whose groups are larger than the heads allow
they alone are asked. Combinations have places of one pool instead."""

SEARCHED: dict[str, Method] = {"furlong": combined, **PUBLISHED}
"""All methods that are searched: the published ones, and the combinations of none."""

ABLATIONS: dict[str, Method] = {
    "InfiniPipe, equal tokens": infinipipe_equal_tokens,
    "InfiniPipe, no checkpointing": infinipipe_no_recompute,
    "InfiniPipe, full checkpointing": infinipipe_full_recompute,
}

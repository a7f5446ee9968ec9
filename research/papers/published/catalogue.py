"""Published methods and baselines, each as the dials that its paper or its public code has.

Every one has every way to deal sequences to replicas: these come with the room.
Those that share whole sequences also have groups larger than the heads allow, which gather K,V
(InfiniPipe runs Ulysses' groups of 16 and 32 devices on a model of 40 heads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from papers.published.dials import Ladder
from papers.published.room import Room

Method = Callable[[Room], Iterator[Ladder]]

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
    """InfiniPipe: pipelines of equal-time chunks, checkpointing per cell."""
    if room.layout.pp > 1:
        # to deal by the time of plans, each of which is searched, takes too long
        room = replace(room, balance="flops") if room.balance == "time" else room
        yield (room.dials("InfiniPipe", walk="elastic", cut="time"),)


def fpdt(room: Room) -> Iterator[Ladder]:
    """FPDT: layer after layer, chunks of every size (the paper settles on 64K), offloading as its
    code has it: K,V on the host or on the device."""
    if room.layout.pp == 1:
        for target, size in product(room.offload, room.sizes):
            yield (
                room.dials("FPDT", walk="layer-first", size=size, stage_layers=1, keep="input",
                           offload=target),
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
they alone are asked."""

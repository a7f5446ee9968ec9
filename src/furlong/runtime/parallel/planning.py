"""The plan of a batch of which each replica has planned its own sequences."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch.distributed as dist

from furlong.errors import ConfigError, UserError
from furlong.plan.plan import ChunkPlan
from furlong.planners.orders import join_replicas
from furlong.runtime.cells.chunk_inputs import labelled_chunks
from furlong.runtime.inputs import ShiftedSequence
from furlong.runtime.parallel.ranks import Ranks
from furlong.runtime.parallel.recovery import reason_of


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the facts about its sequences that others need."""

    plan: ChunkPlan
    labelled: frozenset[int]
    """Chunks that have a label."""
    checksum: int = 0
    """That of all tokens and labels."""


def planned(plan: ChunkPlan, sequences: Sequence[ShiftedSequence]) -> Planned:
    """A plan of these sequences."""
    checksum = 0
    for sequence in sequences:
        for x in (sequence.input_ids, sequence.labels):
            checksum = zlib.crc32(x.cpu().numpy().tobytes(), checksum)
    return Planned(plan, frozenset(labelled_chunks(plan, sequences)), checksum)


def planned_together(ranks: Ranks, make: Callable[[], Planned]) -> tuple[Planned, range]:
    """The joined plan, the same on all processes, and the numbers of this one's sequences in it.

    `make`: the plan of this replica's own sequences, which all its processes have. Raises
    ConfigError where they have others, and on all processes where `make` raises on one.
    """
    found: list[Planned | str | None] = [None] * ranks.num_processes
    try:
        own = make()
    except Exception as error:
        dist.all_gather_object(found, _text_of(error), group=ranks.group)
        raise
    dist.all_gather_object(found, own, group=ranks.group)
    each = []
    for process, answer in enumerate(found):
        if not isinstance(answer, Planned):
            assert answer is not None
            raise _refused(ranks, process, answer)
        each.append(answer)
    plans = [each[replica * ranks.sp] for replica in range(ranks.dp)]
    for process, answer in enumerate(each):
        if answer != plans[_replica(ranks, process)]:
            raise _others(ranks, process)
    stops = list(accumulate(len(p.plan.seq_lens) for p in plans))
    ids = [range(stop - len(p.plan.seq_lens), stop) for p, stop in zip(plans, stops, strict=True)]
    seq_lens = [seq_len for p in plans for seq_len in p.plan.seq_lens]
    joined = join_replicas([p.plan for p in plans], ids, seq_lens)
    firsts = [0, *accumulate(len(p.plan.chunks) for p in plans)]
    labelled = {
        first + chunk for p, first in zip(plans, firsts, strict=False) for chunk in p.labelled
    }
    return Planned(joined, frozenset(labelled)), ids[ranks.replica]


def _replica(ranks: Ranks, process: int) -> int:
    """The replica of a process; see `Ranks` for the order of processes."""
    return process // ranks.sp % ranks.dp


def _text_of(error: Exception) -> str:
    """One line: not every error can be sent itself."""
    return str(error).splitlines()[0] if isinstance(error, UserError) else reason_of(error)


def _refused(ranks: Ranks, process: int, reason: str) -> ConfigError:
    replica = _replica(ranks, process)
    return ConfigError(
        given=f"an error on replica {replica}, while this process waits for its plan",
        required="sequences and options that every replica can plan",
        source=f"process {process}: {reason}",
        change="see the message of that process",
    )


def _others(ranks: Ranks, process: int) -> ConfigError:
    replica = _replica(ranks, process)
    return ConfigError(
        given=f"other sequences or options on process {process} than on process "
        f"{replica * ranks.sp}, both of replica {replica}",
        required="the same sequences on all processes of a replica: its stages and its pools",
        source="the arguments of forward_backward",
        change=f"deal sequences to the {ranks.dp} replicas (Ranks.replica), not to processes",
    )

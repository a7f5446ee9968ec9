"""Agreement among processes: on errors, on values that must be equal (facts), on one plan. All such
exchanges of the engine are here. A process decides whether to join an exchange only by values that
are equal on all processes.

With FSDP2 each process takes its shard from the weights that it has, pipeline stages come from
different processes, and a sequence-parallel group reads a part of each sequence on each process. If
models or sequences differ between processes, no error is raised, and a mixture of them is trained.
So checksums are compared: of weights when they are sharded, of tokens before each step.

Before the first action of a step all processes agree that none of them has failed; if one has, all
raise, and the step can be taken again. A process that fails later closes its connections (see
`failures`), because other processes wait for its messages. Then all raise, and the processes have
to be started again.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from furlong.errors import (
    ConfigError,
    ElsewhereError,
    in_four_parts,
    in_short,
    reason_of,
)
from furlong.models.decoder import HFDecoder
from furlong.plan.plan import ChunkPlan
from furlong.planners.orders import join_replicas
from furlong.runtime.batch import ShiftedSequence
from furlong.runtime.distributed.failures import is_lost, lost
from furlong.runtime.distributed.mesh import Ranks

_T = TypeVar("_T")
_V = TypeVar("_V")
Facts = Mapping[str, object]
"""Values by name that must be equal on all processes that have the name."""


class _Word(NamedTuple):
    """The message that each process sends to all others in `exchange`: whether it has failed, facts
    to compare, and a value."""

    place: str
    """The call that the process makes, in words."""
    failure: str
    """The reason why it cannot go on, in one line; "" if it can."""
    is_quoted: bool
    """Whether that is the error of another process, which reports it, too, if it can."""
    facts: Facts
    value: Any


def all_gather_ints(
    ranks: Ranks, own: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[list[int]]:
    """Return the integers of each process of a group, in order; by default of all processes."""
    group = group or ranks.group
    x = torch.tensor(own, device=ranks.facts_device(group))
    found = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(found, x, group=group)
    rows: list[list[int]] = torch.stack(found).tolist()
    return rows


def run_on_all(ranks: Ranks | None, fn: Callable[[], _T], place: str = "a step") -> _T:
    """Call `fn` on every process and return its result; if it raises on one, raise on all. See
    `agree`."""
    return agree(ranks, lambda: (fn(), {}, None), place)[0]


def agree(
    ranks: Ranks | None, fn: Callable[[], tuple[_T, Facts, _V]], place: str = "a step"
) -> tuple[_T, list[_V]]:
    """Call `fn` on every process. Return (result of `fn` here, `value` of each process). The
    processes communicate in one collective.

    Args:
        fn: Returns (result, facts, value). `result` stays on this process; facts, a dict, must be
            equal on all processes; `value` is sent to all.
        place: The call that the process makes, in words. It must be equal on all processes, and is
            named in errors.

    Raises:
        ElsewhereError: On processes whose `fn` returned, if it raised on another one.
        ConfigError: On all, if processes make different calls (`place`), or facts differ.
        LinkError: If a process does not arrive.
    """
    if ranks is None:
        made, _, value = fn()
        return made, [value]
    # one collective, whether `fn` returns or raises: the other processes wait in it
    try:
        made, facts, value = fn()
    except Exception as error:
        report(ranks, error, place)
        raise
    return made, exchange(ranks, value, place, facts=facts)


def report(
    ranks: Ranks, error: Exception, place: str, group: dist.ProcessGroup | None = None
) -> None:
    """Take part in an `exchange` after an error here: send the error in place of a value, so that
    the other processes raise. A collective, as `exchange` is."""
    is_quoted = isinstance(error, ElsewhereError)
    _said(ranks, _Word(place, reason_of(error), is_quoted, {}, None), group)


def exchange(
    ranks: Ranks, value: _V, place: str, group: dist.ProcessGroup | None = None,
    *, facts: Facts | None = None,
) -> list[_V]:  # fmt: skip
    """Send `value` to the processes of a group, by default to all, and return the value of each in
    order of the processes. A collective. `facts` is a dict of values that must be equal on all of
    them. For `place` and errors see `agree`."""
    words = _said(ranks, _Word(place, "", False, facts or {}, value), group)
    all_failed = {number: word.failure for number, word in words.items() if word.failure}
    if all_failed:
        # name the process where the error arose, not those that it was passed on to
        failed = {n: all_failed[n] for n in all_failed if not words[n].is_quoted} or all_failed
        names, reason = ", ".join(map(str, failed)), next(iter(failed.values()))
        raise ElsewhereError(
            in_four_parts(
                given=f"an error on process {names} ({reason})",
                required=f"{place} that every process can take: all take it, or none does",
                source=f"process {names}, which raises the error itself",
                change="mend there what it tells; then all processes can make the call again",
            )
        )
    firsts: dict[str, tuple[int, object]] = {}
    for number, word in words.items():
        for key, fact in word.facts.items():
            first, before = firsts.setdefault(key, (number, fact))
            if fact != before:
                deal = f"; deal sequences to the {ranks.dp} replicas (Ranks.replica)"
                raise ConfigError(
                    given=f"{key}: {in_short(fact, 60)} on process {number},"
                    f" {in_short(before, 60)} on process {first}",
                    required="the same on all processes",
                    source="the model, arguments and sequences that each process has passed",
                    change="load one checkpoint, draw weights and data with one seed, and pass "
                    "models (hooks, modes, config, frozen weights), arguments and calls that are "
                    "alike on all processes" + deal * ("sequence" in key),
                )
    return [word.value for word in words.values()]


def _said(ranks: Ranks, word: _Word, group: dist.ProcessGroup | None) -> dict[int, _Word]:
    """Exchange messages in a group, by default of all processes. Return {number of a process: its
    message}. Raises ConfigError, on all, if processes make different calls."""
    group = group or ranks.group
    words = [word] * group.size()
    try:
        dist.all_gather_object(words, word, group=group)
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise lost(ranks.groups, error, word.place) from error
    found = dict(zip(dist.get_process_group_ranks(group), words, strict=True))
    numbers: dict[str, list[str]] = {}
    for number, one in found.items():
        numbers.setdefault(one.place, []).append(str(number))
    if len(numbers) > 1:
        raise ConfigError(
            given="; ".join(f"process {', '.join(n)} in {other}" for other, n in numbers.items()),
            required="the same calls and backwards on all processes, in the same order",
            source="the code that calls furlong, on each process",
            change="where one process makes no loss, or its loss raises an error, end it or skip "
            "the backward on all",
        )
    return found


def require_same(ranks: Ranks, facts: Facts) -> None:
    """Compare `facts`, a dict by name, between all processes. Raise ConfigError, on all processes,
    if two processes have different values for a name that both have. A collective."""
    exchange(ranks, None, "a comparison", facts=facts)


def checksum_of(sequence: ShiftedSequence, checksum: int = 0) -> int:
    """Return a CRC-32 of a sequence, its labels and extras, continued from `checksum`."""
    names = sorted(sequence.extras)
    for x in (sequence.input_ids, sequence.labels, *(sequence.extras[name] for name in names)):
        own: Any = x.detach().cpu().contiguous()  # numpy knows no bfloat16
        checksum = zlib.crc32(own.view(torch.uint8).numpy(), checksum)
    return zlib.crc32(repr(names).encode(), checksum)


_NO_MATTER = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
"""Config keys that may differ between processes; dtypes are compared by parameter."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK, _CPU_BLOCK = 2**22, 2**16
"""Elements hashed at a time, which bounds memory (GPU) and fits the cache (CPU)."""


def require_equal_models(
    model: HFDecoder, ranks: Ranks, compute_dtype: torch.dtype | None, settings: Mapping[str, str],
    modules: Mapping[str, str], *, are_known: bool,
) -> None:  # fmt: skip
    """Raise ConfigError, on all processes, if models differ between processes. A collective.

    Compared on all processes are the config, the compute dtype and `settings`, a dict by name.
    Compared within each stage are `modules`, a dict of facts about modules, and the weights: names,
    shapes, dtypes and values. If `are_known`, values of weights were compared before, and are not
    compared again."""
    dtypes = (p.dtype for p in model.base.parameters() if p.is_floating_point())
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NO_MATTER}
    facts = {key: json.dumps(value, default=str, sort_keys=True) for key, value in config.items()}
    facts |= {"class": model.name, "dtype of its passes": str(compute_dtype or next(dtypes))}
    facts |= settings
    parameters = dict(model.base.named_parameters())
    names = zlib.crc32(repr([*modules, *parameters]).encode())
    of_stage = {"checksum of names of modules and weights": f"{names:x}", **modules}
    of_stage |= {name: _form(p) for name, p in parameters.items()}
    facts |= {f"stage {ranks.stage}, {key}": value for key, value in of_stage.items()}
    tied = model.tied_weight if ranks.stage in (0, ranks.pp - 1) else None
    if tied is not None:
        facts["the tied embeddings"] = _form(tied)
    require_same(ranks, facts)  # first: checksums of divided weights are collectives
    if are_known:
        return
    sums = whole_checksums([*parameters.values()])
    facts = {}
    for (name, weight), x in zip(parameters.items(), sums, strict=True):
        facts["the tied embeddings" if weight is tied else f"stage {ranks.stage}, {name}"] = (
            f"checksum {x:x}"
        )
    require_same(ranks, facts)


def _form(weight: Tensor) -> str:
    """Return a weight's shape, dtype and placements, and whether it is trained, in words."""
    dtype = str(weight.dtype).removeprefix("torch.")
    divided = f" in parts {weight.placements}" if isinstance(weight, DTensor) else ""
    trained = "trained" if weight.requires_grad else "frozen"
    return f"{dtype} {tuple(weight.shape)}{divided} {trained}"


def whole_checksums(weights: Sequence[Tensor]) -> list[int]:
    """Return a checksum of each weight, from its values and their indices. A weight has the same
    checksum however it is sharded: checksums of the shards of a DTensor are added up, which is a
    collective over the processes that hold its shards."""
    sums = [_hash_of(weight) for weight in weights]
    divided: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for number, weight in enumerate(weights):
        if isinstance(weight, DTensor):
            placed = enumerate(weight.placements)
            # sharded axes alone: copies on replicas would be counted several times
            cut = tuple(weight.device_mesh.get_group(axis) for axis, p in placed if p.is_shard())
            divided.setdefault(cut, []).append(number)
    for groups, numbers in divided.items():
        totals = torch.stack([sums[number] for number in numbers])
        for group in groups:
            dist.all_reduce(totals, group=group)
        for number, total in zip(numbers, totals, strict=True):
            sums[number] = total
    return [int(total) for total in sums]


def weights_checksum(parameters: Iterable[Tensor]) -> int:
    """Return one checksum of all parameters; of a DTensor this process's shard enters. If the
    checksum changes, parameters have changed, also where tensor versions do not: when an optimizer
    updates DTensors, or when a caller writes through `.data`."""
    sums = torch.stack([_hash_of(parameter) for parameter in parameters])
    return zlib.crc32(repr(sums.tolist()).encode())


def _hash_of(weight: Tensor) -> Tensor:
    """Return a checksum, a tensor () int64, of a weight's values and their indices. Strides have no
    influence.

    Each element's bits are multiplied by a factor for each of its indices, and all products are
    summed modulo 2**64. An index is the one in the whole weight, so the checksums of a weight's
    shards add up to the checksum of the weight.
    """
    own: Any = weight.detach()
    starts = (0,) * own.ndim
    if isinstance(own, DTensor):
        _, starts = compute_local_shape_and_global_offset(
            own.shape, own.device_mesh, own.placements
        )
        own = own.to_local()
    bits: Tensor = own.view(_INTEGERS[own.dtype.itemsize])
    if not bits.ndim:
        bits, starts = bits[None], (0,)
    places = enumerate(zip(bits.shape, starts, strict=True))
    first, *others = (_factors(length, at, axis, bits.device) for axis, (length, at) in places)
    if not others:
        bits, others = bits[:, None], [torch.ones_like(first[:1])]
    for factor in others[:-1]:
        first = (first[:, None] * factor).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    block = _CPU_BLOCK if bits.device.type == "cpu" else _BLOCK
    num_rows = max(1, block // max(1, bits.shape[-1]))
    rows = bits.flatten(0, -2)  # (rows, last)
    for x, factor in zip(rows.split(num_rows), first.split(num_rows), strict=True):
        if own.dtype.itemsize == 8:  # else a sign bit adds the same at every index
            x = x ^ (x >> 32 & 0xFFFFFFFF)
        total += ((x * others[-1]).sum(-1) * factor).sum()
    return total


def _factors(length: int, start: int, axis: int, device: torch.device) -> Tensor:
    """Return pseudorandom odd factors (length,) int64 for an axis's indices from `start` on."""
    x = torch.arange(start + 1, start + length + 1, device=device) * -0x61C8864680B583EB + axis
    x = (x ^ x >> 30) * -0x40A7B892E31B1A47  # constants and shifts of splitmix64
    return (x ^ x >> 27) * -0x6B2FB644ECCEEE15 | 1


def require_same_loss(cotangents: Sequence[Tensor], ranks: Ranks) -> None:
    """Raise ConfigError, on all processes, unless all processes of each replica computed the same
    loss. A collective.

    `cotangents` are the gradients (T, ...) of this process's loss with respect to token values or
    hidden states. They are compared by norm and by a weighted sum."""
    flat = torch.cat([own.detach().double().flatten() for own in cotangents])
    turned = flat * torch.arange(len(flat), device=flat.device).cos()  # sensitive to order
    own = torch.stack([flat.norm(), turned.sum()]).cpu()
    # as the integers of the same bits, which lose no digit
    bits = all_gather_ints(ranks, own.view(torch.int64).tolist())
    rows = torch.tensor(bits, device="cpu").view(torch.float64)
    for process, (norm, turn) in enumerate(rows.tolist()):
        first = ranks.replica_of(process) * ranks.sp
        norm_of_first, turn_of_first = rows[first].tolist()
        bound = 1e-3 * abs(norm_of_first)
        is_equal = abs(norm - norm_of_first) <= bound and abs(turn - turn_of_first) <= bound
        # two losses that are not finite never compare as equal, but are no mismatch
        if not is_equal and (isfinite(norm) or isfinite(norm_of_first)):
            raise ConfigError(
                given=f"another loss on process {process} than on process {first}, of the same "
                "values",
                required="one loss of all values of a replica, made by each of its processes",
                source="the backward of token_values, hidden_states or a chunked model",
                change="make the whole loss on every process of a replica (Ranks.replica); its "
                "gradient counts once",
            )


class ReplicaPlan(NamedTuple):
    """The plan of one replica, and facts about the replica's sequences that the processes of other
    replicas need to join all plans."""

    plan: ChunkPlan
    labelled: set[int]
    """Chunks with at least one label."""
    num_labels: int
    lens: tuple[int, ...]
    """Tokens of each of the caller's sequences, of which the plan's may join several."""
    seed: int | None = None
    """Seed of the chunk sampling, if any."""


def join_brought(
    ranks: Ranks, each: Sequence[ReplicaPlan | None]
) -> tuple[ReplicaPlan, range, range]:
    """Join the plans of all replicas. Return (joint plan, equal on all processes; indices of this
    replica's sequences among those of all callers; range of seq_ids in the joint plan of the
    sequences that this replica has planned).

    `each` has one entry per process: the plan of its replica if the process is the first of the
    replica, else None."""
    own = [one for one in each if one is not None]
    plans = [one.plan for one in own]
    indices = _ranges([len(one.lens) for one in own])
    seq_ids = _ranges([len(plan.seq_lens) for plan in plans])
    chunks = _ranges([len(plan.chunks) for plan in plans])
    labelled = {numbers[n] for numbers, one in zip(chunks, own, strict=True) for n in one.labelled}
    plan = join_replicas(plans, seq_ids, [n for one in plans for n in one.seq_lens])
    num_labels, lens = sum(one.num_labels for one in own), (n for one in own for n in one.lens)
    # the first replica's seed: chunks are drawn once for the whole batch
    joint = ReplicaPlan(plan, labelled, num_labels, tuple(lens), own[0].seed)
    return joint, indices[ranks.replica], seq_ids[ranks.replica]


def _ranges(counts: Sequence[int]) -> list[range]:
    """Return consecutive ranges from 0 on, of `counts` numbers each."""
    return [range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]

"""Agreement among processes: errors, equal facts, one plan.

FSDP2 takes a part of each process's weights, a pipeline takes the first stage from one process and
the last from another, and a pool takes a part of each sequence from each. Where these differ,
nothing fails: what is trained is a mixture. So checksums are compared, of the weights when they are
divided, of the tokens before each step.

A process that has failed in the middle of a step lets go of all it holds and walks through the rest
of its list without computing: it sends zeros, takes what comes, gathers weights, and joins every
agreement in its turn. So it communicates as it would have done without the error, in the same
order. Before gradients are added up the processes of a stage agree that none of them has failed,
and at the end of the list all processes do; where one has, all raise, and the same step can be
taken again. Where others wait for rows of a chunk, shards of gradients or weights that it alone can
send, it cannot be made up for: the run ends.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import isfinite
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from furlong.errors import (
    ConfigError,
    DataError,
    ElsewhereError,
    FurlongError,
    LinkError,
    NoMemoryElsewhereError,
    PlanError,
    in_four_parts,
)
from furlong.models.decoder import HFDecoder
from furlong.ops.backends.select import is_out_of_memory
from furlong.plan.plan import ChunkPlan
from furlong.planners.orders import join_replicas
from furlong.runtime.batch import Batch, ShiftedSequence, labelled_chunks
from furlong.runtime.distributed.mesh import Ranks

_T = TypeVar("_T")
_FAILED, _NO_MEMORY = 1, 2
Outcome = tuple[int, str]
"""How a process has fared, and the reason in one line."""
FINE: Outcome = (0, "")


def gathered(
    ranks: Ranks, own: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[list[int]]:
    """The numbers of each process of a group, by default of all. A collective."""
    group = group or ranks.group
    x = torch.tensor(own, device=ranks.facts_device(group))
    found = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(found, x, group=group)
    rows: list[list[int]] = torch.stack(found).tolist()
    return rows


def together(ranks: Ranks | None, act: Callable[[], _T], place: str = "a step") -> _T:
    """The outcome of `act`, which all processes call. Where it raises on one, it raises on all:
    others would wait for that one for ever. Those that have not failed raise ElsewhereError.

    `place`: where in the caller's code it is. Raises ConfigError, on all, if they are at different
    ones, and LinkError if a process does not come."""
    if ranks is None:
        return act()
    try:
        made = act()
    except Exception as error:
        failure_of(ranks, outcome_of(error), place=place)
        raise
    failure = failure_of(ranks, place=place)
    if failure is not None:
        raise failure
    return made


def failure_of(
    ranks: Ranks,
    own: Outcome = FINE,
    group: dist.ProcessGroup | None = None,
    *,
    place: str = "a step",
) -> ElsewhereError | None:
    """The error for those processes of a group, by default of all, that have not failed; None where
    none has. A collective. `place`: see `together`."""
    group = group or ranks.group
    try:
        rows = gathered(ranks, (own[0], zlib.crc32(place.encode())), group)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise LinkError(
            in_four_parts(
                given=f"process {dist.get_rank()} in {place}, where another one did not come: "
                f"{reason_of(error)}",
                required="the same calls and backwards on all processes, within the timeout of "
                "their group",
                source="the code that calls furlong, on each process",
                change="end all processes where one has raised an error, and start them again",
            )
        ) from error
    if len({at for _, at in rows}) > 1:
        places = [""] * len(rows)
        dist.all_gather_object(places, place, group=group)
        raise _elsewhere(places, group)
    codes = [code for code, _ in rows]
    failed = [at for at, code in enumerate(codes) if code]
    if not failed:
        return None
    texts = [""] * len(codes)
    dist.all_gather_object(texts, own[1], group=group)
    memory = all(codes[at] == _NO_MEMORY for at in failed)
    names = ", ".join(str(dist.get_global_rank(group, at)) for at in failed)
    who = f"process{'es' * (len(failed) > 1)} {names}"
    what = f"out of memory on {who}" if memory else f"an error on {who}, which ended the step"
    kind = NoMemoryElsewhereError if memory else ElsewhereError
    return kind(f"{what} ({texts[failed[0]]})")


def _elsewhere(places: Sequence[str], group: dist.ProcessGroup) -> ConfigError:
    """The error for processes of a group that meet at different places."""
    numbers: dict[str, list[str]] = {}
    for at, place in enumerate(places):
        numbers.setdefault(place, []).append(str(dist.get_global_rank(group, at)))
    return ConfigError(
        given="; ".join(
            f"process{'es' * (len(own) > 1)} {', '.join(own)} in {place}"
            for place, own in numbers.items()
        ),
        required="the same calls and backwards on all processes, in the same order",
        source="the code that calls furlong, on each process",
        change="where one process makes no loss, or its loss raises an error, end it or skip the "
        "backward on all",
    )


def outcome_of(error: BaseException) -> Outcome:
    """An error as others hear of it: not at all where it is about another process."""
    if isinstance(error, ElsewhereError):
        return FINE
    return _NO_MEMORY if is_out_of_memory(error) else _FAILED, reason_of(error)


def reason_of(error: BaseException) -> str:
    """The kind of an error, and its first line."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def cannot_go_on(error: BaseException, number: int, meanwhile: str) -> ConfigError:
    """An error for a process that lacks memory where others wait for what it alone can send."""
    return ConfigError(
        given=f"out of memory on process {number} {meanwhile}: {reason_of(error)}",
        required="memory for that beside the chunks",
        source="the memory of the device",
        change="set chunks.size to less; where there is a checkpoint, --resume goes on from it",
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """A key under which two processes have other values."""

    key: str
    first: int
    process: int
    values: tuple[int, int]


def compared(
    ranks: Ranks, own: Mapping[str, int], numbers: Sequence[int] = ()
) -> tuple[Difference | None, list[Sequence[int]]]:
    """The first difference, None where all processes that have a key have the same value there; and
    the `numbers` of each process. A collective over all."""
    found = [(own, numbers)] * ranks.num_processes
    dist.all_gather_object(found, (own, numbers), group=ranks.group)
    rows, firsts = [of_process for _, of_process in found], dict[str, tuple[int, int]]()
    for process, (values, _) in enumerate(found):
        for key, value in values.items():
            first, before = firsts.setdefault(key, (process, value))
            if value != before:
                return Difference(key, first, process, (before, value)), rows
    return None, rows


@dataclass(frozen=True, slots=True)
class Facts:
    """A step as one process knows it."""

    divisor: int
    num_frozen_layers: int
    """First layers in which, and below which, it trains nothing."""
    trains: bool
    """Whether it has a parameter that is trained."""
    checksums: Mapping[str, int] = field(default_factory=dict)
    """See `checksums`."""


def checksums(
    ranks: Ranks | None, model: HFDecoder, sequences: Sequence[ShiftedSequence]
) -> dict[str, int]:
    """Checksums of the names of trained parameters, which a stage has in common, and of each
    sequence that is here, with its labels and extras."""
    if ranks is None:
        return {}
    names = "\n".join(name for name, p in model.base.named_parameters() if p.requires_grad)
    found = {f"trained parameters of stage {ranks.stage}": zlib.crc32(names.encode())}
    for seq_id, sequence in enumerate(sequences):
        if len(sequence.input_ids):
            found[f"sequence {seq_id}"] = _checksum(sequence)
    return found


def agreed(ranks: Ranks | None, plan: ChunkPlan, own: Facts) -> Facts:
    """The facts of all processes about the step of a plan.

    Raises PlanError, on all, unless all have the same plan and the same divisor, and where the plan
    has no backward in layers that one of them trains; ConfigError or DataError where they train
    other parameters or have other sequences.
    """
    if ranks is None:
        return own
    numbers = own.num_frozen_layers, int(own.trains)
    common = {"plan": plan.checksum, "divisor": own.divisor, **own.checksums}
    difference, rows = compared(ranks, common, numbers)
    if difference is not None:
        raise _other_step(difference)
    frozen_layers = [num_frozen for num_frozen, _ in rows]
    least = min(frozen_layers)
    if sum(plan.stages[: plan.frozen_stages]) > least:
        raise PlanError(
            f"the plan has no backward in its first {plan.frozen_stages} stages, where process "
            f"{frozen_layers.index(least)} trains parameters, or below: plan again"
        )
    return replace(own, num_frozen_layers=least, trains=any(trains for _, trains in rows))


def _other_step(of: Difference) -> FurlongError:
    on = f"on process {of.process} than on process {of.first}"
    if of.key in ("plan", "divisor"):
        first, other = of.values
        shown = f": {other}, not {first}" if of.key == "divisor" else ""
        return PlanError(
            f"process {of.process} has another {of.key} than process {of.first}{shown}"
        )
    if of.key.startswith("sequence"):
        return DataError(
            given=f"{of.key} with other tokens or labels {on}",
            required="the same sequence wherever a process has it: each reads a part",
            source="the sequences passed to Engine.run",
            change="draw and shuffle the data with one seed on all processes",
        )
    return ConfigError(
        given=f"other trained parameters {on}",
        required="the same requires_grad on all processes that share a stage's weights",
        source="the model that was passed to furlong.Engine on each process",
        change="freeze the same parameters on all",
    )


_NO_MATTER = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
"""Keys of a config that may differ; the weights' own dtypes are compared."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_equal(model: HFDecoder, ranks: Ranks, compute_dtype: torch.dtype | None) -> None:
    """Raise ConfigError, on all processes, unless they have the same config and compute in the same
    dtype, and those of a stage have the same weights. Collective over them, on weights that are not
    divided yet."""
    dtypes = (p.dtype for p in model.base.parameters() if p.is_floating_point())
    common = {
        **{key: value for key, value in model.config.to_dict().items() if key not in _NO_MATTER},
        "class": model.name, "dtype of its passes": compute_dtype or next(dtypes),
    }  # fmt: skip
    texts = {key: json.dumps(value, default=str, sort_keys=True) for key, value in common.items()}
    weights = {name: _form(p) for name, p in model.base.named_parameters()}
    own = {"config": texts, f"stage {ranks.stage}": weights}
    if model.tied_weight is not None and ranks.stage in (0, ranks.pp - 1):
        own["tied"] = {"the tied embeddings": _form(model.tied_weight)}
    sums = {key: zlib.crc32(repr(sorted(own[key].items())).encode()) for key in own}
    of, _ = compared(ranks, sums)
    if of is None:
        return
    of_all: list[Mapping[str, str]] = [{}] * ranks.num_processes
    dist.all_gather_object(of_all, own.get(of.key, {}), group=ranks.group)
    one, other = of_all[of.first], of_all[of.process]
    name = next(n for n in {**one, **other} if one.get(n) != other.get(n))
    shown = [f"{of_process.get(name, 'none'):.60}" for of_process in (other, one)]
    raise ConfigError(
        given=f"{name}: {shown[0]} on process {of.process}, {shown[1]} on process {of.first}",
        required="one model, with the same weights, on all processes that share it",
        source="the model that was passed to furlong.Engine on each process",
        change="load the same checkpoint on all, or call torch.manual_seed with one seed on all "
        "right before the model is made",
    )


def _form(weight: Tensor) -> str:
    """The shape, the dtype and a checksum of a weight, and whether it is trained."""
    dtype = str(weight.dtype).removeprefix("torch.")
    trained = "trained" if weight.requires_grad else "frozen"
    return f"{dtype} {tuple(weight.shape)} {trained}, checksum {int(_sum_of_bits(weight)):x}"


def weights_checksum(parameters: Iterable[Tensor]) -> int:
    """A checksum of parameters, and of what this process has of divided ones: optimizers change
    DTensors, and `.data` any tensor, without a new version."""
    locals_ = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
    sums = torch.stack([_sum_of_bits(own) for own in locals_])
    return zlib.crc32(repr(sums.tolist()).encode())


def _sum_of_bits(weight: Tensor) -> Tensor:
    own: Any = weight.detach()
    bits: Tensor = own.contiguous().view(_INTEGERS[own.dtype.itemsize])
    return bits.sum(dtype=torch.int64)


def require_same_loss(cotangents: Sequence[Tensor], ranks: Ranks) -> None:
    """Raise ConfigError, on all processes, unless those of each replica have made the same loss of
    the values that they share, as the values' gradients (T, ...) tell. Collective over them."""
    flat = torch.cat([own.detach().double().flatten() for own in cotangents])
    turned = flat * torch.arange(len(flat), device=flat.device).cos()  # else order would not tell
    own = torch.stack([flat.norm(), turned.sum()]).cpu()
    bits = gathered(ranks, own.view(torch.int64).tolist())
    rows = torch.tensor(bits, device="cpu").view(torch.float64)
    for process, (norm, turn) in enumerate(rows.tolist()):
        first = ranks.replica_of(process) * ranks.sp
        norm_of_first, turn_of_first = rows[first].tolist()
        bound = 1e-3 * abs(norm_of_first)
        is_equal = abs(norm - norm_of_first) <= bound and abs(turn - turn_of_first) <= bound
        if not is_equal and (isfinite(norm) or isfinite(norm_of_first)):
            raise ConfigError(
                given=f"another loss on process {process} than on process {first}, of the same "
                "values",
                required="one loss of all values of a replica, made by each of its processes",
                source="the backward of token_values or hidden_states",
                change="make the whole loss on every process of a replica (Ranks.replica); its "
                "gradient counts once",
            )


def _checksum(sequence: ShiftedSequence, checksum: int = 0) -> int:
    names = sorted(sequence.extras)
    for x in (sequence.input_ids, sequence.labels, *(sequence.extras[name] for name in names)):
        own: Any = x.detach().cpu().contiguous()  # numpy knows no bfloat16
        checksum = zlib.crc32(own.view(torch.uint8).numpy(), checksum)
    return zlib.crc32(repr(names).encode(), checksum)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the facts about its sequences that others need."""

    plan: ChunkPlan
    labelled: frozenset[int]
    """Chunks that have a label."""
    num_labels: int
    checksum: int = 0
    """That of the plan and of all tokens, labels and extras, where there are other processes."""


def planned(plan: ChunkPlan, batch: Batch, ranks: Ranks | None) -> Planned:
    """A plan of these sequences."""
    labelled, checksum = frozenset(labelled_chunks(plan, batch)), 0
    if ranks is not None:
        checksum = plan.checksum
        for sequence in batch.sequences:
            checksum = _checksum(sequence, checksum)
    return Planned(plan, labelled, batch.num_labels or 0, checksum)


def joined(ranks: Ranks, own: Planned) -> tuple[Planned, range]:
    """The plan of all replicas, the same on all processes, and the numbers of this one's sequences
    in it. Collective over them.

    `own`: that of this replica, whose processes all have it: the first one sends it. Raises
    ConfigError where another one has other sequences.
    """
    is_first = not ranks.stage and not ranks.process
    found: list[tuple[int, Planned | None]] = [(0, None)] * ranks.num_processes
    dist.all_gather_object(found, (own.checksum, own if is_first else None), group=ranks.group)
    each = [one for _, one in found if one is not None]
    for process, (checksum, _) in enumerate(found):
        replica = ranks.replica_of(process)
        if checksum != each[replica].checksum:
            raise _others(ranks, process, replica)
    stops = list(accumulate(len(p.plan.seq_lens) for p in each))
    ids = [range(stop - len(p.plan.seq_lens), stop) for p, stop in zip(each, stops, strict=True)]
    seq_lens = [seq_len for p in each for seq_len in p.plan.seq_lens]
    plan = join_replicas([p.plan for p in each], ids, seq_lens)
    starts = accumulate((len(p.plan.chunks) for p in each[:-1]), initial=0)
    labelled = {
        start + chunk for p, start in zip(each, starts, strict=True) for chunk in p.labelled
    }
    num_labels = sum(p.num_labels for p in each)
    return Planned(plan, frozenset(labelled), num_labels), ids[ranks.replica]


def _others(ranks: Ranks, process: int, replica: int) -> ConfigError:
    return ConfigError(
        given=f"other sequences or options on process {process} than on process "
        f"{replica * ranks.sp}, both of replica {replica}",
        required="the same sequences on all processes of a replica: its stages and its pools",
        source="the sequences and options of the call, on each process",
        change=f"deal sequences to the {ranks.dp} replicas (Ranks.replica), not to processes",
    )

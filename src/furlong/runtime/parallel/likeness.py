"""Likeness of what processes bring to a step that they take together.

FSDP2 takes a part of each process's weights, a pipeline takes the first stage from one process and
the last from another, and a pool takes a part of each sequence from each. Where these differ,
nothing fails: what is trained is a mixture. So checksums are compared, of the weights when they are
divided, of the tokens before each step.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from furlong.errors import ConfigError, DataError
from furlong.models.causal_lm import CausalLM
from furlong.runtime.inputs import ShiftedSequence
from furlong.runtime.parallel.ranks import Ranks

_NO_MATTER = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
"""Keys of a config that may differ; the weights' own dtypes are compared."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ABSENT = -(2**62)


def require_alike(model: CausalLM, ranks: Ranks, compute_dtype: torch.dtype | None) -> None:
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
    tied = {} if model.tied_weight is None else {"the tied embeddings": _form(model.tied_weight)}
    for own, among in (
        (texts, 0),
        (weights, ranks.stage),
        (tied if ranks.stage in (0, ranks.pp - 1) else {}, -1 if tied else 0),
    ):
        _compare(own, ranks, among)


def _compare(own: Mapping[str, str], ranks: Ranks, among: int) -> None:
    """Raise ConfigError unless all processes that give the same number `among` have the same texts,
    as far as they have any. Collective over all."""
    checksum = zlib.crc32(repr(sorted(own.items())).encode())
    found = [(among, checksum if own else None)] * ranks.num_processes
    dist.all_gather_object(found, found[0], group=ranks.group)
    firsts: dict[int, int] = {}
    differs = None
    for process, (group, of_process) in enumerate(found):
        if of_process is None:
            continue
        first = firsts.setdefault(group, process)
        if of_process != found[first][1] and differs is None:
            differs = first, process
    if differs is None:
        return
    texts: list[Mapping[str, str]] = [{}] * ranks.num_processes
    dist.all_gather_object(texts, own, group=ranks.group)
    one, other = (texts[process] for process in differs)
    name = next(n for n in {**one, **other} if one.get(n) != other.get(n))
    shown = [f"{texts.get(name, 'none'):.60}" for texts in (other, one)]
    raise ConfigError(
        given=f"{name}: {shown[0]} on process {differs[1]}, {shown[1]} on process {differs[0]}",
        required="one model, with the same weights, on all processes that share it",
        source="the model that was passed to furlong.Engine on each process",
        change="load the same checkpoint on all, or call torch.manual_seed with one seed on all "
        "right before the model is made",
    )


def _form(weight: Tensor) -> str:
    """The shape, the dtype and a checksum of a weight, and whether it is trained."""
    own: Any = weight.detach()
    bits = own.contiguous().view(_INTEGERS[own.dtype.itemsize]).sum(dtype=torch.int64)
    dtype = str(own.dtype).removeprefix("torch.")
    trained = "trained" if weight.requires_grad else "frozen"
    return f"{dtype} {tuple(own.shape)} {trained}, checksum {int(bits):x}"


def trained_names(model: CausalLM) -> int:
    """A checksum of the names of the parameters that are trained."""
    names = [name for name, p in model.base.named_parameters() if p.requires_grad]
    return zlib.crc32("\n".join(names).encode())


def checksums(sequences: Sequence[ShiftedSequence]) -> tuple[int, ...]:
    """A checksum of the tokens and labels of each sequence, where this process has it."""
    return tuple(
        zlib.crc32(_bytes(s.labels), zlib.crc32(_bytes(s.input_ids)))
        if len(s.input_ids)
        else _ABSENT
        for s in sequences
    )


def require_same_sequences(own: Sequence[int], ranks: Ranks) -> None:
    """Raise DataError, on all processes, for a sequence that two of them have otherwise. Collective
    over them; `own`: `checksums`."""
    if not own:  # the plan, which all have, has no sequence
        return
    largest = [*own, *(-x if x != _ABSENT else x for x in own)]
    x = torch.tensor(largest, dtype=torch.int64, device=ranks.facts_device(ranks.group))
    dist.all_reduce(x, dist.ReduceOp.MAX, group=ranks.group)
    most, negative_least = x.view(2, -1).tolist()
    for seq_id, (high, low) in enumerate(zip(most, negative_least, strict=True)):
        if high != _ABSENT and high != -low:
            raise DataError(
                given=f"sequence {seq_id} with other tokens or labels on one process than on "
                "another",
                required="the same sequence wherever a process has it: each reads a part",
                source="the sequences passed to Engine.run",
                change="draw and shuffle the data with one seed on all processes",
            )


def _bytes(x: Tensor) -> Any:
    return x.cpu().contiguous().numpy()

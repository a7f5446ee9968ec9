"""Checksums of what a checkpoint does not hold: frozen weights, and the model of the beginning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from furlong.errors import CheckpointError
from furlong.train.processes import ALONE, Processes


def base_fingerprint(model: nn.Module, processes: Processes = ALONE) -> str | None:
    """A checksum of the frozen parameters of all processes, by name and content; None if all are
    trained. A collective."""
    own = {n: checksum(p.data) for n, p in model.named_parameters() if not p.requires_grad}
    found: dict[str, str] = {}
    for checksums in processes.each(own):
        found |= checksums
    if not found:
        return None
    lines = "".join(f"{name} {found[name]}\n" for name in sorted(found))
    return xxhash.xxh3_128_hexdigest(lines.encode())


def checksum(weight: Tensor) -> str:
    """A checksum of a tensor: its dtype, its shape and its bytes."""
    found = xxhash.xxh3_128(f"{weight.dtype} {tuple(weight.shape)}".encode())
    found.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def check_base(checkpoint: Path, state: Mapping[str, Any], fingerprint: str | None) -> None:
    """Raises CheckpointError unless the frozen weights are those that were trained upon."""
    if state["base_fingerprint"] != fingerprint:
        name = state["config"]["model"]["name"]
        raise CheckpointError(
            given=f"weights of {name} other than those that the adapters were trained upon",
            required="the same base model: a checkpoint of adapters does not hold it",
            source=str(checkpoint),
            change=f"restore the files of {name}",
        )


def check_reference(checkpoint: Path, state: Mapping[str, Any], fingerprint: str | None) -> None:
    """Raises CheckpointError unless the model that the run began with is the one of now: it is the
    reference of its loss, which a checkpoint does not hold."""
    if state.get("reference") != fingerprint:
        name = state["config"]["model"]["name"]
        raise CheckpointError(
            given=f"a reference by other weights of {name} than those that the run began with",
            required="the same model: train.loss: dpo compares with it in every step",
            source=str(checkpoint),
            change=f"restore the files of {name}, or start anew with another out",
        )

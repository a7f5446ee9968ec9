"""The choice of `keep="auto"`: as much as the free bytes of the device hold between two phases."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from furlong.cost.machine import free_ram_budget_bytes, rounded_budget
from furlong.cost.memory import PlanMemory
from furlong.cost.training import Training
from furlong.errors import UserError
from furlong.models.describe import describe
from furlong.planners.decide import with_keep
from furlong.planners.options import ChunkOptions
from furlong.planners.question import Limits
from furlong.runtime.caller import Autocast
from furlong.runtime.session import Session
from furlong.units import format_bytes

_COPIES_TO_COME = 3
"""Copies of the trained weights that are not there at the first call: gradients, and the two
moments of AdamW."""


def decided(
    session: Session, options: ChunkOptions, seq_lens: Sequence[int], autocast: Autocast
) -> ChunkOptions:
    """The options of a call with gradients, with a keep in the place of auto; `kv` where the
    model's bytes cannot be counted."""
    model, storage = session.model, session.state.opened.storage
    try:
        shape = describe(model.config)
    except UserError:
        return _told(session, replace(options, keep="kv"), seq_lens, "bytes cannot be predicted")
    own = session.compute_dtype or next(model.model.parameters()).dtype
    dtype = autocast.dtype if autocast.enabled else own
    training = Training.in_dtype(str(dtype).removeprefix("torch."))
    room = storage.device_bytes
    if room is None:
        room = _room_bytes(session)
    memory = PlanMemory(shape, training, room, device_type=model.device.type)
    budgets = Limits(room, storage.host_bytes, storage.disk_bytes)
    found = with_keep(seq_lens, options, memory, budgets)
    return _told(session, found, seq_lens, f"budget {format_bytes(room)}")


def _told(
    session: Session, options: ChunkOptions, seq_lens: Sequence[int], why: str
) -> ChunkOptions:
    """The options; another choice than the last call's is logged."""
    if session.state.decided != options.keep:
        session.state.decided = options.keep
        logging.getLogger(__name__).info(
            "keep=auto of %s: %s for %s tokens in %d sequences (%s)", session.model.name,
            options.keep, format(sum(seq_lens), ","), len(seq_lens), why,
        )  # fmt: skip
    return options


def _room_bytes(session: Session) -> int:
    """Bytes that were free on the device at the first call, without what training will need of
    them beside its calls: the same for all calls on a model, so that equal ones have equal plans.
    """
    state = session.state
    if state.room_bytes is None:
        to_come = _COPIES_TO_COME * _trained_bytes(session.model.model)
        state.room_bytes = max(0, _free_bytes(session.model.device) - to_come)
    return state.room_bytes


def _free_bytes(device: torch.device) -> int:
    """The budget of `memory.device: auto`; on CUDA with what torch's allocator holds and nobody
    uses."""
    if device.type != "cuda":
        return free_ram_budget_bytes()
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return rounded_budget((torch.cuda.mem_get_info(device)[0] + held) * 19 // 20)


def _trained_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)

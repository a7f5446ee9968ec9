"""Plans as text: short forms that parse back, JSON, and a readable page.

    F3.0 kv           Forward of chunk 3 at stage 0, keeping its K,V
    F3.0 all l2       ... keeping its graph, two layers of it checkpointed
    R3.0 l2           Recompute
    B3.0 a16 c8.5     Backward with factor 16 of its loss and 8.5 of dK,dV (1 is left out)
    K3.0              RebuildKV
    send activation 3.0 to 1, recv gradient 3.0 from 1
    unshard 0, reshard 0, reduce 0
    0:0-4096@2        a slice: tokens [0, 4096) of sequence 0 on process 2 (none: on process 0)
    0:0-4096@4-7      ... spread over the processes 4 to 7; @* over the whole pool
    0:92-110<75       a branch: it continues the piece that ends at 75, not the one before it
    dummy             a chunk without slices

A capital letter stands for computation on a cell; all other actions are words. A saved plan is JSON
with one chunk and one action per line.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError

from furlong.errors import UserError, first_error
from furlong.plan.plan import (
    FIRST_PROCESS,
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Keep,
    Offload,
    OffloadKind,
    OffloadTarget,
    Payload,
    Place,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Reshard,
    Send,
    Slice,
    Unshard,
)
from furlong.units import count_words


def format_action(action: Action) -> str:
    """Return the short form of an action."""
    match action:
        case Forward(chunk, stage, keep, layers):
            return f"F{chunk}.{stage} {keep}" + (f" l{layers}" if layers else "")
        case Recompute(chunk, stage, layers):
            return f"R{chunk}.{stage}" + (f" l{layers}" if layers else "")
        case Backward(chunk, stage, loss_factor, relay_factor):
            loss = f" a{_number(loss_factor)}" if loss_factor != 1 else ""
            relay = f" c{_number(relay_factor)}" if relay_factor != 1 else ""
            return f"B{chunk}.{stage}{loss}{relay}"
        case RebuildKV(chunk, stage):
            return f"K{chunk}.{stage}"
        case Send(payload, chunk, stage, peer):
            return f"send {payload} {chunk}.{stage} to {peer}"
        case Recv(payload, chunk, stage, peer):
            return f"recv {payload} {chunk}.{stage} from {peer}"
        case Unshard(stage) | Reshard(stage) | Reduce(stage):
            return f"{type(action).__name__.lower()} {stage}"


def _number(value: float) -> str:
    return repr(float(value)).removesuffix(".0")


_CELL = r"(\d+)\.(\d+)"
_KEEPS, _PAYLOADS = "|".join(get_args(Keep)), "|".join(get_args(Payload))
# fmt: off
_FORMS: tuple[tuple[str, Callable[..., Action]], ...] = (
    (rf"F{_CELL} ({_KEEPS})(?: l(\d+))?",
     lambda c, s, keep, n: Forward(int(c), int(s), keep, int(n or 0))),
    (rf"R{_CELL}(?: l(\d+))?", lambda c, s, n: Recompute(int(c), int(s), int(n or 0))),
    (rf"B{_CELL}(?: a(\S+))?(?: c(\S+))?",
     lambda c, s, loss, relay: Backward(int(c), int(s), float(loss or 1), float(relay or 1))),
    (rf"K{_CELL}", lambda c, s: RebuildKV(int(c), int(s))),
    (rf"send ({_PAYLOADS}) {_CELL} to (\d+)",
     lambda payload, c, s, peer: Send(payload, int(c), int(s), int(peer))),
    (rf"recv ({_PAYLOADS}) {_CELL} from (\d+)",
     lambda payload, c, s, peer: Recv(payload, int(c), int(s), int(peer))),
    (r"unshard (\d+)", lambda s: Unshard(int(s))),
    (r"reshard (\d+)", lambda s: Reshard(int(s))),
    (r"reduce (\d+)", lambda s: Reduce(int(s))),
)
# fmt: on
_DUMMY = "dummy"
_SLICE = re.compile(r"(\d+):(\d+)-(\d+)(?:@(?:(\d+)(?:-(\d+))?|(\*)))?(?:<(\d+))?")


def parse_action(text: str, *, source: str = "an action's text") -> Action:
    """Parse the short form of an action. Raises UserError, which names `source` as the text's
    origin."""
    try:
        for pattern, build in _FORMS:
            if found := re.fullmatch(pattern, text):
                return build(*found.groups())
    except ValueError:
        pass  # a factor that is no number
    raise _unreadable(repr(text), "an action such as 'F3.0 kv', 'R3.0', 'B3.0' or 'K3.0'", source)


def format_chunk(chunk: Chunk, sp_size: int = 1) -> str:
    """Return the short forms of a chunk's slices, separated by spaces, or `dummy` if it has none.
    `sp_size`: number of processes of the pool."""
    words = (
        f"{s.seq_id}:{s.start}-{s.stop}{_format_place(s.place, sp_size)}"
        + ("" if s.parent is None else f"<{s.parent}")
        for s in chunk.slices
    )
    return " ".join(words) or _DUMMY


def _format_place(place: Place, sp_size: int) -> str:
    if place == FIRST_PROCESS:
        return ""
    if place == Place(0, sp_size):
        return "@*"
    return f"@{place.first}" + (f"-{place.stop - 1}" if place.size > 1 else "")


def parse_chunk(text: str, *, sp_size: int = 1, source: str = "a chunk's text") -> Chunk:
    """Parse the short form of a chunk. `sp_size`: number of processes of the pool, for "@*". Raises
    UserError, which names `source` as the text's origin."""
    if text == _DUMMY:
        return Chunk(())
    slices = []
    for word in text.split(" "):
        found = _SLICE.fullmatch(word)
        if not found or (found[5] and int(found[5]) < int(found[4])):
            forms = "slices such as '0:0-4096', '0:0-4096@2', '0:0-4096@4-7' or '0:92-110<75'"
            raise _unreadable(repr(text), forms, source)
        seq_id, start, stop = map(int, found.groups()[:3])
        first, last, whole, parent = found.groups()[3:]
        place = Place(0, sp_size if whole else 1)
        if first:
            place = Place(int(first), int(last or first) - int(first) + 1)
        slices.append(Slice(seq_id, start, stop, place, int(parent) if parent else None))
    return Chunk(tuple(slices))


def _unreadable(given: str, required: str, source: str = "a saved plan") -> UserError:
    """Return the error for a text that is not a plan or a part of one."""
    return UserError(
        given=given,
        required=required,
        source=source,
        change="make the plan again with this version of furlong: furlong plan --out",
    )


KIND_WORDS = {
    "kv": "K,V", "kv_gradients": "dK,dV", "inputs": "stage inputs", "attention": "attention",
    "graphs": "graphs",
}  # fmt: skip
"""Words for the kinds of memory that can be offloaded."""


def offload_in_words(offload: Offload) -> str:
    """Return words that say where each kind of kept tensor is stored (device, CPU or disk)."""
    words = {"none": "device", "cpu": "CPU", "disk": "disk"}
    held: dict[OffloadTarget, list[str]] = {}
    for kind, target in asdict(offload).items():
        held.setdefault(target, []).append(KIND_WORDS[kind])
    if len(held) == 1:
        return f"all memory on the {words[offload.kv]}"
    return "; ".join(f"{', '.join(kinds)} on the {words[t]}" for t, kinds in held.items())


def format_plan(plan: ChunkPlan) -> str:
    """Return a readable page: the chunks with their kinds, then the actions of each rank."""
    lines = [
        f"{count_words(len(plan.seq_lens), 'sequence')},"
        f" {count_words(sum(plan.seq_lens), 'token')}, "
        f"{count_words(len(plan.chunks), 'chunk')}; "
        f"layers per stage: {', '.join(map(str, plan.stages))}; {offload_in_words(plan.offload)}"
    ]
    if plan.trees:
        lines.append(f"{count_words(len(plan.trees), 'sequence')} with branches")
    if plan.regathers:
        who = "in its pool" if plan.replicated else "the ranks of a stage run in lockstep"
        lines.append(f"weights are gathered with every pass: {who}")
    if plan.sampled:
        lines.append(f"{len(plan.trained)} of {count_words(len(plan.chunks), 'chunk')} are drawn")
    lines += [
        f"chunk {index}: {plan.kind(index)}, {count_words(chunk.num_tokens, 'token')}, "
        f"{format_chunk(chunk, plan.sp_size)}"
        for index, chunk in enumerate(plan.chunks)
    ]
    for rank, actions in enumerate(plan.actions):
        lines.append(f"rank {rank}")
        texts = ", ".join(format_action(action).replace(" ", "\xa0") for action in actions)
        # no-break spaces keep an action on one line
        wrapped = textwrap.wrap(texts, 100, initial_indent="  ", subsequent_indent="  ")
        lines += [line.replace("\xa0", " ") for line in wrapped]
    return "\n".join(lines) + "\n"


PLAN_VERSION = 7
"""The version of the JSON form. Other versions are refused: a plan is cheap to make again."""


class _Saved(BaseModel, extra="forbid", strict=True):
    """The JSON form of a plan, with chunks and actions in their short forms."""

    made_for: Any = None
    version: Literal[6, 7]  # 6 has no reshard
    offload: dict[OffloadKind, OffloadTarget] = Field(min_length=len(get_args(OffloadKind)))
    sp_size: int
    frozen_stages: int
    sampled: bool
    report_loss: bool
    two_phases: bool
    regathers: bool
    replicated: bool = False  # 6 has none
    seq_lens: tuple[int, ...]
    stages: tuple[int, ...]
    chunks: list[str]
    actions: list[list[str]]


def save_plan(plan: ChunkPlan, made_for: Mapping[str, Any] | None = None) -> str:
    """Return a plan as JSON, with one chunk and one action per line. `made_for`: plain values that
    `load_plan` ignores, such as the model and the devices."""
    texts = {
        "made_for": json.dumps(made_for),
        "version": str(PLAN_VERSION),
        "offload": json.dumps(asdict(plan.offload)),
        "chunks": _lines([format_chunk(chunk, plan.sp_size) for chunk in plan.chunks]),
        "actions": "[" + ", ".join(_lines(map(format_action, a)) for a in plan.actions) + "]",
    }
    values = {
        name: texts[name] if name in texts else json.dumps(getattr(plan, name))
        for name in _Saved.model_fields
        if name != "made_for" or made_for is not None
    }
    return "{\n" + ",\n".join(f'"{name}": {value}' for name, value in values.items()) + "\n}\n"


def _lines(texts: Iterable[str]) -> str:
    return json.dumps(list(texts), indent=1)


def load_plan(text: str) -> ChunkPlan:
    """Parse a plan that `save_plan` wrote; `plan.check` checks whether it is legal. Raises
    UserError."""
    try:
        saved = _Saved.model_validate_json(text)
    except ValidationError as error:
        raise _unreadable(first_error(error), f"a saved plan of version {PLAN_VERSION}") from None
    plain = saved.model_dump(exclude={"made_for", "version", "offload", "chunks", "actions"})
    return ChunkPlan(
        **plain,
        offload=Offload(**saved.offload),
        chunks=tuple(
            parse_chunk(chunk, sp_size=saved.sp_size, source=f"chunk {index} of a saved plan")
            for index, chunk in enumerate(saved.chunks)
        ),
        actions=tuple(
            tuple(
                parse_action(action, source=f"rank {rank}, action {index} of a saved plan")
                for index, action in enumerate(own)
            )
            for rank, own in enumerate(saved.actions)
        ),
    )


def read_made_for(text: str) -> Any:
    """Return the `made_for` of a saved plan (see `save_plan`), an empty dict if it has none."""
    return json.loads(text).get("made_for", {})

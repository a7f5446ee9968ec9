"""Chunk options, and a fixed rule for them.

`auto` in a run file means the search of `planners.search`. The fixed rule (`fixed_options`) is used
where no search is possible: without a data set, or for a model whose work cannot be counted.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NoReturn, get_args

from furlong.errors import NEAR, ConfigError
from furlong.plan.plan import Keep, Offload, OffloadTarget, Order
from furlong.planners.spaco import Sampling, sampling_of

SMALLEST_CHUNK = 64
"""Fewest tokens of a chunk in a search, and after out-of-memory steps."""
OFFLOAD_KINDS = tuple(field.name for field in fields(Offload))
"""Kinds of memory that can be offloaded."""
_KEEPS, _ORDERS, _TARGETS = get_args(Keep), get_args(Order), get_args(OffloadTarget)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions:
    """How sequences are cut into chunks, and which tensors are kept. Options change time and
    memory, but no gradient, except for `sample`."""

    size: int = 4096
    """Most tokens in a chunk."""
    num_retained: int = 1
    """Number of last chunks of a sequence that keep their whole graph (ChunkFlow's K). Layer-first
    retains at the last stage only, where the backward follows the forward at once."""
    keep: Keep | Literal["auto"] = "attention"
    """Tensors that the other chunks keep between forward and backward. `auto` (only for token
    values, hidden states and `furlong.chunked`): as much as memory has room for, call by call."""
    offload: OffloadTarget | Mapping[str, OffloadTarget] | Offload = "none"
    """Where kept tensors are stored: one target for all kinds, or a mapping of kinds (kv, inputs,
    attention, graphs) to targets; kinds that it omits stay on the device (none)."""
    order: Order = "chunk-first"
    stage_layers: int | None = None
    """Most layers of a stage; for layer-first only, with default 1."""
    reshard: bool = False
    """Whether weights are freed during a step. Layer-first then runs each stage for the whole
    batch; weights of two stages are whole at a time, and each stage is gathered once in the forward
    and once in the backward. In a pipeline weights of two layers are whole at a time, gathered in
    each pool with each pass. False: weights of all stages are whole for the step."""
    recompute_layers: int = 0
    """Number of first layers of a cell's graph that are checkpointed one by one."""
    hybrid: bool = True
    """Whether the last piece of a long sequence may share its chunk with whole short sequences."""
    sample: Sampling | Mapping[str, Any] | None = None
    """Sampling of the chunks that get a backward; None: all get one, and gradients are exact. With
    sampling, gradients depend on chunk size and draw."""

    @property
    def offloading(self) -> Offload:
        """The offload target of each kind of kept tensor."""
        if isinstance(self.offload, str):
            return Offload(self.offload, self.offload, self.offload, self.offload)
        assert isinstance(self.offload, Offload)  # __post_init__ has made it of a mapping
        return self.offload

    @property
    def kept(self) -> Keep:
        """The value of `keep`. Raises ConfigError if it is auto."""
        if self.keep == "auto":
            _refuse(
                "keep", "auto",
                f"one of {', '.join(_KEEPS)}: with auto only Engine.token_values,"
                " Engine.hidden_states and furlong.chunked choose",
                "name one; furlong plan and furlong train search for it",
            )  # fmt: skip
        return self.keep

    @property
    def sampling(self) -> Sampling | None:
        """How the chunks that get a backward are drawn; None: all chunks get one."""
        assert not isinstance(self.sample, Mapping)  # __post_init__ has made it a Sampling
        return self.sample

    def __post_init__(self) -> None:
        for name, lowest in (("size", 1), ("num_retained", 0), ("recompute_layers", 0)):
            _check_whole(name, getattr(self, name), lowest)
        for name in ("hybrid", "reshard"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "True or False", "pass a boolean")
        _check_among("keep", self.keep, (*_KEEPS, "auto"))
        _check_among("order", self.order, _ORDERS)
        object.__setattr__(self, "offload", checked_offload(self.offload))
        object.__setattr__(self, "sample", sampling_of(self.sample))
        if self.order == "layer-first":
            stage_layers = 1 if self.stage_layers is None else self.stage_layers
            _check_whole("stage_layers", stage_layers, 1)
            object.__setattr__(self, "stage_layers", stage_layers)
        elif self.stage_layers is not None:
            _refuse(
                "stage_layers", self.stage_layers,
                "no stage_layers with order chunk-first, where all layers are one stage",
                "set order to layer-first, or leave stage_layers out",
            )  # fmt: skip


def checked_offload(value: object) -> OffloadTarget | Offload:
    """Return a value of `offload` as one target if all kinds of tensors share it, else as an
    Offload. Raises ConfigError for an invalid value."""
    if isinstance(value, Offload):
        value = {kind: getattr(value, kind) for kind in OFFLOAD_KINDS}
    if not isinstance(value, Mapping):
        _check_among("offload", value, _TARGETS, or_else=" or a mapping of kinds to them")
        return value  # type: ignore[return-value]
    for kind, target in value.items():
        if kind not in OFFLOAD_KINDS:
            near = difflib.get_close_matches(str(kind), OFFLOAD_KINDS, n=1, cutoff=NEAR)
            change = f"did you mean {near[0]}?" if near else f"remove {kind}"
            _refuse("offload", dict(value), f"kinds among {', '.join(OFFLOAD_KINDS)}", change)
        _check_among(f"offload.{kind}", target, _TARGETS)
    offload = Offload(**value)
    alike = all(getattr(offload, kind) == offload.kv for kind in OFFLOAD_KINDS)
    return offload.kv if alike else offload


def _check_whole(name: str, value: object, lowest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        _refuse(
            name, value, f"a whole number of at least {lowest}",
            f"set {name} to {lowest} or more, or to auto in a run file",
        )  # fmt: skip


def _check_among(name: str, value: object, choices: tuple[str, ...], or_else: str = "") -> None:
    if value not in choices:
        near = (
            difflib.get_close_matches(value, choices, n=1, cutoff=NEAR)
            if isinstance(value, str)
            else []
        )
        change = f"did you mean {near[0]}?" if near else "choose one of them"
        _refuse(name, value, f"one of {', '.join(choices)}{or_else}", change)


def _refuse(name: str, value: object, required: str, change: str) -> NoReturn:
    key = name if name.startswith("offload") else f"chunks.{name}"
    raise ConfigError(
        given=f"{key} = {value!r}", required=required, source="ChunkOptions", change=change
    )


def fixed_options(max_seq_len: int, given: Mapping[str, Any] | None = None) -> ChunkOptions:
    """Return options for sequences of at most `max_seq_len` tokens, without a search: those in
    `given`, else defaults (size: the largest power of two up to 4,096 and `max_seq_len`)."""
    chosen: dict[str, Any] = {"size": 1 << (min(4096, max(1, max_seq_len)).bit_length() - 1)}
    return ChunkOptions(**(chosen | dict(given or {})))


def option_values(options: ChunkOptions) -> dict[str, Any]:
    """Return the options as keys and values of a run file: always size, num_retained and keep;
    order and stage_layers if layer-first; reshard if true; offload if any tensor is offloaded."""
    values: dict[str, Any] = {
        "size": options.size, "num_retained": options.num_retained, "keep": options.keep,
    }  # fmt: skip
    if options.order == "layer-first":
        values |= {"order": options.order, "stage_layers": options.stage_layers or 1}
    if options.reshard:
        values["reshard"] = True
    if isinstance(options.offload, str):
        return values if options.offload == "none" else values | {"offload": options.offload}
    named = {kind: where for kind, where in asdict(options.offloading).items() if where != "none"}
    return values | {"offload": named}


def value_in_words(value: object) -> str:
    """Return the value of an option as a run file writes it."""
    if not isinstance(value, Mapping):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return "{" + ", ".join(f"{name}: {inner}" for name, inner in value.items()) + "}"


def options_in_words(options: ChunkOptions) -> str:
    """Return options as text, each as its name and value."""
    return ", ".join(
        f"{name} {value_in_words(value)}" for name, value in option_values(options).items()
    )

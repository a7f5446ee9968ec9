"""Calls of a mixer slice by slice: each with the states that enter it, never with another's.

T tokens of a chunk, D hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from furlong.models.attention import DOOR, BoundCell, called_within
from furlong.models.mixers.caches import DoorCache, SliceCache
from furlong.models.mixers.doors import Current, own_forward
from furlong.ops.state_relay import States
from furlong.plan.passes import Pass

_BUCKET_TOKENS = 64
"""The step of lengths that are alike; shorter ones are alike up to a factor of two."""


@dataclass(frozen=True, slots=True)
class SliceRows:
    """A slice of a chunk, as a mixer sees it."""

    index: int
    """Its number in the chunk."""
    rows: slice
    """Its rows of the chunk."""
    continues: bool
    """Whether it has a prefix, whose states enter it."""
    is_continued: bool
    """Whether a later chunk goes on where it ends."""


class CellStates(Protocol):
    """Where the states of one (chunk, stage) come from, and where they go."""

    def state_slices(self) -> Sequence[SliceRows]: ...

    def enter(self, layer: int, slice_index: int, x: Tensor) -> tuple[Tensor, States]:
        """x (1, T, D) of a slice that continues, and the states that enter it."""
        ...

    def leave(self, what: Pass, layer: int, slice_index: int, y: Tensor, states: States) -> Tensor:
        """y (1, T, D) of a slice that is continued; `states` are those that leave it."""
        ...

    def mixed(self, what: Pass, layer: int) -> None:
        """Note that a layer's mixer is done; may raise KVReady."""
        ...


@dataclass(frozen=True, slots=True)
class Mixer:
    """A module whose tokens meet in a state, and its layer."""

    module: nn.Module
    layer: int


@contextmanager
def relaying(mixers: Sequence[Mixer], shared: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Within it each mixer is called slice by slice; `shared`: attention modules that do not know
    their layer, or serve several, and are told by the cache."""
    changed = []
    try:
        for mixer in mixers:
            current = Current()
            own = own_forward(mixer.module, current)
            mixer.module.__dict__["forward"] = partial(_forward, mixer, own, current)
            changed.append(mixer.module)
        for module in shared:
            module.__dict__["forward"] = partial(_told, module, module.forward)
            changed.append(module)
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _told(module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    caches = [x for x in (*args, *kwargs.values()) if isinstance(x, DoorCache)]
    module.__dict__[DOOR] = caches[0]
    try:
        return own(*args, **kwargs)
    finally:
        del module.__dict__[DOOR]


def _forward(
    mixer: Mixer, own: Callable[..., Any], current: Current, *args: Any, **kwargs: Any
) -> Any:
    """The mixer's output for a chunk: its slices' outputs, joined."""
    pass_of = BoundCell.to(mixer.module)
    if pass_of is None:
        raise called_within(mixer.module)
    cell: Any = pass_of.cell
    what = pass_of.what
    given, call = inputs_of(args, kwargs), partial(_call, own, current)
    outputs: dict[int, Any] = {}
    for parts in in_batches(cell.state_slices()):
        if len(parts) > 1:
            outputs |= _batch(call, parts, given)
        else:
            outputs[parts[0].index] = _slice(mixer, call, cell, what, parts[0], given)
    cell.mixed(what, mixer.layer)
    return joined([outputs[index] for index in sorted(outputs)])


def in_batches(parts: Sequence[SliceRows]) -> list[list[SliceRows]]:
    """Slices that may be called together: whole ones of similar lengths, which pad one another to
    less than twice their tokens; each other one is called alone."""
    batches: dict[tuple[int, ...], list[SliceRows]] = {}
    for part in parts:
        n = part.rows.stop - part.rows.start
        alike = (n.bit_length(),) if n < _BUCKET_TOKENS else (_BUCKET_TOKENS, n // _BUCKET_TOKENS)
        is_whole = not part.continues and not part.is_continued
        batches.setdefault(alike if is_whole else (0, 0, part.index), []).append(part)
    return list(batches.values())


def _batch(call: Callable[..., Any], parts: Sequence[SliceRows], given: Inputs) -> dict[int, Any]:
    """The outputs of whole slices by their numbers, computed as one batch padded on the right: a
    causal layer never looks there."""
    lens = [part.rows.stop - part.rows.start for part in parts]
    length = max(lens)

    def padded(x: Tensor) -> Tensor:
        """x (1, T, ...) -> (B, length, ...)."""
        rows = [x[:, part.rows] for part in parts]
        behind = [(0, 0) * (x.ndim - 2) + (0, length - n) for n in lens]
        return torch.cat([pad(one, more) for one, more in zip(rows, behind, strict=True)])

    cache = SliceCache({}, length)
    output = call(cache, given.of(padded(given.x), padded, cache))
    y, others = first(output), output[1:] if isinstance(output, tuple) else None
    found: dict[int, Any] = {}
    for number, (part, n) in enumerate(zip(parts, lens, strict=True)):
        own = y[number : number + 1, :n]
        found[part.index] = own if others is None else (own, *others)
    return found


def _slice(
    mixer: Mixer, call: Callable[..., Any], cell: CellStates, what: Pass, part: SliceRows,
    given: Inputs,
) -> Any:  # fmt: skip
    x, before = given.x[:, part.rows], States()
    if part.continues:
        x, before = cell.enter(mixer.layer, part.index, x)
    cache = SliceCache(before, x.shape[1])
    output = call(cache, given.of(x, lambda of_tokens: of_tokens[:, part.rows], cache))
    if part.is_continued:
        y = cell.leave(what, mixer.layer, part.index, first(output), cache.after)
        output = (y, *output[1:]) if isinstance(output, tuple) else y
    return output


def _call(
    own: Callable[..., Any],
    current: Current,
    cache: SliceCache,
    given: tuple[Sequence[Any], Mapping[str, Any]],
) -> Any:
    current.cache, current.num_scans = cache, 0
    try:
        return own(*given[0], **given[1])
    finally:
        current.cache = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of a mixer for a whole chunk; `x` (1, T, D) are its hidden states."""

    x: Tensor
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def of(
        self, x: Tensor, take: Callable[[Tensor], Tensor], cache: DoorCache
    ) -> tuple[list[Any], dict[str, Any]]:
        """The same for some rows, whose hidden states are `x` and whose cache is its own; `take`
        makes their part of other tensors (1, T, ...)."""
        cut = partial(self._cut, x, take, cache)
        return [cut(a) for a in self.args], {name: cut(a) for name, a in self.kwargs.items()}

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same with floating-point numbers of another type."""

        def cast(given: Any) -> Any:
            if isinstance(given, tuple):
                return tuple(cast(one) for one in given)
            is_cast = isinstance(given, Tensor) and given.is_floating_point()
            return x if given is self.x else given.to(dtype) if is_cast else given

        x = self.x.to(dtype)
        return Inputs(x, [cast(a) for a in self.args], {k: cast(a) for k, a in self.kwargs.items()})

    def _cut(
        self, x: Tensor, take: Callable[[Tensor], Tensor], cache: DoorCache, given: Any
    ) -> Any:
        if given is self.x:
            return x
        if isinstance(given, DoorCache):
            return cache
        if isinstance(given, tuple):
            return tuple(self._cut(x, take, cache, one) for one in given)
        is_of_tokens = isinstance(given, Tensor) and given.ndim > 1
        if is_of_tokens and given.shape[:2] == (1, self.x.shape[1]):
            return take(given)
        return given


def inputs_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
    """The arguments of a mixer, whose hidden states come first."""
    x = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(x, Tensor) and x.ndim == 3, "a mixer without hidden states"
    return Inputs(x, args, kwargs)


def first(output: Any) -> Tensor:
    """The hidden states of a mixer's output."""
    found = output[0] if isinstance(output, tuple) else output
    assert isinstance(found, Tensor)
    return found


def joined(outputs: Sequence[Any]) -> Any:
    """The output of a chunk of the outputs of its slices, in order."""
    if len(outputs) == 1:
        return outputs[0]
    y = torch.cat([first(output) for output in outputs], 1)
    last = outputs[-1]
    return (y, *last[1:]) if isinstance(last, tuple) else y

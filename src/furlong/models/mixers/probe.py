"""A watch on what the layers of a decoder do with a few tokens.

A layer reaches the door of attention, or touches the states of its cache, or both, or does neither
and then must move no other token. Mixers are not known by name: they are the modules that touch the
cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from furlong.models.attention import bound
from furlong.models.mixers.caches import DoorCache, SliceCache
from furlong.models.mixers.relay import Mixer
from furlong.models.mixers.rg_lru import rg_lru_blocks
from furlong.ops.latent_kv import Expansion
from furlong.ops.layer_kv import AttentionRule
from furlong.plan.passes import Pass

Event = tuple[Literal["attention", "states"], int]
"""A kind of meeting of tokens, and the layer in which it happens."""
NUM_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Probed:
    """The mixers of a decoder, and what its layers do in the order in which they do it."""

    mixers: tuple[Mixer, ...] = ()
    shared: tuple[nn.Module, ...] = ()
    """Attention modules that do not know their layer, or serve several."""
    events: tuple[Event, ...] = ()
    num_returned: int = 0
    """Elements of the tuple that a layer returns; 0: hidden states alone."""


def cache_argument(decoder: nn.Module) -> str | None:
    """The name under which a decoder takes a cache, None if it takes none."""
    takes = inspect.signature(type(decoder).forward).parameters  # a door may stand before it
    return next((name for name in ("past_key_values", "cache_params") if name in takes), None)


@dataclass
class Probe:
    """A cell and the modules of a decoder while it is watched."""

    modules: list[nn.Module] = field(default_factory=list)
    """Modules that run now, the innermost one last."""
    mixers: dict[nn.Module, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    served: dict[nn.Module, list[int]] = field(default_factory=dict)
    """Layers whose keys and values came from a module."""
    _layer: int | None = None
    """The layer whose keys and values came last, until its attention runs."""

    def attend(
        self, what: Pass, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule,
        sinks: Tensor | None, source: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        self.events.append(("attention", layer if self._layer is None else self._layer))
        self._layer = None
        return q

    def take_latents(self, what: Pass, layer: int, latents: Tensor, expand: Expansion) -> Tensor:
        return latents

    def update(self, layer: int) -> None:
        self._layer = layer
        self.served.setdefault(self.modules[-1], []).append(layer)

    def touch(self, layer: int) -> None:
        module = self.modules[-1]
        if module not in self.mixers:
            self.mixers[module] = layer
            self.events.append(("states", layer))

    def forget(self) -> None:
        """Forget a pass, which may have ended in the middle."""
        for seen in (self.modules, self.mixers, self.events, self.served):
            seen.clear()
        self._layer = None

    @property
    def probed(self) -> Probed:
        mixers = tuple(Mixer(module, layer) for module, layer in self.mixers.items())
        shared = tuple(m for m, layers in self.served.items() if layers != [m.layer_idx])
        return Probed(mixers, shared, tuple(self.events))


class WatchedCache(SliceCache):
    """A cache of a whole sequence that tells which module touches its states."""

    def __init__(self, watch: Probe) -> None:
        super().__init__({}, NUM_TOKENS)
        self._watch = watch

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any):  # type: ignore[no-untyped-def]
        self._watch.update(layer_idx)
        return key_states, value_states

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        self._watch.touch(layer)
        return super().get_conv_state(layer, state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer: int, state_idx: int = 0,
        conv_kernel_size: int | None = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        self._watch.touch(layer)
        return super().update_conv_state(conv_states, layer, state_idx, conv_kernel_size, **others)

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        self._watch.touch(layer)
        return super().get_recurrent_state(layer, state_idx)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *args: Any, **named: Any
    ) -> Tensor:
        self._watch.touch(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **named)

    def get_linear_cache(self, layer: int) -> Tensor | None:
        self._watch.touch(layer)
        return super().get_linear_cache(layer)


@contextmanager
def watching(decoder: nn.Module, doors: Sequence[nn.Module]) -> Iterator[tuple[Probe, DoorCache]]:
    """Within it a forward of the decoder with that cache is watched; `doors`: the modules that may
    reach the door of attention."""
    watch, blocks = Probe(), rg_lru_blocks(decoder)
    positions = torch.arange(NUM_TOKENS, device=next(decoder.parameters()).device)

    def begin(module: nn.Module, *_: Any) -> None:
        watch.modules.append(module)
        if module in blocks:  # it touches no cache
            watch.touch(blocks[module])

    def end(module: nn.Module, *_: Any) -> None:
        watch.modules.pop()

    with ExitStack() as stack:
        for module in decoder.modules():
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end).remove)
        stack.enter_context(bound(doors, watch, Pass("values"), positions))
        stack.enter_context(torch.no_grad())
        yield watch, WatchedCache(watch)

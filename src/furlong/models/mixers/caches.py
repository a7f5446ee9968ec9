"""The caches that stand where transformers looks for states and earlier keys.

transformers' layers read and write states through the cache that their decoder was given. A
`DoorCache` goes through the decoder in its place and remembers nothing: keys and values take the
way of `AttentionInterface`. A mixer (`models.mixers.relay`) gets a `SliceCache` of its own for each
slice. Both answer whatever a forward asks of a cache.

    C channels, K tokens that a convolution joins, T tokens of the slice
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from furlong.ops.state_relay import StateKey, States


class DoorCache(DynamicCache):  # type: ignore[misc]
    """An empty cache of no tokens, whatever is written into it."""

    layer: int | None = None
    """The layer whose keys and values came through last: shared blocks serve several."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.layer = layer_idx
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return True


class SliceCache(DoorCache):
    """The states of one mixer for one slice: `before` as they enter it, `after` as they leave it.

    A slice of one token is shown none: the mixer would take its decoding path, which writes in
    place, has no gradient in its kernels and clamps nothing. Its convolution's state is joined all
    the same when the token is written, and the recurrent one waits `at_door` of the scan.
    """

    def __init__(self, before: Mapping[StateKey, Tensor], num_tokens: int) -> None:
        super().__init__()
        self.before, self._hides = before, num_tokens == 1
        self.after: States = {}
        self.at_door: Tensor | None = None

    def get_conv_state(self, _layer: int, state_idx: int = 0) -> Tensor | None:
        # further convolutions of a layer join their state themselves
        return None if self._hides and not state_idx else self.before.get(("conv", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer: int, state_idx: int = 0,
        conv_kernel_size: int | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """x (1, C, T) -> (1, C, K + T), the state in front of it where there is one."""
        before, x = self.before.get(("conv", state_idx)), conv_states
        full = x if before is None else torch.cat([before, x], -1)
        width = x.shape[-1] if conv_kernel_size is None else conv_kernel_size
        missing = max(0, width - full.shape[-1])
        self.after["conv", state_idx] = pad(full, (missing, 0))[..., -width:]
        return full

    def get_recurrent_state(self, _layer: int, state_idx: int = 0) -> Tensor | None:
        before = self.at_door = self.before.get(("recurrent", state_idx))
        return None if self._hides else before

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.after["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, _layer: int) -> Tensor | None:
        return self.before.get(("linear", 0))

    def set_linear_cache(self, _layer: int, linear_cache: Tensor) -> None:
        self.after["linear", 0] = linear_cache

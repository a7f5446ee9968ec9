"""Layers of a cell that attend to the same keys and values (Gemma 4): one of them stores them."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import ref

from torch import Tensor

from furlong.ops.layer_kv import AttentionRule


@dataclass
class SharedKeys:
    """The first layer of each that attends to the same keys and values by the same rule.

    In a cell's first pass all layers run in order, and what later ones share is alive; what it
    finds holds for all passes.
    """

    _owners: dict[int, int] = field(default_factory=dict)
    _sources: dict[int, tuple[ref[Tensor], ref[Tensor], AttentionRule]] = field(
        default_factory=dict
    )

    def owner(self, layer: int, source: tuple[Tensor, Tensor], rule: AttentionRule) -> int:
        """The layer itself, or an earlier one. `source`: its keys and values."""
        if layer not in self._owners:
            key, value = source
            same = (
                owner
                for owner, (keys, values, own_rule) in self._sources.items()
                if keys() is key and values() is value and own_rule == rule
            )
            self._owners[layer] = next(same, layer)
            if self._owners[layer] == layer:
                self._sources[layer] = ref(key), ref(value), rule
        return self._owners[layer]

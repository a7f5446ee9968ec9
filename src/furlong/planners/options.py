"""The dials of a plan, and the rule that sets them where there is nothing to search with.

`auto` in a run file is the search of `planners.auto`. The rule here stands in for it where no data
set is at hand, and for models whose work cannot be counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from furlong.errors import ConfigError
from furlong.plan.values import Keep, Order, Tier, Tiers

_AVAILABLE: dict[str, tuple[str, ...]] = {
    "keep": get_args(Keep),
    "tier": ("device",),
    "order": ("chunk-first",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions:
    """How sequences are cut and what is kept. Changes time and memory, never a gradient."""

    size: int = 4096
    """Most tokens in a chunk."""
    num_retained: int = 1
    """How many last chunks of a sequence keep their whole graph (ChunkFlow's K)."""
    keep: Keep = "attention"
    """What the other chunks keep between forward and backward."""
    tier: Tier = "device"
    """Where K,V and their gradients live."""
    order: Order = "chunk-first"
    hybrid: bool = True
    """Whether a long sequence's tail piece may share its chunk with whole short sequences."""

    @property
    def tiers(self) -> Tiers:
        """The tier of each kind of memory."""
        return Tiers(self.tier, self.tier, self.tier, self.tier)

    def __post_init__(self) -> None:
        for name, lowest in (("size", 1), ("num_retained", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise ConfigError(
                    given=f"chunks.{name} = {value!r}",
                    required=f"a whole number of at least {lowest}",
                    source="ChunkOptions",
                    change=f"set {name} to {lowest} or more, or to auto in a run file",
                )
        if not isinstance(self.hybrid, bool):
            raise ConfigError(
                given=f"chunks.hybrid = {self.hybrid!r}", required="True or False",
                source="ChunkOptions", change="pass a boolean",
            )  # fmt: skip
        for name, choices in _AVAILABLE.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(
                    given=f"chunks.{name} = {value!r}",
                    required=f"one of {', '.join(choices)}",
                    source="ChunkOptions",
                    change="choose one of them; the README says what this release leaves out",
                )


def fixed_options(max_seq_len: int, dials: Mapping[str, Any] | None = None) -> ChunkOptions:
    """Options for sequences of at most `max_seq_len` tokens, without a search.

    Every dial that `dials` leaves out is set by a rule: the size is the largest power of two that
    exceeds neither 4,096 nor `max_seq_len`; the others are ChunkOptions' defaults.
    """
    chosen: dict[str, Any] = {"size": 1 << (min(4096, max(1, max_seq_len)).bit_length() - 1)}
    return ChunkOptions(**(chosen | dict(dials or {})))

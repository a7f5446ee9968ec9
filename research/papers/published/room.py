"""A room: what the methods may choose from in one layout, and the ladders that they share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from furlong.cost.shape import ModelShape
from furlong.errors import ConfigError
from furlong.plan.plan import Layout, OffloadTarget
from furlong.planners.chunks import recompute_choices
from furlong.planners.layouts import cut_layers, divisors, layouts, mean_attended_keys
from papers.published.chunks import Balance
from papers.published.dials import Dials, Ladder
from papers.published.problem import Problem

MOST_CHUNKS = 512
"""Most chunks of the longest sequence: more only make the search slower."""
_MOST_TOKENS = 32_768
"""Most tokens of a chunk per device, about."""
_EVERY = 16
"""Up to so many retained chunks every number is tried, then four in each doubling."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """A layout with a way to deal, and the values that dials may have in it."""

    layout: Layout
    stages: tuple[int, ...]
    balance: Balance
    longest_tokens: int
    sizes: tuple[int, ...]
    """Sizes of chunks, in tokens of an sp group."""
    offload: tuple[OffloadTarget, ...] = ("none",)
    is_pool: bool = False
    """Whether all devices are one pool, on whose places whole sequences are."""
    gathers: bool = False
    """Whether sp groups are larger than the heads allow, though there are layouts with smaller
    ones."""

    def dials(self, method: str, **values: Any) -> Dials:
        """Dials of this room."""
        return Dials(
            method=method, layout=self.layout, stages=self.stages,
            balance=self.balance, **values,
        )  # fmt: skip

    def in_any_order(self, dials: Dials) -> Dials:
        """The dials of a method that leaves the order of groups open, which tells in pipelines."""
        return replace(dials, group_order="searched") if self.layout.pp > 1 else dials

    def retaining(self, dials: Dials, *, least: int) -> Ladder:
        """A rung for each number of retained chunks from `least` on, falling."""
        assert dials.size is not None
        num_chunks = -(-self.longest_tokens // dials.size)
        numbers = (n for n in reversed(retained_numbers(num_chunks)) if n >= least)
        return tuple(replace(dials, num_retained=n) for n in numbers)

    def checkpointing(self, dials: Dials) -> Ladder:
        """A rung for each eighth of every stage's layers that is checkpointed, rising."""
        layers = {tuple(round(n * e / 8) for n in self.stages): None for e in range(9)}
        return tuple(replace(dials, recompute_layers=own) for own in layers)

    def at_capacity(self, dials: Dials) -> Iterator[Ladder]:
        """For some numbers of checkpointed layers, micro-batches as large as memory allows: the
        search sets their size."""
        if self.layout.pp == 1:
            for layers in recompute_choices(sum(self.stages)):
                yield (replace(dials, recompute_layers=(layers,) if layers else ()),)


def retained_numbers(num_chunks: int) -> list[int]:
    """Numbers of retained chunks from 0 to `num_chunks`: every small one, then four in each
    doubling."""
    numbers = list(range(min(_EVERY, num_chunks) + 1))
    while numbers[-1] < num_chunks:
        step = 1 << (numbers[-1].bit_length() - 3)
        numbers.append(min(num_chunks, numbers[-1] + step))
    return numbers


def chunk_sizes(
    layout: Layout, longest_tokens: int, *, least: int, below: int | None = None
) -> tuple[int, ...]:
    """Powers of two of tokens per device from `least` on, as tokens of an sp group: one of them at
    least as long as the longest sequence, none that cuts it into too many chunks."""
    most = max(least, min(_MOST_TOKENS, longest_tokens // layout.sp)).bit_length()
    if below is not None:
        most = min(most, below.bit_length() - 2)
    sizes = (layout.sp << bits for bits in range(least.bit_length() - 1, most + 1))
    return tuple(size for size in sizes if longest_tokens <= MOST_CHUNKS * size)


def idle_layouts(num_devices: int, shape: ModelShape, **sizes: Any) -> list[Layout]:
    """Layouts of the devices, also those that leave some out, so that more devices are hardly ever
    slower, and sizes need not divide their number. `sizes`: as for `layouts`. Raises ConfigError.
    """
    given = [sizes.get(name) for name in ("dp", "sp", "pp")]
    numbers = {num_devices}
    if None in given:
        together = prod(size or 1 for size in given)
        fewer = {num_devices >> bits for bits in range(num_devices.bit_length())}
        fewer |= {1 << bits for bits in range((num_devices - 1).bit_length())}
        fewer.update(round_numbers(num_devices))
        # where no power of two divides the heads, they still divide evenly over fewer devices
        odd = [n for n in divisors(shape.num_heads) if n % 2 and n > 1]
        fewer.update(n * times for n in odd for times in round_numbers(num_devices // n))
        numbers |= fewer | {n // together * together for n in fewer}
    found: list[Layout] = []
    for number in sorted(numbers - {0}, reverse=True):
        with suppress(ConfigError):
            found += layouts(number, shape, **sizes)
    return found or layouts(num_devices, shape, **sizes)


def round_numbers(number: int) -> list[int]:
    """A number, and the largest multiples of 2, 4, 8 ... below it, falling: 13, 12 and 8. An odd
    one has those of the number before it, which has more divisors."""
    return sorted({number >> b << b for b in range(number.bit_length())}, reverse=True)


def rooms_of(problem: Problem, *, least: int, below: int | None = None) -> Iterator[Room]:
    """Every layout and way to deal of a problem, with chunks of at least `least` and
    less than `below` tokens per device. Raises ConfigError where there is no layout."""
    lens, model = problem.seq_lens, problem.model
    mean_keys, longest = mean_attended_keys(lens), max(lens)
    cuts: dict[int, tuple[int, ...]] = {}
    found = idle_layouts(
        problem.num_devices, model.shape, dp=problem.dp, sp=problem.sp, pp=problem.pp,
        gathers=True,
    )  # fmt: skip
    larger = {layout for layout in found if model.shape.num_heads % layout.sp}
    for layout in found:
        if layout.dp > len(lens):
            continue
        if layout.pp not in cuts:
            cuts[layout.pp] = cut_layers(model, layout.pp, mean_keys)
        sizes = chunk_sizes(layout, longest, least=least, below=below)
        for balance in ways_to_deal(layout, len(lens)):
            yield Room(
                layout=layout, stages=cuts[layout.pp], balance=balance, sizes=sizes,
                longest_tokens=longest, offload=problem.offload,
                gathers=layout in larger and len(larger) < len(found),
            )  # fmt: skip


def ways_to_deal(layout: Layout, num_sequences: int) -> tuple[Balance, ...]:
    """The ways to deal that differ."""
    if layout.dp in (1, num_sequences):
        return ("none",)
    return ("none", "tokens", "time")

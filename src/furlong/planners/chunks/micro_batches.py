"""Plans of whole sequences on one stage: every chunk runs forward and backward before the next.

What data parallelism, Ulysses and Skrull have in common. A device holds one chunk at a time, so its
memory says how many tokens that may have; checkpointed layers buy more tokens with time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from furlong.cost.memory.plan_memory import PlanMemory
from furlong.cost.model import CostModel
from furlong.errors import ConfigError
from furlong.plan.values import (
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Place,
    Reduce,
    Slice,
)
from furlong.units import count_words, format_bytes


def chunk_by_chunk(
    seq_lens: Sequence[int],
    replicas: Sequence[Sequence[Chunk]],
    *,
    num_layers: int,
    sp_size: int = 1,
    recompute_layers: int = 0,
    regathers: bool = False,
) -> ChunkPlan:
    """The plan, not checked yet; replica d is rank d. `recompute_layers`: that many first layers
    are checkpointed, each by its own input. `regathers`: as the plan says it; the replicas have
    equally many chunks then."""
    chunks: list[Chunk] = []
    lists: list[tuple[Action, ...]] = []
    for own in replicas:
        actions: list[Action] = []
        for chunk in range(len(chunks), len(chunks) + len(own)):
            actions += Forward(chunk, 0, "all", recompute_layers), Backward(chunk, 0)
        chunks += own
        lists.append((*actions, Reduce(0)))
    return ChunkPlan(
        seq_lens=tuple(seq_lens), chunks=tuple(chunks), stages=(num_layers,), actions=tuple(lists),
        sp_size=sp_size, regathers=regathers,
    )  # fmt: skip


def peak_bytes(
    model: CostModel,
    device_tokens: int,
    *,
    dp_size: int,
    sp_size: int,
    recompute_layers: int,
    place_size: int | None = None,
) -> int:
    """Bytes that a device needs with `device_tokens` tokens at a time, of slices that are sharded
    over all of the pool, or (`place_size`) over so many processes each."""
    return _peak_bytes(
        model.memory(), device_tokens, dp_size, sp_size, recompute_layers, place_size
    )


def _peak_bytes(
    memory: PlanMemory,
    device_tokens: int,
    dp_size: int,
    sp_size: int,
    recompute_layers: int,
    place_size: int | None,
) -> int:
    size = sp_size if place_size is None else place_size
    firsts, num_tokens = range(0, sp_size, size), device_tokens * size
    chunk = Chunk(tuple(Slice(i, 0, num_tokens, Place(at, size)) for i, at in enumerate(firsts)))
    num_layers = memory.shape.num_layers
    plan = chunk_by_chunk(
        (num_tokens,) * len(firsts), [[chunk]], num_layers=num_layers, sp_size=sp_size,
        recompute_layers=recompute_layers,
    )  # fmt: skip
    # the other replicas share the state; one that runs is enough
    plan = replace(plan, actions=plan.actions * dp_size)
    return max(memory.peak_bytes_of_actions(plan, 0))


def fitting_tokens(
    model: CostModel,
    budget_bytes: int,
    *,
    dp_size: int,
    sp_size: int,
    recompute_layers: int = 0,
    place_size: int | None = None,
) -> int:
    """Most tokens that a device can hold at a time (Skrull's Eq. 12); 0 where none fits. The sizes
    are those of `peak_bytes`."""
    memory = model.memory(budget_bytes)
    return _fitting_tokens(memory, dp_size, sp_size, recompute_layers, place_size)


@lru_cache(maxsize=4096)
def _fitting_tokens(
    memory: PlanMemory, dp_size: int, sp_size: int, recompute_layers: int, place_size: int | None
) -> int:
    """Kept from batch to batch, which do not change it."""

    def left(num_tokens: int) -> int:
        return memory.device_budget_bytes - _peak_bytes(
            memory, num_tokens, dp_size, sp_size, recompute_layers, place_size
        )

    low, left_low = 1, left(1)
    if left_low < 0:
        return 0
    high = 1024
    while (left_high := left(high)) >= 0:
        low, left_low, high = high, left_high, 2 * high
    while high - low > 1:
        # bytes grow on straight lines: where this one meets the budget, and one token beyond
        guess = low + (high - low) * left_low // (left_low - left_high)
        for middle in (guess, guess + 1, (low + high) // 2):
            if low < middle < high:
                left_middle = left(middle)
                if left_middle >= 0:
                    low, left_low = middle, left_middle
                else:
                    high, left_high = middle, left_middle
    return low


def recompute_choices(num_layers: int) -> list[int]:
    """Numbers of recomputed layers that are tried: none, all, and eighths between them."""
    return sorted({round(num_layers * eighth / 8) for eighth in range(9)})


def does_not_fit(
    seq_lens: Sequence[int],
    model: CostModel,
    budget_bytes: int,
    *,
    dp_size: int,
    sp_size: int,
    recompute_layers: int,
    device_tokens: int | None = None,
) -> ConfigError:
    """The error for a longest sequence, or a wanted number of tokens, that is too much."""
    layout = {"dp_size": dp_size, "sp_size": sp_size, "recompute_layers": recompute_layers}
    fitting = fitting_tokens(model, budget_bytes, **layout)
    seq_id = max(range(len(seq_lens)), key=seq_lens.__getitem__)
    needed = -(-seq_lens[seq_id] // sp_size) if device_tokens is None else device_tokens
    each = f", {needed:,} on each of {sp_size} devices" if sp_size > 1 else " on one device"
    given = f"sequence {seq_id} of {count_words(seq_lens[seq_id], 'token')}{each}"
    ways = [f"give each device {format_bytes(peak_bytes(model, needed, **layout))}"]
    if device_tokens is not None:
        given = f"{device_tokens:,} tokens on a device at a time"
        ways.append(f"ask for {fitting:,} tokens")
    elif fitting:
        least, num_heads = -(-seq_lens[seq_id] // fitting), model.shape.num_heads
        # Ulysses divides the heads; beyond their number it takes another way to share a sequence
        size = next((n for n in range(least, num_heads + 1) if num_heads % n == 0), least)
        ways.append(f"spread a sequence over {size} devices")
    return ConfigError(
        given=given,
        required=f"at most {count_words(fitting, 'token')} on a device, with {recompute_layers} of "
        f"{count_words(model.shape.num_layers, 'layer')} recomputed",
        source=f"a budget of {format_bytes(budget_bytes)} per device",
        change=", ".join(ways) + ", or cut the sequence",
    )

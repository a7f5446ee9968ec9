"""The candidates of the search of `auto`: all values of the dials that may be worth a try.

Dials that are given hold. What is left out needs as much memory as another candidate and takes more
time, or has more cells than can be walked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from furlong.cost.model import CostModel
from furlong.errors import ConfigError
from furlong.plan.plan import ONE_DEVICE, Keep, Layout, Tier, Tiers
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import stages_of
from furlong.units import count_words

SMALLEST_CHUNK, LARGEST_CHUNK = 64, 65_536
KEEPS: tuple[Keep, ...] = ("attention", "kv", "input")
"""The keeps without a graph, of which the first takes least work and the last least memory."""


@dataclass(frozen=True)
class Space:
    """A model, a batch, a layout, and the dials that are given."""

    model: CostModel
    seq_lens: Sequence[int]
    """Sequences of the steps whose time is compared."""
    sequences_per_step: int
    longest: int
    """Tokens of the longest sequence, which must fit."""
    given: Mapping[str, Any] = field(default_factory=dict)
    most_chunks: int = 512
    """Most chunks of the longest sequence."""
    most_cells: int = 2048
    """Most cells of the longest sequence, layer-first: more take longer to walk than all else."""
    layout: Layout = ONE_DEVICE
    stages: tuple[int, ...] = ()
    """Layers of each stage of a pipeline; empty without one."""
    mean_keys: float = 0.0
    """Keys that a token of the data attends on average: pipelines are cut for them."""


def sizes(space: Space) -> list[int]:
    """Chunk sizes: the given one, or powers of two of tokens per process of a pool, up to one that
    holds the longest sequence."""
    if "size" in space.given:
        return [space.given["size"]]
    sp_size = space.layout.sp
    found = [SMALLEST_CHUNK * sp_size]
    while found[-1] < min(space.longest, LARGEST_CHUNK * sp_size):
        found.append(2 * found[-1])
    few = [size for size in found if space.longest <= space.most_chunks * size]
    return few or found[-1:]


def options_of(space: Space, size: int, lower: Sequence[Tier]) -> Iterator[ChunkOptions]:
    """All options with chunks of one size that may be worth a try."""
    given, num_layers = space.given, space.model.shape.num_layers
    num_chunks = -(-space.longest // size)
    seen: set[ChunkOptions] = set()
    for order in _orders(space, num_chunks):
        for keep, num_retained in _kept(space, num_chunks, layer_first=bool(order)):
            is_chunk_first = order.get("stage_layers", 0) >= num_layers and keep != "input"
            if is_chunk_first and "order" not in given and "stage_layers" not in given:
                continue
            values = {"size": size, "keep": keep, "num_retained": num_retained, **order}
            plain = ChunkOptions(**(values | {k: v for k, v in given.items() if k != "tier"}))
            stages = space.stages or stages_of(num_layers, plain)
            for tiers in _tiers(plain, num_chunks, stages, given, lower):
                options = replace(plain, tier=tiers)
                if options not in seen:
                    seen.add(options)
                    yield options


def _orders(space: Space, num_chunks: int) -> Iterator[dict[str, Any]]:
    """Orders: chunk-first, then layer-first with stages of 1, 2, 4, ... layers. One stage of all
    layers is chunk-first, but for keep=input, whose K,V it need not rebuild. A pipeline, with its
    own stages, is chunk-first."""
    given, num_layers = space.given, space.model.shape.num_layers
    order = given.get("order", "layer-first" if "stage_layers" in given else None)
    if order != "layer-first":
        yield {}
    if order == "chunk-first" or space.stages:
        return
    heights = [given["stage_layers"]] if "stage_layers" in given else [
        *(1 << bits for bits in range((num_layers - 1).bit_length())), num_layers
    ]  # fmt: skip
    if space.model.shape.whole:
        heights = [height for height in heights if height >= num_layers]
        if not heights:
            raise _not_in_stages(space, given["stage_layers"])
    for height in heights:
        is_small = num_chunks * -(-num_layers // height) <= space.most_cells
        if is_small or (order == "layer-first" and height == heights[-1]):
            yield {"order": "layer-first", "stage_layers": height}


def _not_in_stages(space: Space, height: int) -> ConfigError:
    shape = space.model.shape
    return ConfigError(
        given=f"stages of {count_words(height, 'layer')}, for a {shape.family},"
        f" which {shape.whole}",
        required="one stage of all layers: its decoder is not divided between them",
        source="chunks.order, chunks.stage_layers and the model's layers",
        change="set chunks.order to chunk-first",
    )


def _kept(space: Space, num_chunks: int, *, layer_first: bool) -> Iterator[tuple[Keep, int]]:
    """(keep, num_retained): a cell at a time has its graph anyway, so one is retained for nothing;
    layer-first retains at the last stage, where more are worth little."""
    given = space.given
    most = num_chunks - 1
    numbers = [1] if layer_first else [
        1, *(1 << bits for bits in range(2, most.bit_length() + 1, 2) if 1 << bits <= most)
    ]  # fmt: skip
    if "num_retained" in given:
        numbers = [given["num_retained"]]
    if num_chunks == 1 and not layer_first:
        yield given.get("keep", "attention"), numbers[0]
        return
    keeps: Sequence[Keep] = [given["keep"]] if "keep" in given else ("all", *KEEPS)
    for keep in keeps:
        for number in numbers[:1] if keep == "all" else numbers:
            yield keep, number


def _tiers(
    options: ChunkOptions,
    num_chunks: int,
    stages: Sequence[int],
    given: Mapping[str, Any],
    lower: Sequence[Tier],
) -> Iterator[Tiers]:
    """The given tiers; else all on the device, or what is written and read least often first:
    attention, stage inputs, then K,V. Graphs stay: to recompute them moves fewer bytes."""
    if "tier" in given:
        yield ChunkOptions(tier=given["tier"]).tiers
        return
    yield Tiers()
    kinds = []
    if options.keep == "attention" and (num_chunks > 1 or len(stages) > 1):
        kinds.append("attention")
    if options.keep != "all" and len(stages) > 1:
        kinds.append("inputs")
    if num_chunks > 1:
        kinds.append("kv")
    make: Callable[..., Tiers] = Tiers
    for tier in lower:
        for count in range(1, len(kinds) + 1):
            yield make(**dict.fromkeys(kinds[:count], tier))
        if kinds and kinds[-1] == "kv" and len(kinds) > 1:
            yield make(kv=tier)
    if len(lower) > 1 and len(kinds) > 1:
        yield make(**{kinds[0]: "disk"}, **dict.fromkeys(kinds[1:], "host"))

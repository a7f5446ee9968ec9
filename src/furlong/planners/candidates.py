"""Candidates of a search: all chunk options that may be worth a try, with estimates.

    for candidate in chunks(space):                     # ascending in candidate.estimate_s
        candidate.options, candidate.plan_of(seq_lens)

Two formulas rate a candidate without a simulation. `TimeEstimate` estimates its seconds.
`ByteBound` is a lower bound on the bytes of the longest sequence. Options that the user has given
are fixed.

Some options are left out: those that are dominated (another candidate takes less time and no more
memory), and those whose plans have more (chunk, stage) cells than can be simulated. Options with
keep="all" (whole graphs) are tried layer-first (each stage for all chunks before the next stage)
only if no chunk-first plan with them fits. Both orders take as long, but layer-first holds
gradients of K,V of fewer layers at a time.

With sampling, only randomly drawn chunks have a backward. Times are then predicted for one draw,
the same for all candidates. Memory must hold the plan without sampling, as a draw may include all
chunks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from operator import methodcaller
from typing import Any

import numpy as np

from furlong.cost.machine import EFFICIENCIES
from furlong.cost.memory import TOKEN_BYTES, StageBytes, first_backward
from furlong.cost.model import CostModel
from furlong.cost.seconds import Array, Hidden, PassPart, chunk_table, pass_parts
from furlong.cost.shape import ModelShape
from furlong.cost.training import RankWeights
from furlong.errors import ConfigError
from furlong.plan.passes import passes
from furlong.plan.plan import (
    ON_DEVICE,
    ONE_DEVICE,
    TARGETS,
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Keep,
    Layout,
    Offload,
    OffloadTarget,
    RebuildKV,
    Recompute,
    Slice,
)
from furlong.plan.segments import NUM_HOT, row_step, segment_tokens
from furlong.planners.chunks import Groups, group_chunks, shard_all
from furlong.planners.layouts import first_alike
from furlong.planners.options import SMALLEST_CHUNK, ChunkOptions
from furlong.planners.orders import plan_two_phases, schedule_group, stages_of, walk_groups
from furlong.planners.question import Candidate, Question, Space
from furlong.simulate.predict import Needs, most_of, needs_of
from furlong.units import count_words

CHUNKS = "chunks"
"""Name of plans with free chunk options, as opposed to those of a published system."""
LARGEST_CHUNK = 65_536
_FEW_CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 17, 20, 24)
"""Numbers of equal chunks per replica and step for which a chunk size is tried."""
_RETAINED = (2, 4, 6, 8, 16, 64, 256)
"""Numbers of retained chunks that are tried besides 1; they include ChunkFlow's."""
_FILLED = 0.97
"""Share of a chunk that packed sequences fill."""
PAIRS = "two phases"
"""Name of plans with a pair of sequences in each call."""
KEEPS: tuple[Keep, ...] = ("attention", "kv", "input")
"""Values of `keep` without a graph, by rising work and falling memory."""


def chunks(asked: Space, method: str = CHUNKS, **fixed: Any) -> Iterator[Candidate]:
    """Yield candidates with chunk options for the layout of `asked`, by rising estimated time.

    A published system calls this with its name as `method`, and with the options of its plans as
    `fixed`, such as keep="kv". All other options are tried. Nothing is yielded if the user has set
    one of the `fixed` options to another value.
    """
    question, layout = asked.question, asked.layout
    if any(question.options.get(name, value) != value for name, value in fixed.items()):
        return
    space = asked
    if fixed:
        space = replace(asked, question=replace(question, given={**question.given, **fixed}))
    given, found = space.question.options, []
    if layout.pp > 1 and given.get("order") == "layer-first":
        return
    for size in sizes(space, space.most_tokens):
        cut = ChunkOptions(size=size, hybrid=given.get("hybrid", True))
        longest, bounds = longest_step(space, size), bounds_of(space, size)
        is_whole, is_one_chunk = False, space.question.longest <= size
        least: dict[ChunkOptions, Needs] = {}
        for options in options_of(space, size):
            if is_whole and options.keep == "all" and options.order == "layer-first":
                continue
            needs = least[options] = most_of(bound.needs(options) for bound in bounds)
            has_graphs = options.keep == "all" or (is_one_chunk and options.order == "chunk-first")
            if options.offloading == ON_DEVICE and has_graphs:
                is_whole = is_whole or question.limits.hold(needs)
        estimate, fastest_s = None, inf
        if any(map(question.limits.hold, least.values())):
            groups = [group for lens in space.busiest for group in group_chunks(lens, cut)]
            estimate = TimeEstimate(
                space.model, shard_all(groups, layout.sp), sp_size=layout.sp, stages=space.stages,
                num_steps=len(space.busiest) / max(1.0, question.weight),
            )  # fmt: skip
            # without recomputation: a lower bound for all options with this size
            fastest_s = question.weight * estimate.seconds(ChunkOptions(size=size, keep="all"))
        for options, needs in least.items():
            about_s = fastest_s
            if estimate and fastest_s < space.beat_s and question.limits.hold(needs):
                about_s = question.weight * estimate.seconds(options)
            plan_of = space.plan_of(options)
            made = Candidate(method, asked, options, about_s, plan_of, needs, longest)
            found.append(replace(made, unchecked=space.plan_of(options, checked=False)))
    found.sort(key=lambda c: (c.estimate_s, len(c.options.offloading.targets), c.least))
    yield from found


def pairs(space: Space) -> Iterator[Candidate]:
    """Yield the candidates of a run on pairs of sequences, the fastest first. Each call runs a pair
    in two phases: all forwards, the caller's loss, all backwards.

    Between the phases memory holds the tensors of both sequences that `keep` names.
    keep="attention" needs most memory and recomputes no attention; "kv" needs less and recomputes
    attention; "input" needs least and recomputes all forwards. This holds for any lengths.

    All candidates are simulated, as there are few, with the two calls that may need most memory:
    the one with most tokens and the one with the longest sequence. The first depends on chunk size:
    the tokens of a prompt that both sequences share count once if the prompt fills a chunk.
    """
    question, model, num_layers = space.question, space.model, space.model.shape.num_layers
    given, found = question.options, []
    keeps: Sequence[Keep] = [given["keep"]] if "keep" in given else KEEPS
    for size, keep in product(sizes(space), keeps):
        plain = ChunkOptions(size=size, keep=keep, num_retained=0)
        largest = dict.fromkeys(
            max(question.calls, key=key).seq_lens
            for key in (methodcaller("num_tokens", size), lambda call: max(call.seq_lens))
        )
        for offload in _offload(space, plain, len(question.calls[0].seq_lens), (num_layers,)):
            options = replace(plain, offload=offload)
            plan_of = partial(_plan_call, question, options)
            walked = {lens: needs_of(model.memory().curve(plan_of(lens), 0)) for lens in largest}
            most = max(walked, key=lambda lens: question.limits.fullest(walked[lens]))
            seconds = inf
            if question.limits.hold(least := walked[most]):
                seconds = space.busiest_s(plan_of)
            found.append(Candidate(PAIRS, space, options, seconds, plan_of, least, most))
    yield from sorted(found, key=lambda c: (c.estimate_s, len(c.options.offloading.targets)))


def _plan_call(question: Question, options: ChunkOptions, seq_lens: Sequence[int]) -> ChunkPlan:
    lens, forks = question.call_of(seq_lens).planned(options.size)
    return plan_two_phases(lens, options, num_layers=question.model.shape.num_layers, forks=forks)


def bounds_of(space: Space, size: int) -> list[ByteBound]:
    """Return lower bounds on the bytes that a device needs in chunks of `size` tokens. Any of them
    may be the largest, so a plan must satisfy all:

    - without a pipeline: one for the longest sequence, and one for a later sequence, which runs
      when all gradients are in memory
    - without a pipeline but with `reshard`, which runs each stage for the whole step: one for the
      replica with the longest sequence, and one for the replica with most tokens
    - in a pipeline: one for the first stage, and one for the last
    """
    layout, stages = space.layout, space.stages
    if space.question.given.get("reshard") and not stages:
        replicas = space.whole or [own for step in space.dealt for own in step]
        return [
            ByteBound(space.model, max(own), size, layout=layout, beside_tokens=sum(own) - max(own))
            for own in dict.fromkeys((max(replicas, key=max), max(replicas, key=sum)))
        ]
    longest, *others = longest_step(space, size)
    share = -longest % size and others.pop(0) if others else 0
    make = partial(ByteBound, space.model, longest, size, share, layout=layout, stages=stages)
    if not stages:
        more = [ByteBound(space.model, n, size, layout=layout, has_gradients=True) for n in others]
        return [make(), *more]
    return [make(ahead_tokens=sum(others) // layout.sp), make(stage=len(stages) - 1)]


def least_s(space: Space) -> float:
    """Return a lower bound on the mean seconds of a step in a layout, for any chunks and sharding:
    all tokens of the busiest replica in one chunk, at best efficiency and without any wait."""
    sp_size, hardware = space.layout.sp, space.model.hardware
    endless = {
        name: replace(getattr(hardware, name), half_tokens=0.0, square=1.0, packed=1.0)
        for name in EFFICIENCIES
    }
    hardware = replace(hardware, **endless, slice_launch_s=0.0, tile_tokens=0)
    free: tuple[Hidden, ...] = ("all-to-all",)
    model, total_s = replace(space.model, hardware=hardware), 0.0
    for lens in space.busiest:
        slices = tuple(Slice(i, 0, n) for i, n in enumerate(lens))
        seconds = model.cell_seconds(
            shard_all([[Chunk(slices)]], sp_size)[0], space.stages or (model.shape.num_layers,),
            sp_size=sp_size, free=free,
        )  # fmt: skip
        total_s += float(seconds.sum(axis=(1, 2)).max())
    return total_s * space.question.weight


def sizes(space: Space, step_tokens: int = 0) -> list[int]:
    """Return the chunk sizes to try: the size that the user has given, or else two series.

    The first series is powers of two (tokens per process), up to one that holds the longest
    sequence and `step_tokens`, the tokens of the replica with most. The second is sizes that cut
    `step_tokens` evenly into few chunks: a short last chunk takes nearly as long as a full one, and
    a chunk that no step fills wastes memory.
    """
    question, sp_size = space.question, space.layout.sp
    if "size" in question.given:
        return [question.given["size"]]
    unit, largest = SMALLEST_CHUNK * sp_size, LARGEST_CHUNK * sp_size
    found = [unit]
    while found[-1] < min(max(question.longest, step_tokens), largest):
        found.append(2 * found[-1])
    few = [size for size in found if question.longest <= question.most_chunks * size]
    few = few or found[-1:]
    unit = max(unit, row_step(space.model.device_type, sp_size))
    even = [unit * math.ceil(step_tokens / (_FILLED * unit * n)) for n in reversed(_FEW_CHUNKS)]
    even = [size for size in even if few[0] <= size <= largest]
    if space.layout == ONE_DEVICE:
        return sorted({*few, *even[-3:]})
    return [size for size in few if not even or size < even[0]] + even


def options_of(space: Space, size: int) -> Iterator[ChunkOptions]:
    """Yield all chunk options with chunk size `size` that may be worth a try."""
    given, num_layers = space.question.options, space.model.shape.num_layers
    num_chunks = -(-space.question.longest // size)
    seen: set[ChunkOptions] = set()
    for order in _orders(space, num_chunks):
        for keep, num_retained in _kept(space, num_chunks, layer_first=bool(order)):
            is_chunk_first = order.get("stage_layers", 0) >= num_layers and keep != "input"
            if is_chunk_first and "order" not in given and "stage_layers" not in given:
                continue
            values = {"size": size, "keep": keep, "num_retained": num_retained, **order}
            plain = ChunkOptions(**(values | {k: v for k, v in given.items() if k != "offload"}))
            stages = space.stages or stages_of(num_layers, plain)
            for offload in _offload(space, plain, num_chunks, stages):
                options = replace(plain, offload=offload)
                if options not in seen:
                    seen.add(options)
                    yield options


def _orders(space: Space, num_chunks: int) -> Iterator[dict[str, Any]]:
    """Yield one dict of options for each order to try.

    First comes {}, which is chunk-first. Then come layer-first orders, {"order": "layer-first",
    "stage_layers": n}, for n = 1, 2, 4, ... and the number of all layers. With all layers in one
    stage, layer-first runs the same actions as chunk-first; only with keep="input" it stores K,V,
    where chunk-first rebuilds them. In a pipeline, which has stages already, only {} is yielded.
    """
    given, num_layers = space.question.options, space.model.shape.num_layers
    order, reshards = given.get("order"), given.get("reshard", False)
    if "stage_layers" in given or (reshards and not space.stages):
        order = order or "layer-first"
    if order != "layer-first":
        yield {}
    if order == "chunk-first" or space.stages:
        return
    heights = [given["stage_layers"]] if "stage_layers" in given else [
        *(1 << bits for bits in range((num_layers - 1).bit_length())), num_layers
    ]  # fmt: skip
    if space.model.shape.whole or reshards:
        # all layers if weights are kept, fewer if weights of stages are freed
        heights = [height for height in heights if (height < num_layers) == reshards]
        if (space.model.shape.whole and reshards) or not heights:
            raise _not_in_stages(space, reshards)
    for height in heights:
        is_small = num_chunks * -(-num_layers // height) <= space.question.most_cells
        if is_small or (order == "layer-first" and height == heights[-1]):
            yield {"order": "layer-first", "stage_layers": height}


def _not_in_stages(space: Space, reshards: bool) -> ConfigError:
    shape, height = space.model.shape, space.question.options.get("stage_layers", 1)
    kind = f"a {shape.family}, which {shape.whole}" if shape.whole else f"a {shape.family}"
    keys = "chunks.order and chunks.stage_layers"
    is_high = reshards and 1 < shape.num_layers <= height and not shape.whole
    ways = ["remove chunks.stage_layers"] if is_high else [] if reshards else [f"remove {keys}"]
    key, way = "parallel.reshard", "set parallel.reshard to false"
    if space.model.training.offload_weights:
        key, way = "offload", "remove weights from offload"
    return ConfigError(
        given=f"{f'{key} and ' * reshards}stages of {count_words(height, 'layer')}, for"
        f" {kind} of {count_words(shape.num_layers, 'layer')}",
        required="one stage of all layers: its decoder is not divided between them"
        if shape.whole
        else "two stages at least, of which one is freed while another one computes",
        source=f"{f'{key}, ' * reshards}{keys}, and the model's layers",
        change=" or ".join([*ways, *[way] * reshards]),
    )


def _kept(space: Space, num_chunks: int, *, layer_first: bool) -> Iterator[tuple[Keep, int]]:
    """Yield the pairs (keep, num_retained) to try: the tensors that chunks keep, and the number of
    last chunks of a sequence that keep their whole graph instead. If the user has given no number,
    at least one chunk is retained, at no cost: the running chunk has a graph anyway. Layer-first
    tries no more than one, since it retains graphs at the last stage only, and a second one gains
    little there."""
    given = space.question.options
    numbers = [1] if layer_first else [1, *(n for n in _RETAINED if n < num_chunks)]
    if "num_retained" in given:
        numbers = [given["num_retained"]]
    if num_chunks == 1 and not layer_first:
        yield given.get("keep", "attention"), numbers[0]
        return
    keeps: Sequence[Keep] = [given["keep"]] if "keep" in given else ("all", *KEEPS)
    for keep in keeps:
        for number in numbers[:1] if keep == "all" else numbers:
            yield keep, number


def _offload(
    space: Space, options: ChunkOptions, num_chunks: int, stages: Sequence[int]
) -> Iterator[Offload]:
    """Yield the offloads to try. If the user has given an offload, it is the only one. Otherwise no
    offload comes first, then offloads of one, two or three kinds of tensors. Kinds that cause less
    traffic are offloaded first: attention outputs, then stage inputs, then K,V; K,V are also tried
    alone. Graphs are never offloaded, since recomputing them moves fewer bytes."""
    given, lower = space.question.given, space.question.limits.offload_targets
    if "offload" in given:
        yield ChunkOptions(offload=given["offload"]).offloading
        return
    yield Offload()
    kinds = []
    if options.keep == "attention" and (num_chunks > 1 or len(stages) > 1):
        kinds.append("attention")
    if options.keep != "all" and len(stages) > 1:
        kinds.append("inputs")
    if num_chunks > 1:
        kinds.append("kv")
    make: Callable[..., Offload] = Offload
    for target in lower:
        for count in range(1, len(kinds) + 1):
            yield make(**dict.fromkeys(kinds[:count], target))
        if kinds and kinds[-1] == "kv" and len(kinds) > 1:
            yield make(kv=target)
    if len(lower) > 1 and len(kinds) > 1:
        yield make(**{kinds[0]: "disk"}, **dict.fromkeys(kinds[1:], "cpu"))


def longest_step(space: Space, size: int) -> list[int]:
    """Return the sequence lengths of the step of one replica that needs most memory in chunks of
    `size` tokens, in this order:

    1. The longest sequence.
    2. A sequence that fills the rest of its last chunk, if the step has one.
    3. In a pipeline: sequences of one chunk each, as many as are in memory together with it.
       Without a pipeline, if a step has more tokens than a chunk: one more sequence, which runs
       when all gradients are in memory.
    """
    question, has_more = space.question, space.most_tokens > size
    longest, tokens = question.longest, question.size.tokens
    left = (-(-(question.size.sequences or 0) // space.layout.dp) - 1) * longest
    if tokens is not None:
        left = max(0, tokens - longest)
    others = min(-longest % size, left)
    found = [longest]
    for _ in range(len(space.stages) or 1 + has_more):
        found += [others] if others else []
        left -= others if tokens is not None else -(-others // longest) * longest
        others = min(size if space.stages else max(size, longest), left)
    return found


def count_kinds(shape: ModelShape, stages: Sequence[int]) -> tuple[Counter[int], set[int]]:
    """Return (counts, walked) for estimates that time one stage of each kind.

    Stages of one kind have equal layers, so they take equal time. The first and the last stage are
    kinds of their own: the inputs of the first are token ids, which take no memory, and the last
    has the head. `counts` is {first stage of a kind: number of stages of the kind}. `walked` is the
    set of these first stages, and of the stage after each, which sends it gradients.
    """
    alike = first_alike(shape, stages)
    # the first stage is a kind of its own: its inputs are token ids, which take no memory
    count = Counter(alike.index(kind, min(stage, 1)) for stage, kind in enumerate(alike))
    return count, {*count, *(stage + 1 for stage in count)}


class TimeEstimate:
    """Estimated seconds of a step in chunks that are cut already, for any chunk options with this
    chunk size.

    A group is the chunks of one sequence, or one packed chunk. Most chunks of a group run equal
    passes (forward, recompute, backward). Two differ: the last chunk, whose K,V no later chunk
    reads, and chunks that retain their graphs. So the actions of two or three chunks show every
    kind of pass. The cost model then sums the seconds of each kind over all chunks.
    """

    def __init__(
        self,
        model: CostModel,
        groups: Groups,
        *,
        sp_size: int = 1,
        stages: tuple[int, ...] = (),
        num_steps: float = 1,
    ) -> None:
        """Prepare estimates for the chunks of some steps (`groups`).

        `sp_size`: number of processes over which all slices are sharded. `stages`: layers of each
        stage of a pipeline. `num_steps`: number of steps that `groups` make up, in each of which
        the pipeline is filled and drained once; below 1 if `groups` are only a part of a step.
        """
        self._model, self._num_layers = model, model.shape.num_layers
        self._sp_size, self._stages, self._num_steps = sp_size, stages, num_steps
        behind = np.array([len(group) - 1 - i for group in groups for i in range(len(group))])
        order = np.argsort(behind, kind="stable")
        chunks = [chunk for group in groups for chunk in group]
        chunks = [chunks[i] for i in order]
        self._group_sizes = np.array([len(group) for group in groups])
        self._behind = behind[order]
        """Number of chunks after each one in its group, ascending."""
        # for one process: all have equal parts of each slice
        self._table = chunk_table(chunks, model.shape, 1, model.hardware.tile_tokens)
        self._tokens = sum(chunk.num_tokens for chunk in chunks) / sp_size
        self._prefix_tokens = sum(chunk.slices[0].start for chunk in chunks) / sp_size
        self._sums: dict[tuple[tuple[int, ...], int, PassPart], list[float]] = {}
        self._compute: dict[ChunkOptions, float] = {}

    def seconds(self, options: ChunkOptions) -> float:
        """Return approximately the seconds of a step: the larger of the seconds of computation and
        the seconds of copies of offloaded tensors."""
        on_device = replace(options, offload="none", sample=None)
        if on_device not in self._compute:
            self._compute[on_device] = self._compute_s(on_device)
        return max(self._compute[on_device], self._copies_s(options))

    def _compute_s(self, options: ChunkOptions) -> float:
        """Return the seconds in which all passes are computed, without copies of offloaded tensors.
        In a pipeline this includes filling, draining and waits (`_filled_s`)."""
        shape, stages = self._model.shape, self._stages
        few = replace(options, num_retained=min(options.num_retained, 2))
        some = range(2 if options.num_retained < 2 else 3)  # enough for all kinds of passes
        if stages:
            alike = first_alike(shape, stages)
            actions = [
                action
                for stage in dict.fromkeys(alike)
                for action in schedule_group(
                    some, num_retained=few.num_retained, keep=few.kept, stage=stage
                )
            ]
            passes_s = self._stage_seconds(actions, some, stages, options)
            return self._filled_s(np.array([passes_s[stage] for stage in alike]))
        stages = stages_of(self._num_layers, options)
        counts, walked = count_kinds(shape, stages)
        actions = walk_groups([some], stages, few, only=walked)
        passes_s = self._stage_seconds(actions, some, stages, options)
        return float(sum(count * passes_s[stage].sum() for stage, count in counts.items()))

    def _filled_s(self, passes_s: Array) -> float:
        """Return the seconds of a pipeline of S stages, including filling, draining and waits.

        `passes_s`: (S, 3), for each stage the seconds of all forwards, all backwards and all other
        passes. The result is the larger of two times. One is that of the slowest stage: its passes,
        and the time in which the other stages fill and drain the pipeline. The other is that of the
        last stage: its passes, and its waits for the forwards of each group of chunks.

        Forwards of a group arrive at the last stage at the pace of the slowest stage. In later
        groups of a step, the second to the S-th forward arrive later still, as each waits for a
        backward of the previous group. Recomputation waits for nothing.
        """
        num_chunks, num_groups = len(self._behind), len(self._group_sizes)
        forward_s = passes_s[:, 0] / num_chunks
        both_s = forward_s + passes_s[:, 1] / num_chunks
        flow_s = forward_s.max() - forward_s[-1]
        hops_s = np.cumsum([0.0, *np.maximum(both_s[-2::-1] - forward_s[-1], 0.0)])
        most = np.minimum(self._group_sizes, len(both_s)) - 1
        waits_s = (hops_s[most] + (self._group_sizes - 1 - most) * flow_s).mean()
        first_s = (self._group_sizes.mean() - 1) * flow_s + both_s[:-1].sum()
        waits_s *= max(0.0, num_groups - self._num_steps)
        totals_s = passes_s.sum(axis=1)
        slowest = totals_s.argmax()
        filled_s = totals_s[slowest] + self._num_steps * (both_s.sum() - both_s[slowest])
        return float(max(filled_s, totals_s[-1] + waits_s + self._num_steps * first_s))

    def _stage_seconds(
        self,
        actions: Sequence[Action],
        some: range,
        stages: tuple[int, ...],
        options: ChunkOptions,
    ) -> dict[int, Array]:
        """Return {stage: seconds of all its forwards, all its backwards and all its other passes},
        each value an array of shape (3,). `actions` lists only the actions of the chunks `some` of
        one group. The seconds of each of these chunks are summed over all chunks that run the same
        passes."""
        pieces = tuple(Chunk((Slice(0, i, i + 1),)) for i in some)
        plan = ChunkPlan((len(some),), pieces, stages, (tuple(actions),))
        # chunks are sorted by the number after them: last of a group, retained, others
        ends = np.searchsorted(self._behind, (0, 1, max(1, options.num_retained), inf)).tolist()
        firsts = {some[-1]: 0, some[-2]: 1, 0: 2}
        total: dict[int, Array] = defaultdict(lambda: np.zeros(3))
        for action, what in zip(actions, passes(plan, 0), strict=True):
            if isinstance(action, Forward | Recompute | Backward | RebuildKV):
                at = firsts[action.chunk]
                for part in pass_parts(what, stages[action.stage]):
                    sums = self._sums_of(stages, action.stage, part)
                    own_s = sums[ends[at + 1]] - sums[ends[at]]
                    kind = {Forward: 0, Backward: 1}.get(type(action), 2)
                    total[action.stage][kind] += own_s
        return total

    def _sums_of(self, stages: tuple[int, ...], stage: int, part: PassPart) -> list[float]:
        """Return the prefix sums, over chunks, of the seconds of one part of a pass at a stage."""
        key = stages, stage, part
        if key not in self._sums:
            own = self._model.stage_seconds(
                stages, stage, layout=Layout(sp=self._sp_size), ranks=(0,)
            )
            seconds = own.pass_seconds((part,), self._table)
            self._sums[key] = [0.0, *np.cumsum(seconds[0, 0]).tolist()]
        return self._sums[key]

    def _copies_s(self, options: ChunkOptions) -> float:
        """Return a lower bound on the seconds of copies of offloaded tensors: those of the busiest
        link (to CPU memory or disk) in its busier direction, without latencies."""
        cell = self._model.memory().cell((self._num_layers,), 0)
        layers = self._num_layers / max(1, len(self._stages))
        num_stages = len(stages_of(self._num_layers, options))
        offload, keep = options.offloading, options.keep
        read: dict[OffloadTarget, float] = dict.fromkeys(("none", *TARGETS), 0.0)
        written = dict(read)
        if keep == "attention":
            remembered = self._tokens * (1 - 1 / num_stages) * cell.attention(range(round(layers)))
            read[offload.attention] += remembered
            written[offload.attention] += remembered
        if keep != "all":
            delivered = self._tokens * (num_stages - 1) * cell.message
            read[offload.inputs] += 3 * delivered
            written[offload.inputs] += 2 * delivered
        if offload.kv != "none":
            attending = layers / self._num_layers
            attending *= sum(layer.attends for layer in self._model.shape.layers)
            times = {"input": 3, "kv": 3, "attention": 2, "all": 2}[keep]
            each = segment_tokens(cell.kv_layer, self._model.device_type, True)
            cold = max(0.0, self._prefix_tokens - NUM_HOT * each * len(self._behind))
            gradients = cold * attending * cell.kv_gradient_layer
            read[offload.kv] += times * self._prefix_tokens * max(0, attending - 1) * cell.kv_layer
            read[offload.kv] += gradients
            written[offload.kv] += gradients
        links = self._model.hardware.links
        return max(
            moved[target] / links.to(target).bytes_per_s
            for moved in (read, written)
            for target in TARGETS
        )


class ByteBound:
    """Lower bound on the bytes that the longest sequence alone takes, in chunks of one size.

    The bound is the maximum over these moments:

    - in the first backward of the last stage all kept tensors are in memory
    - in the second backward of the last stage the gradients of this stage are in memory, too
    - in a backward of the first of several layer-first stages the gradients of all stages are
      in memory
    - with offloaded K,V, in a later backward of the last stage, one more segment (block of tokens)
      of K,V gradients is on the device
    """

    def __init__(
        self,
        model: CostModel,
        longest: int,
        size: int,
        others: int = 0,
        *,
        layout: Layout = ONE_DEVICE,
        stages: tuple[int, ...] = (),
        stage: int = 0,
        ahead_tokens: int = 0,
        beside_tokens: int = 0,
        has_gradients: bool = False,
    ) -> None:
        """Prepare bounds for `longest` tokens in chunks of `size` tokens.

        Args:
            others: Tokens of short sequences that share the last chunk of the longest sequence.
            stages: Layers of each stage of a pipeline; empty without a pipeline.
            stage: The stage of the pipeline that the device runs.
            ahead_tokens: Tokens of other sequences that have run forward on the stage before.
            beside_tokens: Tokens of other sequences in the replica's step, if each stage runs for
                the whole step (`reshard`).
            has_gradients: Whether all gradients, made by an earlier chunk, are in memory from the
                start.
        """
        memory, shape, sp_size = model.memory(), model.shape, layout.sp
        self._memory, self._size = memory, max(1, size // sp_size)
        self._stages, self._stage, self._ahead_tokens = stages, stage, ahead_tokens
        group_size = max(1, layout.dp * sp_size // model.training.replicate)
        self._beside_tokens = beside_tokens / sp_size
        self._has_gradients = has_gradients
        self._cells: dict[tuple[int, ...], StageBytes] = {}
        self._num_chunks = -(-longest // size)
        self._stored = (self._num_chunks - 1) * self._size
        self._last = (longest - (self._num_chunks - 1) * size + others) // sp_size
        own = stages or (shape.num_layers,)
        first = sum(own[:stage])
        self._num_layers = own[stage]
        self._windows = tuple(
            None if window is None else -(-window // sp_size)
            for window in shape.windows[first : first + self._num_layers]
        )
        self._attends = tuple(layer.attends for layer in shape.layers[first:][: self._num_layers])
        """Whether each layer has attention."""
        self._kinds: dict[int, Counter[int | None]] = {}
        """Number of last layers -> {attention window: number of these layers with it}."""
        self._weights = partial(RankWeights, model.training, shape, group_size=group_size)
        held = self._weights(stages=own, held=frozenset((stage,)))
        self._host_bytes = float(held.host_bytes * held.is_away)
        self._share = 0.0 if held.is_away else 1 / group_size
        """Share of the gradients of a stage that a Reduce leaves on the device."""
        self._made: dict[tuple[tuple[int, ...], int], list[float]] = {}
        self._static_bytes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        kv_layer = self._cell((self._num_layers,)).kv_layer
        self._segment = segment_tokens(kv_layer, memory.device_type, True)
        """Tokens of a segment of offloaded K,V."""

    def _cell(self, stages: tuple[int, ...]) -> StageBytes:
        """Return the sizes of a chunk's tensors at the last of `stages` or, in a pipeline, at the
        device's stage."""
        if stages not in self._cells:
            whole, stage = (self._stages, self._stage) if self._stages else (stages, -1)
            self._cells[stages] = self._memory.cell(whole, stage % len(whole))
        return self._cells[stages]

    def _gradients(self, stages: tuple[int, ...], stage: int) -> list[float]:
        """Return the bytes of gradients that a stage's first Backward allocates: before its layers,
        of each layer, and after them."""
        key = stages, stage
        if key not in self._made:
            held = frozenset((stage,) if self._stages else range(len(stages)))
            own = self._weights(stages=stages, held=held)
            self._made[key] = own.gradients(stage, self._num_chunks)
        return self._made[key]

    def _static(self, stages: tuple[int, ...], *whole: int) -> int:
        """Return the bytes in use throughout a step, including buffers of collectives. `whole`:
        with `reshard`, the two stages whose weights are gathered at this time, so that all others
        are freed; without `reshard` none is given, and all weights are in memory."""
        key = stages, whole
        if key not in self._static_bytes:
            held = frozenset((self._stage,) if self._stages else range(len(stages)))
            own = self._weights(stages=self._stages or stages, held=held)
            found = own.state.weights + own.state.optimizer + self._memory.overhead_bytes
            found += own.collective_bytes(reuses=len(held) == 1, regathers=bool(whole))
            found += own.gathered_bytes
            self._static_bytes[key] = found - (own.freed_bytes(*whole) if whole else 0)
        return self._static_bytes[key]

    def needs(self, options: ChunkOptions) -> Needs:
        """Return a lower bound on the bytes in each memory for plans with these options."""
        moments = [self._at(options, self._last, done=0)]
        if self._num_chunks > 1:
            moments.append(self._at(options, self._size, done=self._last))
        if not self._stages and len(stages_of(self._num_layers, options)) > 1:
            moments.append(self._at_first_stage(options))
        segment = self._segment
        if (
            options.offloading.kv != "none"
            and self._stored >= 5 * segment
            and segment % self._size == 0
        ):
            # a chunk at the border of two segments has one more segment of gradients on the device
            done = self._last + -(-2 * segment // self._size) * self._size
            moments.append(self._at(options, self._size, done=done, num_hot=NUM_HOT + 1))
        return most_of(moments)

    def _at(
        self, options: ChunkOptions, current: int, *, done: int, num_hot: int = NUM_HOT
    ) -> Needs:
        """Return the bytes in each memory at one moment: during the backward of a chunk of
        `current` tokens at the last stage. `done`: tokens whose backward at this stage has run
        before. `num_hot`: if K,V are offloaded, number of newest segments (blocks of tokens) whose
        K,V gradients stay on the device."""
        num_layers, tokens = self._num_layers, self._stored + self._last
        stages = stages_of(num_layers, options)
        cell, num_below = self._cell(stages), len(stages) - 1
        offload, keep, height = options.offloading, options.keep, stages[-1]
        used: dict[OffloadTarget, float] = {"none": 0.0, "cpu": self._host_bytes, "disk": 0.0}
        stage = (self._stages, self._stage) if self._stages else (stages, num_below)
        gradients, made = self._gradients(*stage), 0.0
        is_first = not (done or self._has_gradients)
        there = self._gradients((num_layers,), 0) if self._has_gradients else gradients
        is_walk = options.reshard and not self._stages
        used["none"] = self._static(stages, *((num_below - 1, num_below) * is_walk))
        used["none"] += there[-1] if is_first else sum(there)
        used["none"] += (tokens - done) * TOKEN_BYTES
        if keep == "all":
            whole = self._cell((num_layers,))
            again = min(num_layers, options.recompute_layers * len(stages))
            graphs = sum(sorted(whole.graph_layers)[: num_layers - again])
            used[offload.graphs] += (tokens - done) * (graphs + again * whole.message)
            below = sorted(whole.graph_layers)[: num_layers - height - again]
            used[offload.graphs] += self._beside_tokens * sum(below)
            is_here = offload.graphs == "none"
        else:
            num_done = -(-done // self._size)
            num_retained = max(0, min(options.num_retained, self._num_chunks) - num_done)
            graph_tokens = current + max(0, num_retained - 1) * self._size
            graph = cell.graph(min(options.recompute_layers, height))
            used[offload.graphs if num_retained > 0 else "none"] += graph_tokens * graph
            is_here = offload.graphs == "none" or num_retained <= 0
            if num_below:
                # inputs of cells with a graph are its leaves
                delivered = num_below * (tokens + self._beside_tokens)
                used[offload.inputs] += (delivered - graph_tokens) * cell.message
                used["none"] += graph_tokens * cell.message
            if keep == "attention":
                dropped = max(0, tokens - done - graph_tokens)
                whole, own = (self._cell((num_layers,)), num_layers - height)
                known = (tokens + self._beside_tokens) * whole.attention(range(own))
                known += dropped * whole.attention(range(own, num_layers - 1))
                used[offload.attention] += known
        again = min(options.recompute_layers, height)
        if is_first:
            graph = current * cell.graph(again) if is_here else 0.0
            made = max(a - b for a, b in first_backward(cell, again, graph, gradients))
        loss = self._memory.loss_bytes(cell, current, backward=True)
        used["none"] += current * cell.message + max(loss, current * cell.working + made)
        if keep == "all" or options.num_retained:
            used[offload.graphs] += self._ahead_tokens * cell.graph(again)
        held = height if num_below and keep in ("input", "attention") else num_layers
        used[offload.kv] += self._stored_tokens(held) * cell.kv_layer
        used[offload.kv] += max(0, self._num_chunks - 1 - -(-done // self._size)) * cell.state
        sent_back = self._stored_tokens(height, seen=True)
        if offload.kv == "none":
            used["none"] += sent_back * cell.kv_gradient_layer
        else:
            # the newest segments of gradients stay on the device; others and K,V stream through
            each, prefix = self._segment, tokens - done - current
            cold = max(0.0, sent_back - num_hot * height * each)
            used[offload.kv] += cold * cell.kv_gradient_layer
            used["none"] += min(2 * each, prefix) * cell.kv_layer
            hot = self._stored_tokens(height, seen=True, most=(num_hot - 1) * each)
            sees_all = None in self._windows[num_layers - height :]
            passing = min(2 * each, max(0, prefix - num_hot * each)) if sees_all else 0
            used["none"] += (hot + passing) * cell.kv_gradient_layer
        return Needs(*map(int, used.values()))

    def _at_first_stage(self, options: ChunkOptions) -> Needs:
        """Return the bytes in each memory during the first stage's backward of the second to last
        chunk (or of the only one), when the gradients of all stages are in memory."""
        stages, tokens = stages_of(self._num_layers, options), self._stored + self._last
        current, done = (self._size, self._last) if self._stored else (self._last, 0)
        cell, offload, height = self._memory.cell(stages, 0), options.offloading, stages[0]
        gradients, again = self._gradients(stages, 0), min(options.recompute_layers, height)
        graph, made = current * cell.graph(again), sum(gradients[:-1])
        if not done:
            is_here = options.keep != "all" or offload.graphs == "none"
            made = max(a - b for a, b in first_backward(cell, again, graph * is_here, gradients))
        used: dict[OffloadTarget, float] = {"none": 0.0, "cpu": self._host_bytes, "disk": 0.0}
        others = sum(self._gradients((self._num_layers,), 0)) - sum(gradients[:-1])
        used["none"] = self._static(stages, *((0, 1) * options.reshard))
        used["none"] += made + (tokens - done) * TOKEN_BYTES
        used["none"] += others * (self._share if options.reshard else 1)
        used["none"] += current * (cell.message + cell.working)
        used[offload.inputs] += (tokens - done) * cell.message  # gradients of the stage's output
        used[offload.graphs if options.keep == "all" else "none"] += graph
        waiting = tokens - done - current
        if options.keep == "all":
            used[offload.graphs] += waiting * cell.graph(again)
        elif options.keep == "attention":
            used[offload.attention] += waiting * cell.attention(range(height))
        return Needs(*map(int, used.values()))

    def _stored_tokens(self, height: int, *, seen: bool = False, most: float = inf) -> float:
        """Return how many tokens have stored K,V in each of the last `height` layers, summed over
        these layers. A layer counts at most `most` tokens. With `seen` it counts only tokens to
        which the last chunk attends."""
        if height not in self._kinds:
            first = self._num_layers - height
            attending = zip(self._windows[first:], self._attends[first:], strict=True)
            self._kinds[height] = Counter(window for window, attends in attending if attends)
        total = 0.0
        for window, count in self._kinds[height].items():
            stored = self._stored
            if window is not None and seen:
                stored = min(stored, window - 1)
            elif window is not None:
                stored = (self._num_chunks - 1) * min(self._size, window - 1)
            total += count * min(stored, most)
        return total

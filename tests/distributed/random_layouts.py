"""Steps drawn at random: a layout, a planner, a batch and a model, so that each occurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from distributed.layout_cases import Case
from helpers.decks import Deck
from helpers.pipeline_plans import row_of
from helpers.random_chunks import random_chunks
from helpers.tiny_families import config_of

from furlong.cost.devices.hardware import hardware
from furlong.cost.memory.training import Training
from furlong.cost.model import CostModel
from furlong.cost.shapes.shape import ModelShape
from furlong.plan.check import check
from furlong.plan.rows import rows_of
from furlong.plan.values import Chunk, ChunkPlan, Forward, Tiers
from furlong.planners.chunks.groups import Groups, group_chunks, padded_groups, sliced_groups
from furlong.planners.chunks.placement import shard, shard_long
from furlong.planners.infinipipe.plan import plan_infinipipe
from furlong.planners.methods.flexsp import plan_flexsp
from furlong.planners.methods.skrull import micro_batch_groups
from furlong.planners.options import ChunkOptions
from furlong.planners.orders.one_device import plan_groups
from furlong.planners.orders.pipeline import plan_1f1b
from furlong.planners.orders.replicas import idle_plan, join_replicas
from furlong.planners.orders.seq1f1b import plan_seq1f1b
from furlong.planners.places.plan import plan_places

SIZE = 8
KEEPS = ("input", "kv", "attention", "all")
Sizes = tuple[int, int, int]
"""dp, sp, pp."""


@dataclass(frozen=True)
class Setting:
    """What a planner makes the plan of one replica for; `draw` is for the dials it has beside."""

    sp: int
    heights: tuple[int, ...]
    shape: ModelShape
    frozen_stages: int
    stage_layers: int
    """Most layers of a stage, layer-first."""
    draw: Random

    @property
    def cost(self) -> CostModel:
        return CostModel(self.shape, hardware("A100-80"))

    @property
    def pipeline(self) -> dict[str, Any]:
        """Keywords of the planners of pipelines."""
        return {"stages": self.heights, "sp_size": self.sp, "frozen_stages": self.frozen_stages}

    def sharded(self, groups: Groups) -> Groups:
        return shard(groups, self.sp) if self.sp > 1 else groups

    def cut(self, lens: Sequence[int]) -> Groups:
        return group_chunks(lens, ChunkOptions(size=SIZE, hybrid=self.draw.random() < 0.8))

    def walk(self) -> dict[str, Any]:
        """Dials of a walk that drops graphs."""
        return {
            "keep": self.draw.choice(KEEPS), "recompute_layers": self.draw.choice((0, 0, 1)),
        }  # fmt: skip


def state_aware(lens: Sequence[int], s: Setting, num_retained: int) -> ChunkPlan:
    start = s.draw.choice(("eager", "lazy"))
    dials = s.walk() | {"num_retained": num_retained, "recompute": start}
    return plan_1f1b(lens, s.sharded(s.cut(lens)), **s.pipeline, **dials)


def token_level(lens: Sequence[int], s: Setting) -> ChunkPlan:
    groups = s.sharded(sliced_groups(lens, num_slices=s.draw.randint(2, 4)))
    count = sum(map(len, groups))
    layers = [[s.draw.randint(0, height) for _ in range(count)] for height in s.heights]
    return plan_seq1f1b(lens, groups, recompute_layers=layers, **s.pipeline)


def infinipipe(lens: Sequence[int], s: Setting) -> ChunkPlan:
    return plan_infinipipe(
        lens, s.cost, num_stages=len(s.heights), stages=s.heights, sp_size=s.sp, max_slices=4
    ).plan


def in_a_row(lens: Sequence[int], s: Setting) -> ChunkPlan:
    groups = s.sharded(sliced_groups(lens, num_slices=3))
    return row_of(list(lens), groups, s.heights, [len(groups) // 2], s.draw, sp_size=s.sp)


def skrull(lens: Sequence[int], s: Setting) -> ChunkPlan:
    bucket = -(-max(lens) // s.sp) + 1
    groups = micro_batch_groups(lens, s.cost, sp_size=s.sp, bucket_tokens=bucket)
    return plan_1f1b(lens, groups, **s.pipeline)


def dacp(lens: Sequence[int], s: Setting) -> ChunkPlan:
    """Pieces of long sequences sharded, short ones beside them local."""
    groups = group_chunks(lens, ChunkOptions(size=2 * SIZE))
    return plan_1f1b(lens, shard_long(groups, lens, s.shape, s.sp), **s.pipeline, **s.walk())


def on_any_places(lens: Sequence[int], s: Setting) -> ChunkPlan:
    """As many sequences of other lengths, whole and cut, each on a place of its own."""
    drawn: Sequence[int] = [1]
    while max(drawn) == 1:  # no label at all
        drawn, chunks = random_chunks(
            s.draw, s.sp, num_chunks=3, num_sequences=3 + len(lens), max_tokens=12
        )
    retained = s.draw.choice((0, 1, 2))
    return plan_1f1b(drawn, [chunks], num_retained=retained, **s.pipeline, **s.walk())


def places(lens: Sequence[int], s: Setting) -> ChunkPlan:
    return plan_places(lens, s.cost, pool_size=s.sp, num_tries=0)


def flexsp(lens: Sequence[int], s: Setting) -> ChunkPlan:
    return plan_flexsp(lens, s.cost, pool_size=s.sp)


def on_one_rank(lens: Sequence[int], s: Setting, **order: Any) -> ChunkPlan:
    dials = s.walk() | {"num_retained": s.draw.choice((0, 1, 2))} | order
    options = ChunkOptions(size=SIZE, **dials)
    return plan_groups(
        lens, s.sharded(group_chunks(lens, options)), options,
        num_layers=sum(s.heights), sp_size=s.sp,
    )  # fmt: skip


def layer_first(lens: Sequence[int], s: Setting) -> ChunkPlan:
    return on_one_rank(lens, s, order="layer-first", stage_layers=s.stage_layers)


def padded(lens: Sequence[int], s: Setting) -> ChunkPlan:
    """A padding token is a token without a label."""
    longer, groups = padded_groups(lens)
    return plan_1f1b(longer, s.sharded(groups), **s.pipeline)


Planner = Callable[[Sequence[int], Setting], ChunkPlan]
PLANNERS: Mapping[str, tuple[Planner, Callable[[int, int, int], bool]]] = {
    # name: (planner of a replica, whether it fits into dp, sp, pp)
    "1F1B, K 0": (partial(state_aware, num_retained=0), lambda dp, sp, pp: pp > 1),
    "1F1B, K 1": (partial(state_aware, num_retained=1), lambda dp, sp, pp: pp > 1),
    "1F1B, K 2": (partial(state_aware, num_retained=2), lambda dp, sp, pp: pp > 1),
    "Seq1F1B": (token_level, lambda dp, sp, pp: pp > 1),
    "InfiniPipe": (infinipipe, lambda dp, sp, pp: pp > 1),
    "InfiniPipe, in a row": (in_a_row, lambda dp, sp, pp: pp > 1),
    "padded 1F1B": (padded, lambda dp, sp, pp: pp > 1),
    "Skrull": (skrull, lambda dp, sp, pp: sp > 1),
    "DACP in chunks": (dacp, lambda dp, sp, pp: sp > 1),
    "any places": (on_any_places, lambda dp, sp, pp: sp > 1),
    "places": (places, lambda dp, sp, pp: sp > 1 and pp == 1),
    "FlexSP": (flexsp, lambda dp, sp, pp: sp > 1 and pp == 1),
    "ChunkFlow": (on_one_rank, lambda dp, sp, pp: pp == 1),
    "layer-first": (layer_first, lambda dp, sp, pp: pp == 1),
    "ZeRO-3": (on_one_rank, lambda dp, sp, pp: dp > 1 and pp == 1),
}
_MAY_FREEZE = {"1F1B, K 0", "1F1B, K 1", "1F1B, K 2", "Seq1F1B", "DACP in chunks"}
"""Planners of pipelines that leave backwards out of frozen stages."""

BATCHES: Mapping[str, Callable[[int, int], bool]] = {
    # name: whether it fits into dp, sp
    "packed": lambda dp, sp: True,
    "split": lambda dp, sp: True,
    "hybrid": lambda dp, sp: True,
    "masked": lambda dp, sp: True,
    "three times": lambda dp, sp: dp > 1,
    "few tokens": lambda dp, sp: sp > 1,
    "no work": lambda dp, sp: dp > 1,
    "no label": lambda dp, sp: dp * sp > 1,
}

MODELS: Mapping[str, dict[str, Any]] = {
    # name: fields of a Case
    "Llama": {},
    "tied": {"settings": {"tie_word_embeddings": True}},
    "Gemma 3": {"family": "gemma3_text"},
    "one K,V head": {"settings": {"num_key_value_heads": 1}},
    "Mistral": {"family": "mistral"},
    "LoRA": {"lora": True},
    "LoRA, tied": {"lora": True, "settings": {"tie_word_embeddings": True}},
    "frozen": {"frozen_layers": 1},
}

LAYOUTS: Sequence[Sizes] = (
    *((2, 1, 1), (1, 2, 1), (1, 1, 2)) * 4,
    *((2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1), (1, 1, 4)) * 3,
    (4, 1, 1), (2, 1, 3), (2, 2, 2),
)  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A step of some layout."""

    number: int
    sizes: Sizes
    planner: str
    batch: str
    model: str
    tier: str
    case: Case
    gives_own_alone: bool
    """Whether each process is given what it reads alone."""

    def __str__(self) -> str:
        dp, sp, pp = self.sizes
        texts = self.planner, self.batch, self.model, self.tier
        steps = f", {self.case.num_steps} steps" if self.case.num_steps > 1 else ""
        whole = ", whole model" if self.case.holds_all else ""
        return f"{self.number}: {dp} x {sp} x {pp}, " + " / ".join(texts) + steps + whole


def drawn_layouts(seed: int = 0) -> list[Drawn]:
    """Thirty steps."""
    draw = Random(seed)
    values = {
        "planner": [*PLANNERS], "batch": [*BATCHES], "model": [*MODELS],
        "tier": ["device", "device", "host", "disk"],
    }  # fmt: skip
    decks: dict[str, Deck[Any]] = {name: Deck(draw, own) for name, own in values.items()}
    return [_drawn(number, sizes, decks, draw) for number, sizes in enumerate(LAYOUTS)]


def _drawn(number: int, sizes: Sizes, decks: Mapping[str, Deck[Any]], draw: Random) -> Drawn:
    dp, sp, pp = sizes
    planner = decks["planner"].take(lambda name: PLANNERS[name][1](*sizes))
    batch = decks["batch"].take(
        lambda name: BATCHES[name](dp, sp) and (name, planner) != ("no work", "ZeRO-3")
    )
    model = decks["model"].take()
    heights = (3,) if pp == 1 else tuple(draw.randint(1, 2) for _ in range(pp))
    if model == "Gemma 3" and pp > 1:
        heights = (heights[0] + 1, *heights[1:])
    fields = MODELS[model] | {"settings": _settings(model, sum(heights))}
    fields["frozen_layers"] = heights[0] * ("frozen_layers" in fields)
    config = config_of(fields.get("family", "llama"), **fields["settings"])
    may_freeze = planner in _MAY_FREEZE and pp > 1 and model == "frozen"
    shape = ModelShape.from_config(config.to_dict())
    setting = Setting(sp, heights, shape, int(may_freeze), draw.choice((1, 2)), draw)
    tier = decks["tier"].take()
    plan = _plan(planner, batch, dp, setting)
    plan = replace(plan, tiers=Tiers(tier, tier, tier, tier))
    check(plan)
    heads = config.num_attention_heads, config.num_key_value_heads
    case = Case(
        plan, masked=_masked(plan, batch, draw, heads), num_steps=draw.choice((1, 1, 2)),
        holds_all=pp > 1 and draw.random() < 0.2, **fields,
    )  # fmt: skip
    return Drawn(number, sizes, planner, batch, model, tier, case, draw.random() < 0.5)


def _settings(model: str, num_layers: int) -> dict[str, Any]:
    settings = {**MODELS[model].get("settings", {}), "num_hidden_layers": num_layers}
    if model == "Gemma 3":
        kinds = ("sliding", "sliding", "full") * num_layers
        settings["layer_types"] = [f"{kind}_attention" for kind in kinds[:num_layers]]
    return settings


def _plan(planner: str, batch: str, dp: int, setting: Setting) -> ChunkPlan:
    plans: list[ChunkPlan] = []
    for replica in range(dp):
        if batch == "no work" and replica == dp - 1:
            plans.append(_idle(plans[0], setting))
        else:
            lens = _lens(batch, replica, setting)
            plans.append(PLANNERS[planner][0](lens, setting))
    if dp == 1:
        return plans[0]
    lens_of_all = [n for plan in plans for n in plan.seq_lens]
    ids, first = [], 0
    for plan in plans:
        ids.append(range(first, first + len(plan.seq_lens)))
        first += len(plan.seq_lens)
    zero_3 = CostModel(setting.shape, hardware("A100-80"), Training(zero_stage=3))
    return join_replicas(plans, ids, lens_of_all, zero_3 if planner == "ZeRO-3" else None)


def _idle(like: ChunkPlan, setting: Setting) -> ChunkPlan:
    if len(like.actions) == 1:
        return idle_plan(like)
    keywords = setting.pipeline | {"frozen_stages": like.frozen_stages}
    return replace(plan_1f1b((), [[Chunk(())]], **keywords), tiers=like.tiers)


def _lens(batch: str, replica: int, s: Setting) -> list[int]:
    draw = s.draw
    short = [draw.randint(1, SIZE) for _ in range(draw.randint(2, 4))]
    long = draw.randint(2 * SIZE + 1, 4 * SIZE)
    match batch:
        case "packed":
            return [draw.randint(2, SIZE), *short]
        case "split":
            return [long, draw.randint(SIZE + 1, 2 * SIZE)]
        case "three times":
            return [3 * long, 2 * SIZE] if replica else [long]
        case "few tokens":
            return [2 * SIZE + 1, *(draw.randint(1, s.sp - 1) for _ in range(3))]
        case _:
            return [long, *short, draw.randint(SIZE + 1, 2 * SIZE)]


def _masked(
    plan: ChunkPlan, batch: str, draw: Random, heads: tuple[int, int]
) -> tuple[Sequence[int], ...]:
    """Tokens without a label, by sequence."""
    masked: list[set[int]] = [set() for _ in plan.seq_lens]
    if batch == "masked":
        for own, n in zip(masked, plan.seq_lens, strict=True):
            own |= {*range(draw.randint(0, n))}
    if batch == "no label":
        for seq_id, start, stop in tokens_of(plan, 0, 0, heads):
            masked[seq_id] |= {*range(start + 1, stop + 1)}  # of a token the next one is the label
    found = [sorted(own & {*range(n)}) for own, n in zip(masked, plan.seq_lens, strict=True)]
    return tuple(found)


def tokens_of(
    plan: ChunkPlan, replica: int, process: int, heads: tuple[int, int]
) -> list[tuple[int, int, int]]:
    """(sequence, start, stop) of the tokens that a process of a replica has."""
    num_lists = sum(
        any(isinstance(a, Forward) and not a.stage for a in own) for own in plan.actions
    )
    step = len(plan.actions) // num_lists
    chunks = {a.chunk for a in plan.actions[replica * step] if isinstance(a, Forward)}
    return [
        run
        for chunk in sorted(chunks)
        for run in rows_of(
            plan.chunks[chunk], process, sp_size=plan.sp_size, q_heads=heads[0], kv_heads=heads[1]
        ).tokens
    ]

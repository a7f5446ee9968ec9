"""Steps drawn at random: a layout, a planner, a batch and a model, so that each occurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from distributed.layout_cases import Case
from distributed.random_planners import MAY_FREEZE, PLANNERS, SIZE, Setting
from helpers.decks import Deck
from helpers.tiny_families import config_of

from furlong.models.describe import describe
from furlong.plan.check import check
from furlong.plan.plan import Chunk, ChunkPlan, Forward, Offload
from furlong.plan.rows import rows_of
from furlong.planners.orders import idle_plan, join_replicas, plan_1f1b

Sizes = tuple[int, int, int]
"""dp, sp, pp."""


_NEVER_IDLE = {"1F1B, gathers", "layer-first in a stage"}
"""Planners of replicas that all have work."""

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
    "heads that no group divides": {
        "settings": {"num_attention_heads": 3, "hidden_size": 48, "num_key_value_heads": 3}
    },
    "Mistral": {"family": "mistral"},
    "LoRA": {"lora": True},
    "LoRA, tied": {"lora": True, "settings": {"tie_word_embeddings": True}},
    "frozen": {"frozen_layers": 1},
    "LFM2": {"family": "lfm2"},
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
    offload: str
    case: Case
    gives_own_alone: bool
    """Whether each process is given what it reads alone."""

    def __str__(self) -> str:
        dp, sp, pp = self.sizes
        texts = self.planner, self.batch, self.model, self.offload
        steps = f", {self.case.num_steps} steps" if self.case.num_steps > 1 else ""
        whole = ", whole model" if self.case.holds_all else ""
        return f"{self.number}: {dp} x {sp} x {pp}, " + " / ".join(texts) + steps + whole


def drawn_layouts(seed: int = 27) -> list[Drawn]:
    """Thirty steps."""
    draw = Random(seed)
    values = {
        "planner": [*PLANNERS], "batch": [*BATCHES], "model": [*MODELS],
        "offload": ["none", "none", "cpu", "disk"],
    }  # fmt: skip
    decks: dict[str, Deck[Any]] = {name: Deck(draw, own) for name, own in values.items()}
    return [_drawn(number, sizes, decks, draw) for number, sizes in enumerate(LAYOUTS)]


def _drawn(number: int, sizes: Sizes, decks: Mapping[str, Deck[Any]], draw: Random) -> Drawn:
    dp, sp, pp = sizes
    planner = decks["planner"].take(lambda name: PLANNERS[name][1](*sizes))
    batch = decks["batch"].take(
        lambda name: BATCHES[name](dp, sp) and (name != "no work" or planner not in _NEVER_IDLE)
    )
    model = decks["model"].take()
    heights = (3,) if pp == 1 else tuple(draw.randint(1, 2) for _ in range(pp))
    if model == "Gemma 3" and pp > 1:
        heights = (heights[0] + 1, *heights[1:])
    fields = MODELS[model] | {"settings": _settings(model, sum(heights))}
    fields["frozen_layers"] = heights[0] * ("frozen_layers" in fields)
    config = config_of(fields.get("family", "llama"), **fields["settings"])
    may_freeze = planner in MAY_FREEZE and pp > 1 and model == "frozen"
    shape = describe(config)
    setting = Setting(sp, heights, shape, int(may_freeze), draw.choice((1, 2)), draw)
    target = decks["offload"].take()
    plan = _plan(planner, batch, dp, setting)
    plan = replace(plan, offload=Offload(target, target, target, target))
    check(plan)
    heads = config.num_attention_heads, config.num_key_value_heads
    case = Case(
        plan, masked=_masked(plan, batch, draw, heads), num_steps=draw.choice((1, 1, 2)),
        holds_all=pp > 1 and draw.random() < 0.2 and not may_freeze, **fields,
    )  # fmt: skip
    return Drawn(number, sizes, planner, batch, model, target, case, draw.random() < 0.5)


def _settings(model: str, num_layers: int) -> dict[str, Any]:
    settings = {**MODELS[model].get("settings", {}), "num_hidden_layers": num_layers}
    if model == "Gemma 3":
        kinds = ("sliding", "sliding", "full") * num_layers
        settings["layer_types"] = [f"{kind}_attention" for kind in kinds[:num_layers]]
    if model == "LFM2":
        kinds = ("conv", "full_attention", "conv") * num_layers
        settings["layer_types"] = list(kinds[:num_layers])
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
    return join_replicas(plans, ids, lens_of_all)


def _idle(like: ChunkPlan, setting: Setting) -> ChunkPlan:
    if len(like.actions) == 1:
        return idle_plan(like)
    keywords = setting.pipeline | {"frozen_stages": like.frozen_stages}
    return replace(plan_1f1b((), [[Chunk(())]], **keywords), offload=like.offload)


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

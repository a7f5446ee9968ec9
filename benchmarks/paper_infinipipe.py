"""InfiniPipe: its worked example, and its simulated speed-ups.

The example: two stages of two layers, sequences A of three chunks and B of one, all of as many
tokens; a chunk's activations take 16, a layer's input 1, and 4 more are held for dK,dV of a chunk
whose K,V a later one needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from paper_tables import Row, Table, count_faster, printed, within_factor
from paper_times import step_s

from furlong.cost.devices.hardware import hardware
from furlong.cost.infinipipe import Layout, chunk_bytes
from furlong.cost.lengths import K, sample_lengths
from furlong.cost.memory.training import Training
from furlong.cost.model import CostModel
from furlong.cost.shapes.known_models import model_shape
from furlong.plan.values import Chunk, Slice
from furlong.planners.chunks.split import equal_work_bounds
from furlong.planners.infinipipe.checkpointing import (
    Checkpointing,
    Problem,
    StageLoad,
    choose_layers,
)
from furlong.planners.infinipipe.plan import plan_infinipipe
from furlong.planners.methods.flexsp import plan_flexsp
from furlong.planners.methods.ulysses import plan_ulysses
from furlong.planners.orders.seq1f1b import backward_places, plan_seq1f1b, windows
from furlong.simulate.clock import time_actions
from furlong.simulate.unit_costs import UnitCosts

LAYOUT = Layout(sp_size=1, pp_size=2, num_layers=4, hidden_size=1, kv_size=1, element_bytes=1)
HEIGHTS = (2, 2)
TOKENS = 4
"""Of a chunk: a forward of a stage takes 4, a backward 8, a layer's recomputation 2."""
BOTH, A, B = (3, 1), (3,), (1,)
"""Numbers of chunks of the groups of a pipeline."""


def infinipipe_example() -> Table:
    """Mesh, windows, memory and the least recomputation (Eqs. 5 to 20)."""
    bounds = equal_work_bounds(32, 4, quadratic=1, linear=16)
    rows = [
        Row(case=f"mesh of 32 units, slice {i} ends at", ours=bound, **printed(text))
        for i, (text, bound) in enumerate(
            zip(("13.17", "20.84", "26.87", "32"), bounds, strict=True), 1
        )
    ]
    rows.append(same("backward places (f2b)", "3, 2, 1, 4", [p + 1 for p in backward_places(BOTH)]))
    for stage, texts in enumerate((("1, 2, 3, 4",), ("1, 2, 3", "1, 2, 4"))):
        for text, window in zip(texts, windows(BOTH, 2, stage), strict=True):
            rows.append(
                same(f"window of stage {stage + 1}", text, sorted(chunk + 1 for chunk in window))
            )
        rows.append(
            Row(case=f"bytes of stage {stage + 1}, nothing recomputed", paper=(72, 56)[stage],
                ours=float(stage_load(BOTH, stage, 0).plain_bytes.max()), tolerance=0)
        )  # fmt: skip
    for budget, least in ((55, (3, 1, 0)), (42, (5, 3, None)), (30, (8, 6, None))):
        for name, counts, paper in zip(("A and B", "A", "B"), (BOTH, A, B), least, strict=True):
            if paper is not None:
                found = choose(counts, budget)
                rows.append(
                    same(f"budget {budget}: layers recomputed, {name}", str(paper),
                         ["none fits" if found is None else found.total])
                )  # fmt: skip
    rows += [
        Row(case="budget 55: A and B in one pipeline, beyond the chunks' own time", paper=18,
            ours=beyond(BOTH, 55), tolerance=0),
        Row(case="budget 55: one pipeline after the other", paper=26,
            ours=beyond(A, 55) + beyond(B, 55), tolerance=0),
        same("budget 24: A and B fit", "yes", ["no" if choose(BOTH, 24) is None else "yes"]),
        same("budget 23: A and B fit", "no", ["no" if choose(BOTH, 23) is None else "yes"]),
    ]  # fmt: skip
    return Table(
        "InfiniPipe: worked example", "as named", rows,
        (
            "seconds are simulated on the plan; the sum of Eq. 13 is delta + T_ckpt",
            "derived from the paper's equations as corrected; it prints no such example",
        ),
    )  # fmt: skip


def same(case: str, paper: str, ours: Sequence[object]) -> Row:
    return Row(case=case, paper=paper, ours=", ".join(map(str, ours)), tolerance=0)


def held(recompute_layers: int, continues: bool) -> float:
    """Bytes of one chunk on one stage, by Eq. 10."""
    return chunk_bytes(
        LAYOUT, 1, token_bytes=32, recompute_layers=recompute_layers, continues=continues
    )


def stage_load(counts: tuple[int, ...], stage: int, room_bytes: float) -> StageLoad:
    """What a stage holds in each of its windows."""
    continues = [i < count - 1 for count in counts for i in range(count)]
    alive = np.array(
        [
            [chunk in window for chunk in range(len(continues))]
            for window in windows(counts, 2, stage)
        ]
    )
    plain = np.array([held(0, own) for own in continues])
    saved = np.array([held(0, own) - held(1, own) for own in continues])
    return StageLoad(
        alive=alive, plain_bytes=alive @ plain, acting=np.zeros(len(alive), dtype=np.int64),
        again_bytes=np.zeros(len(alive)), saved_bytes=saved, room_bytes=room_bytes,
    )  # fmt: skip


def choose(counts: tuple[int, ...], budget: float) -> Checkpointing | None:
    loads = tuple(stage_load(counts, stage, budget) for stage in range(2))
    return choose_layers(Problem(counts, HEIGHTS, loads))


def beyond(counts: tuple[int, ...], budget: float) -> float:
    """Makespan of a pipeline less its chunks' own forwards and backwards on one stage."""
    found = choose(counts, budget)
    assert found is not None
    groups = [
        [Chunk((Slice(seq_id, i * TOKENS, (i + 1) * TOKENS),)) for i in range(count)]
        for seq_id, count in enumerate(counts)
    ]
    plan = plan_seq1f1b(
        [count * TOKENS for count in counts], groups, stages=HEIGHTS,
        recompute_layers=found.on_stages(counts, HEIGHTS),
    )  # fmt: skip
    return time_actions(plan, UnitCosts(plan)).duration_s - 3 * TOKENS * sum(counts)


# model, devices of DeepSpeed's sequence parallelism, of Megatron-LM's context parallelism,
# layers that the others checkpoint, as it suits a context of 96K (the revised paper)
INFINIPIPE_MODELS = (("GPT-7B", 16, 2, 10), ("GPT-13B", 32, 4, 20), ("GPT-30B", 32, 4, 55))
INFINIPIPE_DATA = (("commoncrawl", 48), ("commoncrawl", 96), ("github", 48), ("github", 96))


def infinipipe_over_others(num_batches: int = 1) -> Table:
    """InfiniPipe's Figure 8 on four nodes of eight A800, 512 sequences a step, too long ones cut.

    InfiniPipe: sp 8 within a node, four stages. DeepSpeed: Ulysses and ZeRO-3, packed. Megatron-LM:
    TP 8, ZeRO-1, its context parallelism timed as an all-to-all. The others checkpoint as many
    layers as the paper says; a note has them checkpoint what is fastest.
    """
    settings = list(product(INFINIPIPE_MODELS, INFINIPIPE_DATA))
    largest_printed = {"FlexSP": 1.69, "DeepSpeed": 2.07, "Megatron-LM": 2.60}
    rows: list[Row] = []
    found: list[dict[str, float]] = []
    freely: list[dict[str, float]] = []
    for (model, sp, cp, layers), (data, context) in settings:
        seconds: dict[str, float] = defaultdict(float)
        free_seconds: dict[str, float] = defaultdict(float)
        for seed in range(num_batches):
            lens = sample_lengths(data, 512, seed, max_seq_len=context * K, too_long="truncate")
            own = plan_infinipipe(lens, a800(model), num_stages=4, sp_size=8).predicted_s
            for taken, chosen in ((seconds, layers), (free_seconds, None)):
                taken["InfiniPipe"] += own
                for name, others in others_s(model, lens, sp, cp, chosen).items():
                    taken[name] += others
        for kept, taken in ((found, seconds), (freely, free_seconds)):
            kept.append({name: taken[name] / taken["InfiniPipe"] for name in largest_printed})
        text = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found[-1].items())
        rows.append(Row(case=f"{model}, {data}, {context}K", paper="", ours=text))
    for name, paper in largest_printed.items():
        ratios = [of_setting[name] for of_setting in found]
        largest, cause = max(ratios), IDEAL_FLEXSP if name == "FlexSP" else ""
        bound = within_factor(largest, paper)
        rows += [
            count_faster(ratios, f"settings that are faster than {name}", cause),
            Row(case=f"largest over {name}", paper=paper, ours=largest, **bound),
        ]
    spread = ", ".join(
        f"{name} {min(r[name] for r in freely):.2f} to {max(r[name] for r in freely):.2f}"
        for name in largest_printed
    )
    return Table(
        "InfiniPipe over others", "times as fast", rows,
        (f"where the others checkpoint what is fastest for them: over {spread}",),
    )  # fmt: skip


IDEAL_FLEXSP = (
    "FlexSP is at its best here: every division into groups is tried, and forming them anew costs "
    "nothing; most stay within a node and gathers hide behind computation, so that little is left "
    "for InfiniPipe to save"
)


def a800(model: str) -> CostModel:
    training = Training(zero_stage=3, gradient_bytes=2)
    return CostModel(model_shape(model), hardware("A800"), training)


def others_s(
    model: str, lens: Sequence[int], sp: int, cp: int, layers: int | None
) -> dict[str, float]:
    """Seconds of a step of each other system on 32 devices."""
    cost = a800(model)
    megatron = replace(cost, training=replace(cost.training, zero_stage=1, tp_size=8))
    ulysses = plan_ulysses(lens, cost, dp_size=32 // sp, sp_size=sp, recompute_layers=layers)
    parallel = plan_ulysses(lens, megatron, dp_size=4 // cp, sp_size=cp, recompute_layers=layers)
    return {
        "FlexSP": step_s(cost, plan_flexsp(lens, cost, pool_size=32, recompute_layers=layers)),
        "DeepSpeed": step_s(cost, ulysses),
        "Megatron-LM": step_s(megatron, parallel),
    }

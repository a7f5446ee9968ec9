"""Skrull (arXiv 2505.19609): numbers of its text, its Table 3, its buckets and its speed-ups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean

from furlong.cost.lengths import K, sample_lengths
from furlong.cost.machine import Link, Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import ModelShape, model_shape
from furlong.cost.training import Training
from furlong.plan.plan import Chunk, Slice
from furlong.planners import skrull as planner
from furlong.planners.chunks import (
    by_cost,
    by_place,
    chunk_by_chunk,
    pack,
    place_by_load,
    sequence_work,
)
from furlong.planners.question import MARGIN
from papers import skrull_forms
from papers.fused import Counted, fused, whole_cell
from papers.published.chunks import by_order
from papers.seco import HF_LOGIT_BYTES
from papers.skrull_forms import TABLE_3_MB, TABLE_3_US, bucket_tokens
from papers.tables import Row, Table, shown
from papers.timing import fused_card, shared_chunk, step_s
from papers.whole_sequences import plan_skrull, schedule_skrull

GIB = 2**30
WHOLE = frozenset((0,))


def text() -> Table:
    """Appendix A.2: Eq. 13 of Qwen2.5-0.5B."""
    shape = model_shape("Qwen2.5-0.5B")
    sizes = shape.hidden_size, shape.kv_size
    ratio = skrull_forms.flops(32 * K, *sizes) / skrull_forms.flops(4 * K, *sizes)
    return Table(
        "Skrull, numbers in the text", "as named",
        (
            Row(case="tokens from which attention costs more, \"approximately 4K\"", paper=4 * K,
                ours=skrull_forms.quadratic_from_tokens(*sizes), tolerance=0.2),
            Row(case="FLOPs of 32K over those of 4K, \"30 times\"", paper=30, ours=ratio,
                tolerance=0.2),
        ),
        ("by the paper's own Eq. 13, which counts the whole square of attention",),
    )  # fmt: skip


FITTED_MB = (16, 1024)


def table_3() -> Table:
    """Eq. 16 from 16 MB on, through the ends of each column."""
    rows = []
    for name, column in TABLE_3_US.items():
        times = dict(zip(TABLE_3_MB, column, strict=True))
        low, high = FITTED_MB
        us_per_mb = (times[high] - times[low]) / (high - low)
        rows += [
            Row(case=f"{name}, {mb} MB", paper=us, ours=times[low] + us_per_mb * (mb - low),
                tolerance=0.15, fitted=mb in FITTED_MB, on_line=mb not in FITTED_MB)
            for mb, us in times.items() if mb >= low
        ]  # fmt: skip
    return Table(
        "Skrull, Table 3: latency of collectives", "us", rows,
        ("below 16 MB a collective takes about as long however few its bytes: 53 to 168 us",),
    )  # fmt: skip


BUCKETS = {"Qwen2.5-0.5B": 26, "Qwen2.5-7B": 13}


def buckets() -> Table:
    """Eq. 12 with nothing fitted, on an H100 of 80 GB, ZeRO-2 over 32 devices.

    "Selective recomputation" is taken as: outputs of norms and of the gated activation are made
    again, everything that a matrix or attention makes is kept.
    """
    device = fused_card("H100")
    selective = Counted(hidden=2, mlp=2, logit_bytes=HF_LOGIT_BYTES)
    rows, alone = [], []
    for model, paper in BUCKETS.items():
        shape = model_shape(model)
        rows.append(Row(case=model, paper=paper, ours=bucket_k(shape, selective), tolerance=0.25))
        everything = replace(fused(shape), logit_bytes=HF_LOGIT_BYTES)
        alone.append(f"{bucket_k(shape, everything):.1f}K")
    return Table(
        "Skrull, BucketSize on 80 GB", "K tokens", rows,
        (
            f"budget {device.budget_bytes / GIB:.1f} GiB; 16 bytes per logit are nearly half of a "
            "token of 7B and four fifths of one of 0.5B",
            f"without any recomputation: {alone[0]} and {alone[1]}",
        ),
    )  # fmt: skip


def local_shares(num_batches: int = 4) -> Table:
    """Sequences that Algorithms 1 and 2 leave on one process in the paper's six settings."""
    rows = []
    for model, data, dp, cp, batch_size, bucket_k in SETTINGS:
        training = Training(zero_stage=1, gathers=True, replicas=dp)
        cost = CostModel(model_shape(model), fused_card("H100"), training)
        sizes = {"sp_size": cp, "budget_bytes": int(cost.hardware.budget_bytes * (1 - MARGIN))}
        shares = []
        for count in (batch_size, batch_size * dp):
            printed: list[Chunk] = []
            planned: list[Chunk] = []
            for seed in range(num_batches):
                lens = sample_lengths(data, count, seed, max_seq_len=bucket_k * K * cp)
                work = sequence_work(lens, cost.shape)
                for scheduled in schedule_skrull(
                    lens, work, dp_size=dp, sp_size=cp, bucket_tokens=bucket_k * K
                ):
                    printed += scheduled
                for ids in by_cost(work, dp):
                    planned += planner.plan_skrull([lens[i] for i in ids], cost, **sizes).chunks
            shares += [local_share(printed), local_share(planned)]
        rows.append(shown(f"{model}, {data}", " / ".join(f"{share:.0f}" for share in shares)))
    return Table(
        "Skrull, sequences that stay on one process", "per cent", rows,
        (
            "the paper tells none of these. 64 sequences (chatqa2 on 7B: 40) for all replicas with "
            "the paper's BucketSize / with the room that memory leaves in a run (ZeRO-1); then as "
            "many for each replica, which is how the rows below read \"BatchSize = 64\"; the paper "
            "does not say which it means",
            "; ".join(f"{row.case}: {row.ours}" for row in rows),
        ),
    )  # fmt: skip


def local_share(chunks: Sequence[Chunk]) -> float:
    """Per cent of the sequences."""
    sizes = [piece.place.size for chunk in chunks for piece in chunk.slices]
    return 100 * sizes.count(1) / len(sizes)


def bucket_k(shape: ModelShape, activations: Counted) -> float:
    training = Training(gradient_bytes=2, zero_stage=2)
    stages = (shape.num_layers,)
    state = training.weights(shape, stages, WHOLE, 32).state
    buckets = 2 * 2 * 5e8  # DeepSpeed's default of 5e8 elements: one to reduce, one to gather
    cell = whole_cell(shape, training, activations)
    token = cell.graph() + cell.logit * shape.vocab_size
    budget = fused_card("H100").budget_bytes
    return bucket_tokens(budget, state.total + buckets, token) / K


# model, data, dp, cp, sequences per replica, BucketSize in K
SETTINGS = (
    ("Qwen2.5-0.5B", "wikipedia", 4, 8, 64, 26),
    ("Qwen2.5-0.5B", "lmsys-skrull", 4, 8, 64, 26),
    ("Qwen2.5-0.5B", "chatqa2", 4, 8, 64, 26),
    ("Qwen2.5-7B", "wikipedia", 4, 8, 64, 13),
    ("Qwen2.5-7B", "lmsys-skrull", 4, 8, 64, 13),
    ("Qwen2.5-7B", "chatqa2", 2, 16, 40, 13),
)
PRINTED = {
    "mean": 3.76, "mean of Qwen2.5-0.5B": 5.50, "mean of Qwen2.5-7B": 2.03, "largest": 7.54,
}  # fmt: skip
BASELINES: dict[str, int | None] = {
    "one sequence": 1, "two sequences": 2, "four sequences": 4, "packed to the BucketSize": None,
}  # fmt: skip
"""Most sequences of a baseline's micro-batch; none holds more tokens than its group can."""
UNBOUNDED = 2**62
"""Bytes: the paper's BucketSize bounds the tokens instead."""


def speedups(num_batches: int = 3) -> Table:
    """Figure 3, over every micro-batch that its baseline may have had: the paper does not say."""
    own: list[float] = []
    static: dict[str, list[float]] = {name: [] for name in BASELINES}
    placed: dict[str, list[float]] = {name: [] for name in BASELINES}
    for setting in SETTINGS:
        ours, whole, dacp = times(setting, num_batches)
        own.append(ours)
        for name in BASELINES:
            static[name].append(whole[name])
            placed[name].append(dacp[name])
    rows: list[Row] = []
    for name, seconds in static.items():
        ratios = [s / o for s, o in zip(seconds, own, strict=True)]
        alone = [s / p for s, p in zip(seconds, placed[name], strict=True)]
        rows += [
            shown(f"{name}: {case}", found, PRINTED[case])
            for case, found in aggregates(ratios).items()
        ]
        rows += [
            shown(f"{name}: each setting", ", ".join(f"{ratio:.2f}" for ratio in ratios)),
            shown(f"{name}: DACP alone", ", ".join(f"{ratio:.2f}" for ratio in alone)),
        ]
    return Table(
        "Skrull over DeepSpeed, by the micro-batch of the baseline", "times as fast", rows,
        (
            "DeepSpeed with ZeRO-2 deals sequences in turn and shards each over its whole group; "
            "how many make a micro-batch the paper does not say, so no row is promised: its print "
            "lies between one and two of them, where a call's fixed costs decide",
            "**packed to the same BucketSize, static Ulysses is faster than Skrull's own "
            "heuristics** (GDS and DACP) on average: one long local sequence keeps its group "
            "waiting",
            "the paper enables DACP alone first and finds it effective; here it is slower than "
            "nearly every baseline, for the same cause; that the paper finds otherwise is "
            "unexplained",
            "settings: " + "; ".join(f"{model} {data}" for model, data, *_ in SETTINGS) + ". "
            "Memory is bounded by the paper's BucketSize, nothing is recomputed; what is longer "
            "than a group can hold is drawn again; lengths below 1K, most of wikipedia and lmsys, "
            "are not printed",
        ),
    )  # fmt: skip


Times = tuple[float, dict[str, float], dict[str, float]]


_GROUP = 8
_LINES = {
    "all_gather": (6.35, 92.0, 1), "all_to_all": (6.68, 60.0, 1),
    "reduce_scatter": (6.11, 77.0, 1), "all_reduce": (11.80, 117.0, 2),
}  # fmt: skip
"""Table 3 from 16 MB on: (us per MB, us, times a byte moves), relative least squares."""


def skrull_h100() -> Machine:
    """An H100 whose collectives are Skrull's profile, as bus bandwidths: of a group of n, which is
    not stated and taken as 8, each device moves (n - 1) / n."""
    spec, share = fused_card("H100"), (_GROUP - 1) / _GROUP
    links = {
        name: Link(us * 1e-6, share * moves * 1e12 / us_per_mb)
        for name, (us_per_mb, us, moves) in _LINES.items()
    }
    return replace(spec, links=spec.links.with_links(links))


def times(setting: tuple[str, str, int, int, int, int], num_batches: int) -> Times:
    """Seconds of a step: Skrull's, each baseline's, and each baseline's with DACP."""
    model, data, dp, cp, batch_size, bucket_k = setting
    cost = CostModel(model_shape(model), skrull_h100(), Training(zero_stage=2, gradient_bytes=2))
    bucket = bucket_k * K
    own: list[float] = []
    static: dict[str, list[float]] = {name: [] for name in BASELINES}
    placed: dict[str, list[float]] = {name: [] for name in BASELINES}
    for seed in range(num_batches):
        lens = sample_lengths(data, dp * batch_size, seed, max_seq_len=bucket * cp)
        work = sequence_work(lens, cost.shape)

        shared = partial(shared_chunk, seq_lens=lens, sp_size=cp)
        by_load = partial(placed_chunk, lens=lens, work=work, bucket_tokens=bucket, sp_size=cp)
        scheduled = plan_skrull(
            lens, cost, dp_size=dp, sp_size=cp, bucket_tokens=bucket, recompute_layers=0,
            budget_bytes=UNBOUNDED,
        )  # fmt: skip
        own.append(step_s(cost, scheduled))
        for name, count in BASELINES.items():
            batches = [
                micro_batches(replica, lens, count, bucket * cp)
                for replica in by_order(len(lens), dp)
            ]
            for found, make in ((static, shared), (placed, by_load)):
                replicas = [[make(batch) for batch in replica] for replica in batches]
                plan = chunk_by_chunk(lens, replicas, num_layers=cost.shape.num_layers, sp_size=cp)
                found[name].append(step_s(cost, plan))
    return (
        mean(own),
        {name: mean(seconds) for name, seconds in static.items()},
        {name: mean(seconds) for name, seconds in placed.items()},
    )


def micro_batches(
    seq_ids: Sequence[int], seq_lens: Sequence[int], count: int | None, most_tokens: int
) -> list[list[int]]:
    """At most `count` sequences each, as they come; None: packed."""
    if count is None:
        return pack({i: seq_lens[i] for i in seq_ids}, most_tokens)
    found: list[list[int]] = [[]]
    for i in seq_ids:
        full = sum(seq_lens[j] for j in found[-1]) + seq_lens[i] > most_tokens
        if found[-1] and (full or len(found[-1]) == count):
            found.append([])
        found[-1].append(i)
    return found


def placed_chunk(
    seq_ids: Sequence[int],
    lens: Sequence[int],
    work: Sequence[float],
    bucket_tokens: int,
    sp_size: int,
) -> Chunk:
    """A micro-batch as DACP places it; its tokens fit into the buckets."""
    found = place_by_load(
        [lens[i] for i in seq_ids], [work[i] for i in seq_ids], bucket_tokens=bucket_tokens,
        sp_size=sp_size,
    )  # fmt: skip
    assert found is not None, "all tokens fit into the buckets"
    return Chunk(
        by_place(Slice(i, 0, lens[i], place) for place, i in zip(found, seq_ids, strict=True))
    )


def aggregates(ratios: Sequence[float]) -> Mapping[str, float]:
    found = (mean(ratios), mean(ratios[:3]), mean(ratios[3:]), max(ratios))
    return dict(zip(PRINTED, found, strict=True))

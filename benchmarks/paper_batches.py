"""The papers' worked examples beside pipelines: Skrull, SeCO and SpaCO, FPDT."""

from __future__ import annotations

from itertools import combinations, pairwise

from paper_tables import Row, Table, printed

from furlong.cost import skrull
from furlong.cost.lengths import K
from furlong.cost.seconds.streaming import (
    fpdt_forward_slowdown,
    num_kv_loads,
    smallest_hidden_backward_chunk_tokens,
    smallest_hidden_chunk_tokens,
)
from furlong.cost.shapes.known_models import model_shape
from furlong.errors import DataError
from furlong.plan.values import Backward, ChunkPlan
from furlong.planners.chunks.dacp import place_by_load
from furlong.planners.methods.chunkflow import plan_chunkflow
from furlong.planners.methods.skrull import schedule_skrull
from furlong.planners.options import ChunkOptions
from furlong.planners.sampling.rules import (
    Factors,
    Rule,
    Sampling,
    expected_weight,
    fixed_factors,
    survival,
)
from furlong.planners.sampling.spaco import plan_seco, plan_spaco
from furlong.simulate.clock import time_actions
from furlong.simulate.unit_costs import UnitCosts


def skrull_example() -> Table:
    """Algorithm 1 with its corrected RollBack: h = 8, h_kv = 2, two ranks."""
    rows = []
    for lens, bucket, expected, tokens in (
        ((4, 5, 5, 6, 9), 15, "-1, -1, 0, 1, -1", "14, 15"),
        ((2, 3, 4, 5, 6, 12), 20, "0, 1, 0, 1, 0, 1", "12, 20"),
    ):
        work = [skrull.flops(n, 8, 2) for n in lens]
        found = place_by_load(lens, work, bucket_tokens=bucket, cp_size=2)
        assert found is not None
        case = f"C = {bucket}, S = {', '.join(map(str, lens))}"
        rows.append(
            Row(case=f"{case}: placement", paper=expected, tolerance=0,
                ours=", ".join(str(-1 if place.size > 1 else place.first) for place in found))
        )  # fmt: skip
        held = [
            sum(
                n / place.size
                for n, place in zip(lens, found, strict=True)
                if place.first <= rank < place.stop
            )
            for rank in range(2)
        ]
        rows.append(
            Row(case=f"{case}: tokens per rank", paper=tokens, tolerance=0,
                ours=", ".join(f"{n:g}" for n in held))
        )  # fmt: skip
    return Table(
        "Skrull, Algorithm 1: worked examples", "-1: sharded", rows,
        ("followed by hand with the corrected RollBack; the paper prints no example",),
    )  # fmt: skip


def skrull_numbers() -> Table:
    """Eq. 13, and the longest sequence that a group can hold."""
    small, large = model_shape("Qwen2.5-0.5B"), model_shape("Qwen2.5-7B")
    sizes = [(shape.hidden_size, shape.kv_size) for shape in (small, large)]
    from_tokens = [skrull.quadratic_from_tokens(*size) for size in sizes]
    ratio = skrull.flops(32 * K, *sizes[0]) / skrull.flops(4 * K, *sizes[0])
    longest = 208 * K
    return Table(
        "Skrull: numbers in the text", "as named",
        (
            Row(case="Qwen2.5-0.5B: tokens from which attention costs more", paper=4608,
                ours=from_tokens[0], tolerance=0),
            Row(case="Qwen2.5-7B: the same", paper=18432, ours=from_tokens[1], tolerance=0),
            Row(case="Qwen2.5-0.5B: FLOPs of 32K over those of 4K", ours=ratio, **printed("34.35")),
            Row(case="8 ranks of 26K: a sequence of 208K", paper="held", ours=held_by(8, longest),
                tolerance=0),
            Row(case="8 ranks of 26K: one token more", paper="refused",
                ours=held_by(8, longest + 1), tolerance=0),
            Row(case="8 ranks of 26K: LMsysChat1M's longest, 1643K", paper="refused",
                ours=held_by(8, 1643 * K), tolerance=0),
        ),
        (
            "the paper says about 4K and 30 times; the numbers here are those of its own Eq. 13",
            "so LMsysChat1M was filtered or cut, which the paper does not mention",
        ),
    )  # fmt: skip


def held_by(cp_size: int, seq_len: int) -> str:
    try:
        schedule_skrull((seq_len,), (1.0,), dp_size=1, cp_size=cp_size, bucket_tokens=26 * K)
    except DataError:
        return "refused"
    return "held"


NUM_CHUNKS = 128
"""16K tokens in chunks of 128, as SeCO and SpaCO train."""


def seco_spaco_times() -> Table:
    """Steps in forwards of the whole sequence; a backward takes two."""
    seq_lens = (NUM_CHUNKS * 128,)
    seco = duration(plan_seco(seq_lens, num_layers=1, chunk_size=128))
    options = ChunkOptions(size=128, keep="all")
    naive = duration(plan_chunkflow(seq_lens, options, stages=(1,)))
    inference = duration(plan_chunkflow(seq_lens, options, stages=(1,), backward=False))
    rows = [Row(case="SeCO over a plain step", paper=4 / 3, ours=seco / naive, tolerance=1e-9,
                promise="exact")]  # fmt: skip
    for drawn, sparsity, over_seco in ((8, "1/16", "0.297"), (16, "1/8", "0.344"), (32, "1/4", "")):
        plan = sampled(NUM_CHUNKS, drawn)
        spaco, share = duration(plan), drawn / NUM_CHUNKS
        backwards = sum(isinstance(a, Backward) for a in plan.actions[0])
        rows.append(
            Row(case=f"t = {drawn}: chunks with a backward, {sparsity}", paper=share,
                ours=backwards / NUM_CHUNKS, tolerance=0)
        )  # fmt: skip
        rows.append(
            Row(case=f"t = {drawn}: SpaCO over inference", paper=1 + 3 * share,
                ours=spaco / inference, tolerance=1e-9, promise="exact")
        )  # fmt: skip
        if over_seco:
            rows.append(
                Row(case=f"t = {drawn}: SpaCO over SeCO", ours=spaco / seco, **printed(over_seco))
            )
    return Table(
        "SeCO and SpaCO: time of a step", "ratio", rows,
        (
            f"k = {NUM_CHUNKS}, all else linear in tokens: SpaCO with t = 8 is "
            f"{seco / duration(sampled(NUM_CHUNKS, 8)):.1f} times as fast as SeCO (the paper: up "
            "to 3 times)",
        ),
    )  # fmt: skip


def spaco_paths() -> Table:
    """Chains of K,V through earlier chunks, and what of them a draw keeps."""
    dense, drawn = sampled(6, 6), sampled(6, 4)
    scale = NUM_CHUNKS / 8
    rules = {
        "no factors": Factors(1, 1),
        "printed": _factors("paper"),
        "both k/t": Factors(scale, scale),
        "k/t and (k-1)/(t-1)": _factors("fixed"),
        "capped at 2": _factors("fixed", cap=2),
    }
    expected = {
        "no factors": ("0.0625", "0.0034", "0.0002", ""),
        "printed": ("0.0625", "0.0551", "0.0420", "0.0269"),
        "both k/t": ("1", "0.8819", "0.6719", "0.4300"),
        "k/t and (k-1)/(t-1)": ("1", "1", "0.8639", "0.6270"),
        "capped at 2": ("1", "0.1102", "0.0105", "0.0008"),
    }
    rows = [
        Row(case="paths of 2 hops over 6 chunks", paper=20, ours=num_paths(dense, 2), tolerance=0),
        Row(case="the same, 4 of them drawn", paper=4, ours=num_paths(drawn, 2), tolerance=0),
        Row(case="dense over sparse", paper=5, ours=1 / survival(6, 4, 2), tolerance=1e-9,
            promise="exact"),
    ]  # fmt: skip
    rows += [
        Row(case=f"weight of {hops} hops, {name}", **printed(text),
            ours=expected_weight(NUM_CHUNKS, 8, hops, rules[name]))
        for name, texts in expected.items() for hops, text in enumerate(texts) if text
    ]  # fmt: skip
    return Table(
        "SpaCO: paths and expected weights",
        "count; 1: unbiased",
        rows,
        (
            "k = 128, t = 8; derived as survival times factors; by independent draws with "
            "both factors 1/p every weight is 1",
        ),
    )


def _factors(rule: Rule, cap: float | None = None) -> Factors:
    return fixed_factors(Sampling(chunks=8, rule=rule, cap=cap), NUM_CHUNKS)


def sampled(num_chunks: int, num_drawn: int) -> ChunkPlan:
    sampling = Sampling(chunks=num_drawn, rule="fixed", report_loss=True)
    return plan_spaco((num_chunks * 128,), sampling, num_layers=1, chunk_size=128)


def num_paths(plan: ChunkPlan, hops: int) -> int:
    """Chains of `hops` + 1 chunks that have a backward, each earlier than the one before."""
    order = [a.chunk for a in plan.actions[0] if isinstance(a, Backward)]
    return sum(all(a > b for a, b in pairwise(chain)) for chain in combinations(order, hops + 1))


def duration(plan: ChunkPlan) -> float:
    return time_actions(plan, UnitCosts(plan)).duration_s


# card and link; attained TFLOP/s; GB/s per device; c0, c0 of heads grouped by four, 2 c0 in K
FPDT_THRESHOLDS = (
    ("A100, PCIe 4", 200, 25, "8.0", "2.0", "16"),
    ("A100, link shared by 2", 200, 12.5, "16", "4", "32"),
    ("A100, link shared by 4", 200, 6.25, "32", "8", "64"),
    ("A100 at its peak, 6.25 GB/s", 312, 6.25, "49.9", "12.5", "100"),
    ("H100, PCIe 5", 600, 50, "12", "3", "24"),
    ("H100, link shared by 2", 600, 25, "24", "6", "48"),
    ("H100, link shared by 4", 600, 12.5, "48", "12", "96"),
    ("GH200", 600, 400, "1.5", "0.4", "3"),
)


def fpdt_thresholds() -> Table:
    """Chunk sizes from which attention hides the loads of K,V."""
    rows = []
    for name, tera, giga, full, grouped, doubled in FPDT_THRESHOLDS:
        rate, link = tera * 1e12, giga * 1e9
        c0 = smallest_hidden_chunk_tokens(rate, link) / 1000
        quarter = smallest_hidden_chunk_tokens(rate, link, kv_share=0.25) / 1000
        backward = smallest_hidden_backward_chunk_tokens(rate, link) / 1000
        rows += [
            Row(case=f"{name}: c0", ours=c0, **printed(full)),
            Row(case=f"{name}: c0, grouped by four", ours=quarter, **printed(grouped)),
            Row(case=f"{name}: c0 of the backward", ours=backward, **printed(full)),
            Row(case=f"{name}: no wait anywhere", ours=2 * c0, **printed(doubled)),
        ]
    return Table(
        "FPDT: the chunk that hides its loads", "1,000 tokens", rows,
        ("derived; rates and links are assumed, not measured; FPDT itself takes 64K",),
    )  # fmt: skip


def fpdt_slowdowns() -> Table:
    """One layer's forward over eight chunks, for a load of so many blocks' compute."""
    slowdowns = ((0.5, "1.000"), (0.9, "1.075"), (1, "1.094"), (1.5, "1.516"), (2, "1.938"),
                 (4, "3.625"))  # fmt: skip
    rows = [Row(case="K,V loads", paper=27, ours=num_kv_loads(8), tolerance=0)]
    rows += [
        Row(case=f"load / block = {ratio}", ours=fpdt_forward_slowdown(8, ratio), **printed(text))
        for ratio, text in slowdowns
    ]
    return Table(
        "FPDT: a forward that waits for K,V", "over its compute", rows,
        ("derived from the loop order of FPDT's code, which prints no such number",),
    )  # fmt: skip

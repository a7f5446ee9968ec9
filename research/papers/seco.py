"""SeCO and SpaCO (Findings of ACL 2025, arXiv 2505.16710): their plans, times and lengths.

SeCO: a first pass without graphs keeps the K,V of every chunk; then, from the last chunk down, each
is run again and sent back at once. That is ChunkFlow with nothing retained. SpaCO: the same with a
backward for t drawn chunks of k. The paper's listing runs over the drawn chunks in any order; it
must descend.
"""

from __future__ import annotations

from collections.abc import Sequence

from furlong.cost.lengths import K
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.plan.plan import ChunkPlan
from furlong.planners.options import ChunkOptions
from furlong.planners.spaco import Sampling, sampled
from furlong.simulate.clock import time_actions
from papers.chunkflow_plan import plan_chunkflow
from papers.fused import OtherMemory
from papers.tables import Row, Table, speedup
from papers.timing import fused_card
from papers.unit_costs import UnitCosts

GIB = 2**30
HF_LOGIT_BYTES = 16
"""transformers' unfused loss: float32 logits, their shifted copy, log-softmax and its gradient."""


def plan_seco(seq_lens: Sequence[int], *, num_layers: int, chunk_size: int) -> ChunkPlan:
    """A checked plan for one device; short sequences are packed into chunks of their own."""
    options = ChunkOptions(size=chunk_size, num_retained=0, keep="kv", hybrid=False)
    return plan_chunkflow(seq_lens, options, stages=(num_layers,))


def plan_spaco(
    seq_lens: Sequence[int], sampling: Sampling, *, num_layers: int, chunk_size: int
) -> ChunkPlan:
    """A checked plan whose backwards are those of the chunks that `sampling` draws."""
    plan = plan_seco(seq_lens, num_layers=num_layers, chunk_size=chunk_size)
    return sampled(plan, sampling)


def times() -> Table:
    """16K tokens in chunks of 128, in forwards of the whole sequence; a backward takes two."""
    seq_lens = (16 * K,)
    seco = duration(plan_seco(seq_lens, num_layers=1, chunk_size=128))
    options = ChunkOptions(size=128, keep="all")
    naive = duration(plan_chunkflow(seq_lens, options, stages=(1,)))
    drawn = Sampling(chunks=8, rule="fixed", report_loss=True)
    spaco = duration(plan_spaco(seq_lens, drawn, num_layers=1, chunk_size=128))
    return Table(
        "SeCO and SpaCO: time of a step", "per cent; times as fast",
        (
            Row(case="SeCO's overhead, \"an estimated 33 %\"", paper=33,
                ours=100 * (seco / naive - 1), tolerance=0.5 / 33, promise="as printed"),
            speedup("SpaCO with 8 chunks over SeCO, \"up to 3x\"", 3, seco / spaco),
        ),
        ("all else linear in tokens; what is launched for small chunks is not counted",),
    )  # fmt: skip


def duration(plan: ChunkPlan) -> float:
    return time_actions(plan, UnitCosts(plan)).duration_s


def lengths() -> Table:
    """Llama 3 8B, LoRA of rank 8, RTX 3090: the longest power of two that fits; nothing fitted."""
    naive = longest_k(chunk=None)
    rows = [
        Row(case="all at once", paper=1, ours=naive, tolerance=0.0),
        Row(case="SeCO, chunks of 128", paper=16, ours=longest_k(chunk=128), tolerance=0.0),
    ]
    card = fused_card("RTX3090")
    return Table(
        "SeCO: longest sequence on one RTX 3090", "K tokens", rows,
        (
            f"budget {card.budget_bytes / GIB:.1f} of {card.memory_bytes / GIB:.0f} GiB; the next "
            f"power of two would need {peak_on_card(2, None) / GIB:.1f} GiB all at once and "
            f"{peak_on_card(32, 128) / GIB:.1f} GiB in chunks",
        ),
    )  # fmt: skip


def longest_k(chunk: int | None, candidates: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)) -> int:
    budget = fused_card("RTX3090").budget_bytes
    return max((k for k in candidates if peak_on_card(k, chunk) <= budget), default=0)


def peak_on_card(length_k: int, chunk: int | None) -> int:
    """Bytes that one sequence needs, in chunks of so many tokens or all at once."""
    shape, training = model_shape("Llama-3-8B"), Training(lora=Lora(rank=8), kv_gradient_bytes=2)
    memory = OtherMemory(shape, training, 0, logit_bytes=HF_LOGIT_BYTES)
    options = ChunkOptions(size=chunk or length_k * K, num_retained=0 if chunk else 1, keep="kv")
    plan = plan_chunkflow((length_k * K,), options, stages=(shape.num_layers,))
    return max(memory.peak_bytes_of_actions(plan, 0))

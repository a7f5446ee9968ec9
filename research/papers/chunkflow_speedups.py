"""ChunkFlow's speed-ups over Megatron-LM (Figure 8), and what more devices cost short sequences.

Both systems of a row run the same batches on the same cost model; seconds are means over batches of
lengths drawn from the paper's own table.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from furlong.cost.lengths import K, sample_lengths
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.plan.plan import Chunk, ChunkPlan, Slice
from papers.chunkflow import chunkflow_plan
from papers.chunkflow_times import CARD, TABLE_4
from papers.fused_pairs import FusedPairs
from papers.seq1f1b_plan import plan_seq1f1b
from papers.tables import Table, aggregate, count_faster, shown, speedup
from papers.tensor_parallel import TensorParallel
from papers.timing import fused_card, step_s, with_fixed_costs

FULLY_RECOMPUTED = {("Qwen2.5-7B", 256), ("Qwen2.5-14B", 256), ("Qwen2.5-32B", 256)}
"""Where Megatron-LM needs full recomputation (ChunkFlow, Table 3); elsewhere it is selective, which
with flash attention recomputes nothing."""


def speedups(num_batches: int, fixed_factor: float = 1.0) -> dict[str, float]:
    """By setting. `fixed_factor` multiplies the assumed fixed costs of a call."""
    found = {}
    spec = with_fixed_costs(fused_card(CARD), fixed_factor)
    for model, context, tp, pp, (size, retained) in TABLE_4:
        shape = model_shape(model)
        cost = TensorParallel.of(shape, spec, Training(kv_gradient_bytes=2), tp)
        stages = (shape.num_layers // pp,) * pp
        full = (model, context) in FULLY_RECOMPUTED
        theirs, ours = [], []
        for seed in range(num_batches):
            lens = sample_lengths("chunkflow-evaluation", 256, seed, max_seq_len=context * K)
            theirs.append(step_s(cost, megatron_plan(lens, stages, full), FusedPairs))
            ours.append(step_s(cost, chunkflow_plan(lens, size * K, retained, stages)))
        name = f"{model}, {context}K, TP {tp}, PP {pp}, {'full' if full else 'selective'}"
        found[name] = mean(theirs) / mean(ours)
    return found


def over_megatron(num_batches: int = 20) -> Table:
    """ChunkFlow's Figure 8 on the layouts of its Tables 3 and 4, 256 sequences a step.

    Megatron-LM runs every sequence as a micro-batch, unpadded, in the order of the data, in 1F1B
    with fused pairs of messages. Both replicate nothing: the paper prints no number of devices.
    """
    found, halved = speedups(num_batches), speedups(num_batches, 0.5)
    rows = [shown(name, speedup) for name, speedup in found.items()]
    rows += [count_faster(list(found.values())), speedup("largest", 4.53, max(found.values()))]
    return Table(
        "ChunkFlow over Megatron-LM", "times as fast", rows,
        (
            "the bars of Figure 8 are not in the text; the paper prints the largest only",
            "an A100's half_tokens, the fixed cost of a call, was chosen in view of ChunkFlow's "
            "Table 6, not of this one; with half of it and of the launch times the speed-ups are "
            f"{min(halved.values()):.2f} to {max(halved.values()):.2f}",
        ),
    )  # fmt: skip


def megatron_plan(
    seq_lens: Sequence[int], stages: tuple[int, ...], fully_recomputed: bool
) -> ChunkPlan:
    """1F1B over micro-batches of one sequence each."""
    groups = [[Chunk((Slice(seq_id, 0, n),))] for seq_id, n in enumerate(seq_lens)]
    layers = [[n * fully_recomputed] * len(groups) for n in stages]
    return plan_seq1f1b(seq_lens, groups, stages=stages, recompute_layers=layers)


def more_devices(num_batches: int = 20) -> Table:
    """Section 1: sequences below 32K on the 16 devices that 256K needs, instead of 4."""
    found = {
        "TP 4, PP 4, full": drop(4, 4, True, num_batches),
        "TP 4, PP 4, selective": drop(4, 4, False, num_batches),
        "TP 16, PP 1, selective": drop(16, 1, False, num_batches),
    }
    own, *others = found.items()
    return Table(
        "ChunkFlow, section 1: 16 devices instead of 4", "per cent",
        (aggregate(f"performance lost below 32K ({own[0]})", 65, own[1]),),
        (
            "per device, 64 sequences of LMSysChat1M one by one; on 16 as the paper's Table 3 "
            "runs 256K; " + ", ".join(f"{name}: {lost:.0f}" for name, lost in others),
        ),
    )  # fmt: skip


def drop(tp: int, pp: int, fully_recomputed: bool, num_batches: int) -> float:
    """Per cent of a device's performance, against TP 4 without a pipeline."""
    shape = model_shape("Qwen2.5-7B")
    seconds = [0.0, 0.0]
    for i, (own_tp, own_pp, full) in enumerate(((4, 1, False), (tp, pp, fully_recomputed))):
        training = Training(kv_gradient_bytes=2)
        cost = TensorParallel.of(shape, fused_card(CARD), training, own_tp)
        stages = (shape.num_layers // own_pp,) * own_pp
        for seed in range(num_batches):
            lens = sample_lengths("lmsys-chunkflow", 64, seed, max_seq_len=32 * K)
            seconds[i] += step_s(cost, megatron_plan(lens, stages, full), FusedPairs)
    return 100 * (1 - 4 * seconds[0] / (tp * pp * seconds[1]))

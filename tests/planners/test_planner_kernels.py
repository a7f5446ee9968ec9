"""Attention's kernels on a GPU, by what `auto` decides: the rows and keys of every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from furlong.config.schema import DataConfig, LoraConfig, ModelConfig, RunConfig, Source
from furlong.cost.machine import Machine
from furlong.cost.shape import model_shape
from furlong.ops.attention import AttentionRule, Gathered, SliceAttention
from furlong.ops.backends.cudnn import split_calls
from furlong.plan.lengths import StepSize, count_lengths
from furlong.plan.rows import rows_of
from furlong.plan.segments import segment_tokens
from furlong.planners.decide import decide
from furlong.planners.question import Question
from furlong.planners.setup import cost_model_of, limits_of

SHAPE = model_shape("Qwen3-8B")
K = 1024


def decided(card: str, num_tokens: int, *, is_lora: bool = True, **given: Any) -> Any:
    """The plan of one sequence that a run of Qwen3-8B decides on."""
    lora = LoraConfig(rank=16) if is_lora else None
    config = RunConfig(
        model=ModelConfig(name="Qwen3-8B", lora=lora),
        data=DataConfig(train=(Source(path="none"),), max_seq_len=num_tokens),
    )
    machine, num_devices = Machine.named(card), 1 if is_lora else 8
    limits = limits_of(machine, machine.budget("auto")[0], 1000 * 2**30)
    model = cost_model_of(config, SHAPE, machine, num_devices)
    question = Question((), model, limits, num_devices, **given)
    decision = decide(question, count_lengths([num_tokens]), size=StepSize(1))
    assert decision.answer is not None
    return decision.answer.best.plan_of([num_tokens])


class Counting:
    """Of each call the pairs that cuDNN computes, and the others."""

    tally = None

    def __init__(self) -> None:
        self.pairs: Counter[bool] = Counter()

    def forward(self, q: torch.Tensor, k: torch.Tensor, _: Any, block: Any) -> Any:
        for rows, keys, is_fused in split_calls(q.shape[1], k.shape[1], block):
            own = block if block.squares else block.at(rows.start, keys.start)
            pairs = own.num_pairs(rows.stop - rows.start, keys.stop - keys.start)
            self.pairs[is_fused] += pairs * q.shape[0]
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


@dataclass
class Stored:
    """What is stored before slices, whose positions are `starts`."""

    starts: dict[int, int]
    per_segment: int

    def prefix(self, index: int, *_: Any, **__: Any) -> Iterator[Any]:
        start = self.starts[index]
        for first in range(0, start, self.per_segment):
            keys = meta(1, min(self.per_segment, start - first))
            yield Block(keys, keys, start - first)


@dataclass
class Block:
    k: torch.Tensor
    v: torch.Tensor
    distance: int

    def add_grad(self, *_: Any) -> None: ...


def meta(heads: int, rows: int) -> torch.Tensor:
    return torch.empty((heads, rows, 8), device="meta")


def fused_share(plan: Any) -> float:
    """Of the pairs of a plan's attention, those of cuDNN, on all processes of a pool."""
    counting: Any = Counting()
    is_moved = plan.offload.kv != "none"
    per_segment = segment_tokens(2 * SHAPE.stored_size, "cuda", is_moved)
    for process in range(plan.sp_size):
        for chunk in plan.chunks:
            rows = rows_of(
                chunk, process, sp_size=plan.sp_size, q_heads=SHAPE.num_heads,
                kv_heads=SHAPE.num_kv_heads,
            )  # fmt: skip
            for level in rows.levels:
                stored: Any = Stored({x.index: x.start for x in level.slices}, per_segment)
                first, stop = (0, level.num_queries) if level.size > 1 else level.local
                q = meta(SHAPE.num_heads // level.inner_size, stop - first)
                every, kv = meta(1, level.slices[-1].keys[1]), meta(1, stop - first)
                gathered = Gathered(every, every) if level.num_inner > 1 else None
                attention = SliceAttention(
                    level.slices, stored, AttentionRule(1.0), counting, first
                )
                attention.forward(q, kv, kv, None, gathered)
    n = sum(plan.seq_lens)
    assert counting.pairs.total() == SHAPE.num_heads * n * (n + 1) // 2, "all of attention"
    return counting.pairs[True] / counting.pairs.total()


@pytest.mark.parametrize(
    "num_tokens",
    [32 * K, 128 * K, pytest.param(K * K, marks=[pytest.mark.slow, pytest.mark.nightly])],
)
@pytest.mark.parametrize("card", ["H100", "H200"])
def test_cudnn_computes_what_auto_decides(card, num_tokens):
    assert fused_share(decided(card, num_tokens)) == 1


def test_a_size_that_is_no_multiple_leaves_its_last_rows_to_flash_attention():
    assert 0.98 < fused_share(decided("H100", 32 * K, given={"size": 8000})) < 1


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "given",
    [
        {}, {"method": "places", "given": {"sp": 8}},
        {"method": "infinipipe", "given": {"pp": 4, "sp": 2}},
        {"method": "infinipipe", "given": {"pp": 8}},
    ],
)  # fmt: skip
def test_cudnn_computes_what_eight_cards_divide(given):
    """All weights trained, in pools and pipelines: but for a chunk's last tokens."""
    assert fused_share(decided("H200", 128 * K, is_lora=False, **given)) > 0.9999

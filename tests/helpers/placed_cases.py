"""Cases of plans with sequences on places, and a function that runs them in a gloo pool."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from furlong.ops.sequence_parallel import AllToAll
from furlong.plan.plan import Chunk, Place, Slice, place_sizes
from furlong.plan.rows import rows_of
from furlong.planners.options import ChunkOptions
from furlong.testing import num_labels, reference_loss, take_grads, worst_relative_error
from helpers.batches import batch
from helpers.placed import obey, plan_of
from helpers.random_chunks import random_chunks
from helpers.tiny_families import build
from helpers.wide_norms import widen_norms


@dataclass(frozen=True)
class PlacedCase:
    """A case; `chunks`: slices of each chunk as (seq_id, start, stop, first process, size)."""

    name: str
    chunks: Sequence[Sequence[tuple[int, int, int, int, int]]]
    options: ChunkOptions = field(default_factory=lambda: ChunkOptions(size=8))
    family: str = "llama"
    changes: Mapping[str, Any] = field(default_factory=dict)
    masked: tuple[range, ...] = ()
    backward: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def placed(self) -> tuple[Chunk, ...]:
        return tuple(
            Chunk(tuple(Slice(s, a, b, Place(first, size)) for s, a, b, first, size in chunk))
            for chunk in self.chunks
        )

    @property
    def lens(self) -> list[int]:
        ends = {s: max(b for c in self.chunks for i, _, b, *_ in c if i == s)
                for c in self.chunks for s, *_ in c}  # fmt: skip
        return [ends[s] for s in sorted(ends)]


def random_case(seed: int, sp_size: int, heads: Sequence[tuple[int, int]]) -> PlacedCase:
    """Return a case with chunks, model and options drawn from a seed."""
    draw = random.Random(seed)
    lens, chunks = [1], ()
    while max(lens) == 1:  # no label at all
        lens, chunks = random_chunks(
            draw, sp_size, num_chunks=draw.randint(1, 4), num_sequences=draw.randint(1, 9),
            max_tokens=24,
        )  # fmt: skip
    family = draw.choice(("llama", "llama", "mistral", "gpt_oss"))
    q_heads, kv_heads = draw.choice(heads)
    options = ChunkOptions(
        size=8, keep=draw.choice(("kv", "attention", "input")),
        num_retained=draw.choice((0, 1, 2, 9)), recompute_layers=draw.choice((0, 0, 1)),
    )  # fmt: skip
    changes = {
        "num_attention_heads": q_heads, "num_key_value_heads": kv_heads, "num_hidden_layers": 2,
        "head_dim": 8,
    }  # fmt: skip
    if 32 % q_heads:
        changes["hidden_size"] = 8 * q_heads
    if family == "gpt_oss":
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    plain = [[(s.seq_id, s.start, s.stop, s.place.first, s.place.size) for s in chunk.slices]
             for chunk in chunks]  # fmt: skip
    return PlacedCase(f"seed {seed}", plain, options, family, changes)


def oddities(case: PlacedCase, sp_size: int) -> Counter[str]:
    """Count the unusual situations in a case."""
    heads = case.changes["num_attention_heads"], case.changes["num_key_value_heads"]
    found: Counter[str] = Counter()
    for chunk in case.placed:
        found["chunks with several prefixes"] += sum(s.start > 0 for s in chunk.slices) > 1
        for process in range(sp_size):
            rows = rows_of(chunk, process, sp_size=sp_size, q_heads=heads[0], kv_heads=heads[1])
            found["processes without a token"] += not rows.tokens
            found["gathered levels"] += sum(level.num_inner > 1 for level in rows.levels)
            found["copied heads"] += sum(x.inner_size > heads[1] for x in rows.levels)
            found["processes of three levels"] += len(rows.levels) >= 3
            found["empty shares"] += sum(x.local[0] == x.local[1] for x in rows.levels)
    return found


@dataclass
class Counted:
    """An exchange that counts how often it is started."""

    exchange: AllToAll
    num_started: int = 0

    def start(self, x: Tensor, send_rows: Any, recv_rows: Any, size: int) -> Callable[[], Tensor]:
        self.num_started += 1
        return self.exchange.start(x, send_rows, recv_rows, size)


def gloo_exchange(rank: int, sp_size: int) -> AllToAll:
    """Return an exchange with one group per size of a place; all processes must call this."""
    groups = {}
    for size in place_sizes(sp_size)[1:]:
        for first in range(0, sp_size, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= rank < first + size:
                groups[size] = group
    return AllToAll(groups)


def over_pool(x: Tensor) -> Tensor:
    """Sum x over all processes, in place, and return it."""
    dist.all_reduce(x)
    return x


@dataclass(frozen=True)
class Found:
    """The errors of one case."""

    gradients: float
    loss: float
    tokens: float
    num_exchanges: int


def model_of(case: PlacedCase) -> nn.Module:
    model = widen_norms(build(case.family, **case.changes))
    if case.family == "gpt_oss":
        model.set_attn_implementation("eager")
    return model


def run_cases(rank: int, cases: Sequence[PlacedCase], sp_size: int) -> list[Found]:
    """Run cases and return their errors, which only the first process computes (0 on others)."""
    exchange = gloo_exchange(rank, sp_size)
    return [_run(rank, case, sp_size, exchange) for case in cases]


def _run(rank: int, case: PlacedCase, sp_size: int, exchange: AllToAll) -> Found:
    model = model_of(case)
    plan = plan_of(
        case.lens, case.placed, sp_size, case.options,
        num_layers=model.config.num_hidden_layers, backward=case.backward,
    )  # fmt: skip
    sequences = batch(case.lens, masked=case.masked)
    counted = Counted(exchange)
    with ExitStack() as stack:
        if case.options.offload != "none":  # offload tensors however small they are
            stack.enter_context(patch("furlong.runtime.cell._MIN_BYTES", 1))
            stack.enter_context(patch("furlong.kv.store.segment_tokens", lambda *_: 3))
        loss_sum, token_losses = obey(model, plan, sequences, counted, rank, over_pool)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and case.backward}
    missing = [name for name, p in trained.items() if p.grad is None]
    assert not missing, f"no gradient of {missing}: a sum over processes would lack it"
    for p in trained.values():
        dist.all_reduce(p.grad)
    if rank:
        return Found(0.0, 0.0, 0.0, counted.num_started)
    given = take_grads(model)
    loss = reference_loss(model, sequences, backward=case.backward)
    truth = take_grads(model)
    return Found(
        worst_relative_error(given, truth) if truth else 0.0,
        abs(loss_sum / num_labels(sequences) / loss - 1),
        _token_error(model, sequences, token_losses), counted.num_started,
    )  # fmt: skip


def _token_error(model: nn.Module, sequences: Any, given: Sequence[Tensor]) -> float:
    """Return the largest error of a token's loss, if the plan evaluates; else 0."""
    error = 0.0
    for sequence, losses in zip(sequences, given, strict=False):
        with torch.no_grad():
            logits = model(input_ids=sequence["input_ids"][None], use_cache=False).logits[0]
        each = cross_entropy(logits[:-1], sequence["labels"][1:], reduction="none")
        expected = torch.cat((each, each.new_zeros(1)))
        error = max(error, float((losses - expected).abs().max()))
    return error

"""Losses by position against transformers' own forward."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from furlong.api import Engine
from furlong.data.loader import LoaderState, TrainBatch
from furlong.data.tokenize import Sequence
from furlong.ops.loss import IGNORE_INDEX
from furlong.planners.options import ChunkOptions
from furlong.report.beyond import Beyond, PositionSpan
from furlong.train.batches import BatchEngine
from furlong.train.evaluation import evaluate
from furlong.train.memory import Fitting, UsedMemory

LENS = (300, 1, 65, 64, 130)


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.0,
    )
    return LlamaForCausalLM(config).double().train()


def make_batches() -> list[TrainBatch]:
    draw = np.random.default_rng(0)
    sequences = []
    for seq_id, seq_len in enumerate(LENS):
        ids = draw.integers(0, 48, size=seq_len).astype(np.int32)
        labels = ids.copy()
        labels[: draw.integers(0, 1 + seq_len // 2)] = IGNORE_INDEX
        sequences.append(Sequence(seq_id, "drawn", ids, labels))
    return [
        TrainBatch(tuple(sequences[:1]), LoaderState(0, 1)),
        TrainBatch((sequences[1],), LoaderState(0, 2)),
        TrainBatch(tuple(sequences[2:]), LoaderState(1, 0)),
    ]


def true_losses(
    model: LlamaForCausalLM, batches: list[TrainBatch]
) -> tuple[list[int], list[float]]:
    """Position and loss of every token with a label."""
    positions, losses = [], []
    for batch in batches:
        for sequence in batch.tensors():
            with torch.no_grad():
                logits = model(sequence["input_ids"][None]).logits[0]
            for position in range(1, len(sequence["labels"])):
                label = sequence["labels"][position]
                if label != IGNORE_INDEX:
                    positions.append(position)
                    losses.append(float(cross_entropy(logits[position - 1], label)))
    return positions, losses


@pytest.mark.parametrize("size", [7, 512])
def test_loss_by_position_is_that_of_the_whole_model(size: int) -> None:
    model, batches = make_model(), make_batches()
    model.model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    positions, losses = true_losses(model, batches)
    given = evaluate(BatchEngine(Engine(model)), batches, Fitting(ChunkOptions(size=size)))
    assert given is not None
    assert given.num_valid_tokens == len(losses)
    assert given.loss == pytest.approx(np.mean(losses), rel=1e-12)
    assert [(b.start, b.stop) for b in given.by_position] == [
        (0, 64), (64, 128), (128, 256), (256, 512),
    ]  # fmt: skip
    for bucket in given.by_position:
        own = [
            loss
            for position, loss in zip(positions, losses, strict=True)
            if bucket.start <= position < bucket.stop
        ]
        assert (bucket.num_valid_tokens, bucket.loss) == (
            len(own), pytest.approx(np.mean(own), rel=1e-12),
        )  # fmt: skip
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_dropout_is_off() -> None:
    model, batches = make_model(), make_batches()
    layer = model.model.layers[0]
    layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Dropout(0.5))
    engine = Engine(model)
    _, losses = true_losses(model.eval(), batches)
    model.train()
    given = evaluate(BatchEngine(engine), batches, Fitting(ChunkOptions(size=32)))
    assert given is not None and given.loss == pytest.approx(np.mean(losses), rel=1e-12)


def test_a_loss_that_is_not_finite_is_not_hidden() -> None:
    model, batches = make_model(), make_batches()
    engine = Engine(model.eval())  # the start-up check would refuse what comes next
    model.train()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    given = evaluate(BatchEngine(engine), batches, Fitting(ChunkOptions(size=32)))
    assert given is not None and np.isnan(given.loss)


def test_it_stops_when_it_is_asked_to() -> None:
    model, batches = make_model(), make_batches()
    asked = iter([False, True])
    given = evaluate(
        BatchEngine(Engine(model)),
        batches,
        Fitting(ChunkOptions(size=32)),
        should_stop=lambda: next(asked),
    )
    assert given is None and model.training


def test_it_is_held_to_the_budget_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = make_model(), make_batches()
    optimizer = torch.optim.SGD(model.parameters())
    device = torch.device("cpu")
    used = UsedMemory(model.parameters(), optimizer, device, budget_bytes=1 << 40)
    fitting = Fitting(ChunkOptions(size=256), say=lambda line: None)
    engine = Engine(model)
    whole = evaluate(BatchEngine(engine), batches, fitting, used=used)
    needed = 1 << 50
    monkeypatch.setattr(used, "peak_bytes", lambda: needed if fitting.options.size > 64 else 0)
    in_parts = evaluate(BatchEngine(engine), batches, fitting, used=used)
    assert fitting.options.size == 64
    assert whole is not None and in_parts is not None
    assert in_parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_loss_beyond_the_trained_length_is_beside_that_of_the_same_sequences() -> None:
    """Only the sequences of 300 and 130 tokens are longer than 100."""
    model, batches = make_model(), make_batches()
    options = Fitting(ChunkOptions(size=64))
    given = evaluate(BatchEngine(Engine(model)), batches, options, trained_tokens=100)
    assert given is not None and given.beyond is not None
    longer = [
        true_losses(model, [TrainBatch((sequence,), LoaderState(0, 1))])
        for batch in batches for sequence in batch.sequences if len(sequence.labels) > 100
    ]  # fmt: skip
    for span in given.beyond.spans:
        reaching = [
            (dict(zip(*each, strict=True)), span.start // 25) for each in longer
        ]  # position -> loss
        inside, trained = [], []
        for by_position, number in reaching:
            own = [loss for at, loss in by_position.items() if at // 25 == number]
            inside += own
            trained += [loss for at, loss in by_position.items() if 50 <= at < 100 and own]
        assert span.num_valid_tokens == len(inside)
        assert (span.loss, span.trained_loss, span.loss_error) == (
            pytest.approx(np.mean(inside), rel=1e-12),
            pytest.approx(np.mean(trained), rel=1e-12),
            pytest.approx(np.std(inside, ddof=1) / len(inside) ** 0.5, rel=1e-6),
        )
    assert [each.start for each in given.beyond.outside] == list(range(100, 300, 25))
    shorter = evaluate(BatchEngine(Engine(model)), batches, options, trained_tokens=300)
    assert shorter is not None and shorter.beyond is None


@pytest.mark.parametrize(
    ("rises", "position"),
    [
        ((0.0, 0.0, 0.01, -0.01, 0.01), None),  # by chance alone
        ((0.0, 0.3, 0.3, 0.3, -0.1), 50),  # and falls below at the end
        ((0.0, -0.1, 0.0, 0.3, -0.1), 70),
        ((0.0, 0.03, 0.03, -0.01, 0.03), 50),  # by all that follow
        ((0.0, 0.0, math.nan, 0.0, 0.0), 60),
        ((0.0, -0.01, 0.02, 0.4, 0.9), 60),
        ((0.0, 0.3, 0.3, 0.3, -0.01), 50),  # the last by chance
        ((0.5, 0.05, 0.05, 0.05, 0.05), 50),  # what lies within the trained length is not asked
    ],
)
def test_the_loss_rises_from_where_a_run_of_spans_is_above_the_trained_positions(
    rises: tuple[float, ...], position: int | None
) -> None:
    spans = tuple(
        PositionSpan(start, start + 10, 2 + rise, 2.0, 0.01, 0.005, 100)
        for start, rise in zip(range(40, 90, 10), rises, strict=True)
    )
    assert Beyond(50, spans).rises_from == position

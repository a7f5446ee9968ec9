"""The table of every model: what is right, refused or not run, and that it can say 'wrong'."""

from __future__ import annotations

import re
from functools import partial

import families
import model_gradients
import pytest
import torch
from model_gradients import Row, cut, measure

import furlong


def test_a_right_model():
    row = measure("llama")
    whole, cut = (float(text.split()[0]) for text in row.detail.split(";"))
    assert row.outcome == row.cut == "exact" and max(whole, cut) <= 1e-12


@pytest.mark.slow  # transformers' imports
def test_a_refused_model_and_one_that_does_not_run_alone():
    refused, not_run = map(measure, ("bloom", "gemma4_unified_assistant"))
    assert refused.outcome == "refused" and "AttentionInterface" in refused.detail
    assert not_run.outcome == "not run" and "shared_kv_states" in not_run.detail


def nothing_handed_on(whole, model, sequences, options, **settings):
    return whole(model, cut(sequences), furlong.ChunkOptions(size=64), **settings)


def with_gradient(change):
    """One number of one gradient is another."""

    def damaged(whole, model, *arguments, **settings):
        result = whole(model, *arguments, **settings)
        gradient = model.model.norm.weight.grad
        gradient[3] = change(gradient[3])
        return result

    return damaged


def crash(*_, **__):
    raise AttributeError("no such thing | at all")


@pytest.mark.parametrize(
    ("damaged", "outcome", "told"),
    [
        (nothing_handed_on, "wrong", r"([1-9]|0\.[1-9])"),
        (with_gradient(lambda x: x * (1 + 1e-6)), "wrong", r".*model\.norm\.weight"),
        (with_gradient(lambda x: float("nan")), "wrong", r"inf \(model\.norm\.weight"),
        (crash, "crash", "AttributeError: no such thing / at all$"),
    ],
)
def test_an_engine_that_is_wrong_or_fails(damaged, outcome, told, monkeypatch):
    monkeypatch.setattr(furlong, "forward_backward", partial(damaged, furlong.forward_backward))
    row = measure("llama")
    assert row.outcome == outcome and re.match(told, row.detail), row


def test_only_what_rounds_by_itself_may_be_rounded():
    """gemma casts norms' weights to float32 and sums their gradients in it, mllama casts logits,
    llama does neither."""
    moved = {}
    for family in ("llama", "gemma", "mllama"):
        model = model_gradients.build(family, torch.float64, "sdpa")
        sequences = model_gradients._sequences()
        _, truth = model_gradients._true_gradients(model, sequences)
        moved[family] = model_gradients.own_rounding(model, sequences, truth)
    assert moved["llama"] < 1e-13
    assert all(1e-9 < moved[family] < 1e-6 for family in ("gemma", "mllama"))


def test_what_was_right_must_stay_right():
    before = families.outcomes_of(
        families.document([
            Row("a", "A", "exact", "1e-15"), Row("b", "B", "rounded", "1e-7"),
            Row("c", "C", "refused", "reason"), Row("d", "D", "exact", "1e-15"),
            Row("g", "G", "exact", "1e-15", "exact"),
        ])
    )  # fmt: skip
    assert before == {
        "a": ("exact", "-"), "b": ("rounded", "-"), "c": ("refused", "-"), "d": ("exact", "-"),
        "g": ("exact", "exact"),
    }  # fmt: skip
    better = [Row("b", "B", "exact", "1e-15"), Row("c", "C", "exact", "1e-15")]
    assert families.misses(better, before) == []
    worse = [
        Row("a", "A", "rounded", "1e-7"), Row("b", "B", "refused", "reason"),
        Row("c", "C", "not run", "reason"), Row("d", "D", "unprovable", "reason"),
        Row("e", "E", "wrong", "0.5 (x)"), Row("f", "F", "crash", "KeyError"),
        Row("g", "G", "exact", "1e-15", "refused"),
    ]  # fmt: skip
    found = [miss.split()[0] for miss in families.misses(worse, before)]
    assert found == ["a", "b", "d", "e", "f", "g"]

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
from furlong.runtime.executor import Executor


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


def test_an_error_within_a_family_s_own_rounding_is_measured_in_wider_numbers(monkeypatch):
    def worst(model, *_):
        is_wide = type(model).__module__.endswith("_in_float64")
        return (1e-10 if is_wide else 1e-3), "a weight"

    monkeypatch.setattr(model_gradients, "own_rounding", lambda *given: 1e-3)
    monkeypatch.setattr(model_gradients, "_worst", worst)
    row = measure("llama")
    assert (row.outcome, row.cut) == ("widened", "widened") and row.detail.startswith("1.0e-10")


def test_a_model_that_is_wrong_in_stages_alone_is_wrong(monkeypatch):
    deliver = Executor._deliver_gradient
    monkeypatch.setattr(
        Executor, "_deliver_gradient", lambda self, cell, x: deliver(self, cell, 1.001 * x)
    )
    # the start-up check sees it too, and would refuse to cut
    monkeypatch.setattr("furlong.runtime.session.self_check", lambda *_: 0.0)
    row = measure("llama")
    assert row.outcome == "wrong" and row.detail.startswith("layer by layer: ")


def test_a_control_that_does_not_move_proves_nothing(monkeypatch):
    monkeypatch.setattr(model_gradients, "cut", lambda sequences: sequences)
    row = measure("llama")
    assert row.outcome == "unprovable" and "without a relay" in row.detail


def test_only_what_rounds_by_itself_may_be_rounded():
    """gemma casts norms' weights to float32 and sums their gradients in it, llama does not."""
    moved = {}
    for family in ("llama", "gemma"):
        model = model_gradients.build(family, torch.float64, "sdpa")
        sequences = model_gradients._sequences()
        _, truth = model_gradients._true_gradients(model, sequences)
        moved[family] = model_gradients.own_rounding(model, sequences, truth)
    assert moved["llama"] < 1e-13 and 1e-9 < moved["gemma"] < 1e-6


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


@pytest.mark.slow  # three new processes
def test_a_process_each_a_time_limit_and_the_exit_code(monkeypatch, tmp_path, capsys):
    document = tmp_path / "models.md"
    document.write_text(families.document([Row("bloom", "BloomForCausalLM", "exact", "1e-15")]))
    monkeypatch.setattr(families, "DOCUMENT", document)
    assert families.main(["--only", "LlamaForCausalLM"]) == 0
    assert families.main(["--only", "bloom"]) == 1
    assert "MISSED: bloom (BloomForCausalLM) was exact, is refused" in capsys.readouterr().out
    assert families.main(["--only", "no such model"]) == 2
    (late,) = families.measure_all(["gpt2"], jobs=1, limit_s=0)
    assert (late.outcome, late.detail) == ("not run", "no answer within 0 s")
    assert "bloom" in document.read_text()

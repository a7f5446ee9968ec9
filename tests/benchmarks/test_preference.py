"""The arithmetic of benchmarks/preference.py, and that its trials compute what they say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from contenders import build
from measuring import Measurement
from preference import ATTENTION, KV, SHARED, TRL, pair_promises
from preference_trial import BETA, Trial, run

MIB = 2**20


def measured(cpu_s: float, extra_bytes: int, num_tokens: int = 32_768) -> list[Measurement]:
    return [Measurement(9.0, cpu_s, extra_bytes, 0.7, 2.0, num_tokens)]


def test_a_pair_keeps_six_figures() -> None:
    results = {
        TRL: measured(100, 1000), ATTENTION: measured(85, 600), KV: measured(100, 350),
        SHARED: measured(60, 400),
    }  # fmt: skip
    assert [promise.verdict for promise in pair_promises(results)] == ["met"] * 6
    missed = pair_promises(results | {SHARED: measured(61, 400), KV: measured(99, 351)})
    assert {p.name for p in missed if p.verdict == "MISSED"} == {
        "keep=kv: extra peak / TRL", "keep=kv, prompt shared: time / TRL",
    }  # fmt: skip


@pytest.mark.parametrize("num_answers", [2, 4])
def test_trials_compute_one_loss_and_one_gradient(num_answers: int) -> None:
    trial = Trial("furlong", "flat", 96, 24, num_answers, 32, {"size": 32, "keep": "kv"})
    own, shared = run(trial), run(replace(trial, share_prompts=True))
    assert shared.loss == pytest.approx(own.loss, rel=1e-4, abs=1e-6)
    assert shared.grad_norm == pytest.approx(own.grad_norm, rel=1e-4)


def test_the_first_step_is_what_streambp_computes() -> None:
    """Its margin is 0, and the first token of each answer is not learnt."""
    trial = Trial("furlong", "flat", 96, 24, 2, 32, {"size": 32, "keep": "kv"}, begins=True)
    found = run(trial)
    assert found.loss == pytest.approx(math.log(2), rel=1e-6)
    model, signs = build("flat"), (1, -1)
    for sign, ids in zip(signs, trial.answers(), strict=True):
        logits = model(input_ids=ids[None]).logits[0, 96:-1]
        log_probs = logits.log_softmax(-1).gather(1, ids[97:, None])
        (-0.5 * BETA * sign * log_probs.sum()).backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert found.grad_norm == pytest.approx(float(torch.stack(norms).norm()), rel=1e-4)

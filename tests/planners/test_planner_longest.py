"""The longest sequence that a decision could still train."""

from __future__ import annotations

import pytest

from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.plan.plan import Layout
from furlong.planners.decide import longest_sequence
from furlong.planners.orders import plan_replica
from furlong.planners.question import Limits, Question
from furlong.planners.search import search
from furlong.simulate.predict import predict

MODEL = CostModel(model_shape("Qwen2.5-0.5B"), Machine.named("H100"))
GIB = 2**30


@pytest.mark.parametrize("pp", [1, 2])
def test_the_longest_sequence_fits_and_a_longer_one_does_not(pp: int) -> None:
    given = {"size": 4096, "num_retained": 0, "keep": "kv", "order": "chunk-first"}
    layout, limits = Layout(pp=pp), Limits(20 * GIB)
    sizes = {"dp": 1, "sp": 1, "pp": pp}
    answer = search(Question([[9000, 300]], MODEL, limits, pp, given=given | sizes))
    longest = longest_sequence(answer)
    assert longest.limit == "memory"
    model, stages = answer.question.model_of(layout), answer.question.stages_of(layout)

    def peak_bytes(num_tokens: int) -> int:
        plan = plan_replica([num_tokens], answer.options, num_layers=24, stages=stages)
        return predict(model, plan).device_bytes

    most = longest.num_tokens
    assert peak_bytes(most) <= limits.limit_bytes < peak_bytes(most * 102 // 100)
    # memory has room for more than the model has positions
    few = longest_sequence(answer, num_positions=most // 2)
    assert (few.num_tokens, few.limit) == (most // 2, "positions")
    assert longest_sequence(answer, num_positions=10**9) == longest


def test_a_pool_that_places_whole_sequences_cuts_those_that_fit_no_other_way() -> None:
    answer = search(Question([[900] * 16], MODEL, Limits(10 * GIB), 2, given={"sp": 2}))
    assert answer.best.method == "places"
    assert longest_sequence(answer).num_tokens > 10_000

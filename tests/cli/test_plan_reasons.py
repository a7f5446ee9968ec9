"""Why a choice was made: its neighbours are priced as the search prices them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from furlong.cli.plan import reasons
from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.planners.question import Limits, Question
from furlong.planners.search import search

LORA = Training(lora=Lora(16, "all-linear"))
GIB = 2**30


def answer_to(seq_lens, *, name="Qwen2.5-0.5B", gib=20, training=LORA, **more):
    model = CostModel(model_shape(name), Machine.named("A100-80"), training)
    return search(Question([seq_lens], model, Limits(int(gib * GIB), 200 * GIB), **more))


def test_what_lacks_memory_does_not_fit_when_it_is_given():
    answer = answer_to([32_768], gib=6)
    told = dict(line.split(": ", 1) for line in map(str, reasons(answer)) if line[:4] == "keep")
    ((chosen, costs),) = told.items()
    assert chosen == f"keep {answer.options.keep}"
    lacking = re.findall(r"(\w+) lacks", costs)
    assert lacking
    for keep in lacking:
        given = {"keep": keep, "size": answer.options.size, "order": answer.options.order}
        assert not search(replace(answer.question, given=given)).tried


def test_what_is_given_has_no_reason_and_sizes_of_a_layout_have_one():
    given = {"size": 4096, "keep": "kv", "order": "chunk-first", "offload": "none"}
    assert reasons(answer_to([9000], given=given)) == []
    answer = answer_to([65_536], name="Qwen2.5-7B", gib=70, num_devices=8, training=Training())
    layout = answer.best.layout
    own = [name for name in ("pp", "sp") if getattr(layout, name) > 1]
    lines = [line.partition(" ")[0] for line in reasons(answer)]
    assert own and lines[: len(own)] == own
    named = reasons(replace(answer, question=replace(answer.question, given=dict.fromkeys(own, 8))))
    assert not set(own) & {line.partition(" ")[0] for line in named}


@pytest.mark.parametrize("method", ["seco", "fpdt"])
def test_a_method_is_compared_with_what_it_offers(method):
    lines = reasons(answer_to([9000], method=method))
    assert not any(line.startswith(("keep", "order")) for line in lines)

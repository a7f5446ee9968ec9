"""The cost of sequences that branch: of the prompt once, and of each answer as behind it."""

import re
from pathlib import Path

import pytest

from furlong.cost.machine import Machine
from furlong.cost.memory import PARTS
from furlong.cost.model import CostModel
from furlong.cost.seconds import attended_keys, chunk_table
from furlong.cost.shape import model_shape
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device, plan_two_phases

MODEL = CostModel(model_shape("Qwen2.5-7B"), Machine.named("H100"))
PROMPT, ANSWER, ANSWERS = 16_384, 1024, 8
FORKS = {0: [(PROMPT + ANSWER * i, PROMPT) for i in range(1, ANSWERS)]}
OPTIONS = ChunkOptions(size=4096, keep="kv", num_retained=0)


def shared(make):
    return make([PROMPT + ANSWERS * ANSWER], OPTIONS, num_layers=28, forks=FORKS)


def alone(make):
    return make([PROMPT + ANSWER] * ANSWERS, OPTIONS, num_layers=28)


def test_attended_keys_are_those_along_the_path():
    plan = shared(plan_on_device)
    table = chunk_table(plan.chunks, MODEL.shape, 1, position=plan.position)
    behind = attended_keys(PROMPT, PROMPT + ANSWER)
    assert sum(table.local_keys.values()).sum() == attended_keys(0, PROMPT) + ANSWERS * behind
    assert table.tokens.sum() == PROMPT + ANSWERS * ANSWER
    # four answers share a chunk and read the prompt once for all
    assert [chunk.num_tokens for chunk in plan.chunks] == [4096] * 6
    assert table.prefix_tokens[None][0].tolist() == [0, 4096, 8192, 12_288, PROMPT, PROMPT]


PAGE = Path(__file__).parents[2] / "docs" / "post-training.md"
ROWS = re.findall(
    r"^\| \w+, ([\d,]+) \+ (\d+) x ([\d,]+) \| ([\d.]+)x \| ([\d.]+)x \| ([\d.]+)x \|$",
    PAGE.read_text(encoding="utf-8"), re.MULTILINE,
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_the_page_says_what_sharing_saves(row):
    prompt, num_answers, answer = (int(text.replace(",", "")) for text in row[:3])
    forks = {0: [(prompt + answer * i, prompt) for i in range(1, num_answers)]}
    plans = [
        plan_two_phases([prompt + num_answers * answer], OPTIONS, num_layers=28, forks=forks),
        plan_two_phases([prompt + answer] * num_answers, OPTIONS, num_layers=28),
    ]
    tables = [chunk_table(p.chunks, MODEL.shape, 1, position=p.position) for p in plans]
    token_flops, key_flops = (
        sum(getattr(layer, of) for layer in MODEL.shape.layers) for of in ("flops", "key_flops")
    )
    kv = PARTS.index("kv")
    for found, said in zip(
        (
            [table.tokens.sum() for table in tables],
            [
                token_flops * t.tokens.sum() + key_flops * sum(t.local_keys.values()).sum()
                for t in tables
            ],
            [MODEL.memory().curve(plan, 0).device[:, kv].max() for plan in plans],
        ),
        row[3:], strict=True,
    ):  # fmt: skip
        assert found[0] / found[1] == pytest.approx(float(said), abs=6e-4)


def test_the_page_has_its_table():
    assert len(ROWS) == 4

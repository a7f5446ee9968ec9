"""Plans written as texts, and the checker's errors about them."""

import re

import pytest

from furlong.errors import PlanError
from furlong.plan.check import check
from furlong.plan.plan import ChunkPlan
from furlong.plan.text import parse_action, parse_chunk


def plan_of(chunks, *ranks, stages=(2,), **fields):
    """Return a plan from texts: chunks separated by "; ", a rank's actions by ", " (none: "")."""
    sp_size = fields.get("sp_size", 1)
    pieces = tuple(parse_chunk(text, sp_size=sp_size) for text in chunks.split("; "))
    seq_lens = {}
    for chunk in pieces:
        for piece in chunk.slices:
            seq_lens[piece.seq_id] = max(piece.stop, seq_lens.get(piece.seq_id, 0))
    return ChunkPlan(
        seq_lens=fields.pop("seq_lens", tuple(seq_lens[i] for i in sorted(seq_lens))),
        chunks=pieces,
        stages=stages,
        actions=tuple(
            tuple(map(parse_action, texts.split(", ") if texts else ())) for texts in ranks
        ),
        **fields,
    )


def refusal(plan, memory=None):
    """Return (rule, wrong line without its number) of a plan that the checker must refuse."""
    with pytest.raises(PlanError) as error:
        check(plan, memory)
    text = str(error.value)
    (guilty,) = re.findall(r"^ *\d+  (.*)    <-- here$", text, flags=re.MULTILINE)
    return text.splitlines()[0].removeprefix("broken rule: "), guilty

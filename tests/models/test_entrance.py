"""Every pass goes through the model's one entrance, if it has one."""

from __future__ import annotations

import torch
from helpers.gradients import batch
from helpers.tiny_families import build
from torch import nn

import furlong
from furlong.models.entrance import ENTRANCE, add_entrance, enter


def test_a_model_without_an_entrance_is_left_alone():
    base = nn.Linear(1, 1)
    before = dict(vars(base))
    assert enter(base, lambda: torch.ones(1)).item() == 1
    assert vars(base) == before


def test_a_wrapper_of_the_entrance_sees_the_model_and_the_call():
    base, seen = nn.Linear(1, 1), []
    name = add_entrance(base)
    assert name == ENTRANCE and getattr(base, name).__self__ is base
    plain = getattr(base, name)
    base.__dict__[name] = lambda run: (seen.append("in"), plain(run), seen.append("out"))[1]
    assert enter(base, lambda: (seen.append("run"), torch.ones(1))[1]).item() == 1
    assert seen == ["in", "run", "out"]


def test_every_pass_and_every_head_enters_before_layers_are_swapped():
    """A wrapper that looks at the modules at its first call must see all of the model's own."""
    model = build("llama")
    own = [type(m).__name__ for m in model.modules()]
    plain = getattr(model, add_entrance(model))
    seen = []

    def wrapper(run):
        seen.append([type(m).__name__ for m in model.modules()])
        return plain(run)

    model.__dict__[ENTRANCE] = wrapper
    options = furlong.ChunkOptions(size=8, keep="input", order="layer-first", stage_layers=1)
    result = furlong.forward_backward(model, batch([21]), options)
    assert all(names == own for names in seen)
    num_passes = sum(r.text[0] in "FR" for r in result.timeline.records)
    assert len(seen) >= num_passes + 3, "and the head of three chunks"

"""Dropout on several processes: masks of their own, the same in a recompute and in a second run."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
from distributed.layout_cases import Case, whole_grads
from distributed.test_pipeline_engine import STAGES
from helpers.ranks import run_ranks
from torch import Tensor, nn

import furlong
from furlong.plan.plan import ChunkPlan
from furlong.runtime.distributed.mesh import make_ranks

CASE = Case(ChunkPlan((16,), (), STAGES, ((), ())), settings={"num_hidden_layers": 3})
NUM_CHUNKS = 2
OPTIONS = furlong.ChunkOptions(size=8, num_retained=0, keep="kv")


class Masks:
    """Notes the mask of each call of dropout within it."""

    def __init__(self) -> None:
        self.found: list[bytes] = []
        self._own = nn.functional.dropout

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        state = torch.get_rng_state()
        mask = self._own(torch.ones_like(x), *args, **kwargs)
        self.found.append((mask > 0).numpy().tobytes())
        torch.set_rng_state(state)
        return self._own(x, *args, **kwargs)


def model_of(layers: range | None) -> nn.Module:
    """A stage with adapters, whose input is dropped at a rate of 0.5."""
    base: Any = CASE.model(layers)
    torch.manual_seed(7)
    config = peft.LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj"])
    return peft.get_peft_model(base, config).double()


def masks_of(rank: int, sizes: tuple[int, int, int]) -> tuple[list[bytes], list[bytes]]:
    """The masks of a step and of the next one; after the same seed all come again."""
    ranks = make_ranks(*sizes, "cpu")
    layers = CASE.layers_of(ranks.stage) if ranks.pp > 1 else None
    engine = furlong.Engine(model_of(layers).train(), ranks=ranks)
    sequences = CASE.sequences()  # the same on all replicas
    engine.forward_backward(sequences, OPTIONS)
    found, grads = [], []
    for seed in (1, None, 1):
        whole_grads(engine.model.model)
        if seed is not None:
            torch.manual_seed(seed)
        masks = Masks()
        with patch.object(nn.functional, "dropout", masks):
            engine.forward_backward(sequences, OPTIONS)
        found.append(masks.found)
        grads.append(whole_grads(engine.model.model))
    assert found[0] == found[2]
    assert all(torch.equal(x, grads[2][name]) for name, x in grads[0].items())
    return found[0], found[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "sizes",
    [(1, 2, 1), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ((2, 1, 1), (1, 1, 2)))],
)
def test_each_process_draws_its_own_masks_and_a_recompute_the_same(sizes):
    (first, later), (second, _) = run_ranks(masks_of, sizes, num_ranks=2, limit_s=120)
    assert first and second
    assert not set(first) & set(second), "two processes drew the same mask"
    assert not set(first) & set(later), "two steps drew the same mask"
    for stage, own in enumerate((first, second)):
        num_layers = STAGES[stage] if sizes[2] > 1 else sum(STAGES)
        assert len(set(own)) == NUM_CHUNKS * num_layers, "a recompute drew another mask"
        assert len(own) > len(set(own)), "nothing was recomputed"

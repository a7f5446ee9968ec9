"""States in the memory walk against those that the engine's store really holds."""

import pytest
import torch
from helpers.hybrids import build

import furlong
from furlong.cost.machine import Machine
from furlong.cost.memory import PARTS
from furlong.cost.model import CostModel
from furlong.cost.training import Training
from furlong.kv.store import StateStore
from furlong.models.describe import describe
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device

NUM_TOKENS, CHUNK = 70, 16


class CountedStore(StateStore):
    """A store that knows the most bytes that it has held."""

    peak_bytes = 0

    def write(self, at, found):
        super().write(at, found)
        held = self.__dict__.setdefault("held", {})
        held[at] = sum(x.nbytes for x in found.values())
        self._look()

    def send(self, *given):
        super().send(*given)
        self._look()

    def free(self, at):
        super().free(at)
        self.__dict__.get("held", {}).pop(at, None)

    def _look(self):
        sent = sum(
            x.nbytes for grads in self._grads.values() for x in grads.values() if x is not None
        )
        now = sum(self.__dict__.get("held", {}).values()) + sent
        CountedStore.peak_bytes = max(CountedStore.peak_bytes, now)


@pytest.mark.parametrize("order", ["chunk-first", "layer-first"])
@pytest.mark.parametrize("keep", ["kv", "attention", "input"])
@pytest.mark.parametrize("family", ["lfm2", "jamba"])
def test_the_walk_counts_what_the_store_holds(family, keep, order, monkeypatch):
    monkeypatch.setattr("furlong.kv.store.StateStore", CountedStore)
    model = build(family, wide=False).float()
    ids = torch.arange(5, 5 + NUM_TOKENS)
    options = ChunkOptions(size=CHUNK, keep=keep, order=order, num_retained=0)
    batch = [{"input_ids": ids, "labels": ids.clone()}]
    for _ in range(2):  # the first time the self-check runs, too
        CountedStore.peak_bytes = 0
        furlong.forward_backward(model, batch, options, max_seq_len=NUM_TOKENS)
    shape = describe(model.config)
    cost = CostModel(shape, Machine.named("H100"), Training.in_dtype("float32"))
    plan = plan_on_device((NUM_TOKENS,), options, num_layers=shape.num_layers)
    counted = cost.memory().curve(plan, 0).device[:, PARTS.index("states")].max()
    # one more set is on its way, as copies or as gradients
    height = plan.stages[0]
    layers = [range(i, i + height) for i in range(0, shape.num_layers, height)]
    moving = max(shape.state_bytes(own, 4) for own in layers)
    assert CountedStore.peak_bytes == counted - moving > 0

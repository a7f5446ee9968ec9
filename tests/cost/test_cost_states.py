"""States of recurrent layers in a plan's memory: when they live, where, and in the real store."""

from functools import cache

import pytest
import torch
from helpers.hybrids import HYBRIDS, build
from helpers.shapes import shape_of_values

import furlong
from furlong.cost.machine import Machine
from furlong.cost.memory import PARTS, TENSOR_KINDS
from furlong.cost.model import CostModel
from furlong.cost.training import Training
from furlong.kv.store import StateStore
from furlong.models.describe import describe
from furlong.plan.plan import Chunk, Forward, Place, Slice
from furlong.plan.text import format_action
from furlong.planners.candidates import ByteBound
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device

CONFIG = {
    **HYBRIDS["qwen3_next"], "model_type": "qwen3_next", "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 4,
}  # fmt: skip
STATE = 3 * (4 * 4 * 16 * 16 + 4 * 128 * 4)
"""Bytes of three layers' states in float32: 4 heads of 16 x 16, 4 columns of 128 channels."""


@cache
def cost_model():
    shape = shape_of_values(CONFIG)
    return CostModel(shape, Machine.named("H100"), Training.in_dtype("float32"))


def planned(lens=(40,), **dials):
    options = ChunkOptions(**{"size": 10, "keep": "kv", **dials})
    return plan_on_device(lens, options, num_layers=4)


def states_of(plan):
    return cost_model().memory().curve(plan, 0).device[:, PARTS.index("states")]


def test_states_live_from_their_forward_to_their_backward():
    plan = planned(num_retained=0)
    texts = [format_action(action) for action in plan.actions[0]]
    states = dict(zip(texts, (states_of(plan) / STATE).tolist(), strict=True))
    # those that are kept, and the copy of one that a pass works on
    assert states["F0.0 kv"] == 1
    assert states["F2.0 kv"] == 3 + 1
    assert states["R3.0"] == 3 + 1
    # those that are kept, the gradients that have come, and those that it makes
    assert states["B3.0"] == 3 + 0 + 1
    assert states["B2.0"] == 3 + 1 + 1
    assert states["B1.0"] == 2 + 1 + 1
    assert states["B0.0"] == 1 + 1 + 0


@pytest.mark.parametrize("keep", ["input", "kv", "attention", "all"])
@pytest.mark.parametrize("order", ["chunk-first", "layer-first"])
def test_no_state_is_left(keep, order):
    plan = planned(keep=keep, order=order)
    assert states_of(plan).max() > 0
    last = cost_model().memory().curve(plan, 0).device[-1, PARTS.index("states")]
    assert last <= 2 * STATE  # the first chunk's, while its backward runs


def test_whole_sequences_have_no_states():
    assert not states_of(planned((10, 7, 3))).any()


def test_states_are_offloaded_with_keys_and_values():
    plan = planned(num_retained=0, offload="cpu")
    memory = cost_model().memory()
    on_device = states_of(plan)
    assert on_device.max() == 2 * STATE < states_of(planned(num_retained=0)).max()
    moved = memory.curve(plan, 0).traffic
    kv = TENSOR_KINDS.index("kv")
    forwards = [i for i, a in enumerate(plan.actions[0]) if isinstance(a, Forward)]
    assert moved.written[forwards[0], kv] >= STATE
    assert moved.read[forwards[1], kv] >= STATE


@pytest.mark.parametrize("keep", ["kv", "attention", "all"])
@pytest.mark.parametrize("target", ["none", "cpu"])
def test_no_walk_needs_less_than_the_bound(keep, target):
    options = ChunkOptions(size=10, keep=keep, offload=target, num_retained=0)
    curve = cost_model().memory().curve(plan_on_device((100,), options, num_layers=4), 0)
    needs = ByteBound(cost_model(), 100, 10).needs(options)
    assert needs.device_bytes <= max(curve.device_bytes)
    assert needs.cpu_bytes <= curve.cpu.max()


def test_the_time_of_recurrent_layers_is_linear_in_tokens():
    config = {**HYBRIDS["mamba2"], "model_type": "mamba2", "conv_kernel": 4, "expand": 2}
    model = CostModel(shape_of_values(config), Machine.named("H100"))
    seconds = []
    for length in (2**13, 2**14, 2**14 + 2**13):
        options = ChunkOptions(size=2**11, keep="kv", num_retained=0)
        plan = plan_on_device((length,), options, num_layers=3)
        costs = model.costs(plan)
        seconds.append(sum(costs.compute_s(action, 0) for action in plan.actions[0]))
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0])


def test_processes_of_a_place_wait_for_the_states_of_earlier_tokens():
    """Without attention the wait shows once, for all layers, and nothing is exchanged beside."""
    config = {**HYBRIDS["mamba2"], "model_type": "mamba2", "conv_kernel": 4, "expand": 2}
    model = CostModel(shape_of_values(config), Machine.named("H100"))
    waits = []
    for size, num_tokens in ((2, 2**24), (4, 2**24), (4, 2**25)):
        chunks = [Chunk((Slice(0, 0, num_tokens, Place(0, size)),))]
        seconds, free = (
            model.cell_seconds(chunks, (3,), sp_size=size, free=given)
            for given in ((), ("all-to-all",))
        )
        waits.append((seconds - free)[0, 0])
    assert (waits[0] > 0).all()
    # the part of the others is a half, then three quarters
    assert waits[1] / waits[0] == pytest.approx([1.5, 1.5], rel=0.05)
    assert waits[2] / waits[1] == pytest.approx([2, 2], rel=0.05)
    assert (waits[0] < free[0, 0] / 2).all()


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


@pytest.mark.parametrize(
    ("family", "keep", "order"),
    [
        ("lfm2", "kv", "chunk-first"), ("lfm2", "attention", "layer-first"),
        ("lfm2", "input", "chunk-first"), ("jamba", "kv", "layer-first"),
        ("jamba", "attention", "chunk-first"), ("jamba", "input", "layer-first"),
    ],
)  # fmt: skip
@pytest.mark.few(2)
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
    moving = max(sum(shape.layers[n].state_bytes(4) for n in own) for own in layers)
    assert CountedStore.peak_bytes == counted - moving > 0

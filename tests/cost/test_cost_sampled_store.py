"""Sampled plans: the walk against the real store, and a draw beside the exact step."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from papers.chunkflow_plan import plan_chunkflow

from furlong.cost.memory.levels import PARTS
from furlong.cost.memory.plan_memory import PlanMemory
from furlong.cost.memory.training import Training
from furlong.cost.shapes.shape import ModelShape
from furlong.plan.values import Backward
from furlong.planners.options import ChunkOptions
from furlong.planners.sampling.plans import sample_backwards
from furlong.planners.sampling.rules import Factors

CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 64, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 90, "num_hidden_layers": 1,
}  # fmt: skip


def memory(window: int | None) -> PlanMemory:
    shape = replace(ModelShape.from_config(CONFIG), windows=(window,))
    return PlanMemory(shape, Training.in_dtype("float32"), 10**15, device_type="cpu")


def test_a_backward_whose_window_holds_no_drawn_chunk_on_the_device() -> None:
    """Chunk 7 sees chunk 6 alone, which is not drawn; the store takes the gradients of 0 and 4
    all the same (`LayerSegments._add` takes all that are bare), the walk does not."""
    torch = pytest.importorskip("torch")
    from furlong.kv.arena import Arena
    from furlong.kv.store import KVStore
    from furlong.runtime.layout import piece_lens, trained_pieces

    window, drawn = 33, (0, 4, 7)
    plan = plan_chunkflow((512,), ChunkOptions(size=64, keep="kv", num_retained=0), stages=(1,))
    plan = sample_backwards(plan, dict.fromkeys(drawn, Factors(2.0, 2.0)))
    arena = Arena(torch.device("cpu"))
    with (
        patch("furlong.kv.store.segment_tokens", lambda *_: 32),
        patch("furlong.cost.memory.stored_layers.segment_tokens", lambda *_: 32),
    ):
        curve, _ = memory(window).walk(plan, 0)
        lens = piece_lens(plan)[0]
        store = KVStore(arena, {0: lens}, trained=trained_pieces(plan))
        for piece in range(7):
            k = torch.zeros(2, lens[piece], 64)
            store.write(0, 0, piece, k, k, window)
        for block in store.prefix(0, 0, 7, window, gradients=True):
            block.add_grad(torch.zeros(block.k.shape), torch.zeros(block.v.shape))
    at = next(i for i, a in enumerate(plan.actions[0]) if isinstance(a, Backward) and a.chunk == 7)
    parts = [PARTS.index("kv"), PARTS.index("kv_gradients")]
    assert arena.taken_bytes == curve.device[at, parts].sum()


@pytest.mark.parametrize("graphs", ["device", "host"])
def test_no_draw_needs_more_memory_than_the_exact_step(graphs: str) -> None:
    """What the search relies on. An exact step retains the last chunk's graph, here of one token; a
    draw without that chunk retains the graph of a whole one beside what it needs anyway."""
    options = ChunkOptions(size=64, keep="kv", num_retained=2, tier={"graphs": graphs})
    whole = plan_chunkflow((6 * 64 + 1,), options, stages=(1,))
    exact, _ = memory(None).walk(whole, 0)
    plan = sample_backwards(whole, {i: Factors(2.0, 2.0) for i in (1, 3, 4)})
    drawn, _ = memory(None).walk(plan, 0)
    assert drawn.device.sum(axis=1).max() <= exact.device.sum(axis=1).max()
    assert drawn.host.max() <= exact.host.max()

"""Sampled plans: the walk against the real store, and a draw beside the exact step."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from helpers.shapes import with_windows
from papers.chunkflow_plan import plan_chunkflow

from furlong.cost.memory import KINDS, PARTS, PlanMemory
from furlong.cost.training import Training
from furlong.models.describe import describe
from furlong.plan.plan import Backward
from furlong.plan.text import format_action
from furlong.planners.options import ChunkOptions
from furlong.planners.spaco import Factors, sample_backwards

KV_PARTS = ("kv", "kv_gradients")
CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 64, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 90, "num_hidden_layers": 1,
}  # fmt: skip


def memory(window: int | None) -> PlanMemory:
    shape = with_windows(describe(CONFIG), (window,))
    return PlanMemory(shape, Training.in_dtype("float32"), 10**15, device_type="cpu")


def test_a_backward_whose_window_holds_no_drawn_chunk_on_the_device() -> None:
    """Chunk 7 sees chunk 6 alone, which is not drawn; the store takes the gradients of 0 and 4
    all the same (`LayerSegments._add` takes all that are bare), the walk does not."""
    import torch

    from furlong.kv.arena import Arena
    from furlong.kv.store import KVStore
    from furlong.plan.plan import piece_lens
    from furlong.runtime.cells.layout import trained_pieces

    window, drawn = 33, (0, 4, 7)
    plan = plan_chunkflow((512,), ChunkOptions(size=64, keep="kv", num_retained=0), stages=(1,))
    plan = sample_backwards(plan, dict.fromkeys(drawn, Factors(2.0, 2.0)))
    arena = Arena(torch.device("cpu"))
    with (
        patch("furlong.kv.store.segment_tokens", lambda *_: 32),
        patch("furlong.cost.memory.segment_tokens", lambda *_: 32),
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


PIECE = 2048
"""Tokens of a segment of this model on a CPU, and of a chunk here: a segment is a piece."""
SEGMENT_BYTES = PIECE * 2 * 2 * 64 * 4


def walked(drawn, *, tier="device", window=None, report_loss=False, keep="kv"):
    """The bytes of K,V and their gradients on the device, the host's, and the traffic, of a draw
    of six chunks; each by its action, in segments."""
    options = ChunkOptions(size=PIECE, keep=keep, num_retained=0, tier={"kv": tier})
    plan = plan_chunkflow((6 * PIECE,), options, stages=(1,))
    plan = replace(plan, tiers=options.tiers)
    factors = dict.fromkeys(drawn, Factors(2.0, 2.0))
    plan = sample_backwards(plan, factors, report_loss=report_loss)
    curve, traffic = memory(window).walk(plan, 0)
    names = [format_action(action).split()[0] for action in plan.actions[0]]
    kv, gradients = (curve.device[:, PARTS.index(part)] / SEGMENT_BYTES for part in KV_PARTS)
    columns = [KINDS.index(kind) for kind in KV_PARTS]
    moved = (traffic.read[:, columns], traffic.written[:, columns])
    return names, [list(x) for x in (kv, gradients, curve.host / SEGMENT_BYTES)], [
        [tuple(row / SEGMENT_BYTES) for row in rows] for rows in moved
    ]  # fmt: skip


def test_only_drawn_chunks_have_gradients_in_the_store() -> None:
    """Chunk 4 sees four chunks, of which it sends gradients to chunk 1 alone; chunk 5 is read by
    nobody, so it is not computed, and chunk 4 need not be stored."""
    names, (kv, gradients, _), _ = walked((1, 4))
    assert names == [
        "F0.0",
        "F1.0",
        "F2.0",
        "F3.0",
        "F4.0",
        "R4.0",
        "B4.0",
        "R1.0",
        "B1.0",
        "reduce",
    ]
    assert kv == [4, 4, 4, 4, 4, 4, 4, 2, 2, 0]
    assert gradients == [0, 0, 0, 0, 0, 0, 1, 1, 1, 0]
    # with the loss of all chunks five are stored; the first gradient brings those of both drawn
    names, (kv, gradients, _), _ = walked((1, 4), report_loss=True)
    assert max(kv) == 5 and max(gradients) == 2 and "F5.0" in names


def test_only_drawn_chunks_have_gradients_in_a_lower_tier() -> None:
    """Chunks 0, 1 and 5 are drawn: chunk 5 sends to 0 and 1, which are beyond the newest two."""
    names, (_, gradients, host), (read, written) = walked((0, 1, 5), tier="host")
    at = {name: i for i, name in enumerate(names)}
    assert [written[at[f"F{c}.0"]] for c in range(5)] == [(1, 0)] * 5
    assert written[at["B5.0"]] == (0, 2) and read[at["B5.0"]] == (5, 0)
    assert host[at["B5.0"]] == 5 + 2 and host[at["F4.0"]] == 5
    # what chunk 5 has sent is read by chunks 1 and 0 themselves, and chunk 1 adds to that of 0
    assert read[at["B1.0"]] == (1, 2) and read[at["B0.0"]] == (0, 0)
    assert host[-1] == gradients[-1] == 0


def test_a_window_narrows_what_a_draw_keeps() -> None:
    """Of each chunk the last 1,023 tokens are stored, of which only the chunk behind sees any."""
    _, (kv, gradients, _), _ = walked((1, 2, 4), window=1024)
    share = 1023 / PIECE
    assert max(kv) == pytest.approx(4 * share)
    # all gradients of a segment of two pieces, as far as they are drawn
    assert 0 < max(gradients) <= max(kv)
    assert max(walked((0, 2, 4), window=1024)[1][1]) <= max(gradients)


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

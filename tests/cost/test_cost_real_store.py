"""The walk against the real store, driven by the same plans: bytes moved by every action, bytes in
the arena and in the pool at its peak."""

from dataclasses import replace

import pytest
from helpers.shapes import shape_of_values, with_windows
from papers.chunkflow_plan import plan_chunkflow

from furlong.cost.memory import PARTS, TENSOR_KINDS, PlanMemory
from furlong.cost.training import Training
from furlong.plan.passes import kv_frees, passes
from furlong.plan.plan import Offload, Reduce
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device
from furlong.planners.spaco import Factors, sample_backwards

HEADS, HEAD_DIM = 2, 64
CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 64, "head_dim": HEAD_DIM,
    "num_attention_heads": 4, "num_key_value_heads": HEADS, "vocab_size": 90,
}  # fmt: skip
KV, GRADIENTS = TENSOR_KINDS.index("kv"), TENSOR_KINDS.index("kv_gradients")


class Driven:
    """The store of a plan of one sequence, which is told what the plan's passes are."""

    def __init__(self, plan, windows, make_pool):
        import torch

        from furlong.kv.arena import Arena
        from furlong.kv.store import KVStore
        from furlong.runtime.cell import trained_pieces

        driven = self

        class Watched(Arena):
            def take(self, shape, dtype):
                taken = super().take(shape, dtype)
                driven.arena_bytes = max(driven.arena_bytes, self.taken_bytes)
                return taken

        self.arena = Watched(torch.device("cpu"))
        self.pool = None if plan.offload.kv == "none" else make_pool(torch.device("cpu"))
        self.lens, self.continues = plan.piece_lens[0], plan.continues
        trained = trained_pieces(plan)
        self.store = KVStore(
            self.arena, {0: self.lens}, self.pool, trees=plan.trees, trained=trained
        )
        self.windows, self.zeros = windows, torch.zeros
        self.arena_bytes = 0

    def moved(self):
        return (self.pool.read_bytes, self.pool.written_bytes) if self.pool else (0, 0)

    def obey(self, piece, what):
        """What an action does to the store; returns the arena's peak meanwhile."""
        self.arena_bytes = self.arena.taken_bytes
        num_layers = len(self.windows)
        stop = num_layers - (what.computes == "to last kv")
        for layer, window in enumerate(self.windows):
            if what.writes_kv and self.continues[piece]:
                kv = self.zeros(2, HEADS, self.lens[piece], HEAD_DIM)
                self.store.write(0, layer, piece, kv[0], kv[1], window)
            attends = what.remembered <= layer < stop
            if piece and attends and what.computes not in ("nothing", "backward"):
                for _ in self.store.prefix(0, layer, piece, window, gradients=False):
                    pass
        if what.computes == "backward":
            for layer in reversed(range(num_layers)):
                window = self.windows[layer]
                for block in (
                    self.store.prefix(0, layer, piece, window, gradients=True) if piece else ()
                ):
                    block.add_grad(self.zeros(block.k.shape), self.zeros(block.v.shape))
                self.store.later_grads(0, layer, piece)
        return self.arena_bytes


@pytest.mark.parametrize("target", ["none", "cpu"])
@pytest.mark.parametrize(
    ("windows", "length", "size", "keep", "num_retained"),
    [((3000, 700, None), 9000, 300, "input", 1), ((None, None), 15_762, 2048, "kv", 0),
     ((None, 700), 13_739, 1000, "attention", 2), ((3000, 700, None), 11_000, 5000, "kv", 1),
     ((None, 700), 9_100, 700, "input", 2)],
)  # fmt: skip
@pytest.mark.few(4)
def test_the_walk_is_what_the_store_does(target, windows, length, size, keep, num_retained):
    options = ChunkOptions(size=size, keep=keep, num_retained=num_retained)
    plan = plan_chunkflow((length,), options, stages=(len(windows),))
    compare(replace(plan, offload=Offload(kv=target)), windows)


@pytest.mark.parametrize("target", ["none", "cpu"])
@pytest.mark.parametrize("windows", [(None, None), (None, 700)], ids=str)
@pytest.mark.parametrize("keep", ["kv", "input"])
@pytest.mark.few(3)
def test_the_walk_of_branches_is_what_the_store_does(target, windows, keep):
    """Two long branches, the second of which branches again, and short ones."""
    forks = {0: [(8000, 5000), (11_500, 10_000), (12_000, 10_000), (14_500, 5000)]}
    options = ChunkOptions(size=900, keep=keep, num_retained=0)
    plan = plan_on_device([15_000], options, num_layers=len(windows), forks=forks)
    compare(replace(plan, stages=(len(windows),), offload=Offload(kv=target)), windows)


@pytest.mark.parametrize("target", ["none", "cpu"])
@pytest.mark.parametrize("window", [None, 1200])
@pytest.mark.parametrize(
    ("drawn", "report_loss"),
    [((1, 4), True), ((0, 1, 5), False), ((5, 3, 0), False), ((2,), False), ((0,), False)],
)
def test_the_walk_of_a_draw_is_what_the_store_does(target, window, drawn, report_loss):
    """Chunks without a backward have no gradients, and may not be computed or stored at all."""
    options = ChunkOptions(size=2048, keep="kv", num_retained=0)
    plan = plan_chunkflow((6 * 2048,), options, stages=(2,))
    factors = dict.fromkeys(drawn, Factors(2.0, 2.0))
    plan = sample_backwards(
        replace(plan, offload=Offload(kv=target)), factors, report_loss=report_loss
    )
    compare(plan, (window, None))


@pytest.mark.parametrize("graphs", ["none", "cpu"])
def test_no_draw_needs_more_memory_than_the_exact_step(graphs):
    """What the search relies on. An exact step retains the last chunk's graph, here of one token; a
    draw without that chunk retains the graph of a whole one beside what it needs anyway."""
    options = ChunkOptions(size=64, keep="kv", num_retained=2, offload={"graphs": graphs})
    whole = plan_chunkflow((6 * 64 + 1,), options, stages=(1,))
    memory = memory_of((None,))
    exact = memory.curve(whole, 0)
    drawn = memory.curve(sample_backwards(whole, dict.fromkeys((1, 3, 4), Factors(2.0, 2.0))), 0)
    assert drawn.device.sum(axis=1).max() <= exact.device.sum(axis=1).max()
    assert drawn.cpu.max() <= exact.cpu.max()


def memory_of(windows):
    shape = shape_of_values(CONFIG | {"num_hidden_layers": len(windows)})
    return PlanMemory(
        with_windows(shape, windows), Training.in_dtype("float32"), 10**15, device_type="cpu"
    )


def compare(plan, windows):
    """Bytes of every action, by the walk and by the store."""
    from furlong.kv.pools import CpuPool

    target = plan.offload.kv
    num_layers = len(windows)
    curve = memory_of(windows).curve(plan, 0)
    traffic = curve.traffic
    driven = Driven(plan, windows, CpuPool)
    arena, held = [], []
    for index, (action, what, dead) in enumerate(
        zip(plan.actions[0], passes(plan, 0), kv_frees(plan, 0), strict=True)
    ):
        if isinstance(action, Reduce):
            continue
        before = driven.moved()
        arena.append(driven.obey(action.chunk, what))
        held.append(driven.pool.held_bytes if driven.pool else 0)
        moved = [now - then for now, then in zip(driven.moved(), before, strict=True)]
        of_kv = [KV, GRADIENTS]
        planned = [traffic.read[index, of_kv].sum(), traffic.written[index, of_kv].sum()]
        assert moved == planned, f"action {index}, {action}"
        assert held[-1] == curve.cpu[index], f"action {index}, {action}"
        for chunk, _ in dead:
            for layer in range(num_layers):
                driven.store.free(0, layer, chunk)
    stored = curve.device[:, [PARTS.index("kv"), PARTS.index("kv_gradients")]].sum(axis=1)
    if target == "none":
        assert arena == stored[: len(arena)].tolist()
    else:  # and two segments of each that arrive, in the pool's own memory
        most = 2 * 2**21
        assert max(arena) <= stored.max() <= max(arena) + 2 * most
    assert driven.arena.taken_bytes == 0 == driven.store.num_buffers
    if driven.pool:
        driven.pool.close()

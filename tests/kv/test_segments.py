"""Segments through any pool give the bits that plain tensors give, and their bytes are counted."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.kv.arena import Arena
from furlong.kv.pools import CpuPool, DevicePool, DiskPool
from furlong.kv.store import KVStore
from furlong.plan.segments import NUM_HOT, StoredTokens

CPU = torch.device("cpu")
K, H = 2, 3
TARGETS = ["none", "arena pool", "cpu", "disk"]


class Plain:
    """What the store must do, with whole tensors in dicts."""

    def __init__(self, lens):
        self.lens, self.kv, self.grad = lens, {}, {}

    def write(self, layer, piece, k, v, window):
        kept = min(k.shape[1], k.shape[1] if window is None else window - 1)
        first = k.shape[1] - kept
        self.kv[layer, piece] = torch.stack([k, v])[:, :, first:].clone()

    def seen(self, layer, piece, window):
        """(2, K, S, H) of all pieces before, and how many of its tokens are seen."""
        none = torch.zeros(2, K, 0, H, dtype=torch.bfloat16)
        whole = torch.cat([none, *(self.kv[layer, p] for p in range(piece))], 2)
        total = whole.shape[2]
        return whole, total if window is None else min(total, window - 1)

    def add(self, layer, piece, num_seen, grads):
        """grads (2, K, num_seen, H) to the last tokens before the piece."""
        for p in reversed(range(piece)):
            kept = self.kv[layer, p].shape[2]
            share = min(kept, num_seen)
            grad = self.grad.setdefault((layer, p), torch.zeros(2, K, kept, H))
            if share:
                grad[:, :, kept - share :] += grads[:, :, num_seen - share : num_seen]
            num_seen -= share


def make_pool(target, arena, folder):
    if target == "none":
        return None
    if target == "arena pool":
        return DevicePool(arena, poison=True)
    return (
        CpuPool(CPU, poison=True, staging_bytes=2**16)
        if target == "cpu"
        else DiskPool(folder, CPU, poison=True, staging_bytes=2**16)
    )


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype)


class Walk:
    """A store and its plain double, which are told the same and must agree."""

    def __init__(self, target, folder, lens, windows):
        torch.manual_seed(0)
        self.arena = Arena(CPU, poison=True)
        self.pool = make_pool(target, self.arena, folder)
        self.store = KVStore(self.arena, {7: lens}, self.pool)
        self.plain, self.lens, self.windows = Plain(lens), lens, windows

    def write(self, layer, piece):
        k, v = random(2, K, self.lens[piece], H)
        self.store.write(7, layer, piece, k, v, self.windows[layer])
        self.plain.write(layer, piece, k, v, self.windows[layer])

    def read(self, layer, piece, *, gradients):
        window = self.windows[layer]
        whole, num_seen = self.plain.seen(layer, piece, window)
        whole = whole[:, :, whole.shape[2] - num_seen :]
        grads, met = random(2, K, num_seen, H), []
        for block in self.store.prefix(7, layer, piece, window, gradients=gradients):
            start = num_seen - block.distance
            stop = start + block.k.shape[1]
            met.append((start, stop))
            assert torch.equal(block.k, whole[0, :, start:stop])
            assert torch.equal(block.v, whole[1, :, start:stop])
            if gradients:
                block.add_grad(*grads[:, :, start:stop])
        ordered = sorted(met)
        assert (met[::-1] if gradients else met) == ordered
        assert [t for a, b in ordered for t in range(a, b)] == list(range(num_seen))
        if gradients and num_seen:
            self.plain.add(layer, piece, num_seen, grads)

    def relay(self, layer, piece):
        sent = self.store.later_grads(7, layer, piece)
        expected = self.plain.grad.get((layer, piece))
        kept = self.plain.kv[layer, piece].shape[2]
        if expected is None or sent is None:
            assert sent is None or all(torch.all(t == 0) for t in sent[1:])
            assert expected is None or torch.all(expected == 0) or not kept
            return
        first, dk, dv = sent
        assert first == self.lens[piece] - kept and dk.dtype == torch.float32
        assert torch.equal(dk, expected[0]) and torch.equal(dv, expected[1])

    def free(self, layer, piece):
        self.store.free(7, layer, piece)
        self.plain.kv.pop((layer, piece), None)

    def assert_empty(self):
        assert self.store.num_buffers == 0 and self.arena.taken_bytes == 0
        if self.pool is not None:
            self.pool.close()

    def step(self, layers=(0,)):
        """One forward and one backward of all pieces."""
        pieces = range(len(self.lens))
        for piece in pieces:
            for layer in layers:
                if piece < pieces[-1]:
                    self.write(layer, piece)
                self.read(layer, piece, gradients=False)
        for piece in reversed(pieces):
            for layer in reversed(layers):
                self.read(layer, piece, gradients=True)
                if piece < pieces[-1]:
                    self.relay(layer, piece)
                    self.free(layer, piece)


LENS = st.lists(st.integers(0, 23), min_size=2, max_size=7)
WINDOWS = st.lists(st.one_of(st.none(), st.integers(1, 30)), min_size=2, max_size=2)


@pytest.fixture
def segments_of_five(monkeypatch):
    monkeypatch.setattr("furlong.kv.store.segment_tokens", lambda *_: 5)


@pytest.mark.parametrize("target", TARGETS)
def test_a_step_gives_the_bits_of_plain_tensors(target, tmp_path, segments_of_five):
    @settings(max_examples=25)
    @given(LENS, WINDOWS)
    def run(lens, windows):
        walk = Walk(target, tmp_path, lens, windows)
        walk.step((0, 1))
        walk.assert_empty()

    run()


@pytest.mark.parametrize("target", TARGETS)
def test_any_order_gives_the_bits_of_plain_tensors(target, tmp_path, segments_of_five):
    """Pieces are freed, written again, read with and without gradients as it comes."""
    names = st.sampled_from(["write", "write", "free", "read", "send", "send", "relay"])

    @settings(max_examples=50)
    @given(
        LENS, st.one_of(st.none(), st.integers(1, 30)),
        st.lists(st.tuples(names, st.integers(0, 6)), max_size=40),
    )  # fmt: skip
    def run(lens, window, actions):
        walk = Walk(target, tmp_path, lens, [window])
        for piece in range(len(lens) - 1):
            walk.write(0, piece)
        for name, number in actions:
            piece = number % len(lens)
            alive = [p for p in range(len(lens)) if (0, p) in walk.plain.kv]
            if name in ("read", "send"):
                if all(p in alive for p in range(piece)) and alive:
                    walk.read(0, piece, gradients=name == "send")
            elif piece == len(lens) - 1:
                continue
            elif name == "write":
                if piece not in alive and (0, piece) in walk.plain.grad:
                    continue  # no plan makes it anew
                walk.write(0, piece)
            elif name == "free":
                walk.free(0, piece)
            elif piece in alive:
                walk.relay(0, piece)
        for piece in range(len(lens)):
            walk.free(0, piece)
        walk.assert_empty()

    run()


def counted(walk, layer=0):
    """Bytes (written, read) of a step by the store's docstring."""
    lens, window = walk.lens, walk.windows[layer]
    tokens = StoredTokens.of(lens, window, 5)
    last = len(lens) - 1
    size = [b - a for a, b in pairwise(tokens.bounds)]
    kv, wide = 2 * K * H * 2, 2 * K * H * 4
    written = kv * tokens.offsets[-1]
    read = 0
    for p in range(1, last + 1):
        seen = list(tokens.seen_segments(p, window))
        closed = [i for i in seen if tokens.bounds[i + 1] <= tokens.offsets[min(p + 1, last)]]
        read += kv * (sum(size[i] for i in closed) + sum(size[i] for i in seen))
        cold = wide * sum(size[i] for i in seen[: max(0, len(seen) - NUM_HOT)])
        written, read = written + cold, read + cold
    return written, read


@pytest.mark.parametrize(
    ("lens", "window"),
    [
        ([20] * 8, None), ([5] * 9, 9), ([3] * 20, 24), ([7, 31, 2, 9, 18, 4], None), ([64, 3], 9),
        ([7, 31, 2, 9, 18, 4], 24), ([4, 4], 24), ([3] * 20, None),
    ],
)  # fmt: skip
def test_the_bytes_of_a_step_are_those_of_the_docstring(lens, window, tmp_path, segments_of_five):
    walk = Walk("cpu", tmp_path, lens, [window])
    walk.step()
    assert (walk.pool.written_bytes, walk.pool.read_bytes) == counted(walk)
    walk.assert_empty()


def test_the_arena_holds_no_more_of_a_longer_sequence(tmp_path, segments_of_five):
    peaks = []

    class Watched(Arena):
        def take(self, shape, dtype):
            taken = super().take(shape, dtype)
            peaks[-1] = max(peaks[-1], self.taken_bytes)
            return taken

    for num_pieces in (6, 24):
        peaks.append(0)
        walk = Walk("disk", tmp_path, [10] * num_pieces, [None])
        walk.arena = walk.store.arena = Watched(CPU)
        walk.step()
        walk.assert_empty()
    assert peaks[0] == peaks[1] > 0


def test_segments_of_the_device_go_back_one_by_one(tmp_path, segments_of_five):
    walk = Walk("none", tmp_path, [10] * 4, [None])
    for piece in range(3):
        walk.write(0, piece)
    held = [walk.arena.taken_bytes]
    for piece in (1, 2, 0):
        walk.free(0, piece)
        held.append(walk.arena.taken_bytes)
    assert all(a > b for a, b in pairwise(held)) and held[-1] == 0


def test_a_block_ends_when_the_next_is_asked_for(tmp_path, segments_of_five):
    walk = Walk("cpu", tmp_path, [10, 1], [None])
    walk.write(0, 0)
    blocks = walk.store.prefix(7, 0, 1, None, gradients=True)
    first = next(blocks)
    assert not torch.any(first.k.isnan())
    next(blocks)
    assert torch.all(first.k.isnan())


@pytest.mark.parametrize("target", TARGETS)
def test_an_error_in_the_middle_leaves_nothing_behind(target, tmp_path, segments_of_five):
    walk = Walk(target, tmp_path, [10] * 4, [None, 9])
    for layer in (0, 1):
        for piece in range(3):
            walk.write(layer, piece)
        walk.read(layer, 3, gradients=True)
    blocks = walk.store.prefix(7, 0, 3, None, gradients=True)
    next(blocks).add_grad(*torch.zeros(2, K, 5, H))
    walk.store.clear()
    blocks.close()
    walk.assert_empty()


def test_a_reader_that_is_collected_touches_nothing(tmp_path, segments_of_five):
    """The garbage collector ends the generator of a failed step at any time, or never."""
    walk = Walk("cpu", tmp_path, [10, 1], [None])
    walk.write(0, 0)
    blocks = walk.store.prefix(7, 0, 1, None, gradients=True)
    next(blocks).add_grad(*torch.zeros(2, K, 5, H))
    held_bytes = walk.pool.held_bytes
    blocks.close()
    assert walk.pool.held_bytes == held_bytes and walk.pool.written_bytes == held_bytes
    walk.store.clear()
    walk.assert_empty()

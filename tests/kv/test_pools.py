"""One contract over all pools, with a dict of tensors as the reference; staging; slabs."""

import logging
import time
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.errors import ConfigError
from furlong.kv.arena import Arena
from furlong.kv.pools import Budget, CpuPool, DevicePool, DiskPool, Event, Staging

CPU = torch.device("cpu")
POOLS = ["device", "cpu", "disk"]


def make(kind, folder, device=CPU, **options):
    if kind == "device":
        options = {name: value for name, value in options.items() if name == "poison"}
        return DevicePool(Arena(device), **options)
    return CpuPool(device, **options) if kind == "cpu" else DiskPool(folder, device, **options)


@pytest.fixture(params=POOLS)
def pool(request, tmp_path):
    pool = make(request.param, tmp_path, poison=True)
    yield pool
    pool.clear()
    pool.close()


staged = pytest.mark.parametrize("pool", ["cpu", "disk"], indirect=True)


def random_tensor(generator, dtype, num_rows):
    x = torch.randint(-100, 100, (3, num_rows, 5), generator=generator).to(dtype)
    return x.transpose(0, 1) if num_rows % 2 else x


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "get", "get", "prefetch", "add", "drop"]),
        st.integers(0, 10**6),
        st.sampled_from([0, 1, 40, 2000]),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    ),
    max_size=40,
)


def obey(pool, operations, device=CPU):
    """Carry the operations out on the pool and on a dict; both must agree all along."""
    generator = torch.Generator().manual_seed(0)
    expected, written, leases = {}, 0, []
    for name, choice, num_rows, dtype in operations:
        handle = list(expected)[choice % len(expected)] if expected else None
        if name == "put":
            x = random_tensor(generator, dtype, num_rows).to(device)
            handle = pool.put(x)
            assert handle.shape == x.shape and handle.dtype == dtype
            assert handle.num_bytes == x.numel() * dtype.itemsize
            expected[handle] = x.clone()
            x.zero_()  # it may be changed at once
            written += handle.num_bytes
        if handle is None:
            continue
        if name in ("drop", "add"):
            for lease in [lease for owner, lease in leases if owner is handle]:
                lease.release()
            leases = [(owner, lease) for owner, lease in leases if owner is not handle]
        if name == "prefetch":
            pool.prefetch(handle)
        elif name == "get":
            leases.append((handle, pool.get(handle)))
        elif name == "add":
            lease = pool.get(handle)
            lease.tensor.copy_(expected[handle].logical_not())
            expected[handle] = lease.tensor.clone()
            lease.write_back()
            written += handle.num_bytes
        elif name == "drop":
            pool.drop(handle)
            del expected[handle]
        for owner, lease in leases:
            assert torch.equal(lease.tensor, expected[owner])
        assert pool.held_bytes == sum(h.num_bytes for h in expected) <= pool.peak_bytes
    for _, lease in leases:
        lease.release()
    for handle, x in expected.items():
        lease = pool.get(handle)
        assert torch.equal(lease.tensor, x) and lease.tensor.is_contiguous()
        lease.release()
        pool.drop(handle)
    assert pool.written_bytes == (0 if isinstance(pool, DevicePool) else written)
    pool.close()


@pytest.mark.parametrize(
    ("kind", "staging_bytes"),
    [("device", 1), ("cpu", 1), ("cpu", 2**25), ("cpu", "slow link"), ("disk", 2**16),
     ("disk", "slow link")],
)  # fmt: skip
def test_what_comes_back_is_what_went_in(kind, staging_bytes, tmp_path, request):
    if staging_bytes == "slow link":
        request.getfixturevalue("delays")
        staging_bytes = 2**16

    @settings(max_examples=25)
    @given(OPERATIONS)
    def run(operations):
        obey(make(kind, tmp_path, staging_bytes=staging_bytes, poison=True), operations)

    run()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", POOLS)
def test_what_comes_back_on_cuda_is_what_went_in(kind, tmp_path):
    names = ["put"] * 8 + ["prefetch", "get", "add", "get", "prefetch", "drop"] * 8
    pool = make(kind, tmp_path, torch.device("cuda"), poison=True)
    obey(pool, [(n, 7 * i, 2000, torch.float32) for i, n in enumerate(names)], "cuda")


@staged
def test_a_prefetch_counts_once(pool):
    handle = pool.put(torch.ones(1000))
    for _ in range(3):
        pool.prefetch(handle)
    pool.get(handle).release()
    assert pool.read_bytes == pool.written_bytes == 4000
    pool.get(handle).release()
    assert pool.read_bytes == 8000


@staged
def test_what_is_on_its_way_back_gives_way_to_what_is_written(pool):
    handle = pool.put(torch.ones(1000))
    lease = pool.get(handle)
    lease.tensor.fill_(3)
    pool.prefetch(handle)
    pool._back.drain()  # it has come back
    lease.write_back()
    lease = pool.get(handle)
    assert torch.all(lease.tensor == 3)
    lease.release()


def test_a_released_lease_is_poisoned(pool):
    handle = pool.put(torch.ones(1000))
    lease = pool.get(handle)
    tensor = lease.tensor
    lease.release()
    assert torch.all(tensor.isnan())
    with pytest.raises(AssertionError, match="a lease ends once"):
        lease.release()
    again = pool.get(handle)
    assert torch.all(again.tensor == 1)
    again.release()


@staged
def test_a_graph_that_outlives_its_lease_is_noticed_without_poison(pool):
    pool._poison = False
    lease = pool.get(pool.put(torch.ones(1000)))
    x = torch.ones(1000, requires_grad=True)
    y = (x * lease.tensor).sum()
    lease.release()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_what_requires_a_gradient_is_kept_without_its_graph(pool):
    x = torch.ones(3, requires_grad=True)
    lease = pool.get(pool.put(x * 3))
    assert not lease.tensor.requires_grad and lease.tensor.tolist() == [3, 3, 3]
    lease.release()


@pytest.mark.parametrize("kind", POOLS)
def test_close_complains_of_what_is_left(kind, tmp_path):
    pool = make(kind, tmp_path)
    handle = pool.put(torch.ones(3))
    pool.get(handle)
    with pytest.raises(AssertionError, match="a lease of the handle is left"):
        pool.drop(handle)
    with pytest.raises(AssertionError, match="1 handles and 1 leases are left"):
        pool.close()


def test_clear_forgets_and_the_pool_goes_on(pool):
    handle = pool.put(torch.ones(1000))
    pool.prefetch(handle)
    lease, other = pool.get(handle), pool.get(handle)
    pool.prefetch(handle)
    pool.clear()
    lease.release()  # of before: without effect
    other.write_back()
    assert pool.held_bytes == 0
    with pytest.raises(AssertionError, match="the handle was dropped"):
        pool.get(handle)
    handle = pool.put(torch.full((1000,), 3.0))
    lease = pool.get(handle)
    assert torch.all(lease.tensor == 3)
    lease.release()


def failing(*_):
    raise ValueError("the worker fell over")


@staged
def test_an_error_of_a_worker_surfaces_in_the_next_call(pool, monkeypatch):
    handle = pool.put(torch.ones(3))
    monkeypatch.setattr(pool, "_copy_out", failing)
    pool.put(torch.ones(3))
    pool._out.drain()
    for call in (partial(pool.put, torch.ones(3)), *(partial(f, handle) for f in (
        pool.get, pool.prefetch))):  # fmt: skip
        with pytest.raises(ValueError, match="the worker fell over"):
            call()
    pool.clear()
    pool.put(torch.ones(3))


@staged
def test_what_could_not_be_written_or_read_is_never_handed_out(pool, monkeypatch):
    monkeypatch.setattr(pool, "_copy_back", failing)
    handle = pool.put(torch.ones(3))
    with pytest.raises(ValueError, match="the worker fell over"):
        pool.get(handle)
    monkeypatch.undo()
    pool.clear()
    monkeypatch.setattr(pool, "_copy_out", failing)
    handle = pool.put(torch.ones(3))
    with pytest.raises(ValueError, match="the worker fell over"):
        pool.get(handle)


@staged
def test_a_slow_link_never_piles_up_copies(pool, monkeypatch):
    write = pool._copy_out
    monkeypatch.setattr(pool, "_copy_out", lambda *a: (time.sleep(5e-3), write(*a)))
    pool._staging._limit_bytes = 2**16
    handles = [pool.put(torch.full((2**12,), float(i))) for i in range(12)]
    assert pool._staging.total_bytes <= 2**16 and pool.waited_s > 0
    for handle in handles:
        pool.prefetch(handle)
    assert pool._staging.total_bytes <= 2**16
    for number, handle in enumerate(handles):
        lease = pool.get(handle)
        assert torch.all(lease.tensor == number)
        lease.release()


@pytest.mark.parametrize(("kind", "key"), [("cpu", "memory.cpu"), ("disk", "memory.disk")])
def test_a_budget_is_kept(kind, key, tmp_path):
    pool = make(kind, tmp_path, budget=Budget(10_000))
    first = pool.put(torch.ones(2000))
    with pytest.raises(ConfigError, match=key) as raised:
        pool.put(torch.ones(2000))
    assert "9.77 KiB" in str(raised.value), "the budget is told"
    pool.drop(first)
    pool.drop(pool.put(torch.ones(2000)))
    assert pool.peak_bytes == 8000
    pool.close()


MIB = 2**20


def staging(num_largest):
    def allocate(num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    return Staging(allocate, 32 * MIB, lambda event: None, Event, num_largest)


def test_a_tensor_larger_than_the_limit_is_prefetched_where_several_of_the_largest_are_let():
    """Remembered attention of 7B at 8,192 tokens; K,V and gradients of two segments."""
    assert staging(0).take(56 * MIB, may_wait=False) is None
    own = staging(3)
    in_use = [own.take(56 * MIB, may_wait=False) for _ in range(3)]
    assert all(in_use) and own.take(56 * MIB, may_wait=False) is None
    own.give(in_use.pop(), Event())
    assert own.take(56 * MIB, may_wait=False) and own.total_bytes == 3 * 56 * MIB
    four = staging(5)
    assert all(four.take(size * MIB, may_wait=False) for size in (8, 16, 8, 16))


class Later(Event):
    """Done after so many looks."""

    def __init__(self, num_looks: int) -> None:
        self._num_looks = num_looks

    def done(self) -> bool:
        self._num_looks -= 1
        return self._num_looks < 0


def test_a_buffer_that_is_done_between_two_looks_is_not_taken_again():
    own = staging(0)
    first, second, _ = [own.take(16 * MIB) for _ in range(3)]
    for buffer in (first, second):
        own.give(buffer, Later(1000))
    first.free, second.free = Later(1), Later(1000)
    assert own.take(16 * MIB) is second


def test_slabs_are_reused_and_a_large_tensor_gets_one_with_little_waste():
    pool = CpuPool(CPU)
    for _ in range(10):
        handles = [pool.put(torch.ones(2**20)) for _ in range(10)]
        for handle in handles:
            pool.drop(handle)
    assert pool.memory.num_bytes == 2**26
    pool.close()
    for _ in range(14):
        pool._take_place(33 * MIB)
    assert [memory.numel() for memory, _ in pool.memory.slabs] == [2**28, 2**28]
    assert 1.2 * 14 * 33 * MIB > 2 * 2**28


def test_what_is_reserved_is_taken_once_and_suffices(monkeypatch):
    """59 MB records, 41 GiB of them, as 7B has of 128K tokens."""
    pinned = []

    def pin(num_bytes):
        pinned.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    monkeypatch.setattr("furlong.kv.pools.pinned_memory", pin)
    monkeypatch.setattr("furlong.kv.pools.StreamLane", lambda device: None)
    pool, record = CpuPool(torch.device("cuda")), 58_720_256 + 917_504
    total = 41 * 2**30 // record * record
    for _ in range(2):
        pool.reserve(total, None)
    assert total < sum(pinned) < 1.04 * total and max(pinned) == 2**32
    slabs = len(pinned)
    for _ in range(total // record):
        pool._take_place(record)
    assert len(pinned) == slabs == len(pool.memory.slabs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinned memory exists here")
def test_refused_pinned_memory_is_told_once_and_done_without(caplog, monkeypatch):
    monkeypatch.setattr("furlong.kv.pools.StreamLane", lambda device: None)
    pool = CpuPool(torch.device("cuda"))
    with caplog.at_level(logging.WARNING):
        for size in (2**26, 2**26, 2**30):
            pool._take_place(size)
    (record,) = caplog.records
    assert "refuses 256 MiB of pinned CPU memory" in record.getMessage()

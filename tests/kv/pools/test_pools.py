"""One contract over all pools, with a dict of tensors as the reference."""

import time
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.errors import ConfigError
from furlong.kv.arena import Arena
from furlong.kv.pools import Budget, CpuPool, DevicePool, DiskPool

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
        st.sampled_from(["put", "put", "get", "get", "prefetch", "overwrite", "add", "drop"]),
        st.integers(0, 10**6),
        st.sampled_from([0, 1, 40, 2000]),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    ),
    max_size=40,
)


def obey(pool, operations):
    """Carry the operations out on the pool and on a dict; both must agree all along."""
    generator = torch.Generator().manual_seed(0)
    expected, written, leases = {}, 0, []
    for name, choice, num_rows, dtype in operations:
        handle = list(expected)[choice % len(expected)] if expected else None
        if name == "put":
            x = random_tensor(generator, dtype, num_rows)
            handle = pool.put(x)
            assert handle.shape == x.shape and handle.dtype == dtype
            assert handle.num_bytes == x.numel() * dtype.itemsize
            expected[handle] = x.clone()
            x.zero_()  # it may be changed at once
            written += handle.num_bytes
        if handle is None:
            continue
        if name in ("overwrite", "drop", "add"):
            for lease in [lease for owner, lease in leases if owner is handle]:
                lease.release()
            leases = [(owner, lease) for owner, lease in leases if owner is not handle]
        if name == "prefetch":
            pool.prefetch(handle)
        elif name == "get":
            leases.append((handle, pool.get(handle)))
        elif name == "overwrite":
            x = torch.randint(-100, 100, handle.shape, generator=generator).to(handle.dtype)
            pool.overwrite(handle, x)
            expected[handle] = x.clone()
            x.zero_()
            written += handle.num_bytes
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


@pytest.mark.parametrize("staging_bytes", [1, 2**16, 2**25])
@pytest.mark.parametrize("kind", POOLS)
def test_what_comes_back_is_what_went_in(kind, staging_bytes, tmp_path):
    @settings(max_examples=25, deadline=None)
    @given(OPERATIONS)
    def run(operations):
        obey(make(kind, tmp_path, staging_bytes=staging_bytes, poison=True), operations)

    run()


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_slow_copies_give_the_same_bits(kind, tmp_path, delays):
    @settings(max_examples=10, deadline=None)
    @given(OPERATIONS)
    def run(operations):
        obey(make(kind, tmp_path, staging_bytes=2**16, poison=True), operations)

    run()


@staged
def test_a_prefetch_counts_once(pool):
    handle = pool.put(torch.ones(1000))
    for _ in range(3):
        pool.prefetch(handle)
    pool.get(handle).release()
    assert pool.read_bytes == pool.written_bytes == 4000
    pool.get(handle).release()
    assert pool.read_bytes == 8000


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
    handle = pool.put(x * 2)
    pool.overwrite(handle, x * 3)
    lease = pool.get(handle)
    assert not lease.tensor.requires_grad and lease.tensor.tolist() == [3, 3, 3]
    lease.release()


@pytest.mark.parametrize("kind", POOLS)
def test_close_complains_of_what_is_left(kind, tmp_path):
    pool = make(kind, tmp_path)
    handle = pool.put(torch.ones(3))
    pool.get(handle)
    with pytest.raises(AssertionError, match="a lease of the handle is left"):
        pool.drop(handle)
    with pytest.raises(AssertionError, match="a lease of the handle is left"):
        pool.overwrite(handle, torch.zeros(3))
    with pytest.raises(AssertionError, match="1 handles and 1 leases are left"):
        pool.close()


def test_clear_forgets_and_the_pool_goes_on(pool):
    handle = pool.put(torch.ones(1000))
    pool.prefetch(handle)
    lease = pool.get(handle)
    pool.prefetch(handle)
    pool.clear()
    lease.release()  # of before: without effect
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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", POOLS)
def test_the_contract_on_cuda(kind, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pool, device = make(kind, tmp_path, torch.device("cuda"), poison=True), "cuda"
    tensors = [torch.randn(1000, 300, device=device) for _ in range(30)]
    handles = []
    for x in tensors:
        own = x.clone()
        handles.append(pool.put(own))
        own.zero_()
    for handle, x in zip(handles, tensors, strict=True):
        pool.prefetch(handle)
        lease = pool.get(handle)
        assert torch.equal(lease.tensor, x)
        lease.tensor.add_(1) if kind != "device" else None
        lease.write_back() if kind != "device" else lease.release()
    for handle, x in zip(handles, tensors, strict=True):
        lease = pool.get(handle)
        assert torch.equal(lease.tensor, x + (kind != "device"))
        lease.release()
        pool.drop(handle)
    pool.close()

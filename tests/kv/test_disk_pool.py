"""The disk pool: its file, its folder, its errors, and that it takes no memory."""

import errno
import fcntl
import os
import resource
from pathlib import Path

import pytest
import torch

from furlong.errors import ConfigError
from furlong.kv import disk
from furlong.kv.pools import DiskPool

CPU = torch.device("cpu")


def assert_keeps(pool, num_tensors=5):
    handles = [pool.put(torch.full((5000,), float(i))) for i in range(num_tensors)]
    for number, handle in enumerate(handles):
        lease = pool.get(handle)
        assert torch.all(lease.tensor == number)
        lease.release()
        pool.drop(handle)
    pool.close()


def test_the_file_has_no_name_and_is_closed(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    pool = DiskPool(tmp_path, CPU)
    handle = pool.put(torch.ones(10_000))
    assert list(tmp_path.iterdir()) == []
    pool.drop(handle)
    pool.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_places_are_reused(tmp_path):
    pool = DiskPool(tmp_path, CPU)
    for _ in range(20):
        handles = [pool.put(torch.ones(n)) for n in (5000, 100, 3000)]
        for handle in handles:
            pool.drop(handle)
    assert os.fstat(pool.file._file.fileno()).st_size == 20_480 + 4096 + 12_288
    pool.close()


def refuse_direct(monkeypatch, where):
    real = getattr(os, where)

    def call(first, *rest):
        flags = rest[0] if where == "open" else fcntl.fcntl(first, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(first, *rest)

    monkeypatch.setattr(os, where, call)


@pytest.mark.parametrize("where", ["open", "pwrite"])
def test_a_filesystem_without_direct_access_is_buffered(where, tmp_path, monkeypatch):
    refuse_direct(monkeypatch, where)
    monkeypatch.setattr(disk, "_SYNC_BYTES", 30_000)
    synced = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(fd), real(fd)))
    pool = DiskPool(tmp_path, CPU)
    assert not pool.file.is_direct
    assert_keeps(pool)
    assert len(synced) == 2


def test_short_reads_and_writes_go_on(tmp_path, monkeypatch):
    write, read = os.pwrite, os.preadv

    def some(data):
        return memoryview(data)[:4096]  # a slice of a mmap itself is a copy, which is not aligned

    monkeypatch.setattr(os, "pwrite", lambda fd, data, start: write(fd, some(data), start))
    monkeypatch.setattr(os, "preadv", lambda fd, data, start: read(fd, [some(data[0])], start))
    assert_keeps(DiskPool(tmp_path, CPU))


def raise_error(code):
    raise OSError(code, os.strerror(code))


def test_a_disk_that_reserves_nothing_still_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: raise_error(errno.EOPNOTSUPP))
    assert_keeps(DiskPool(tmp_path, CPU))


def test_a_full_disk_is_told_at_put_by_the_true_cause(tmp_path):
    pool = DiskPool(tmp_path, CPU)
    kept = pool.put(torch.ones(2**18))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, limits[1]))
    try:
        with pytest.raises(ConfigError, match="File too large, 1 MiB more were needed") as raised:
            for _ in range(9):
                pool.put(torch.ones(2**18))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(tmp_path) in raised.value.given and "memory.disk_dir" in raised.value.source
    lease = pool.get(kept)
    assert torch.all(lease.tensor == 1), "what was kept before is safe"
    pool.clear()
    pool.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_names_what_makes_room(code, tmp_path, monkeypatch):
    pool = DiskPool(tmp_path, CPU)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: raise_error(code))
    with pytest.raises(ConfigError, match="make room there") as raised:
        pool.put(torch.ones(10))
    assert os.strerror(code) in raised.value.given
    assert pool.held_bytes == 0
    pool.close()


def test_a_disk_that_fails_in_the_worker_is_told_in_the_next_call(tmp_path, monkeypatch):
    pool = DiskPool(tmp_path, CPU)
    monkeypatch.setattr(os, "pwrite", lambda *_: raise_error(errno.EIO))
    handle = pool.put(torch.ones(10))
    with pytest.raises(ConfigError, match="Input/output error"):
        pool.get(handle)
    pool.clear()
    pool.close()


def test_a_folder_that_takes_no_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for name, told in (("absent", "No such file or directory"), ("file", "Not a directory")):
        with pytest.raises(ConfigError, match=told) as raised:
            DiskPool(tmp_path / name, CPU)
        assert name in raised.value.given and "a folder that exists" in raised.value.change
    monkeypatch.setattr(os, "open", lambda *_: raise_error(errno.EROFS))
    with pytest.raises(ConfigError, match=os.strerror(errno.EROFS)) as raised:
        DiskPool(tmp_path, CPU)
    assert "can be written to" in raised.value.change


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_a_folder_in_ram_is_refused_by_name():
    with pytest.raises(ConfigError, match="a tmpfs: its files are in RAM"):
        DiskPool(Path("/dev/shm"), CPU)


def resident_bytes(*kinds):
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[f"Rss{kind}"].split()[0]) for kind in kinds) * 1024


def test_what_is_on_disk_takes_no_memory(tmp_path):
    shared = resident_bytes("Shmem")
    pool = DiskPool(tmp_path, CPU, staging_bytes=2**23)
    x = torch.ones(2**19)
    handles = [pool.put(x) for _ in range(8)]
    before = resident_bytes("Anon", "File")
    handles += [pool.put(x) for _ in range(64)]  # 128 MiB
    for handle in handles:
        pool.prefetch(handle)
        pool.get(handle).release()
    assert pool.held_bytes == 72 * 2**21
    assert resident_bytes("Anon", "File") - before < 2**23
    assert resident_bytes("Shmem") == shared
    pool.clear()
    pool.close()

"""The unlinked file of a `DiskPool`, read and written with O_DIRECT, past the page cache.

Mapped files would count as resident memory, and buffered writes block once the kernel has too many
dirty pages; O_DIRECT does neither. The file is unlinked as soon as it is open, so that nothing
remains on disk, even after a crash."""

from __future__ import annotations

import errno
import io
import mmap
import os
import sys
import uuid
from pathlib import Path

import psutil

from furlong.errors import ConfigError
from furlong.units import format_bytes

PAGE_BYTES = 4096
_SYNC_BYTES = 2**26
"""Bytes written between syncs on a filesystem without O_DIRECT."""
_IN_RAM = ("tmpfs", "ramfs")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NamelessFile:
    """An open, unlinked file in `folder`; the system frees it when the process ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._dirty_bytes = 0
        if not hasattr(os, "O_DIRECT"):
            raise ConfigError(
                given=f"{folder} for the disk, on {sys.platform}",
                required="Linux",
                source="memory.disk_dir",
                change="leave the disk out",
            )
        _refuse_ram(folder)
        try:
            descriptor, self.is_direct = _open(folder)
        except OSError as error:
            raise self._refusal(error) from error
        self._file = io.FileIO(descriptor, "r+")  # closes itself if `close` is never called

    def reserve(self, start: int, num_bytes: int) -> None:
        """Allocate `num_bytes` of the file from `start` on. Raises ConfigError if the disk is
        full."""
        try:
            os.posix_fallocate(self._file.fileno(), start, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise self._refusal(error, num_bytes) from error
            os.ftruncate(self._file.fileno(), start + num_bytes)  # grows the file, reserves nothing

    def write(self, pages: memoryview, start: int) -> None:
        """Write whole pages from byte `start` on; raises ConfigError if the system refuses."""
        done = 0
        try:
            while done < len(pages):
                done += os.pwrite(self._file.fileno(), pages[done:], start + done)
            self._dirty_bytes += 0 if self.is_direct else done
            if self._dirty_bytes > _SYNC_BYTES:  # before the kernel blocks the writer
                self._dirty_bytes = 0
                os.fdatasync(self._file.fileno())
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._refusal(error, len(pages)) from error

    def read(self, pages: memoryview, start: int) -> None:
        """Fill `pages` from byte `start` on; raises ConfigError if the system refuses."""
        done = 0
        try:
            while done < len(pages):
                count = os.preadv(self._file.fileno(), [pages[done:]], start + done)
                if not count:
                    raise OSError(errno.EIO, "the file has become shorter")
                done += count
            if not self.is_direct:
                os.posix_fadvise(self._file.fileno(), start, done, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._refusal(error) from error

    def close(self) -> None:
        self._file.close()

    def _refusal(self, error: OSError, num_bytes: int = 0) -> ConfigError:
        reason = os.strerror(error.errno) if error.errno else str(error)
        more = f", {format_bytes(num_bytes)} more were needed" if num_bytes else ""
        change = "name a folder that exists, on a disk that can be written to"
        if error.errno in _NO_ROOM:
            change = "make room there, name a folder on a larger disk, or lower memory.disk"
        return ConfigError(
            given=f"{self.folder} for the disk: {reason}{more}",
            required="a folder on a disk with room for all that the plan keeps there",
            source="memory.disk_dir",
            change=change,
        )


def _refuse_ram(folder: Path) -> None:
    """Raise ConfigError for a folder whose files are in RAM."""
    try:
        resolved = folder.resolve()
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return
    above = [m for m in reversed(mounts) if resolved.is_relative_to(m.mountpoint)]
    kind = max(above, key=lambda m: len(m.mountpoint)).fstype if above else ""
    if kind in _IN_RAM:
        raise ConfigError(
            given=f"{folder}, which is on a {kind}: its files are in RAM",
            required="a folder on a disk",
            source="memory.disk_dir",
            change="name a folder on a disk; what may stay in RAM belongs to memory.device or, on a"
            " GPU, to CPU memory",
        )


def _open(folder: Path) -> tuple[int, bool]:
    """Create and unlink a file; return its descriptor and whether O_DIRECT works in the folder,
    which is tried out with one page."""
    page = mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    name, descriptor = folder / f".furlong-{uuid.uuid4().hex}", None
    for flag in (os.O_DIRECT, 0):
        try:
            descriptor = os.open(name, flag | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.pwrite(descriptor, page, 0)
            os.preadv(descriptor, [page], 0)
            break
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            if not flag or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            descriptor = None
        finally:
            name.unlink(missing_ok=True)
    assert descriptor is not None
    return descriptor, bool(flag)

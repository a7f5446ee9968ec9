"""Files that are not on this machine, read through fsspec; what a connection loses is read again.

`hf://` is the hub's own file system, whose listing and ranges huggingface_hub asks for; other
addresses are whatever fsspec knows.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

import fsspec  # type: ignore[import-untyped]
from huggingface_hub import errors as hub

from furlong.errors import DataError

WAITS_S = (1, 4, 16)
"""Seconds before each new try, but of the hub."""

_BUFFER_BYTES = 2**20
_T = TypeVar("_T")
_CLIENT_ERROR: Any = hub.HTTPError  # type: ignore[attr-defined]  # whichever client it has
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def retried(work: Callable[[], _T], what: str) -> _T:
    """The outcome of `work`, which asks a server for `what`; tried again where a connection fails,
    and told. Raises DataError where it does not come back, and at once for what is not there."""
    # huggingface_hub has tried six times by then, and said so each time.
    for wait_s in (*(() if what.startswith("hf://") else WAITS_S), None):
        try:
            return work()
        except (OSError, _CLIENT_ERROR) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if isinstance(error, _FINAL) or _is_refusal(error):
                raise DataError(
                    given=f"{what}: {reason}",
                    required="files that can be read",
                    source=what,
                    change="check the name, and log in (hf auth login) if it is closed",
                ) from error
            if wait_s is None:
                raise DataError(
                    given=f"{what}: {reason}",
                    required="a connection that holds",
                    source=what,
                    change="go on with --resume when it is back",
                ) from error
            print(f"{what}: {reason}; again in {wait_s} s")
            time.sleep(wait_s)
    raise AssertionError


def find(address: str) -> tuple[str, list[str], Any]:
    """The root of an address in its file system, the files there or below, and the file system.
    Raises DataError."""
    try:
        system, root = fsspec.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise DataError(
            given=f"{address}: {str(error).splitlines()[0]}",
            required="an address that fsspec reads, such as hf://datasets/OWNER/NAME or s3://...",
            source=address,
            change="install the package that fsspec names, or write another address",
        ) from error
    found = retried(lambda: system.find(root), address)
    return root, sorted(found), system


def open_remote(address: str) -> BinaryIO:
    """The bytes of a file elsewhere."""
    # typed as no raw stream
    return io.BufferedReader(_Remote(address), _BUFFER_BYTES)


class _Remote(io.RawIOBase):
    """A file elsewhere, opened anew where reading it fails."""

    def __init__(self, address: str) -> None:
        self._address, self._at = address, 0
        self._opened: Any = None

    def _do(self, act: Callable[[Any], _T]) -> _T:
        def once() -> _T:
            try:
                if self._opened is None:
                    self._opened = fsspec.open(self._address, "rb").open()
                self._opened.seek(self._at)
                return act(self._opened)
            except BaseException:
                self._opened = None
                raise

        return retried(once, self._address)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        found: bytes = self._do(lambda opened: opened.read(len(view)))
        view[: len(found)] = found
        self._at += len(found)
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence)
        if base is None:
            base = self._do(lambda opened: int(opened.seek(0, io.SEEK_END)))
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        super().close()


def _is_refusal(error: BaseException) -> bool:
    """Whether a server answers that it will not, whenever it is asked."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is not None and 400 <= status < 500 and status not in (408, 429)

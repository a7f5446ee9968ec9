"""Files that a verb writes, and output streams: a failed write to stdout or stderr does not stop
the verb.

Standard output and error may be closed or full, or nobody may read them any more.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from furlong.errors import ConfigError, refusal
from furlong.files import os_errors_told

_BEGINNINGS = {".png": (b"\x89png",), ".svg": (b"<?xml", b"<svg")}


class Output:
    """A text stream that drops everything after its first failed write.

    `error`: the operating system's message for that failure; None if the reader ended early
    (`furlong ... | head`) or the terminal was closed, which count as success.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._is_lost = False
        self.error: str | None = None

    def write(self, text: str) -> int:
        if not self._is_lost:
            try:
                self._stream.write(text)
            except (OSError, ValueError) as error:
                self._give_up(error)
        if "\n" in text:  # a log file may be read while the verb runs
            self.flush()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not self._is_lost:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError | ValueError) -> None:
        self._is_lost = True
        number = getattr(error, "errno", None)
        if number not in (errno.EPIPE, errno.EIO):
            self.error = getattr(error, "strerror", None) or str(error)
        # Python flushes the stream's buffer at exit: to the null device, so that it cannot fail.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def tell_loading() -> None:
    """Print to stderr, before imports that take seconds, that torch and transformers are loaded."""
    if "torch" not in sys.modules:
        print("loading torch and transformers ...", file=sys.stderr, flush=True)


@contextmanager
def lasting_output() -> Iterator[Output]:
    """Context manager: replace stdout and stderr by streams that never raise, and flush both at the
    end. Yields the new stdout."""
    before = sys.stdout, sys.stderr
    # Also for a closed stdin, so that no file of a run gets the descriptor of a standard stream.
    closed = [stream for stream in (*before, sys.stdin) if stream is None]
    nowhere = [open(os.devnull, "w") for _ in closed]  # noqa: SIM115
    unused = iter(nowhere)
    out, err = (Output(next(unused) if stream is None else stream) for stream in before)
    sys.stdout, sys.stderr = out, err
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before
        for stream in nowhere:
            stream.close()


@contextmanager
def speaker_only(speaks: bool) -> Iterator[None]:
    """Context manager: if `speaks` is false, drop what this process prints to stdout, and Python
    warnings. Other output to stderr is kept."""
    if speaks:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_output(path: Path, flag: str, endings: Sequence[str], *keys: str) -> None:
    """Raise ConfigError if the suffix of `path` is not one of `endings`, or if a file there must
    not be replaced (see `check_replaced`). `flag`: the option that names the file, for the
    message."""
    if path.suffix.lower() not in endings:
        required = f"a name that ends in {' or '.join(endings)}"
        raise refusal(f"{flag} {path}", required, "give the file another ending")
    check_replaced(path, flag, *keys)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager: create the folder of the file `path`; raise an OSError as ConfigError."""
    change = ", or choose another place"
    required = "a file that can be written"
    with os_errors_told(ConfigError, required=required, source=str(path), or_else=change):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield


def check_replaced(path: Path, flag: str, *keys: str) -> None:
    """Raise ConfigError if there is a file at `path` that a verb must not replace. A verb may
    replace an empty file, a JSON object with all `keys` or, if no `keys` are given, an image in the
    format of the suffix."""
    try:
        content = path.read_bytes() if path.is_file() else b""
    except OSError:  # reported when the file is written
        return
    if not content.strip():
        return
    if keys:
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        is_own = isinstance(found, dict) and found.keys() >= set(keys)
    else:
        is_own = content.lower().startswith(_BEGINNINGS[path.suffix.lower()])
    if not is_own:
        raise refusal(
            f"{path}, which is there and is something else than what would replace it",
            "a new file, or one that furlong wrote",
            "choose another name, or remove the file",
            flag,
        )

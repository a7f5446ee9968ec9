"""The parser of a verb's flags, the error of a command line, and files that it would replace."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from furlong.errors import ConfigError

_BEGINNINGS = {
    ".png": (b"\x89png",), ".svg": (b"<?xml", b"<svg"),
}  # fmt: skip


class VerbParser(argparse.ArgumentParser):
    """The flags of a verb. Raises ConfigError instead of ending the process."""

    def __init__(self, verb: str, *, takes: str, description: str) -> None:
        """`takes`: what the verb is called with, for the error."""
        super().__init__(prog=f"furlong {verb}", allow_abbrev=False, description=description)
        self._takes = takes

    def error(self, message: str) -> NoReturn:
        raise refusal(message, self._takes, f"see {self.prog} --help")


def refusal(
    given: str, required: str, change: str, source: str = "the command line"
) -> ConfigError:
    """The error of a command line, or of what it names."""
    return ConfigError(given=given, required=required, source=source, change=change)


def check_output(path: Path, flag: str, endings: Sequence[str], *keys: str) -> None:
    """Raise ConfigError for a name with another ending, and where `check_replaced` does."""
    if path.suffix.lower() not in endings:
        required = f"a name that ends in {' or '.join(endings)}"
        raise refusal(f"{flag} {path}", required, "give the file another ending")
    check_replaced(path, flag, *keys)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of what is written; raises ConfigError in the place of the system's error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        given = f"{path}: {error.strerror}"
        raise refusal(given, "a file that can be written", "choose another place") from error


def check_replaced(path: Path, flag: str, *keys: str) -> None:
    """Raises ConfigError where a file that would be replaced is no JSON object with `keys`, or,
    without keys, no picture of its ending; an empty file may be replaced."""
    try:
        content = path.read_bytes() if path.is_file() else b""
    except OSError:  # told when it is written
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

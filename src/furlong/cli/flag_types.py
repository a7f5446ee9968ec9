"""The parser of a verb's flags, readers of their values, and the error of a command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from furlong.errors import ConfigError

MAX_DEVICES = 65_536
MAX_BATCH = 16_384
"""Most sequences of one step's batch."""


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


def number(flag: str, lowest: int, most: int) -> Callable[[str], int]:
    """A reader of a flag's whole number between two bounds. Raises ConfigError."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if not lowest <= value <= most:
            shown = text if len(text) <= 40 else text[:40] + "..."
            required = f"a whole number of at least {lowest} and at most {most:,}"
            raise refusal(f"{flag} {shown}", required, f"give a number in it, such as {flag} 8")
        return value

    return read


def refusal(
    given: str, required: str, change: str, source: str = "the command line"
) -> ConfigError:
    """The error of a command line, or of what it names."""
    return ConfigError(given=given, required=required, source=source, change=change)


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


def check_num_devices(num_devices: int, source: str) -> None:
    """Raises ConfigError for more devices than can be planned for."""
    if num_devices > MAX_DEVICES:
        given, most = f"{num_devices:,} devices", f"at most {MAX_DEVICES:,}"
        raise refusal(given, most, "use fewer devices", source)

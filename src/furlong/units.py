"""Parse and format amounts with units, and counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil

DAY_S = 86_400
_BYTES_PER_UNIT = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def parse_bytes(text: str | int) -> int:
    """Return the bytes in `512MiB`, `1.5 GB` or a plain number. Raises ValueError for others."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in _BYTES_PER_UNIT:
        raise ValueError("an amount of memory such as 512MiB, 24GiB or 80GB")
    amount = float(match[1]) * _BYTES_PER_UNIT[match[2].upper()]
    if amount >= 2**63:
        raise ValueError(f"{str(text)[:40]!r} is more memory than there is: less than 8 EiB")
    return int(amount)


_BINARY = (" KiB", " MiB", " GiB", " TiB")


def format_bytes(num_bytes: float) -> str:
    """Format bytes as `1.5 GiB`: three significant digits, in the largest binary unit that fits."""
    return _scaled(num_bytes, 1024, _BINARY, " B")


def bytes_alike(amounts: Sequence[float]) -> tuple[list[str], str]:
    """Format amounts of bytes in the unit of the largest one: `["0.05", "17.4"], "GiB"`."""
    unit = format_bytes(max(map(abs, amounts), default=0)).rpartition(" ")[2]
    scaled = [amount / _BYTES_PER_UNIT[unit.upper()] for amount in amounts]
    return [f"{x:.{2 if abs(x) < 10 else 1 if abs(x) < 100 else 0}f}" for x in scaled], unit


def budget_of(num_bytes: float) -> str:
    """Return bytes as text that `parse_bytes` reads, rounded up to a budget such as `144.5GiB`."""
    if num_bytes < 2**30:
        return f"{ceil(num_bytes / 2**20)}MiB"
    return f"{ceil(num_bytes * 100 / 2**30) / 100}GiB"


def format_seconds(seconds: float) -> str:
    """Format seconds as `850 ms`, `12.3 s`, `4 min 05 s`, `2 h 03 min` or `6.2 days`."""
    if seconds < 0.9995:  # 1 s, in three digits of milliseconds
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds < 48 * 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{seconds / DAY_S:,.1f} days"


def format_count(count: float) -> str:
    """Format a number of tokens or parameters as `812`, `16.4K` or `1.3M`."""
    return _scaled(count, 1000, ("K", "M", "G", "T"), "")


def _scaled(value: float, base: int, units: Sequence[str], single: str) -> str:
    for power, unit in reversed([*enumerate(units, 1)]):
        size = base**power
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.3g}{unit}" if value < 999.5 * size else f"{scaled:.0f}{unit}"
    return f"{value:.0f}{single}"


def count_words(number: int, noun: str) -> str:
    """Format a number and its noun: `1 rank`, `2,048 ranks`, `2 processes`."""
    return f"{number:,} {plural(number, noun)}"


def plural(number: float, noun: str) -> str:
    """Return the noun, in the plural unless the number is 1."""
    if number == 1:
        return noun
    return noun + ("es" if noun.endswith(("s", "ch")) else "s")

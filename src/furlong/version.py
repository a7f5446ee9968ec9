"""The version of the package, and those of the packages that compute."""

from __future__ import annotations

import re

__version__ = "0.1.0"
OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS = (5, 17), (5, 24)
"""The first and the last release of transformers on which all families have been compared
(`benchmarks/families.py --check`)."""


def versions() -> dict[str, str]:
    """Return the installed versions of what computes, by package; import none of them."""
    from importlib.metadata import version

    return {"furlong": __version__} | {name: version(name) for name in ("torch", "transformers")}


def versions_in_words() -> str:
    """Return the versions in one line, as `furlong --version` prints them."""
    return ", ".join(f"{name} {number}" for name, number in versions().items())


def transformers_release() -> tuple[int, ...]:
    """Return the numbers (major, minor) of the installed transformers."""
    return tuple(map(int, re.findall(r"\d+", versions()["transformers"])[:2]))

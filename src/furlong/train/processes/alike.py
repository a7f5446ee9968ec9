"""Whether all processes were started with the same run, programs and data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from furlong import __version__
from furlong.errors import ConfigError
from furlong.train.processes.together import Processes
from furlong.train.setup.architecture import differing_keys

_PACKAGES = ("torch", "transformers")


def check_alike(processes: Processes, facts: Mapping[str, Any], source: str) -> None:
    """Raises ConfigError, on all processes, unless every one has the facts of the first one.

    `facts`: plain values by name; `source`: where they come from.
    """
    if processes.num_processes == 1:
        return
    own = json.loads(json.dumps(dict(facts)))
    first = processes.by_first(lambda: own)
    processes.together(lambda: _compare(own, first, source))


def versions() -> dict[str, str]:
    """Versions of what computes, by package; nothing is imported."""
    found = {"furlong": __version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _compare(own: Mapping[str, Any], first: Mapping[str, Any], source: str) -> None:
    if differing := differing_keys(own, first, "on process 0"):
        raise ConfigError(
            given=differing,
            required="the same on all processes of a run",
            source=source,
            change="start all processes by one command, in equal environments",
        )

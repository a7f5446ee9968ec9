"""The files that `furlong plan` writes: pictures, traces, plans."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from furlong.cli.flag_types import refusal
from furlong.report.scene import Panel
from furlong.report.timelines import save_timelines


def draw(
    panels: Sequence[Panel], chosen: argparse.Namespace, *, most_ranks: int = 16, note: str = ""
) -> None:
    """Write the picture and the trace that are asked for, and print that they are written; `note`:
    words for the picture in the place of those for its ranks. Raises ConfigError where a file
    cannot be written."""
    for path in (chosen.picture, chosen.trace):
        if path is not None:
            with writing(path):
                shown = save_timelines(panels, path, most_ranks=most_ranks)
            if not chosen.json:
                print(f"wrote {path}{note or (f'; {shown}' if shown else '')}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises ConfigError in the place of the system's error."""
    try:
        yield
    except OSError as error:
        given = f"{path}: {error.strerror}"
        raise refusal(given, "a file that can be written", "choose another place") from error

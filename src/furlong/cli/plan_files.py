"""The files that `furlong plan` writes: pictures, traces, plans."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from furlong.cli.flag_types import refusal
from furlong.report.pictures.ranks import choose_ranks
from furlong.report.pictures.scene import Panel
from furlong.report.pictures.timeline import save_timelines


def draw(panel: Panel, chosen: argparse.Namespace) -> None:
    """Write the picture and the trace that are asked for: the picture of some ranks where there
    are many, the trace of all."""
    for path, shown in ((chosen.picture, with_few_ranks(panel)), (chosen.trace, panel)):
        if path is not None:
            save([shown], path)
            if not chosen.json:
                note = shown.note.removeprefix(panel.note).removeprefix("; ")
                print(f"wrote {path}" + (f"; {note}" if note else ""))


def with_few_ranks(panel: Panel, most: int = 16) -> Panel:
    """The panel with at most `most` rows."""
    shown = choose_ranks(panel.plan, panel.timeline, most)
    if not shown.note:
        return panel
    note = "; ".join(filter(None, (panel.note, shown.note)))
    return replace(panel, ranks=shown.ranks, note=note)


def save(panels: list[Panel], path: Path) -> None:
    """`save_timelines`; raises ConfigError where the file cannot be written."""
    with _told(path):
        save_timelines(panels, path)


def write(text: str, path: Path) -> None:
    """Raises ConfigError where the file cannot be written."""
    with _told(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raises ConfigError in the place of the system's error."""
    try:
        yield
    except OSError as error:
        given = f"{path}: {error.strerror}"
        raise refusal(given, "a file that can be written", "choose another place") from error

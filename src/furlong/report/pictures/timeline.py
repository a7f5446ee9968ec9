"""Pictures of timelines: PNG and SVG, one self-contained HTML page, and a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from furlong.errors import ConfigError
from furlong.report.pictures.ranks import choose_ranks
from furlong.report.pictures.scene import Panel, make_scenes

PICTURES = (".png", ".svg", ".html")


def save_timelines(panels: Sequence[Panel], path: str | Path, *, most_ranks: int = 16) -> str:
    """Draw one or several timelines into a file whose ending says how.

    `.png`, `.svg`: the panels one below the other on one time scale. `.html`: a page that needs no
    network, with zoom, pan and a tooltip per action; several panels become tabs. `.json`: Chrome
    trace events of all ranks of the one panel. A picture has at most `most_ranks` ranks of each
    panel, unless that names some: returns the words for the choice in the first one, if any.
    Raises ConfigError for another ending.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".json" and len(panels) == 1:
        from furlong.report.pictures.trace import save_trace

        save_trace(make_scenes(panels)[0], path)
        return ""
    if suffix not in PICTURES:
        raise ConfigError(
            given=f"{path.name} for {len(panels)} timelines",
            required=f"a name that ends in {', '.join(PICTURES)}; or one timeline and .json",
            source="the name of a picture or a trace",
            change="give the file another ending",
        )
    shown, notes = [], []
    for panel in panels:
        ranks, words = panel.ranks, ""
        if ranks is None:
            ranks, words = choose_ranks(panel.plan, panel.timeline, most_ranks)
        notes.append(words)
        note = "; ".join(filter(None, (panel.note, words)))
        shown.append(replace(panel, ranks=ranks, note=note))
    if suffix == ".html":
        from furlong.report.pictures.page import save_page

        save_page(make_scenes(shown), path)
    else:
        from furlong.report.pictures.picture import save_picture  # matplotlib loads slowly

        save_picture(make_scenes(shown), path)
    return notes[0]

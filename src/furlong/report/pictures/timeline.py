"""Pictures of timelines: PNG and SVG, one self-contained HTML page, and a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from furlong.errors import ConfigError
from furlong.report.pictures.ranks import choose_ranks
from furlong.report.pictures.scene import Panel, make_scenes

PICTURES = (".png", ".svg", ".html")
TRACES = (".json",)


def save_timelines(panels: Sequence[Panel], path: str | Path) -> None:
    """Draw one or several timelines into a file whose ending says how.

    `.png`, `.svg`: the panels one below the other on one time scale. `.html`: a page that needs no
    network, with zoom, pan and a tooltip per action; several panels become tabs. `.json`: Chrome
    trace events of the one panel. Raises ConfigError for another ending.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".png" | ".svg":
            from furlong.report.pictures.picture import save_picture  # matplotlib loads slowly

            save_picture(make_scenes([_few_ranks(panel) for panel in panels]), path)
        case ".html":
            from furlong.report.pictures.page import save_page

            save_page(make_scenes(panels), path)
        case ".json" if len(panels) == 1:
            from furlong.report.pictures.trace import save_trace

            save_trace(make_scenes(panels)[0], path)
        case _:
            raise ConfigError(
                given=f"{path.name} for {len(panels)} timelines",
                required=f"a name that ends in {', '.join(PICTURES)}; or one timeline and .json",
                source="the name of a picture or a trace",
                change="give the file another ending",
            )


def _few_ranks(panel: Panel) -> Panel:
    """The panel with as many ranks as one can look at, unless somebody has chosen them."""
    shown = choose_ranks(panel.plan, panel.timeline, 32)
    if panel.ranks is not None or not shown.note:
        return panel
    note = "; ".join(filter(None, (panel.note, shown.note)))
    return replace(panel, ranks=shown.ranks, note=note)

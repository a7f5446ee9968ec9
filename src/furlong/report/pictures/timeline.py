"""Pictures of timelines: PNG and SVG, one self-contained HTML page, and a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from furlong.errors import ConfigError
from furlong.report.pictures.scene import Panel, make_scene

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
            from furlong.report.pictures.picture import (
                save_picture,  # matplotlib takes its time to load
            )

            save_picture([make_scene(panel) for panel in panels], path)
        case ".html":
            from furlong.report.pictures.page import save_page

            save_page([make_scene(panel) for panel in panels], path)
        case ".json" if len(panels) == 1:
            from furlong.report.pictures.trace import save_trace

            save_trace(panels[0], path)
        case _:
            raise ConfigError(
                given=f"{path.name} for {len(panels)} timelines",
                required=f"a name that ends in {', '.join(PICTURES)}; or one timeline and .json",
                source="the name of a picture or a trace",
                change="give the file another ending",
            )

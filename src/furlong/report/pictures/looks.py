"""Colours of pictures, and what they mean: a hue per sequence, a shade per kind of action."""

from __future__ import annotations

COLOURS = (
    "#3d7ac6", "#e38b29", "#43a05f", "#c9569a", "#20a39e",
    "#d4544c", "#7f63c2", "#a59a2e", "#9a6b4d", "#56aee2",
)  # fmt: skip
"""Of sequences, in the order in which they first run; they repeat when there are more."""
PACKED_COLOUR = "#7b8798"
NOBODY_COLOUR = "#4a5464"

INK = "#1d2530"
FAINT = "#667080"
LANE = "#e9ecf1"
"""Of a rank that computes nothing."""
LIMIT = "#c8372d"
DEVICE = "#4f76a3"
HOST = "#8a6fb0"

MESSAGE_COLOURS = {
    "activation": "#2b3442",
    "gradient": "#8a93a3",
    "collective": "#b0752b",
    "copy": HOST,
}
KIND_WORDS = {
    "forward": "forward",
    "recompute": "recompute",
    "rebuild": "rebuild K,V",
    "backward": "backward",
    "activation": "activation message",
    "gradient": "gradient message",
    "collective": "collectives",
    "copy": "copies between tiers",
}
"""In the order of a legend."""

_LIGHTER = {"forward": 0.5, "recompute": 0.82, "rebuild": 0.82}
HATCHES = {"recompute": "//////", "rebuild": "......"}


def fill(colour: str, kind: str) -> str:
    """The shade of a kind: a forward is light, a backward full, what runs again almost white (and
    hatched); messages have colours of their own."""
    return MESSAGE_COLOURS.get(kind) or tint(colour, _LIGHTER.get(kind, 0.0))


def tint(colour: str, share: float) -> str:
    """`colour` (#rrggbb) with that share of white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)

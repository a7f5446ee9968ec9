"""Colours of pictures: a hue for every cut sequence, a tone for every packed chunk, a shade for
every kind of action, a fill for every part of memory.

The colours of a group differ for the colour-blind too, at full strength and half as strong: the
tests simulate how they see them.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal[
    "forward", "recompute", "rebuild", "backward", "activation", "gradient", "collective", "copy"
]

SEQUENCE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Hues of cut sequences, the longest first; they repeat when there are more (after Okabe, Ito)."""
PACKED_COLOURS = ("#2b4256", "#cfc08a", "#8780cc", "#86793f")
"""Tones of the chunks that hold whole sequences."""
DARKEST = 0.35
"""How much black the first chunk of a cut sequence has; the last one has none."""
GREY = "#7b8798"

INK, FAINT, LINE, LIMIT = "#1d2530", "#667080", "#c3c9d3", "#c8372d"
LANE = "#eef0f4"
"""The ground on which a rank's actions stand: what stays free of them is idle."""

PART_COLOURS = {
    "weights": "#55606f",
    "gradients": "#8d96a3",
    "optimizer": "#b9c0c9",
    "buffers": "#e3e6ea",
    "kv": "#2f6fb0",
    "kv_gradients": "#9cc3e6",
    "activations": "#e08a2e",
    "logits": "#f2d64b",
    "in use": "#9db6d3",
    "host": "#8a6fb0",
    "host and disk": "#8a6fb0",
    "disk": "#c9b6de",
}
"""Fills of the parts of memory, from the bottom of a stack to its top; `in use` is the total, where
nothing more is known."""

MESSAGE_COLOURS: dict[Kind, str] = {
    "activation": "#2b3442",
    "gradient": "#8a93a3",
    "collective": "#b0752b",
    "copy": PART_COLOURS["host"],
}
KIND_WORDS: dict[Kind, str] = {
    "forward": "forward",
    "recompute": "recompute",
    "rebuild": "rebuild K,V",
    "backward": "backward",
    "activation": "activation message",
    "gradient": "gradient message",
    "collective": "collectives",
    "copy": "copies between tiers",
}
"""The kinds in the order of a legend."""
LIGHTER: dict[Kind, float] = {"forward": 0.5, "recompute": 0.82, "rebuild": 0.82}
HATCHES: dict[Kind, str] = {"recompute": "//////", "rebuild": "......"}


def fill(colour: str, kind: Kind) -> str:
    """The shade of a kind: a forward is light, a backward full, a second computation almost white
    (and hatched); messages have colours of their own."""
    return MESSAGE_COLOURS.get(kind) or tint(colour, LIGHTER.get(kind, 0.0))


def tint(colour: str, share: float) -> str:
    """`colour` (#rrggbb) mixed with that share of white; a negative share is one of black."""
    to = 255 if share > 0 else 0
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (to - part) * abs(share)):02x}" for part in parts)


def ink_on(colour: str) -> str:
    """White or dark letters, whichever can be read on `colour`."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#ffffff" if 0.3 * red + 0.59 * green + 0.11 * blue < 140 else INK

"""Keys of other trainers: one table for advice on unknown keys, `furlong convert` and the docs."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

Kind = Literal["ours", "needless", "lost", "refused"]


class Verdict(NamedTuple):
    """The answer to another trainer's key: furlong's key for it, or why there is none."""

    kind: Kind
    text: str
    """furlong's key, which may have an explanation after a comma; or why there is none."""

    @property
    def advice(self) -> str:
        """Advice for a user who wrote the other trainer's key."""
        prefix = {"ours": "write ", "needless": "remove it: "}.get(self.kind, "there is none: ")
        return prefix + self.text

    @property
    def target(self) -> str:
        """furlong's key, without the explanation."""
        return re.split(r"[ ,]", self.text, maxsplit=1)[0]


@cache
def foreign_table() -> dict[str, dict[str, Any]]:
    """Return the sections of foreign.yaml by name. The sections `ours`, `needless`, `lost` and
    `refused` map the text of each verdict to other trainers' keys; `defaults` maps each trainer to
    the defaults of its keys."""
    from ruamel.yaml import YAML

    text = files("furlong.config").joinpath("foreign.yaml").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = YAML(typ="safe", pure=True).load(text)
    return table


@cache
def _answers() -> dict[str, Verdict]:
    kinds: tuple[Kind, ...] = ("ours", "needless", "lost", "refused")
    return {
        name.replace("_", ""): Verdict(kind, text)
        for kind in kinds
        for text, names in foreign_table()[kind].items()
        for name in names
    }


def answer_to(key: str) -> Verdict | None:
    """Return the verdict on another trainer's key; None if the key is unknown.

    The key `a.b.c` is looked up as a whole, then as `c`. If neither is known, the verdict on the
    section `b`, or else on `a`, is returned, unless furlong has a key for this section. Case, `-`
    and `_` are ignored.
    """
    parts = key.lower().replace("-", "_").replace("_", "").split(".")
    answers = _answers()
    found = answers.get(".".join(parts)) or answers.get(parts[-1])
    if found is not None:
        return found
    outer = next((answers[part] for part in reversed(parts[:-1]) if part in answers), None)
    return outer if outer is not None and outer.kind != "ours" else None

#!/usr/bin/env python3
"""Write docs/reference.md: every key of a run, and the keys of other trainers.

The keys come from the schema; the other trainers' come from config/foreign.yaml. A fast test
compares the page with what this writes.
"""

from __future__ import annotations

import re
from pathlib import Path

from furlong.config.foreign import foreign_table
from furlong.config.schema import all_keys, section_of
from furlong.config.sources import default_of, values_in_words

PAGE = Path(__file__).parents[1] / "docs/reference.md"
_HEAD = """\
# Reference

Every key of a run file. On the command line a key is a flag, `--train.lr=1e-5`, which comes before
the file. `scripts/reference.py` writes this page; `furlong train --help` shows the same.
"""
_FOREIGN = """\
## Keys of other trainers

A key of TRL, axolotl, LLaMA-Factory, ms-swift, torchtune, Arctic Training or open-instruct is
refused, in a run file as on the command line and in whatever section it stands; the message says
what this table says. `furlong convert` reads whole recipes by the same table
([coming from others](coming-from.md)).
"""
_KINDS = {
    "ours": ("Ours", "Here"),
    "needless": ("Not needed", "Why"),
    "lost": ("Not there; a run computes the same without", "Why"),
    "refused": ("Not there; a run computes something else without", "Why"),
}


def reference() -> str:
    """The page."""
    lines = [_HEAD]
    sections: dict[str, list[str]] = {"": []}
    for key, field in all_keys().items():
        if section_of(field):
            sections[key] = []
        else:
            values = values_in_words(key).replace("|", "\\|")
            default = default_of(key).removeprefix("default: ")
            default = default if field.is_required() else f"`{default}`"
            what = " ".join(str(field.description).split())
            row = f"| `{key}` | `{values}` | {default} | {what} |"
            sections[key.rpartition(".")[0]].append(row)
    for section, rows in sorted(sections.items(), key=lambda item: item[0] == ""):
        lines.append(f"## {section or 'The run itself'}\n")
        if section:
            lines.append(f"{_description(section)}\n")
        lines += ["| Key | Values | Default | What it is |", "| --- | --- | --- | --- |", *rows, ""]
    lines.append(_FOREIGN)
    for kind, (title, head) in _KINDS.items():
        lines += [f"### {title}\n", f"| There | {head} |", "| --- | --- |"]
        for answer, names in foreign_table()[kind].items():
            shown = ", ".join(f"`{name}`" for name in names)
            lines.append(f"| {shown} | {_marked(answer)} |")
        lines.append("")
    lines.pop()
    return "\n".join(lines) + "\n"


def _description(section: str) -> str:
    return " ".join(str(section_of(all_keys()[section]).__doc__).split())


def _marked(text: str) -> str:
    """The text with names of keys and files in code."""
    known = sorted((*all_keys(), "chat_template.jinja"), key=len, reverse=True)
    dotted = [name for name in known if "." in name]
    return re.sub("|".join(map(re.escape, dotted)), lambda found: f"`{found[0]}`", text)


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")

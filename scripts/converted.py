#!/usr/bin/env python3
"""Write docs/recipes-converted.md: what becomes of 37 public recipes of other trainers.

The recipes' settings are in tests/recipes/others.yaml. A fast test compares the page with what this
writes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/recipes-converted.md"
_HEAD = """\
# Recipes converted

What `furlong convert` makes of 37 public recipes for long sequences. {whole} of them convert whole:
nothing is lost that changes what is computed; {all} lose nothing at all. {answered} more do once
one key is given that the message asks for: `--data.chat_template` where only the recipe's own code
has the template, `--model.name` where another run comes before. Of their {keys:,} keys {taken} are
taken, {needless} not needed, {lost} not there while a run computes the same without them,
{refused} not there so that it computes something else. Each of the 37 trains two steps on a tiny
model of its family and tiny data of its shape, with what could be taken
(`tests/recipes/test_recipes_of_others.py`). Paths of models and data are the recipes' own.

The settings are restated in `tests/recipes/others.yaml`. `scripts/converted.py` writes this page.

| Recipe | Computes something else without | Computes the same without | Keys | Taken | Not needed |
| --- | --- | --- | ---: | ---: | ---: |
"""


def page() -> str:
    """The page."""
    sys.path.append(str(ROOT / "tests"))
    from helpers.recipes_of_others import converted, recipes_of_others

    rows, numbers = (
        [],
        dict.fromkeys(("ours", "needless", "lost", "refused", "whole", "all", "answered"), 0),
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, recipe in recipes_of_others().items():
            made = converted(name, Path(folder))
            kinds = [verdict.kind for verdict in made.verdicts.values()]
            for kind in set(kinds):
                numbers[kind] += kinds.count(kind)
            numbers["whole"] += made.is_whole
            numbers["all"] += "lost" not in kinds and made.is_whole
            if "answers" in recipe:
                numbers["answered"] += converted(name, Path(folder), answered=True).is_whole
            missing = {
                kind: [f"`{key}`" for key, one in made.verdicts.items() if one.kind == kind]
                for kind in ("refused", "lost")
            }
            place = recipe["from"].replace("@", " @ ", 1)
            counts = f"{len(kinds)} | {kinds.count('ours')} | {kinds.count('needless')}"
            lacks = " | ".join(", ".join(names) or "nothing" for names in missing.values())
            rows.append(f"| {place} | {lacks} | {counts} |")
    keys = sum(numbers[kind] for kind in ("ours", "needless", "lost", "refused"))
    head = _HEAD.format(**numbers, taken=numbers["ours"], keys=keys)
    return head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    PAGE.write_text(page(), encoding="utf-8")

#!/usr/bin/env python3
"""Write what each recipe takes into its third line, by the command that stands there.

A slow test compares the lines with what this writes.
"""

from __future__ import annotations

import io
import json
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

from furlong.cli.main import main as furlong
from furlong.units import format_bytes, format_count, format_seconds

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
_COMMAND = re.compile(r"\(furlong (plan .*)\)$")


def planned_line(recipe: Path) -> str | None:
    """The third line of a recipe as its command makes it; none where no command stands there. It
    is called from the root of the repository."""
    match = _COMMAND.search(recipe.read_text(encoding="utf-8").splitlines()[2])
    if match is None:
        return None
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = furlong([*shlex.split(match[1]), "--json", "--no-calibration"])
    if code:
        raise SystemExit(f"{recipe.name}: furlong {match[1]} ends with {code}")
    plan = json.loads(printed.getvalue())
    device_bytes = max(rank["device_bytes"] for rank in plan["memory"])
    cpu_bytes = max(rank["cpu_bytes"] for rank in plan["memory"])
    parts = [f"{format_bytes(device_bytes)} on the card"]
    if cpu_bytes:
        parts.append(f"{format_bytes(cpu_bytes)} of RAM")
    step = format_seconds(plan["step_s"] + plan["optimizer_s"])
    start = plan["batch"]["source"].partition(" of ")[0]
    what = {"a pair": "a pair", "the longest": "an answer"}.get(start, "a step")
    parts.append(f"{step} for {what} of {format_count(plan['batch']['num_tokens'])} tokens")
    return f"# Planned: {', '.join(parts)} (furlong {match[1]})"


def main() -> None:
    for recipe in RECIPES:
        line = planned_line(recipe)
        if line is not None:
            lines = recipe.read_text(encoding="utf-8").splitlines()
            recipe.write_text("\n".join([*lines[:2], line, *lines[3:]]) + "\n", encoding="utf-8")
            print(recipe.name, line, sep="\n", flush=True)


if __name__ == "__main__":
    main()

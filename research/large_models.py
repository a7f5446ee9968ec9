"""What large models take on one card, a node and eight nodes: the table of
docs/research/large-models.md, which says what its cells are.

    python research/large_models.py            # cells that are not in large-models.json
    python research/large_models.py 8B         # those of one model again
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from furlong.cli.main import main as furlong
from furlong.units import format_seconds

PAGE = Path(__file__).parents[1] / "docs/research/large-models.md"
FOUND = PAGE.with_suffix(".json")
MODELS = {
    "8B": "Qwen3-8B", "14B": "Qwen2.5-14B", "32B": "Qwen2.5-32B", "70B": "Llama-3.1-70B",
}  # fmt: skip
KINDS = {"full": (), "LoRA": ("--model.lora.rank=16",)}
LENGTHS = {"32K": 32_768, "128K": 131_072, "1M": 1_048_576}
POOL = ("--parallel.sp=8", "--parallel.pp=1")
MACHINES: dict[str, tuple[str, ...]] = {
    "1 x 24 GB": ("--hardware=RTX4090",),
    "1 x 80 GB": ("--hardware=H100",),
    "8 x 80 GB": ("--hardware=H100", "--devices=8", *POOL),
    "64 x 80 GB": ("--hardware=H100", "--devices=64", *POOL, "--sequences=8"),
}


def asked() -> Iterator[tuple[str, list[str]]]:
    """The name of each cell, and the flags of its plan."""
    for model, name in MODELS.items():
        for kind, flags in KINDS.items():
            for length, tokens in LENGTHS.items():
                for machine, more in MACHINES.items():
                    yield f"{model} {kind}, {length}, {machine}", [
                        f"--lengths={tokens}", f"--model.name={name}", "--memory.cpu=8TiB",
                        "--no-calibration", *flags, *more,
                    ]  # fmt: skip


def cell(flags: list[str]) -> str:
    """The answer to one question."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(io.StringIO()):
        if furlong(["plan", *flags, "--json"]):
            return "-"
    plan: dict[str, Any] = json.loads(printed.getvalue())
    weights = plan["weights"]
    kind = "C" if weights["host_bytes"] else "f" if weights["reshard"] else "k"
    rank = max(plan["memory"], key=lambda one: int(one["device_bytes"]))
    ram = rank["cpu_bytes"] * min(8, plan["num_devices"])
    step = format_seconds(plan["step_s"] + plan["optimizer_s"])
    return f"*{kind}* {rank['device_bytes'] / 1e9:.0f} / {ram / 1e9:,.0f}, {step}"


def table(cells: dict[str, str]) -> str:
    """The table of the cells."""
    lines = [f"| | tokens | {' | '.join(MACHINES)} |", "| --- | ---: |" + " --- |" * len(MACHINES)]
    for model in MODELS:
        for kind in KINDS:
            for length in LENGTHS:
                own = [cells.get(f"{model} {kind}, {length}, {one}", "") for one in MACHINES]
                lines.append(f"| {model} {kind} | {length} | {' | '.join(own)} |")
    return "\n".join(lines)


def main(models: list[str]) -> None:
    cells = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    for name, flags in asked():
        if name not in cells or (models and name.split()[0] in models):
            cells[name] = cell(flags)
            print(name, cells[name], flush=True)
            FOUND.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition("| | tokens |")
    after = rest.partition("\n\n")[2]
    PAGE.write_text(f"{before}{table(cells)}\n\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

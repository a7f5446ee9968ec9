"""`furlong export`: a Hugging Face model from a run or one of its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from furlong.cli.output import tell_loading
from furlong.config.sources import FlagParser


def run(arguments: Sequence[str]) -> int:
    parser = FlagParser(
        "export",
        takes="furlong export RUN_OR_CHECKPOINT [--merge] [--out FOLDER]",
        description="Write a run's newest checkpoint, or the one that is named, as a Hugging Face"
        " model with its tokenizer; adapters in peft's format.",
    )
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="folder of either")
    parser.add_argument("--merge", action="store_true", help="add adapters to their base weights")
    parser.add_argument(
        "--out", metavar="FOLDER", help="new folder; default: beside the checkpoints of the run"
    )
    given = parser.parse_args(arguments)
    from furlong.train.export import export

    out = None if given.out is None else Path(given.out).expanduser()
    export(Path(given.source).expanduser(), merge=given.merge, out=out, loading=tell_loading)
    return 0

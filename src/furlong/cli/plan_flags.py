"""The flags of `furlong plan` that are no keys of a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from furlong.cli.flag_types import number, refusal

if TYPE_CHECKING:
    from furlong.config.sources import RunFlags

MAX_DEVICES = 65_536
MAX_BATCH = 16_384
"""Sequences of one step's batch."""
PICTURES, TRACES = (".png", ".svg", ".html"), (".json",)

_USAGE = """\
furlong plan RUN.yaml [FLAGS]
       furlong plan --lengths FILE|PRESET --model.name CONFIG.json|NAME --hardware NAME [FLAGS]
       furlong plan PLAN.json [--model.name M --hardware H]
       furlong plan RUN_FOLDER"""
_ABOUT = """\
Chooses the fastest plan of a batch that fits: no data, weights or devices are needed. Prints what
it does, predicted seconds and memory. A saved plan, or the measured one of a run, is shown again.
Beside the flags that come first all keys of furlong train are flags: sizes of parallel, chunks and
memory that are given hold, what is left out or auto is searched.
"""


def parse_flags(arguments: Sequence[str]) -> RunFlags:
    """The command line. Raises ConfigError; `--help` ends the process with SystemExit(0)."""
    from furlong.config.schema import PlannedRun
    from furlong.config.sources import RunParser, read_flags

    parser = RunParser(prog="furlong plan", usage=_USAGE, allow_abbrev=False, description=_ABOUT)
    parser.add_argument("subject", nargs="?", metavar="RUN.yaml|PLAN.json|RUN_FOLDER")
    _add_batch(parser)
    _add_outputs(parser)
    flags = read_flags(PlannedRun, parser, arguments)
    _check_outputs(flags.own)
    return flags


def _add_batch(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the batch, the devices and the search")
    group.add_argument(
        "--lengths", metavar="FILE|PRESET",
        help="lengths that furlong lengths wrote, or a preset (docs/presets.md)",
    )  # fmt: skip
    group.add_argument(
        "--sequences", type=number(1, MAX_BATCH), metavar="N",
        help="sequences of a step: the longest, and others drawn by train.seed"
        " (default: train.sequences_per_step of a run; all of a file; 64 of a preset)",
    )  # fmt: skip
    group.add_argument(
        "--hardware", metavar="NAME",
        help="a known device (docs/presets.md); cpu, and a run's default: this machine",
    )  # fmt: skip
    group.add_argument(
        "--devices", type=number(1, MAX_DEVICES), metavar="N",
        help="how many (default: the product of the sizes of parallel)",
    )  # fmt: skip
    group.add_argument(
        "--zero", type=int, choices=range(4), metavar="0..3",
        help="what replicas and sp ranks shard: 1 optimizer, 2 gradients too, 3 weights too"
        " (default: 1; on one device 0)",
    )  # fmt: skip
    group.add_argument(
        "--no-calibration", action="store_true",
        help="predict with assumed figures, not with those that furlong calibrate has measured",
    )  # fmt: skip
    group.add_argument(
        "--runnable", action="store_true",
        help="only plans that this release runs: those of one device",
    )  # fmt: skip
    group.add_argument(
        "--method", metavar="NAME",
        help="search the plans of one method only; --compare lists them all",
    )  # fmt: skip


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what comes out")
    group.add_argument(
        "--compare", action="store_true",
        help="the same batch under every method, each with its best layout",
    )  # fmt: skip
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument("--out", metavar="FILE", type=Path, help="save the plan: .json")
    group.add_argument(
        "--picture", metavar="FILE", type=Path, help=f"draw the timeline: {', '.join(PICTURES)}"
    )
    group.add_argument(
        "--trace", metavar="FILE", type=Path, help="write a trace that Perfetto opens: .json"
    )


def _check_outputs(chosen: argparse.Namespace) -> None:
    for flag, path, endings in (
        ("--picture", chosen.picture, PICTURES),
        ("--trace", chosen.trace, TRACES),
        ("--out", chosen.out, TRACES),
    ):
        if path is not None and path.suffix.lower() not in endings:
            raise refusal(
                f"{flag} {path}", f"a name that ends in {', '.join(endings)}",
                "give the file another ending",
            )  # fmt: skip
        if path is not None and not path.parent.is_dir():
            raise refusal(
                f"{flag} {path}", "a file in a folder that exists",
                f"make the folder {path.parent}, or choose another one",
            )  # fmt: skip
    if chosen.out is not None and chosen.out == chosen.trace:
        raise refusal(
            f"--out and --trace {chosen.out}", "two files: a plan and a trace",
            "give one of them another name",
        )  # fmt: skip
    if chosen.compare and (chosen.out or chosen.trace):
        raise refusal(
            f"--compare with {'--out' if chosen.out else '--trace'}",
            "one plan to write; --compare makes one per method",
            "add --method NAME in the place of --compare",
        )

"""`furlong rope`: the loss by position with other factors of RoPE, without training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from furlong.cli.output import check_output, tell_loading, writing
from furlong.cli.train import run_together
from furlong.config.messages import NO_FILE
from furlong.config.schema import RunConfig
from furlong.config.sources import FlagParser, build_run, read_flags, read_run_file

if TYPE_CHECKING:
    from furlong.train.processes import Processes

_DESCRIPTION = (
    "Evaluate the held-out data of a run (data.eval) that is longer than its model's positions,"
    " with the model's own RoPE and with larger factors, by default of YaRN. Print to which length"
    " the loss of each holds, and which to write into the run file. Nothing is trained, and no run"
    " folder is made."
)


def run(arguments: Sequence[str]) -> int:
    return run_together(partial(_show, arguments))


def _show(arguments: Sequence[str], processes: Processes) -> int:
    config, own = processes.together(partial(_parse, arguments))
    tell_loading()
    from furlong.report.beyond import chosen_rope, format_ropes, save_beyond_picture
    from furlong.train.ropes import try_ropes

    tried, longest = try_ropes(config, own.factors, processes)
    print(format_ropes(tried, longest))
    print(chosen_rope(tried, longest))
    if own.picture is not None and processes.is_first:
        with writing(own.picture):
            curves = {each.name: each.beyond for each in tried}
            save_beyond_picture(curves, own.picture, of_ropes=True)
        print(f"picture written to {own.picture}")
    return 0


def _parse(arguments: Sequence[str]) -> tuple[RunConfig, argparse.Namespace]:
    usage = "furlong rope [RUN.yaml] [--factors F ...] [--picture FILE] [--section.key=value ...]"
    parser = FlagParser(
        "rope",
        takes="RUN.yaml, and --factors 2 4 or others of 1 or more",
        description=_DESCRIPTION,
        usage=usage,
    )
    parser.add_argument("file", nargs="?", help="run file (YAML or JSON)")
    parser.add_argument(
        "--factors", nargs="+", type=_factor, default=(), metavar="F",
        help="values of model.rope.factor to try beside the model's own; default: it is doubled"
        " until it reaches the longest sequence",
    )  # fmt: skip
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw them: .png or .svg")
    flags = read_flags(parser, arguments)
    file, own = flags.own.file, flags.own
    if own.picture is not None:
        check_output(own.picture, "--picture", (".png", ".svg"))
    return build_run({} if file is None else read_run_file(file), file or NO_FILE, flags), own


def _factor(text: str) -> float:
    with suppress(ValueError):
        if 1 <= (factor := float(text)) < float("inf"):
            return factor
    raise argparse.ArgumentTypeError(f"{text}: a factor is a number of 1 or more")

"""`furlong plan`: chooses a plan, or shows one that was saved or measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from furlong.cli.flag_types import MAX_BATCH, MAX_DEVICES, check_replaced, number, refusal

if TYPE_CHECKING:
    from furlong.config.sources import RunFlags
    from furlong.report.patience import Tell

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
_OF_A_PLAN = (
    "--model", "--memory.device", "--memory.host", "--hardware", "--no-calibration",
    "--json", "--out", "--picture", "--trace",
)  # fmt: skip
"""Flags, or what they begin with, that go with a plan which is there already."""
_ENDINGS = {"--picture": (".png", ".svg"), "--trace": (".json",), "--out": (".json",)}

_KEYS = {"--out": ("chunks", "actions"), "--trace": ("traceEvents",)}
"""Keys of the files that furlong writes."""


def run(arguments: Sequence[str]) -> int:
    flags = parse_flags(arguments)
    from furlong.cli.planning import show
    from furlong.config.sources import is_run_file
    from furlong.report.patience import patience

    subject = flags.own.subject
    if subject is None or is_run_file(subject):
        compares = flags.own.compare
        with patience("comparing methods" if compares else "searching for a plan") as tell:
            if flags.own.smallest:
                _show_smallest(flags, tell)
            else:
                (show.show_comparison if compares else show.show_search)(flags, tell)
        return 0
    for name in sorted(flags.names):
        if not name.startswith(_OF_A_PLAN):
            raise refusal(
                f"{subject} with a flag of the search ({name})",
                "a saved plan or a run folder alone: nothing is searched",
                "leave the flag out, or name a run file or --lengths in its place",
            )
    if Path(subject).is_dir():
        show.show_run(Path(subject), flags.own)
    else:
        show.show_saved(subject, flags)
    return 0


def _show_smallest(flags: RunFlags, tell: Tell) -> None:
    """The plan for the smallest known card that holds one, or for the fewest of --hardware's, in
    powers of two. Raises ConfigError where none does."""
    from furlong.cli.planning import show
    from furlong.cli.planning.question import subject_of
    from furlong.cost.machine import KNOWN, THIS_CPU, hardware
    from furlong.errors import UserError
    from furlong.report.text import line
    from furlong.units import format_bytes

    own, too_small, changes = flags.own, "", [{"devices": 2**n} for n in range(11)]
    if own.hardware is None:
        of_size: dict[int, str] = {}  # the slowest card of each
        for name in sorted(KNOWN, key=lambda name: KNOWN[name].peak_flops_per_s):
            of_size.setdefault(KNOWN[name].memory_bytes, name)
        changes = [{"hardware": of_size[num_bytes]} for num_bytes in sorted(of_size)]
    # what is wrong on every card is told as it is
    asked = flags._replace(own=argparse.Namespace(**vars(own) | changes[0]))
    given = subject_of(asked).config.memory.device
    for changed in changes:
        chosen = argparse.Namespace(**vars(own) | changed)
        words = f"{chosen.devices or 1} x {chosen.hardware}"
        tell(words + too_small)
        try:
            is_card = chosen.hardware != THIS_CPU
            if given != "auto" and is_card and given > hardware(chosen.hardware).memory_bytes:
                raise refusal(
                    f"memory.device = {format_bytes(given)}", f"what a {chosen.hardware} has",
                    "leave memory.device out, or lower it",
                )  # fmt: skip
            show.show_search(flags._replace(own=chosen), lambda _: None)
        except UserError as error:
            last, too_small = error, f"{too_small}{', ' if too_small else '; too small: '}{words}"
        else:
            if not own.json:
                print(line("smallest", words + too_small))
            return
    raise refusal(f"{words}, the last of --smallest: {last.given}", last.required, last.change)


def parse_flags(arguments: Sequence[str]) -> RunFlags:
    """The command line. Raises ConfigError; `--help` ends the process with SystemExit(0)."""
    from furlong.config.sources import RunParser, read_flags

    parser = RunParser(prog="furlong plan", usage=_USAGE, allow_abbrev=False, description=_ABOUT)
    parser.add_argument("subject", nargs="?", metavar="RUN.yaml|PLAN.json|RUN_FOLDER")
    _add_flags(parser)
    flags = read_flags(parser, arguments)
    _check_outputs(flags.own)
    return flags


# fmt: off
def _add_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument_group("the batch, the devices and the search").add_argument
    flag("--lengths", metavar="FILE|PRESET",
         help="lengths that furlong lengths wrote, or a preset (docs/presets.md)")
    flag("--sequences", type=number("--sequences", 1, MAX_BATCH), metavar="N",
         help="sequences of a step: the longest, and others drawn by train.seed"
         " (default: train.sequences_per_step of a run; all of a file; 64 of a preset)")
    flag("--hardware", metavar="NAME",
         help="a known device (docs/presets.md); cpu, and a run's default: this machine")
    flag("--devices", type=number("--devices", 1, MAX_DEVICES), metavar="N",
         help="how many (default: the product of the sizes of parallel)")
    flag("--no-calibration", action="store_true",
         help="predict with assumed figures, not with those that furlong calibrate has measured")
    flag("--smallest", action="store_true",
         help="find the smallest known card that holds the batch, or how many of --hardware do")
    flag = parser.add_argument_group("what comes out").add_argument
    flag("--compare", action="store_true",
         help="the same batch under every method, each with its best layout")
    flag("--json", action="store_true", help="print one JSON object")
    flag("--out", metavar="FILE", type=Path, help="save the plan: .json")
    flag("--picture", metavar="FILE", type=Path,
         help=f"draw the timeline: {', '.join(_ENDINGS['--picture'])}")
    flag("--trace", metavar="FILE", type=Path, help="write a trace that Perfetto opens: .json")
# fmt: on


def _check_outputs(chosen: argparse.Namespace) -> None:
    for flag, endings in _ENDINGS.items():
        path: Path | None = getattr(chosen, flag.removeprefix("--"))
        if path is not None and path.suffix.lower() not in endings:
            required = f"a name that ends in {', '.join(endings)}"
            change = "give the file another ending"
            if flag == "--out":
                change += ", or leave --out out: a run's folder is of no use to a plan"
            raise refusal(f"{flag} {path}", required, change)
        if path is not None and not path.parent.is_dir():
            change = f"make the folder {path.parent}, or choose another one"
            raise refusal(f"{flag} {path}", "a file in a folder that exists", change)
        if path is not None:
            check_replaced(path, flag, *_KEYS.get(flag, ()))
    if chosen.out is not None and chosen.out == chosen.trace:
        given = f"--out and --trace {chosen.out}"
        raise refusal(given, "two files: a plan and a trace", "give one of them another name")
    if chosen.smallest and (chosen.compare or (chosen.hardware and chosen.devices)):
        raise refusal(
            f"--smallest with {'--compare' if chosen.compare else '--hardware and --devices'}",
            "at most one of --hardware and --devices: the other is what is looked for",
            "leave one of them out",
        )
    if chosen.compare and (chosen.out or chosen.trace):
        raise refusal(
            f"--compare with {'--out' if chosen.out else '--trace'}",
            "one plan to write; --compare makes one per method",
            "add --chunks.method=NAME in the place of --compare",
        )

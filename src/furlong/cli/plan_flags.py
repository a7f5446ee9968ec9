"""The flags of `furlong plan`."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from furlong.cli.flag_types import amount, amount_or_auto, number, tier_or_auto
from furlong.errors import ConfigError
from furlong.plan.lengths import MAX_TOKENS

MAX_DEVICES = 65_536
MAX_BATCH = 16_384
"""Sequences of one step's batch."""
MAX_SEED = 2**63 - 1
_MAX_RANK = 65_536
PICTURES, TRACES = (".png", ".svg", ".html"), (".json",)

_USAGE = """\
furlong plan RUN.yaml [FLAGS]
       furlong plan --lengths FILE|PRESET --model CONFIG.json|NAME --hardware NAME [FLAGS]
       furlong plan PLAN.json [--model M --hardware H]
       furlong plan RUN_FOLDER"""
_ABOUT = """\
Chooses the fastest plan of a batch that fits: no data, weights or devices are needed. Prints what
it does, predicted seconds and memory. A saved plan, or the measured one of a run, is shown again.
"""


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        required, change = "flags as furlong plan --help lists them", "see furlong plan --help"
        if message.startswith(prefix):
            flag = message.removeprefix(prefix).split()[0].split("=")[0]
            close = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.5)
            required = " ".join(_USAGE.split()).replace(" furlong", ", or furlong")
            change = f"did you mean {close[0]}?" if close else change
        raise ConfigError(
            given=message,
            required=required,
            source="the command line",
            change=change,
        )


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; what is not given is None. Raises ConfigError; `--help` ends the process
    with SystemExit(0)."""
    parser = _Parser(prog="furlong plan", usage=_USAGE, allow_abbrev=False, description=_ABOUT)
    parser.add_argument("subject", nargs="?", metavar="RUN.yaml|PLAN.json|RUN_FOLDER")
    _add_batch(parser)
    _add_layout(parser)
    _add_outputs(parser)
    chosen = parser.parse_args(arguments)
    for flag, path, endings in (
        ("--picture", chosen.picture, PICTURES),
        ("--trace", chosen.trace, TRACES),
        ("--out", chosen.out, TRACES),
    ):
        if path is not None and path.suffix.lower() not in endings:
            raise ConfigError(
                given=f"{flag} {path}",
                required=f"a name that ends in {', '.join(endings)}",
                source="the command line",
                change="give the file another ending",
            )
        if path is not None and not path.parent.is_dir():
            raise ConfigError(
                given=f"{flag} {path}",
                required="a file in a folder that exists",
                source="the command line",
                change=f"make the folder {path.parent}, or choose another one",
            )
    if chosen.out is not None and chosen.out == chosen.trace:
        raise ConfigError(
            given=f"--out and --trace {chosen.out}",
            required="two files: a plan and a trace",
            source="the command line",
            change="give one of them another name",
        )
    if chosen.compare and (chosen.out or chosen.trace):
        raise ConfigError(
            given=f"--compare with {'--out' if chosen.out else '--trace'}",
            required="one plan to write; --compare makes one per method",
            source="the command line",
            change="add --method NAME in the place of --compare",
        )
    return chosen


def _add_batch(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the batch and the model")
    group.add_argument(
        "--lengths",
        metavar="FILE|PRESET",
        help="lengths that furlong lengths wrote, or a preset (docs/presets.md)",
    )
    group.add_argument(
        "--sequences",
        type=number(1, MAX_BATCH),
        metavar="N",
        help="sequences of one step's batch, drawn from the lengths"
        " (default: the run's, or all of a file of at most 64, or 64)",
    )
    group.add_argument(
        "--seed",
        type=number(0, MAX_SEED),
        metavar="N",
        help="of that draw (default: the run's, or 0)",
    )
    group.add_argument(
        "--max-seq-len", type=number(1, MAX_TOKENS), metavar="N", help="leave longer sequences out"
    )
    group.add_argument(
        "--model",
        metavar="CONFIG.json|NAME",
        help="config.json, the folder that holds it, a known name (docs/presets.md), or a model of"
        " the Hugging Face hub",
    )
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "float64"),
        help="of the compute (default: the run's, or bfloat16)",
    )
    group.add_argument(
        "--lora-rank",
        type=number(1, _MAX_RANK),
        metavar="R",
        help="train adapters of all linear layers, and freeze the rest",
    )
    group.add_argument(
        "--zero",
        type=int,
        choices=range(4),
        metavar="0..3",
        help="what replicas and sp ranks shard: 1 optimizer, 2 gradients too,"
        " 3 weights too (default: 1; on one device 0)",
    )


def _add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "devices, chunks and memory; what is left out or auto is searched"
    )
    group.add_argument(
        "--hardware", metavar="NAME", help="a known device (docs/presets.md); cpu: this machine"
    )
    group.add_argument(
        "--devices",
        type=number(1, MAX_DEVICES),
        metavar="N",
        help="how many (default: the product of the sizes below)",
    )
    for name, what in (
        ("dp", "data-parallel replicas"),
        ("sp", "devices that share a sequence"),
        ("pp", "pipeline stages"),
    ):
        group.add_argument(
            f"--parallel.{name}",
            dest=name,
            type=number(1, MAX_DEVICES, auto=True),
            metavar="N",
            help=what,
        )
    _add_chunks(group)
    group.add_argument(
        "--memory.device",
        dest="memory",
        type=amount_or_auto,
        metavar="AMOUNT",
        help="budget of a device, such as 40GB (default: the hardware's)",
    )
    group.add_argument(
        "--memory.host",
        dest="host",
        type=amount_or_auto,
        metavar="AMOUNT",
        help="budget of a GPU's host (default: no limit; 0: nothing may live there)",
    )
    group.add_argument(
        "--memory.disk",
        dest="disk",
        type=amount,
        metavar="AMOUNT",
        help="budget on disk (default: 0, nothing may live there)",
    )
    group.add_argument(
        "--no-calibration",
        action="store_true",
        help="predict with assumed figures, not with those that furlong calibrate has measured",
    )
    group.add_argument(
        "--method",
        metavar="NAME",
        help="search the plans of one method only; --compare lists them all",
    )


def _add_chunks(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--chunks.size",
        dest="size",
        type=number(1, MAX_TOKENS, auto=True),
        metavar="TOKENS",
        help="most tokens of a chunk",
    )
    group.add_argument(
        "--chunks.num_retained",
        dest="num_retained",
        type=number(0, MAX_TOKENS, auto=True),
        metavar="N",
        help="last chunks of a sequence that keep their graph",
    )
    group.add_argument(
        "--chunks.keep",
        dest="keep",
        choices=("auto", "input", "kv", "attention", "all"),
        help="what the other chunks keep",
    )
    group.add_argument(
        "--chunks.tier",
        dest="tier",
        type=tier_or_auto,
        metavar="TIER",
        help="where kept tensors live: device, host, disk, or a mapping of kinds (kv, inputs,"
        " attention, graphs) such as '{attention: disk}'; on several devices of K,V alone",
    )
    group.add_argument(
        "--chunks.order",
        dest="order",
        choices=("auto", "chunk-first", "layer-first"),
        help="whether a chunk goes through all layers first, or all chunks through a stage",
    )
    group.add_argument(
        "--chunks.stage_layers",
        dest="stage_layers",
        type=number(1, MAX_TOKENS, auto=True),
        metavar="N",
        help="most layers of a stage, with layer-first",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what comes out")
    group.add_argument(
        "--compare",
        action="store_true",
        help="the same batch under every method, each with its best layout",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument("--out", metavar="FILE", type=Path, help="save the plan: .json")
    group.add_argument(
        "--picture", metavar="FILE", type=Path, help=f"draw the timeline: {', '.join(PICTURES)}"
    )
    group.add_argument(
        "--trace", metavar="FILE", type=Path, help="write a trace that Perfetto opens: .json"
    )

"""`furlong plan`: chooses a plan, or shows one that was saved or measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from furlong.cli.flag_types import refusal
from furlong.cli.plan_flags import parse_flags

_OF_A_PLAN = (
    "--model", "--memory.device", "--hardware", "--zero", "--no-calibration", "--json", "--out",
    "--picture", "--trace",
)  # fmt: skip
"""Flags, or what they begin with, that go with a plan which is there already."""


def run(arguments: Sequence[str]) -> int:
    flags = parse_flags(arguments)
    subject = flags.own.subject
    if subject is None or _is_run_file(subject):
        if flags.own.compare:
            from furlong.cli import plan_compare

            plan_compare.run(flags)
        else:
            from furlong.cli import plan_choose

            plan_choose.run(flags)
        return 0
    for name in sorted(flags.names):
        if not name.startswith(_OF_A_PLAN):
            raise refusal(
                f"{subject} with a flag of the search ({name})",
                "a saved plan or a run folder alone: nothing is searched",
                "leave the flag out, or name a run file or --lengths in its place",
            )
    from furlong.cli import plan_saved

    if Path(subject).is_dir():
        plan_saved.show_run(Path(subject), flags.own)
    else:
        plan_saved.show_plan(subject, flags)
    return 0


def _is_run_file(name: str) -> bool:
    from furlong.config.run_file import is_run_file

    return is_run_file(name)

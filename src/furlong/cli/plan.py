"""`furlong plan`: chooses a plan, or shows one that was saved or measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from furlong.cli.plan_flags import parse_flags
from furlong.errors import ConfigError

_OF_THE_SEARCH = (
    "lengths", "sequences", "seed", "max_seq_len", "devices", "dp", "sp", "pp", "size",
    "num_retained", "keep", "tier", "order", "stage_layers", "host", "disk", "method", "compare",
)  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    chosen = parse_flags(arguments)
    subject = chosen.subject
    if subject is None or _is_run_file(subject):
        if chosen.compare:
            from furlong.cli import plan_compare

            plan_compare.run(chosen)
        else:
            from furlong.cli import plan_choose

            plan_choose.run(chosen)
        return 0
    path = Path(subject)
    for name in _OF_THE_SEARCH:
        if getattr(chosen, name) not in (None, False):
            raise ConfigError(
                given=f"{subject} with a flag of the search ({name})",
                required="a saved plan or a run folder alone: nothing is searched",
                source="the command line",
                change="leave the flag out, or name a run file or --lengths in its place",
            )
    from furlong.cli import plan_saved

    if path.is_dir():
        plan_saved.show_run(path, chosen)
    else:
        plan_saved.show_plan(subject, chosen)
    return 0


def _is_run_file(name: str) -> bool:
    from furlong.config.run_file import is_run_file

    return is_run_file(name)

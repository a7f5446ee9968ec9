"""`furlong train`: trains what a run file and flags describe."""

from __future__ import annotations

from collections.abc import Sequence

from furlong.config.sources import parse_run

_RESUME = "--resume"


def run(arguments: Sequence[str]) -> int:
    config = parse_run(
        arguments,
        switches={_RESUME: "go on with the run in out, from its newest whole checkpoint"},
    )
    # torch and transformers are loaded when the command line has been found sound.
    from furlong.train.run import train

    train(config, resume=_RESUME in arguments)
    return 0

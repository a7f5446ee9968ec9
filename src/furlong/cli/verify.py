"""`furlong verify`: proves gradients, isolation and accumulation on a run's shrunk model."""

from __future__ import annotations

from collections.abc import Sequence

from furlong.cli.output import tell_loading
from furlong.config.sources import parse_run

_DESCRIPTION = (
    "Prove gradients, isolation and accumulation on a run's configuration, in small; without one on"
    " a model of furlong's own. Takes some seconds of one core."
)


def run(arguments: Sequence[str]) -> int:
    config = parse_run(arguments, "verify", description=_DESCRIPTION) if arguments else None
    # torch and transformers load slowly: the command line is checked first.
    tell_loading()
    from furlong.report.patience import patience
    from furlong.verify import verify

    with patience("proving"):
        failed = [finding.name for finding in verify(config) if not finding.passed]
    if failed:
        print(f"failed: {', '.join(failed)}")
        return 1
    return 0

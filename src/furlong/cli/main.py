"""The command `furlong`: verbs, exit codes, nothing heavy at import.

Exit codes: 0; 2 with one message of four parts for what the user can mend; 1 for our own failures,
with a traceback.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

from furlong import __version__
from furlong.errors import ConfigError, UserError

_VERBS = ("train", "plan", "lengths", "export", "verify")
_HELP = """\
usage: furlong VERB [...]

Trains LLMs on sequences longer than the hardware should allow, with exact gradients.

verbs:
  train RUN.yaml [--section.key=value ...]   train a model and export it; --resume goes on
  plan RUN.yaml|PLAN.json|RUN_FOLDER         choose the fastest plan that fits; show a plan
  lengths RUN.yaml|DATA... [--tokenizer T]   how long the sequences are: a table, a picture
  export RUN_OR_CHECKPOINT [--merge]         write a checkpoint as a Hugging Face model
  verify [RUN.yaml]                          prove gradients, isolation and resume in small
  VERB --help                                every key of a verb

  --version, --help
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(given)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _dispatch(arguments: list[str]) -> int:
    match arguments:
        case [] | ["--help" | "-h", *_]:
            print(_HELP, end="")
            return 0
        case ["--version", *_]:
            print(f"furlong {__version__}")
            return 0
        case ["train", *rest]:
            from furlong.cli import train

            return train.run(rest)
        case ["plan", *rest]:
            from furlong.cli import plan

            return plan.run(rest)
        case ["lengths", *rest]:
            from furlong.cli import lengths

            return lengths.run(rest)
        case ["export", *rest]:
            from furlong.cli import export

            return export.run(rest)
        case ["verify", *rest]:
            from furlong.cli import verify

            return verify.run(rest)
    close = difflib.get_close_matches(arguments[0], [*_VERBS, "--help", "--version"], n=1)
    raise ConfigError(
        given=f"furlong {arguments[0]}",
        required=f"a verb: {', '.join(_VERBS)}",
        source="the command line",
        change=f"did you mean furlong {close[0]}?" if close else "see furlong --help",
    )

"""The command `furlong`: verbs, exit codes, nothing heavy at import.

Exit codes: 0; 2 with one message of four parts for an error that the user can fix; 128 plus the
signal's number (130 for Ctrl-C) if a signal ended the verb; 1 with a traceback for other errors.
"""

from __future__ import annotations

import atexit
import difflib
import faulthandler
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from furlong.cli.output import Output, lasting_output
from furlong.errors import ConfigError, UserError
from furlong.families import versions_in_words
from furlong.train.stop import QuietEnd

_VERBS = ("train", "plan", "lengths", "calibrate", "export", "verify", "convert", "rope")
# Verbs whose result is their output.
_PRINTED = ("plan", "lengths", "rope")
_HELP = """\
usage: furlong VERB [...]

Trains LLMs on sequences longer than the hardware should allow, with exact gradients.

verbs:
  train RUN.yaml [--section.key=value ...]   train a model and export it; --resume goes on
  plan RUN.yaml|PLAN.json|RUN_FOLDER         choose the fastest plan that fits; show a plan
  lengths RUN.yaml|DATA... [--tokenizer T]   how long the sequences are: a table, a picture
  rope RUN.yaml [--factors F ...]            which RoPE factor holds to which length, untrained
  calibrate [RUN.yaml]                       measure this machine, for predictions that hold
  export RUN_OR_CHECKPOINT [--merge]         write a checkpoint as a Hugging Face model
  verify [RUN.yaml]                          prove gradients and isolation in small
  convert RECIPE [--out RUN.yaml]            a run file from a recipe of TRL, axolotl and others
  VERB --help                                every key of a verb

  --version, --help
"""


def command() -> NoReturn:
    """Run the command line and end the process without the teardown of torch, which takes seconds.

    Exit handlers that were registered before are not called, so call it only in a new process.
    """
    ended: list[int] = []
    # Registered first, as atexit calls the last registered handler first.
    atexit.register(_leave, ended)
    ended.append(main())
    sys.exit(ended[0])


def _leave(ended: list[int]) -> None:
    """End the process at once with exit code `ended[0]`; do nothing if `main` has not returned, so
    that `ended` is empty. Also do nothing under coverage, whose exit handler must still write its
    data."""
    if ended and "coverage" not in sys.modules:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by the caller
            stream.flush()
        os._exit(ended[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a traceback, e.g. if a mapped file is truncated
    # transformers warns each time it reads a config; furlong checks the same things
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    with lasting_output() as out, QuietEnd() as end:
        try:
            code = _dispatch(given)
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        except BaseException:
            # A library may have replaced the exception that the signal raised.
            if end.number is None:
                raise
            print(end, file=sys.stderr)
            return 128 + end.number
        if end.number is not None:  # the verb has printed what it had
            return 128 + end.number
        return code or _check_written(out, given)


def _check_written(out: Output, arguments: list[str]) -> int:
    """Warn if the printed output is incomplete. Return the exit code of a verb that has succeeded:
    2 if the incomplete output is the verb's only result, else 0."""
    out.flush()
    if out.error is None:
        return 0
    print(f"warning: the output is incomplete: {out.error}", file=sys.stderr)
    return 2 if arguments and arguments[0] in _PRINTED else 0


def _dispatch(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else "--help"
    if verb in _VERBS:
        code: int = import_module(f"furlong.cli.{verb}").run(arguments[1:])
        return code
    if verb in ("--help", "-h"):
        print(_HELP, end="")
        return 0
    if verb == "--version":
        print(versions_in_words())
        return 0
    close = difflib.get_close_matches(verb, [*_VERBS, "--help", "--version"], n=1)
    raise ConfigError(
        given=f"furlong {verb}",
        required=f"a verb: {', '.join(_VERBS)}",
        source="the command line",
        change=f"did you mean furlong {close[0]}?" if close else "see furlong --help",
    )

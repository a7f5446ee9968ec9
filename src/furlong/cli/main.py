"""The command `furlong`: verbs, exit codes, nothing heavy at import.

Exit codes: 0; 2 with one message of four parts for what the user can mend; 128 and the signal's
number (130 for Ctrl-C) where a signal ended the verb; 1 for our own failures, with a traceback.
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

_VERBS = ("train", "plan", "lengths", "calibrate", "export", "verify", "convert")
# Verbs whose result is what they print: elsewhere it lies in files.
_PRINTED = ("plan", "lengths")
_HELP = """\
usage: furlong VERB [...]

Trains LLMs on sequences longer than the hardware should allow, with exact gradients.

verbs:
  train RUN.yaml [--section.key=value ...]   train a model and export it; --resume goes on
  plan RUN.yaml|PLAN.json|RUN_FOLDER         choose the fastest plan that fits; show a plan
  lengths RUN.yaml|DATA... [--tokenizer T]   how long the sequences are: a table, a picture
  calibrate [RUN.yaml]                       measure this machine, for predictions that hold
  export RUN_OR_CHECKPOINT [--merge]         write a checkpoint as a Hugging Face model
  verify [RUN.yaml]                          prove gradients and isolation in small
  convert RECIPE [--out RUN.yaml]            a run file from a recipe of TRL, axolotl and others
  VERB --help                                every key of a verb

  --version, --help
"""


def command() -> NoReturn:
    """Runs the command line and ends the process, without taking torch apart, which needs seconds.

    Only for a process of its own: nothing runs behind the handlers that are registered meanwhile.
    """
    ended: list[int] = []
    # The first to be registered is the last to be called.
    atexit.register(_leave, ended)
    ended.append(main())
    sys.exit(ended[0])


def _leave(ended: list[int]) -> None:
    """Ends the process at once with the code in `ended`, if a verb has come to its end; coverage
    writes its figures later."""
    if ended and "coverage" not in sys.modules:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by the caller
            stream.flush()
        os._exit(ended[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a place, where mapped memory loses its file
    # what it warns of while it reads a config, again for each copy, is checked here
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    with lasting_output() as out, QuietEnd() as end:
        try:
            code = _dispatch(given)
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        except BaseException:
            # Libraries make other errors of a signal that comes while they are imported.
            if end.number is None:
                raise
            print(end, file=sys.stderr)
            return 128 + end.number
        if end.number is not None:  # a verb has told what it had
            return 128 + end.number
        return code or _check_written(out, given)


def _check_written(out: Output, arguments: list[str]) -> int:
    """The exit code of a verb that has done its work, by what became of its output."""
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

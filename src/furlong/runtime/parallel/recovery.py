"""An error on one of several processes in the middle of a step: nobody waits for it for ever.

A process that has failed lets go of all it holds and walks through the rest of its list without
computing: it sends zeros, also to its pool (`empty_passes`), takes what comes, gathers weights, and
joins every agreement in its turn. So it communicates as it would have done without the error, in
the same order. Before gradients are added up the processes of a stage agree that none of them has
failed, and at the end of the list all processes do; where one has, all raise, and the same step can
be taken again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from furlong.errors import ConfigError, ElsewhereError, NoMemoryElsewhereError
from furlong.ops.scarcity import is_out_of_memory
from furlong.runtime.parallel.agreement import gathered
from furlong.runtime.parallel.ranks import Ranks

_T = TypeVar("_T")
_FINE, _FAILED, _NO_MEMORY = range(3)


class Failures:
    """Failures of one step, as far as this process knows them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._own = _FINE
        self._text = ""
        self.stage_knows = False
        """Whether all processes of this stage know that one of them has failed."""
        self.all_know = False
        """Whether all processes have told each other how the step has ended."""

    def note(self, error: BaseException) -> None:
        """This process has failed, unless the error is about another one."""
        if not isinstance(error, ElsewhereError):
            self._own = _NO_MEMORY if is_out_of_memory(error) else _FAILED
            self._text = reason_of(error)

    def agree_in_stage(self) -> None:
        """Raise ElsewhereError where only others of this stage have failed. Collective over it."""
        group = self._ranks.shard_mesh.get_group()
        codes = self._codes(group)
        self.stage_knows = any(codes)
        if any(codes) and not self._own:
            raise _elsewhere({dist.get_global_rank(group, at): c for at, c in enumerate(codes)})

    def agree(self) -> None:
        """The same over all processes; the error names their own ones."""
        codes = self._codes(self._ranks.group)
        self.all_know = True
        if not any(codes):
            return
        texts = [""] * len(codes)
        dist.all_gather_object(texts, self._text, group=self._ranks.group)
        if not self._own:
            raise _elsewhere(dict(enumerate(codes)), texts)

    def _codes(self, group: dist.ProcessGroup) -> list[int]:
        return [code for (code,) in gathered(self._ranks, [self._own], group)]


def made_together(ranks: Ranks | None, make: Callable[[], _T]) -> _T:
    """The outcome of `make`. Raises ElsewhereError where it raises on another process only."""
    if ranks is None:
        return make()
    failures = Failures(ranks)
    try:
        made = make()
    except Exception as error:
        failures.note(error)
        failures.agree()
        raise
    failures.agree()
    return made


def let_go(error: BaseException) -> None:
    """Forget the tensors that the frames of an error hold."""
    traceback.clear_frames(error.__traceback__)


def reason_of(error: BaseException) -> str:
    """The kind of an error, and its first line."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def cannot_go_on(error: BaseException, number: int, meanwhile: str) -> ConfigError:
    """An error for a process that lacks memory where others wait for what it alone can send."""
    return ConfigError(
        given=f"out of memory on process {number} {meanwhile}: {reason_of(error)}",
        required="memory for that beside the chunks",
        source="the memory of the device",
        change="set chunks.size to less; where there is a checkpoint, --resume goes on from it",
    )


def _elsewhere(codes: dict[int, int], texts: list[str] | None = None) -> ElsewhereError:
    """`codes` and `texts`: what each process says of itself."""
    failed = [number for number, code in codes.items() if code]
    memory = all(codes[number] == _NO_MEMORY for number in failed)
    who = f"process {failed[0]}" if len(failed) == 1 else f"processes {', '.join(map(str, failed))}"
    what = f"out of memory on {who}" if memory else f"an error on {who}, which ended the step"
    if texts is not None:
        what += f" ({texts[failed[0]]})"
    return (NoMemoryElsewhereError if memory else ElsewhereError)(what)

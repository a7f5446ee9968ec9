"""Exchange of one rank with others, as an argument of the executor.

No plan that needs another rank can run on `Alone`: a REDUCE that nothing carries out would leave
half a gradient that looks like a whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from furlong.errors import PlanError
from furlong.plan.check import missing_to_run
from furlong.plan.plan import Action, ChunkPlan, Recv, Send
from furlong.plan.text import format_action


class Comms(Protocol):
    """Messages and collectives of one rank."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing of the list is left under way between the ranks."""
        ...

    def accept(self, plan: ChunkPlan) -> None:
        """Raise PlanError for a plan with ranks that nothing here stands for."""
        ...

    def before(self, index: int) -> None:
        """Action number `index` is about to begin."""
        ...

    def send(self, action: Send, x: Tensor) -> None:
        """Send hidden states, or their gradient, (T, D) to a neighbour."""
        ...

    def recv(self, action: Recv) -> Tensor:
        """Receive the same."""
        ...

    def unshard(self, stage: int) -> None:
        """Gather a stage's parameters."""
        ...

    def reshard(self, stage: int) -> None:
        """Let go of what `unshard` gathered."""
        ...

    def backward(self, stage: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Within it runs a Backward of a stage, its rank's last one or not, without the loss in
        front of it."""
        ...

    def reduce(self, stage: int) -> None:
        """Add up a stage's gradients over its ranks."""
        ...

    def settle(self) -> None:
        """The list has been obeyed. Raises ElsewhereError where another process could not."""
        ...

    def give_up(self, error: BaseException, rest: Sequence[Action]) -> None:
        """An error has ended this process's step at the first action of `rest`: pass on what others
        wait for. Raises ElsewhereError where the error is only that others have failed."""
        ...

    def add_up(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes; it may be changed."""
        ...


class Alone:
    """The comms of a single rank, which holds every sum whole."""

    is_settled = True

    def accept(self, plan: ChunkPlan) -> None:
        if missing_to_run(plan):
            raise PlanError(
                f"this run has one rank: the plan has {len(plan.actions)} with {plan.sp_size} "
                "processes each, whose gradients nothing would add up"
            )

    def before(self, index: int) -> None:
        """Nothing is on its way."""

    def send(self, action: Send, x: Tensor) -> None:
        raise _nobody(format_action(action))

    def recv(self, action: Recv) -> Tensor:
        raise _nobody(format_action(action))

    def unshard(self, stage: int) -> None:
        """Nothing is sharded."""

    def reshard(self, stage: int) -> None:
        """Nothing is sharded."""

    def backward(self, stage: int, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()  # nobody waits for it

    def reduce(self, stage: int) -> None:
        """The only rank's sum is the whole one."""

    def settle(self) -> None:
        """There is no other process."""

    def give_up(self, error: BaseException, rest: Sequence[Action]) -> None:
        """Nobody waits."""

    def add_up(self, values: Tensor) -> Tensor:
        return values


def _nobody(text: str) -> PlanError:
    return PlanError(f"this run has one rank: nobody answers {text!r}")

"""A plan in two phases, between which the caller makes a loss: one node of autograd's graph.

The forward obeys all Forwards of a plan, the backward everything else, with what autograd brings.
The parameters are inputs of the node, so that its gradients take autograd's own way: `.grad`,
`torch.autograd.grad`, hooks, data parallelism and scalers see each parameter once. Both phases
compute on leaves of their own, which share the parameters' memory: an error leaves every `.grad` as
it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from furlong.errors import ConfigError
from furlong.models.fingerprint import adapter_states
from furlong.models.wrappers import refuse_hooks
from furlong.plan.plan import ChunkPlan, Forward
from furlong.runtime.checks.surroundings import Autocast
from furlong.runtime.comms import Alone
from furlong.runtime.executor import Executor
from furlong.runtime.followed_model import FollowedModel
from furlong.runtime.memory.pools import Pools
from furlong.runtime.modes import modes_kept
from furlong.runtime.precision import made_gradients
from furlong.runtime.tokens.joined import Joined
from furlong.runtime.tokens.outputs import OutputHead, Outputs

Gradients = Literal["returned", "added"]


class TwoPhases:
    """One call: what lives from its forward to its backward. Dropped without a backward, it gives
    back what it holds."""

    def __init__(
        self,
        followed: FollowedModel,
        plan: ChunkPlan,
        joined: Joined,
        outputs: Outputs,
        gradients: Gradients,
        autocast: Autocast,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        """`watch`: see `Executor.run`, of both phases."""
        self._followed, self._plan, self._gradients = followed, plan, gradients
        self._joined = joined
        self._watch = watch
        self._model = followed.model
        self._parameters = tuple(self._model.model.parameters())
        self._modes = [(module, module.training) for module in self._model.model.modules()]
        self._adapters = adapter_states(self._model.model)
        self._head = OutputHead(outputs, is_rounded=autocast.enabled)
        kept = followed.kept
        # pools of its own: other calls may come, and fail, between the phases
        pools = kept.opened.beside()
        self._executor = _Executor(
            self._model, plan, joined.sequences,
            num_valid_tokens=1, num_labels=1, backend=kept.backend, pools=pools, comms=Alone(),
            head=self._head, modes=autocast,
        )  # fmt: skip
        self._end = weakref.finalize(self, kept.drop, partial(_end, self._executor, pools))
        self._end.atexit = False

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return self._parameters

    def first(self) -> list[Tensor]:
        """The outputs of each sequence, without a graph. Call it alone on the model."""
        forwards = sum(isinstance(action, Forward) for action in self._plan.actions[0])
        with self._followed.computing(), self._model.installed():
            self._executor.advance(forwards, self._watch)
        self._followed.kept.has_drawn |= self._executor.has_drawn
        return self._head.outputs.finish()

    def second(self, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradient of each parameter; None for what has none, or whose `.grad` has got it."""
        if not self._end.alive:
            raise ConfigError(
                given="a second backward through the same values",
                required="one: the first has freed what the chunks kept",
                source="retain_graph=True, or two losses of the same values",
                change="add the losses and call backward once, or compute the values again",
            )
        returned: dict[int, Tensor] | None = {} if self._gradients == "returned" else None
        model = self._model
        now = {id(p) for p in model.model.parameters()}
        try:
            if now != {id(p) for p in self._parameters}:
                raise _changed("parameters")
            if adapter_states(model.model) != self._adapters:
                raise _changed("active, disabled or merged adapters")
            if returned is None:
                refuse_hooks(model.model)
            made = made_gradients(model.model) if returned is None else nullcontext()
            self._head.cotangents = cotangents
            with (
                self._followed.alone(takes_autocast=True), _as_then(model.model, self._modes),
                made, self._followed.computing(returned=returned), model.installed(),
            ):  # fmt: skip
                self._executor.drop(_unused(self._plan, self._joined, cotangents))
                self._executor.advance(len(self._plan.actions[0]), self._watch)
            self._head.require_unmoved(next(p.dtype for p in self._parameters))
        finally:
            self._head.cotangents = ()
            self._end()
        return [(returned or {}).get(id(p)) for p in self._parameters]


class _Executor(Executor):
    """An executor that leaves out what nobody asks for."""

    _dropped: frozenset[int] = frozenset()

    def drop(self, chunks: frozenset[int]) -> None:
        """Forget chunks of which no further action runs, with all that go on from them."""
        self._dropped = chunks
        for chunk in chunks:
            if self._ledger.holds("kv", chunk, 0):
                self._free_kv(chunk, 0)
            if self._ledger.holds("attention", chunk, 0):
                self._ledger.release("attention", chunk, 0)
            self._live.pop((chunk, 0)).forget_graph()

    def _act(self, index: int) -> None:
        if getattr(self._actions[index], "chunk", None) not in self._dropped:
            super()._act(index)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: TwoPhases, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*parameters)  # a weight that was changed in place is an error
        return tuple(run.first())

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return None, *ctx.run.second(cotangents)


def differentiable(run: TwoPhases) -> list[Tensor]:
    """The outputs of a call, with a graph that leads to the parameters."""
    return list(_Node.apply(run, *run.parameters))  # type: ignore[no-untyped-call]


def _unused(plan: ChunkPlan, joined: Joined, cotangents: Sequence[Tensor | None]) -> frozenset[int]:
    """The chunks without a token of a sequence that has a cotangent, which none such needs."""
    used = {
        index
        for index, chunk in enumerate(plan.chunks)
        if any(cotangents[i] is not None for s in chunk.slices for i in joined.members(s))
    }
    for seq_id, group in plan.groups.items():
        # also one whose tail shares its chunk with a used sequence
        tree = plan.trees.get(seq_id)
        if tree is None and not used.isdisjoint(group):
            used.update(group)
        for number in (n for n, chunk in enumerate(group) if tree and chunk in used):
            used.update(group[earlier] for earlier in plan.trees[seq_id].path(number))
    return frozenset(range(len(plan.chunks))) - used


def _end(executor: Executor, pools: Pools) -> None:
    executor.abandon()
    pools.close()


@contextmanager
def _as_then(model: nn.Module, modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Within it modules train or evaluate as they did in the forward."""
    with modes_kept(model):
        for module, training in modes:
            module.training = training
        yield


def _changed(what: str) -> ConfigError:
    return ConfigError(
        given=f"a model whose {what} are others than in the forward",
        required="the model that the values were computed with",
        source="the backward of token_values, hidden_states or a chunked model",
        change="add, merge or switch adapters, or resize embeddings, after the backward",
    )

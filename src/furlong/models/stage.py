"""A stage: consecutive layers of a decoder, fed and read at its layers.

The decoder's list of layers is swapped in place for the length of a pass. `Skip` stands for every
layer of another stage, `_Inject` for the layer before the stage, `_Capture` for that behind it.
So what a family does between embedding and first layer (multiplier, positions, dropout), or behind
the last layer, touches no other stage; config, layer indices and parameter names stay those of the
whole model.

    T tokens of a chunk, D hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from furlong.errors import PlanError
from furlong.families import family_of
from furlong.models.attention import CellAttention, KVReady, bound
from furlong.models.entrance import enter, has_entrance
from furlong.models.held import Skip, in_place_of, layer_list, returned, uncuttable
from furlong.models.mixers.probe import Event
from furlong.models.wrappers import COMPILED_CALL
from furlong.plan.passes import Pass


class Model(Protocol):
    """The whole model as far as a stage needs it; `causal_lm.CausalLM` is one."""

    base: Any
    config: Any
    decoder: Any
    num_layers: int

    @property
    def cell_modules(self) -> Sequence[nn.Module]:
        """The modules that a cell is bound to: those of attention, and mixers."""
        ...

    @property
    def events(self) -> tuple[Event, ...] | None:
        """Events of the layers, in order; None: attention in each of them."""
        ...

    @property
    def num_returned(self) -> int:
        """Elements of the tuple that a layer returns; 0: hidden states alone."""
        ...

    @property
    def name(self) -> str: ...
    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder's layers in order."""
        ...

    def decode(self, **inputs: Tensor) -> Tensor:
        """Final hidden states (1, T, D)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (T, V) of final hidden states (T, D)."""
        ...


class Stage:
    """Layers [layers.start, layers.stop) of a model; the first also embeds, the last has a head."""

    def __init__(self, model: Model, layers: range) -> None:
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == model.num_layers
        self._model = model
        self._is_whole = self.is_first and self.is_last
        if not self._is_whole:
            self._list_name, _ = layer_list(model.decoder, model.num_layers, model.name)
            self._inject, self._capture = _Inject(), _Capture()
            self._list = nn.ModuleList(self._slots(model.layers))

    @property
    def events(self) -> tuple[Event, ...] | None:
        """Events of the stage's layers, in order; None: attention in each of them."""
        own = self._model.events
        return None if own is None else tuple(e for e in own if e[1] in self.layers)

    def run(self, x: Tensor, position_ids: Tensor, cell: CellAttention, what: Pass) -> Tensor:
        """Hidden states (T, D) behind the stage's last layer; final ones behind the last stage.

        x: token ids (T,) of the first stage, hidden states (T, D) of the others, as a leaf where
        their gradient is wanted. Call it inside `installed`.
        """
        run = partial(self._run, x, position_ids, cell, what)
        if what.computes == "to last kv" and has_entrance(self._model.base):
            with self._ending_calls():
                enter(self._model.base, run)
            raise KVReady
        return enter(self._model.base, run)[0]  # behind a wrapper's hooks: they take no views

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (T, V) of final hidden states (T, D)."""
        return self._model.logits(hidden)

    def _run(self, x: Tensor, position_ids: Tensor, cell: CellAttention, what: Pass) -> Tensor:
        """Hidden states (1, T, D)."""
        decode, modules = self._model.decode, self._model.cell_modules
        positions = position_ids[None].clone()  # a hook that changes them must not meet them again
        with ExitStack() as stack:
            stack.enter_context(bound(modules, cell, what, position_ids))
            if what.recompute_layers and what.computes == "graph":
                stack.enter_context(self._checkpointed(cell, what, position_ids))
            if self._is_whole:
                return decode(input_ids=x[None], position_ids=positions)
            stack.enter_context(self._swapped(x))
            if self.is_first:
                decode(input_ids=x[None], position_ids=positions)
            else:
                # a family may scale its embeddings in place: they must not be x
                final = decode(inputs_embeds=x.new_zeros((1, *x.shape)), position_ids=positions)
                if self.is_last:
                    return final
            return self._capture.taken()

    def _slots(self, own: Sequence[nn.Module]) -> Iterator[nn.Module]:
        for index, layer in enumerate(own):
            if index in self.layers:
                yield layer
            elif index == self.layers.start - 1:
                yield in_place_of(layer, self._inject)
            elif index == self.layers.stop:
                yield in_place_of(layer, self._capture)
            else:
                yield in_place_of(layer, Skip())

    @contextmanager
    def _swapped(self, x: Tensor) -> Iterator[None]:
        """Within it the decoder's layers are the stage's, fed with x (T, D)."""
        children = self._model.decoder._modules
        own = children[self._list_name]
        children[self._list_name] = self._list
        for stand_in in self._list:
            if isinstance(stand_in, _Inject | _Capture | Skip):
                stand_in.num_returned = self._model.num_returned
        self._inject.x = None if self.is_first else x
        try:
            yield
        finally:
            children[self._list_name] = own
            self._inject.x = self._capture.hidden = None  # they would pin a graph

    def _ending_calls(self) -> AbstractContextManager[None]:
        """Within it a pass that ends at the last K,V ends its calls, of which a wrapper sees none
        begin that does not end: the last layer returns its input."""

        def until_kv(forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            with suppress(KVReady):
                forward(hidden, *args, **kwargs)
            return returned(hidden, self._model.num_returned)

        last = self.events[-1][1] if self.events else self.layers[-1]
        return _wrapped(self._model.layers[last : last + 1], lambda own: partial(until_kv, own))

    def _checkpointed(
        self, cell: CellAttention, what: Pass, position_ids: Tensor
    ) -> AbstractContextManager[None]:
        """Within it the stage's first layers keep only their inputs in the graph.

        Their recompute runs inside the backward: it finds the same cell, and writes nothing.
        """
        again = replace(what, writes_kv=False, remembers=0, recompute_layers=0)
        first = self.layers.start

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), bound(self._model.cell_modules, cell, again, position_ids)

        return _wrapped(
            self._model.layers[first : first + what.recompute_layers],
            lambda own: partial(checkpoint, own, use_reentrant=False, context_fn=contexts),
        )


@contextmanager
def _wrapped(
    layers: Sequence[nn.Module], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Within it the forward of each layer, or its compiled call, is what `wrap` makes of it."""
    places = [(x, COMPILED_CALL if x.__dict__.get(COMPILED_CALL) else "forward") for x in layers]
    own = [layer.__dict__.get(name) for layer, name in places]  # a caller may have set one
    try:
        for layer, name in places:
            layer.__dict__[name] = wrap(getattr(layer, name))
        yield
    finally:
        for (layer, name), before in zip(places, own, strict=True):
            layer.__dict__.pop(name, None)
            if before is not None:
                layer.__dict__[name] = before


class _Inject(nn.Module):
    """Returns the stage's input whatever it is given."""

    x: Tensor | None = None
    num_returned = 0

    def forward(self, *_: Any, **__: Any) -> Any:
        assert self.x is not None
        return returned(self.x[None], self.num_returned)  # (T, D) -> (1, T, D)


class _Capture(nn.Module):
    """Keeps the hidden states that it is given: the stage's output."""

    hidden: Tensor | None = None
    num_returned = 0

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        self.hidden = hidden_states
        return returned(hidden_states, self.num_returned)

    def taken(self) -> Tensor:
        assert self.hidden is not None, "the decoder left before the stage's output"
        return self.hidden


def stages(model: Model, heights: Sequence[int]) -> tuple[Stage, ...]:
    """The stages of `heights[i]` layers each, together all layers of the model.

    Raises PlanError for stages of other layers, UnsupportedModelError for several stages of a
    decoder without one list of its layers.
    """
    if sum(heights) != model.num_layers or min(heights) < 1:
        raise PlanError(
            f"the plan's stages of {', '.join(map(str, heights))} layers are not those of "
            f"{model.name}, which has {model.num_layers}"
        )
    why = family_of(model.config.model_type).whole
    if why and len(heights) > 1:
        raise uncuttable(model.name, why)
    stops = accumulate(heights)
    return tuple(
        Stage(model, range(stop - n, stop)) for n, stop in zip(heights, stops, strict=True)
    )

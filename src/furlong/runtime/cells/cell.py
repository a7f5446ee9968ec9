"""One (chunk, stage) while it computes: where its attention reads, writes and remembers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from furlong.errors import UnsupportedModelError
from furlong.kv.pools.contract import Handle, Lease, Pool
from furlong.kv.store import KVStore
from furlong.models.attention import KVReady
from furlong.models.mixers.probe import Event
from furlong.models.mixers.relay import SliceRows
from furlong.ops.backend import Backend
from furlong.ops.chunk_attention import Known, chunk_attention, store_kv
from furlong.ops.exchange import Exchange
from furlong.ops.latent_kv import Expansion, LatentKV, own_slices, store_latents
from furlong.ops.layer_kv import AttentionRule, LayerKV
from furlong.ops.state_relay import Gradients, States, arrive, depart
from furlong.plan.passes import Pass
from furlong.plan.rows import ChunkRows
from furlong.runtime.cells.layer_view import LayerView, Piece
from furlong.runtime.cells.shared_keys import SharedKeys


@dataclass
class Cell:
    """A `models.attention.CellAttention` over the store; `known` waits in the pool `attention`."""

    rows: ChunkRows
    """The rows of the chunk that this process has."""
    pieces: Mapping[int, Piece]
    """By number, those slices that are of cut sequences: only they have a prefix or write K,V."""
    store: KVStore
    backend: Backend
    attention: Pool
    layers: range
    """Layers of the stage."""
    events: tuple[Event, ...] | None = None
    """Events of the layers, in order; None: attention in each of them."""
    exchange: Exchange | None = None
    """Needed where a slice lies on several processes."""
    relay_factor: float = 1.0
    attended: list[int] = field(default_factory=list)
    """Layers that have attended in this pass, in order; whoever starts a forward clears it."""
    mixed_layers: list[int] = field(default_factory=list)
    """Layers whose mixers are done in this pass, in order."""
    known: dict[int, tuple[Handle, ...]] = field(default_factory=dict)
    """By layer: out (T, N, H), and the log-sum-exp (rows, heads) of each part of the attention,
    which a forward has put away."""
    adds_gradients: bool = True
    """Whether a backward adds to gradients of weights where keys and values are made of latents."""
    _expansions: dict[int, tuple[Expansion, int]] = field(default_factory=dict)
    """By layer, until it attends: how its latents are expanded, and their width."""
    _shared: SharedKeys = field(default_factory=SharedKeys)
    _graph_leases: list[Lease] = field(default_factory=list)
    """Leases of `known` that a graph uses, until its backward."""
    _pass_leases: list[Lease] = field(default_factory=list)
    """Leases of `known` that the layer under way uses, in a pass without a graph."""

    def attend(
        self,
        what: Pass,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AttentionRule,
        sinks: Tensor | None,
        source: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """q (N, T, H), k and v (K, T, H) -> (N, T, H)."""
        self.attended.append(layer)
        place = layer - self.layers.start
        owner = layer if source is None else self._shared.owner(layer, source, rule)
        view = self._view(what, layer, owner)
        ends = self._ends(what, ("attention", layer))
        # of an earlier layer all is remembered that the last one but one could be
        ends_before = ends and layer == self.layers[-1]
        if what.writes_kv and (ends_before or place < what.remembered):
            store_kv(k, v, rows=self.rows, layer_kv=view, rule=rule, exchange=self.exchange)
        if ends_before:
            raise KVReady
        out, known = chunk_attention(
            q, k, v, rows=self.rows, layer_kv=view, rule=rule, backend=self.backend,
            exchange=self.exchange, sinks=sinks,
            known=self._recalled(what, layer) if place < what.remembered else None,
        )  # fmt: skip
        if place < what.remembers:
            kept = (known[0].detach(), *known[1])
            self.known[layer] = tuple(self.attention.put(x.transpose(0, 1)) for x in kept)
        if ends:
            raise KVReady
        return out

    def state_slices(self) -> list[SliceRows]:
        """The slices of the chunk, for layers whose tokens meet in a state."""
        assert not self.rows.exchanged, "states on several processes"
        if self.rows.own is None:  # the one token of a dummy, which is of no sequence
            return [SliceRows(0, slice(0, self.rows.num_rows), continues=False, is_continued=False)]
        found = []
        for placed in self.rows.own.slices:
            piece = self.pieces.get(placed.index)
            ends = (False, False) if piece is None else (piece.index > 0, piece.continues)
            found.append(SliceRows(placed.index, slice(*placed.keys), *ends))
        return found

    def enter(self, layer: int, slice_index: int, x: Tensor) -> tuple[Tensor, States]:
        """x (1, T, D) of a slice that continues, and the states that enter it."""
        piece, states = self.pieces[slice_index], self.store.states
        before = piece.seq_id, layer, piece.index - 1
        return arrive(x, states.read(*before), partial(states.send, *before))

    def leave(self, what: Pass, layer: int, slice_index: int, y: Tensor, states: States) -> Tensor:
        """y (1, T, D) of a slice that is continued; `states` are those that leave it."""
        piece = self.pieces[slice_index]
        if what.writes_kv:
            self.store.states.write(piece.seq_id, layer, piece.index, states)
        return depart(y, tuple(states.values()), partial(self._relayed_states, layer, piece))

    def mixed(self, what: Pass, layer: int) -> None:
        """Note that a layer's mixer is done; the last event of the stage ends a pass to there."""
        self.mixed_layers.append(layer)
        if self._ends(what, ("states", layer)):
            raise KVReady

    def take_latents(self, what: Pass, layer: int, latents: Tensor, expand: Expansion) -> Tensor:
        """Latents (T, W) of which the keys and values of the layer's next `attend` are made: they
        are stored in the place of those, where a slice lies on this process alone."""
        own = self.rows.own
        if own is None:
            return latents
        latents = store_latents(latents, own, LayerView(self, layer, writes=what.writes_kv))
        ends = self._ends(what, ("attention", layer)) and layer == self.layers[-1]
        if ends and not self.rows.exchanged:
            self.attended.append(layer)
            raise KVReady
        self._expansions[layer] = expand, latents.shape[1]
        return latents

    def begin_pass(self, what: Pass) -> None:
        """Begin to bring what the first layer of a pass will recall."""
        self.attended.clear()
        self.mixed_layers.clear()
        if what.remembered:
            self._prefetch(self.layers.start)

    def require_met(self, name: str) -> None:
        """Raise UnsupportedModelError unless a pass has met each layer's events, once, in order."""
        if self.events is None:
            require_each_layer(name, self.attended, self.layers)
            return
        met = {"attention": self.attended, "states": self.mixed_layers}
        for kind, layers in met.items():
            if layers != [layer for what, layer in self.events if what == kind]:
                raise other_events(name, kind, layers)

    def _ends(self, what: Pass, event: Event) -> bool:
        """Whether a pass to the last K,V ends with an event."""
        if what.computes != "to last kv":
            return False
        return event == (self.events[-1] if self.events else ("attention", self.layers[-1]))

    def _relayed_states(self, layer: int, piece: Piece) -> Gradients | None:
        """Gradients of the states that leave a piece, from the chunk behind it."""
        sent = self.store.states.relayed(piece.seq_id, layer, piece.index)
        if sent is None or self.relay_factor == 1:
            return sent
        return [None if grad is None else grad * self.relay_factor for grad in sent]

    def end_pass(self) -> None:
        """Let go of what a pass without a graph has recalled: no later layer uses it."""
        _release(self._pass_leases)

    def forget(self) -> None:
        """Drop what was remembered, after the backward."""
        self.end_pass()
        _release(self._graph_leases)
        for handles in self.known.values():
            for handle in handles:
                self.attention.drop(handle)
        self.known.clear()

    def _view(self, what: Pass, layer: int, owner: int) -> LayerKV:
        """The store as a layer of this cell sees it, which reads what `owner` has stored."""
        view = LayerView(self, owner, writes=what.writes_kv, is_own=owner == layer)
        if layer not in self._expansions:
            return view
        expand, width = self._expansions.pop(layer)
        return LatentKV(
            view, own_slices(self.rows.own), expand, width, self.rows.num_rows, self.adds_gradients
        )

    def _recalled(self, what: Pass, layer: int) -> Known:
        """Attention of an earlier pass, the next layer's on its way."""
        self.end_pass()  # the layer before has used its own
        leases = [self.attention.get(handle) for handle in self.known[layer]]
        # a cell may have its graph before a RebuildKV passes through it
        held = self._graph_leases if what.computes == "graph" else self._pass_leases
        held += leases
        if layer - self.layers.start + 1 < what.remembered:
            self._prefetch(layer + 1)
        out, *lses = (lease.tensor.transpose(0, 1) for lease in leases)
        return out, tuple(lses)

    def _prefetch(self, layer: int) -> None:
        for handle in self.known.get(layer, ()):
            self.attention.prefetch(handle)


def _release(leases: list[Lease]) -> None:
    for lease in leases:
        lease.release()
    leases.clear()


def require_each_layer(name: str, attended: Sequence[int], layers: range) -> None:
    """Raise UnsupportedModelError unless a pass attended in all of `layers`, once, in order."""
    if len(attended) != len(layers):
        raise UnsupportedModelError(
            given=f"{name} reaches transformers' AttentionInterface {len(attended)} times in a "
            f"forward of {len(layers)} layers",
            required="every layer's attention to go through it once",
            source="the model's forward",
            change="train a model of another family, or one that skips no layer (layerdrop 0)",
        )
    if list(attended) != list(layers):
        raise UnsupportedModelError(
            given=f"{name} has attention layers numbered {', '.join(map(str, attended))}",
            required=f"{layers[0]} to {layers[-1]}, in the order in which they run",
            source="layer_idx of the model's attention modules",
            change="number them anew after layers are removed, copied or moved: "
            "layer.self_attn.layer_idx = its place",
        )


def other_events(name: str, kind: str, layers: Sequence[int]) -> UnsupportedModelError:
    """The refusal of a forward whose layers do something else than in the probe."""
    return UnsupportedModelError(
        given=f"{name} has computed {kind} in layers {', '.join(map(str, layers)) or 'none'}",
        required="the same layers in each forward",
        source="the model's forward",
        change="train a model that skips no layer (layerdrop 0)",
    )

"""A cell is one chunk at one stage: the tensors that it holds between forward and backward, and the
attention of its layers over the KV store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from furlong.errors import PlanError, UnsupportedModelError
from furlong.kv.pools import Handle, Lease, Pool, Pools
from furlong.kv.store import KVStore, present
from furlong.models.attention import KVReady
from furlong.models.decoder import HFDecoder
from furlong.models.mixers import (
    SliceRows,
    StateForms,
    StateKey,
    States,
    TokenMixing,
    in_graph,
    receive_states,
    send_states,
)
from furlong.models.support import OTHER_FAMILY
from furlong.ops.attention import (
    AttentionRule,
    LaterGrads,
    LayerKV,
    PrefixBlock,
    SavedAttention,
    chunk_attention,
    store_kv,
)
from furlong.ops.backends.base import Backend
from furlong.ops.latent import Expansion, LatentKV, store_latents
from furlong.ops.sequence_parallel import Exchange, pass_on
from furlong.plan.passes import Pass
from furlong.plan.plan import Chunk, ChunkPlan
from furlong.plan.rows import ChunkRows, rows_of
from furlong.runtime.rng import RNGState
from furlong.runtime.routing import Routing


def rows_on(model: HFDecoder, plan: ChunkPlan, process: int = 0) -> Callable[[Chunk], ChunkRows]:
    """Return a function that maps a chunk to its rows on `process` of the sequence-parallel group.

    Raises PlanError for sequences that branch if the model has recurrent layers.
    """
    if plan.trees and model.events is not None:
        raise PlanError(
            f"the plan has sequences that branch, and {model.name} has recurrent layers, whose "
            "state goes on to one piece only: plan each answer with a prompt of its own"
        )
    q_heads, kv_heads = 1, 1
    if plan.sp_size > 1:
        q_heads, kv_heads = model.heads_for(plan.sp_size)
    return partial(
        rows_of, process=process, sp_size=plan.sp_size, q_heads=q_heads, kv_heads=kv_heads,
        position=plan.position,
    )  # fmt: skip


def open_store(plan: ChunkPlan, pools: Pools) -> KVStore:
    """Return an empty store for a plan's K,V, in the pool that the plan offloads them to."""
    pool = None if plan.offload.kv == "none" else pools.of(plan.offload.kv)
    trained = trained_pieces(plan)
    return KVStore(pools.arena, plan.piece_lens, pool, trained=trained, trees=plan.trees)


def trained_pieces(plan: ChunkPlan) -> dict[int, list[int]] | None:
    """Return {seq_id: numbers of pieces} for each sequence that is cut. Piece n of a sequence is
    the part in the n-th of its chunks; the K,V gradients of the listed pieces are kept. Return None
    if gradients of all pieces are kept, because the plan samples no chunks."""
    if not plan.sampled:
        return None
    return {
        seq_id: [index for index, chunk in enumerate(group) if chunk in plan.trained]
        for seq_id, group in plan.groups.items()
    }


def chunk_pieces(plan: ChunkPlan, chunk: int) -> dict[int, Piece]:
    """Return a `Piece` for each slice of a chunk whose sequence is cut, keyed by the slice's number
    in the chunk. Slices of whole sequences are not in the result."""
    index_of = dict(plan.links[chunk])
    return {
        number: Piece(
            s.seq_id, index_of[s.seq_id], s.start, s.stop,
            continues=plan.is_read(s.seq_id, index_of[s.seq_id]),
        )
        for number, s in enumerate(plan.chunks[chunk].slices)
        if s.seq_id in index_of
    }  # fmt: skip


def state_runs(model: HFDecoder, plan: ChunkPlan, process: int) -> StateRuns:
    """Return a function that maps the number of a chunk to the parts of its slices that recurrent
    layers compute on `process`, or that one process of the group passes on to another.

    They are in the order of slices and tokens, which is that of the messages on all processes. So
    each process waits for earlier tokens alone, and in a backward for later ones alone.
    """
    if model.events is None:
        return lambda chunk: []
    rows_of_all = [rows_on(model, plan, number) for number in range(plan.sp_size)]

    @cache
    def owned(chunk: int) -> dict[int, list[Owned]]:
        """Return seq_id -> its tokens in the chunk, in their order, by process."""
        found: dict[int, list[Owned]] = {}
        for number, rows_here in enumerate(rows_of_all):
            last: Owned | None = None
            for (seq_id, start, stop), row in rows_here(plan.chunks[chunk]).runs():
                own = found.setdefault(seq_id, [])
                if own and own[-1] is last and last[1] == start:  # the halves of one stretch
                    start, row = last[0], last[3]
                    own.pop()
                last = start, stop, number, row
                own.append(last)
        return {seq_id: sorted(own) for seq_id, own in found.items()}

    def runs(chunk: int) -> list[SliceRows]:
        pieces, found = chunk_pieces(plan, chunk), []
        for index, one in enumerate(plan.chunks[chunk].slices):
            piece, parts = pieces.get(index), owned(chunk)[one.seq_id]
            stored = None  # the process that has stored the entering states
            if piece is not None and piece.index > 0:
                stored = owned(plan.groups[one.seq_id][piece.index - 1])[one.seq_id][-1][2]
            if stored not in (None, parts[0][2]):
                parts = [(one.start, one.start, present(stored), 0), *parts]
            for n, (start, stop, number, row) in enumerate(parts):
                before = parts[n - 1][2] if n else None
                behind = parts[n + 1][2] if n + 1 < len(parts) else None
                rows = slice(row, row + stop - start) if number == process else slice(0, 0)
                if number == process or behind is not None:
                    ends = behind is None and piece is not None and piece.continues
                    starts = not n and stored is not None
                    found.append(SliceRows(index, rows, starts, ends, number, before, behind))
        return found

    return runs


StateRuns = Callable[[int], list[SliceRows]]
Owned = tuple[int, int, int, int]
"""Consecutive tokens of a sequence on one process: (start, stop, process, their first row)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a cut sequence that is in one chunk. (A slice of a chunk is a piece or a whole
    sequence.)"""

    seq_id: int
    index: int
    """Its position in the sequence's group of chunks, from 0."""
    start: int
    stop: int
    """Its tokens in the sequence, [start, stop)."""
    continues: bool
    """Whether later chunks read its K,V."""


@dataclass(frozen=True, slots=True)
class LayerView:
    """Access of one layer's attention to the KV store, for one chunk: it reads the stored prefix,
    stores K,V for later chunks and returns their gradients. Implements `ops.attention.LayerKV`."""

    cell: Cell
    layer: int
    writes: bool
    is_own: bool = True
    """False where the layer attends to K,V that another layer stores."""

    def keeps(self, slice_index: int) -> bool:
        piece = self.cell.pieces.get(slice_index)
        return self.writes and self.is_own and piece is not None and piece.continues

    def write(self, slice_index: int, k: Tensor, v: Tensor, rule: AttentionRule) -> None:
        piece, store = self.cell.pieces[slice_index], self.cell.store
        store.write(piece.seq_id, self.layer, piece.index, k, v, rule.window, rule.block)

    def prefix(
        self, slice_index: int, window: int | None, *, gradients: bool
    ) -> Iterator[PrefixBlock]:
        piece = self.cell.pieces.get(slice_index)
        if piece is None or piece.index == 0:
            return
        store = self.cell.store
        yield from store.prefix(piece.seq_id, self.layer, piece.index, window, gradients=gradients)

    def later_grads(self, slice_index: int) -> LaterGrads | None:
        piece, cell = self.cell.pieces.get(slice_index), self.cell
        if piece is None or not self.is_own:
            return None
        return cell.store.later_grads(piece.seq_id, self.layer, piece.index, cell.relay_factor)


_MIN_BYTES = 4096
"""Saved tensors that are smaller, or not floating-point, stay on the device."""


@dataclass(frozen=True, slots=True)
class _Away:
    """Placeholder for a saved tensor whose storage is in the pool."""

    handle: Handle
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class SavedGraph:
    """The pool's copies of the tensors that autograd saved for one graph."""

    pool: Pool
    _handles: list[Handle] = field(default_factory=list)

    @contextmanager
    def saving(self, stays: Iterable[Tensor]) -> Iterator[None]:
        """Context manager: tensors that autograd saves inside are moved to the pool, one copy for
        all tensors that share a storage; a backward brings them back. Weights, small or integer
        tensors, and tensors that share memory with one of `stays` are not moved."""
        known = {x.untyped_storage().data_ptr() for x in stays if not isinstance(x, DTensor)}
        sent: dict[tuple[int, int, torch.dtype], tuple[Handle, Tensor]] = {}
        # The table holds the tensors: a freed address could be given to another tensor.

        @torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled layers call it too
        def pack(x: Tensor) -> Tensor | _Away:
            storage = x.untyped_storage()
            small = storage.nbytes() < _MIN_BYTES or not x.is_floating_point()
            # FSDP2 allocates gathered weights after `known` was built
            is_weight = isinstance(x if x._base is None else x._base, nn.Parameter)
            if small or is_weight or storage.data_ptr() in known:
                # detached: a node that saves its own output would hold itself, and without a
                # backward through it (the last norm, any node after an error) never be freed
                return x.detach()
            # with the version: a storage that changed in place between two saves needs two copies
            key = storage.data_ptr(), x._version, x.dtype
            if key not in sent:
                with torch.no_grad():
                    # the whole storage: all views of it share one copy
                    flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage)  # type: ignore[call-overload]
                    sent[key] = self.pool.put(flat), x
                self._handles.append(sent[key][0])
            return _Away(sent[key][0], x.shape, x.stride(), int(x.storage_offset()))

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
                yield
        finally:
            sent.clear()  # the graph keeps `pack`, and so the table

    def _unpack(self, packed: Tensor | _Away) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        lease = self.pool.get(packed.handle)
        with torch.no_grad():
            # copied, so that the pool may reuse its buffer while autograd uses the tensor
            flat = lease.tensor.clone()
        lease.release()
        return flat.as_strided(packed.shape, packed.stride, packed.offset)

    def drop(self) -> None:
        """Free the pool's copies, after the backward."""
        for handle in self._handles:
            self.pool.drop(handle)
        self._handles.clear()


@dataclass
class Cell:
    """One chunk at one stage: holds what the chunk's later passes need, such as saved attention
    outputs and the graph, and computes attention over the chunk and its stored prefix. Implements
    `models.attention.CellAttention`."""

    rows: ChunkRows
    """The chunk's rows on this process."""
    pieces: Mapping[int, Piece]
    """Slice index -> piece, for slices of cut sequences: only they have a prefix or write K,V."""
    store: KVStore
    backend: Backend
    attention: Pool
    layers: range
    """Layers of the stage."""
    events: Sequence[TokenMixing] = ()
    """Attention and recurrent mixers of the layers, in the order in which they run."""
    exchange: Exchange | None = None
    """All-to-all, for slices that several processes hold."""
    runs: Sequence[SliceRows] = ()
    """Parts of the chunk's slices that recurrent layers compute or pass on (`state_runs`)."""
    process: int = 0
    """Number of this process in its sequence-parallel group."""
    sp_size: int = 1
    relay_factor: float = 1.0
    met: list[TokenMixing] = field(default_factory=list)
    """Events of the current pass, in order."""
    saved_attention: dict[int, tuple[Handle, ...]] = field(default_factory=dict)
    """Layer -> handles of the saved attention output (T, N, H), and of the log-sum-exps
    (rows, heads) of its parts."""
    x: Tensor | None = None
    """Input leaf (T, D) of the graph; None in the first stage."""
    output: Tensor | None = None
    """Output (T, D) of the stage with its graph, from that pass until the backward."""
    rng: RNGState | None = None
    saved: SavedGraph | None = None
    """Saved tensors of a retained graph, if the plan offloads graphs."""
    routing: Routing | None = None
    """Consumer of router logits, if there is one."""
    routed: dict[str, bool] = field(default_factory=dict)
    """Router of the pass with a graph -> whether its loss's gradient has been added."""
    adds_gradients: bool = True
    """Whether backward accumulates gradients of the latent up-projection (MLA)."""
    _latents: dict[int, LatentKV] = field(default_factory=dict)
    """Layer -> its latents as K,V, from `take_latents` until `attend`."""
    _owners: dict[int, int] = field(default_factory=dict)
    """Layer -> the layer that stores the K,V it attends to."""
    _sources: dict[int, tuple[ref[Tensor], ref[Tensor], AttentionRule]] = field(
        default_factory=dict
    )
    """Layer that stores K,V -> weak references to its K and V, and its mask rule."""
    _graph_leases: list[Lease] = field(default_factory=list)
    """Leases of `saved_attention` for the graph, until its backward."""
    _pass_leases: list[Lease] = field(default_factory=list)
    """Leases of `saved_attention` for the current layer, in a pass without a graph."""

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
        """Return the output (N, T, H) of one layer's attention. The queries q (N, T, H) attend to
        the chunk's k and v (K, T, H), and to K,V that earlier chunks have stored. Some passes, as
        `what` says, also store k and v. Raises KVReady to end a pass that only had to compute up to
        here.

        `source`: the tensors (K, V) as the model passes them, if it passes one pair to several
        layers."""
        self.met.append(("attention", layer))
        place = layer - self.layers.start
        owner = layer if source is None else self._owner(layer, source, rule)
        view: LayerKV | None = self._latents.pop(layer, None)
        if view is None:
            view = LayerView(self, owner, writes=what.writes_kv, is_own=owner == layer)
        ends = self._ends(what, ("attention", layer))
        # a layer below the stage's last one must attend: later passes reuse its saved output
        ends_before = ends and layer == self.layers[-1]
        # with saved attention `chunk_attention` stores nothing
        if what.writes_kv and (ends_before or place < what.remembered):
            store_kv(k, v, rows=self.rows, layer_kv=view, rule=rule, exchange=self.exchange)
        if ends_before:
            raise KVReady
        out, saved = chunk_attention(
            q, k, v, rows=self.rows, layer_kv=view, rule=rule, backend=self.backend,
            exchange=self.exchange, sinks=sinks,
            saved=self._recalled(what, layer) if place < what.remembered else None,
        )  # fmt: skip
        if place < what.remembers:
            kept = (saved[0].detach(), *saved[1])
            self.saved_attention[layer] = tuple(self.attention.put(x.transpose(0, 1)) for x in kept)
        if ends:
            raise KVReady
        return out

    def state_slices(self) -> list[SliceRows]:
        """Return the parts of the chunk's slices that this process computes, and those that another
        process passes on, in the order in which all processes of the group take them."""
        if any(run.process == self.process and run.num_tokens for run in self.runs):
            return [*self.runs]
        # a dummy chunk, or a process without tokens: one token of no sequence
        rows = slice(0, self.rows.num_rows)
        dummy = SliceRows(-1, rows, continues=False, is_continued=False, process=self.process)
        return [dummy, *self.runs]

    def receive(
        self, run: SliceRows, x: Tensor, states: States, forms: StateForms
    ) -> tuple[Tensor, States]:
        """Return (x, states): the input x (1, T, D) of a run, and the states with which it starts,
        as another process has sent them. In the backward their gradients are sent back."""

        def send(grads: Mapping[StateKey, Tensor | None]) -> None:
            dense = {}
            for kind, state in states.items():
                grad = grads[kind]
                dense[kind] = torch.zeros_like(state) if grad is None else grad
            self._message((run.process, present(run.before)), dense, forms, x.device)

        return receive_states(x, states, send)

    def pass_on(
        self, run: SliceRows, y: Tensor, states: States, forms: StateForms
    ) -> tuple[Tensor, States]:
        """Send the `states` at the end of a run to the process of the slice's next tokens. Every
        process of the group calls this, in the same order. Return (y, states): the run's output y
        (1, T, D), unchanged, and the states on the process that gets them.

        In the backward the gradients of the states come back, in the reverse order."""
        way = run.process, present(run.behind)
        arrived = self._message(way, states, forms, y.device)
        if self.process == way[1] or not torch.is_grad_enabled():
            return y, arrived

        def later_grads() -> list[Tensor | None]:
            return [*self._message(way[::-1], {}, forms, y.device).values()]

        own = [states[kind] for kind in forms] if self.process == way[0] else []
        return send_states(in_graph(y), own, later_grads), arrived

    def _message(
        self, way: tuple[int, int], states: States, forms: StateForms, device: torch.device
    ) -> States:
        """Send states from one process of the group to another; return them on the receiver."""
        assert self.exchange is not None, "states for another process, without an exchange"
        given = [states[kind] for kind in forms] if self.process == way[0] else []
        arrived = pass_on(
            self.exchange, self.sp_size, self.process, way, given, [*forms.values()], device
        )
        return dict(zip(forms, arrived, strict=True)) if arrived else {}

    def enter(self, layer: int, slice_index: int, x: Tensor) -> tuple[Tensor, States]:
        """Read the recurrent states with which a slice starts: those that the preceding chunk has
        stored. Return (x, states): the slice's input x (1, T, D), unchanged, and the states, both
        as outputs of one autograd node. Its backward sends the gradients of the states to the
        store."""
        piece, states = self.pieces[slice_index], self.store.states
        at = piece.seq_id, layer, piece.start
        return receive_states(x, states.read(at), partial(states.send, at))

    def leave(self, what: Pass, layer: int, slice_index: int, y: Tensor, states: States) -> Tensor:
        """Store the recurrent `states` at the end of a slice that a later chunk continues, if the
        pass writes K,V. Return the slice's output y (1, T, D), unchanged, as the output of an
        autograd node. Its backward also propagates the gradients of `states` that later chunks have
        sent."""
        piece, store = self.pieces[slice_index], self.store.states
        at, kinds = (piece.seq_id, layer, piece.stop), tuple(states)
        if what.writes_kv:
            store.write(at, states)

        def later_grads() -> list[Tensor | None]:
            return store.later_grads(at, kinds, self.relay_factor)

        return send_states(y, tuple(states.values()), later_grads)

    def mixed(self, what: Pass, layer: int) -> None:
        """Record that the recurrent mixer of a layer has run. Raises KVReady to end a pass that
        only had to compute up to here."""
        self.met.append(("states", layer))
        if self._ends(what, ("states", layer)):
            raise KVReady

    def take_latents(self, what: Pass, layer: int, latents: Tensor, expand: Expansion) -> Tensor:
        """Store a layer's latents (T, W), from which its K,V can be computed (MLA), and return them
        as the output of an autograd node.

        Only slices whose tokens are all on this process are handled like this: their latents are
        stored in place of K,V, and the layer's next `attend` applies `expand` to compute K,V from
        latents. Raises KVReady to end a pass that only had to compute up to here."""
        own = self.rows.own
        if own is None:
            return latents
        view = LayerView(self, layer, writes=what.writes_kv)
        latents = store_latents(latents, own, view)
        ends = self._ends(what, ("attention", layer)) and layer == self.layers[-1]
        # nothing would read the K,V that `attend` makes of the latents
        if ends and not self.rows.exchanged:
            self.met.append(("attention", layer))
            raise KVReady
        self._latents[layer] = LatentKV(
            view, frozenset(placed.index for placed in own.slices), expand, latents.shape[1],
            self.rows.num_rows, self.adds_gradients,
        )  # fmt: skip
        return latents

    def route(self, what: Pass, router: str, logits: Tensor) -> None:
        """Hand the logits (T, E) of a router to `routing`. In a pass with a graph, the backward
        will add the gradient of the router's loss to that of the logits."""
        num_tokens = self.rows.num_tokens
        if self.routing is None or not num_tokens:  # a dummy chunk: one row of no sequence
            return
        if what.computes == "values":
            self.routing.meet(router, logits, self.rows)
        # a checkpoint calls again within the backward, with a graph of its own
        elif what.computes == "graph" and logits.requires_grad and router not in self.routed:
            self.routed[router] = False
            gradient = self.routing.gradient(router, logits, self.rows)
            logits.register_hook(partial(self._add_routed, router, gradient))

    def _add_routed(self, router: str, gradient: Tensor, given: Tensor) -> Tensor:
        self.routed[router] = True
        return given + gradient

    def require_routed(self, name: str) -> None:
        """Raise UnsupportedModelError if the backward has passed a router by. `name`: the model's
        class, for the message."""
        passed = [router for router, is_added in self.routed.items() if not is_added]
        if passed:
            raise UnsupportedModelError(
                given=f"{name}, whose {passed[0]} returns logits that nothing else depends on",
                required="router logits on the way to the loss, for a router loss",
                source="the model's code, and output_router_logits",
                change="set output_router_logits to False",
            )

    def begin_pass(self, what: Pass) -> None:
        """Forget which layers have run, and prefetch the first layer's saved attention output."""
        self.met.clear()
        if what.remembered:
            self._prefetch(self.layers.start)

    def require_met(self, name: str) -> None:
        """Raise UnsupportedModelError unless the pass ran the attention or recurrent mixer of each
        layer once, in order. `name`: the model's class, for the message."""
        for kind in ("attention", "states"):
            met, layers = (
                [layer for own, layer in events if own == kind]
                for events in (self.met, self.events)
            )
            if met != layers:
                raise UnsupportedModelError(
                    given=f"{name} computes attention or states {len(met)} times in a forward of "
                    f"{len(layers)} layers, numbered {', '.join(map(str, met)) or 'none'}",
                    required=f"each of layers {', '.join(map(str, layers))} once, in the order in "
                    "which they run",
                    source="the model's forward, and layer_idx of its attention modules",
                    change=OTHER_FAMILY
                    if not met
                    else "number them anew after layers are removed, copied or moved "
                    "(layer.self_attn.layer_idx = its place), and skip none (layerdrop 0)",
                )

    def _ends(self, what: Pass, event: TokenMixing) -> bool:
        """Whether the pass ends at `event`, which is (kind, layer) of an attention or a recurrent
        mixer. It does if the pass only has to compute up to the stage's last K,V or state, and
        `event` is the stage's last."""
        return what.computes == "to last kv" and event == self.events[-1]

    def saving(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context manager: offload what autograd saves, if the plan offloads this cell's graph."""
        if self.saved is None:
            return nullcontext()
        return self.saved.saving((*model.parameters(), *model.buffers()))

    def end_pass(self) -> None:
        """Return to the pool the saved attention outputs that a pass without a graph has borrowed
        (leases)."""
        _release(self._pass_leases)

    def forget(self) -> None:
        """Free the graph and the saved attention, after the backward."""
        self.output = None  # first: the graph refers to the pool's copies
        if self.saved is not None:
            self.saved.drop()
        self.end_pass()
        _release(self._graph_leases)
        for handles in self.saved_attention.values():
            for handle in handles:
                self.attention.drop(handle)
        self.saved_attention.clear()

    def _owner(self, layer: int, source: tuple[Tensor, Tensor], rule: AttentionRule) -> int:
        """Return the layer that stores the K,V of `layer`: the first layer that has received the
        same two tensors, `source`, and has the same `rule`. This may be `layer` itself.

        It is determined in the cell's first pass, where layers run in order and shared tensors are
        alive. Later passes reuse the answer.
        """
        if layer not in self._owners:
            key, value = source
            # weak references: another tensor may get the id of a freed one
            same = (
                owner
                for owner, (keys, values, own_rule) in self._sources.items()
                if keys() is key and values() is value and own_rule == rule
            )
            self._owners[layer] = next(same, layer)
            if self._owners[layer] == layer:
                self._sources[layer] = ref(key), ref(value), rule
        return self._owners[layer]

    def _recalled(self, what: Pass, layer: int) -> SavedAttention:
        """Return the layer's saved attention output, and prefetch the next layer's."""
        self.end_pass()  # the layer before is done with its leases
        leases = [self.attention.get(handle) for handle in self.saved_attention[layer]]
        # a RebuildKV may run while the graph is alive, and must not release its leases
        held = self._graph_leases if what.computes == "graph" else self._pass_leases
        held += leases
        if layer - self.layers.start + 1 < what.remembered:
            self._prefetch(layer + 1)
        out, *lses = (lease.tensor.transpose(0, 1) for lease in leases)
        return out, tuple(lses)

    def _prefetch(self, layer: int) -> None:
        for handle in self.saved_attention.get(layer, ()):
            self.attention.prefetch(handle)


def _release(leases: list[Lease]) -> None:
    for lease in leases:
        lease.release()
    leases.clear()

"""Carries out one rank's actions on a device. It decides nothing: the plan says what comes when."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from furlong.errors import ConfigError, PlanError
from furlong.kv.arena import Arena
from furlong.kv.store import KVStore
from furlong.models.causal_lm import CausalLM
from furlong.ops.backend import Backend
from furlong.ops.loss import tile_tokens, tiled_loss, token_losses
from furlong.plan.check import check
from furlong.plan.liveness import kv_frees
from furlong.plan.text import format_action, tiers_in_words
from furlong.plan.values import (
    ON_DEVICE,
    Action,
    Backward,
    ChunkPlan,
    Forward,
    RebuildKV,
    Recompute,
    Reduce,
)
from furlong.runtime.cell import Cell, KVReady, Piece, require_each_layer
from furlong.runtime.inputs import ChunkInputs, ShiftedSequence, chunk_inputs
from furlong.runtime.ledger import Ledger
from furlong.runtime.memory import memory_bytes
from furlong.runtime.rng import RNGState, replayed
from furlong.timeline import Record, Timeline


@dataclass(slots=True)
class _Live:
    """What a cell holds between its forward and its backward."""

    cell: Cell
    inputs: ChunkInputs
    hidden: Tensor | None = None
    """Final hidden states (T, D) with their graph."""
    rng: RNGState | None = None


class Executor:
    """One plan on one device; the plan is checked, and `run` may be called once.

    Gradients of loss / num_valid_tokens are added to the parameters' `.grad`.
    """

    def __init__(
        self,
        model: CausalLM,
        plan: ChunkPlan,
        sequences: Sequence[ShiftedSequence],
        *,
        num_valid_tokens: int,
        backend: Backend,
        arena: Arena,
        rank: int = 0,
    ) -> None:
        if len(plan.stages) != 1 or plan.sp_size != 1 or plan.tiers != ON_DEVICE:
            raise PlanError(
                f"this executor runs one stage on one device: the plan has {len(plan.stages)} "
                f"stages, sp_size {plan.sp_size}, {tiers_in_words(plan.tiers)}"
            )
        if len(plan.actions) != 1:
            raise PlanError(
                f"this executor runs one rank: the plan has {len(plan.actions)}, whose gradients "
                "nothing would add up"
            )
        check(plan)
        self._model = model
        self._plan = plan
        self._sequences = sequences
        self._num_valid_tokens = num_valid_tokens
        self._backend = backend
        self._rank = rank
        self._actions = plan.actions[rank]
        self._backwards = {(a.chunk, a.stage) for a in self._actions if isinstance(a, Backward)}
        self._store = KVStore(arena, piece_lens(plan))
        self._ledger = Ledger()
        self._live: dict[tuple[int, int], _Live] = {}
        self._trains = any(module.training for module in model.model.modules())
        self._max_tile_tokens = tile_tokens(model.vocab_size, model.device)
        self._loss_sum = 0.0
        lens = () if self._backwards else plan.seq_lens
        self.token_losses = [
            torch.zeros(seq_len, dtype=torch.float64, device="cpu") for seq_len in lens
        ]
        """The loss of each token (T,) of each sequence; empty for a plan with backwards."""
        self.has_drawn = False
        """Whether a forward in train mode drew random numbers."""

    def run(self) -> tuple[float, Timeline]:
        """Obey the plan; returns the summed loss and what ran when. Call inside `installed`."""
        records: list[Record] = []
        start_s = time.perf_counter()
        frees = kv_frees(self._plan, self._rank)
        try:
            for action, dead in zip(self._actions, frees, strict=True):
                began_s = time.perf_counter() - start_s
                self._obey(action)
                for chunk, stage in dead:
                    self._free_kv(chunk, stage)
                if self._model.device.type == "cuda":
                    torch.cuda.synchronize(self._model.device)
                ended_s = time.perf_counter() - start_s
                in_use_bytes = memory_bytes(self._model.device)
                records.append(
                    Record(self._rank, "compute", action, began_s, ended_s, in_use_bytes, 0)
                )
            self._ledger.assert_empty()
            assert self._store.num_buffers == 0, "the store still holds K,V at the end of the step"
        finally:
            for live in self._live.values():
                live.cell.forget()
            self._live.clear()
            self._store.clear()
        return self._loss_sum, Timeline(tuple(records))

    def _obey(self, action: Action) -> None:
        match action:
            case Forward(recompute_layers=0):
                self._forward(action)
            case Recompute(recompute_layers=0):
                self._recompute(action)
            case RebuildKV():
                self._rebuild_kv(action)
            case Backward():
                self._backward(action)
            case Reduce():
                pass  # a single rank holds the whole sum
            case _:
                raise PlanError(f"this executor does not carry out {format_action(action)}")

    def _forward(self, action: Forward) -> None:
        live = self._open(action.chunk)
        self._live[action.chunk, action.stage] = live
        continues = self._plan.continues[action.chunk]
        live.cell.writes_kv = continues
        if continues:
            self._ledger.hold("kv", action.chunk, action.stage)
        if action.keep == "all":
            self._ledger.hold("graph", action.chunk, action.stage)
            with torch.enable_grad():
                live.hidden = self._hidden(live)
        elif (action.chunk, action.stage) not in self._backwards:
            self._evaluate(live, action.chunk)
        elif continues:
            live.rng = RNGState.read(self._model.device) if self._trains else None
            if action.keep == "attention":
                live.cell.remembers = True
                self._ledger.hold("attention", action.chunk, action.stage)
            self._run_to_last_kv(live)

    def _recompute(self, action: Recompute) -> None:
        live = self._live[action.chunk, action.stage]
        live.cell.writes_kv = live.cell.remembers = live.cell.stops_at_last_kv = False
        self._ledger.hold("graph", action.chunk, action.stage)
        with torch.enable_grad(), replayed(live.rng, self._model.device):
            live.hidden = self._hidden(live)

    def _rebuild_kv(self, action: RebuildKV) -> None:
        live = self._live[action.chunk, action.stage]
        self._ledger.hold("kv", action.chunk, action.stage)
        live.cell.writes_kv = True
        with replayed(live.rng, self._model.device):
            self._run_to_last_kv(live)

    def _backward(self, action: Backward) -> None:
        live = self._live[action.chunk, action.stage]
        assert live.hidden is not None
        hidden = live.hidden
        if not hidden.requires_grad:
            self._require_gradient(hidden)
        live.cell.relay_factor = action.relay_factor
        loss_sum, grad = tiled_loss(
            self._model.logits, hidden, live.inputs.labels, max_tile_tokens=self._max_tile_tokens,
            grad_scale=action.loss_factor / self._num_valid_tokens,
        )  # fmt: skip
        self._loss_sum += loss_sum
        if hidden.requires_grad:
            torch.autograd.backward(hidden, grad)
        live.cell.forget()
        if self._ledger.holds("attention", action.chunk, action.stage):
            self._ledger.release("attention", action.chunk, action.stage)
        self._ledger.release("graph", action.chunk, action.stage)
        del self._live[action.chunk, action.stage]

    def _require_gradient(self, hidden: Tensor) -> None:
        """Raise ConfigError if neither the decoder nor the head leads to a trained parameter."""
        with torch.enable_grad():
            logits = self._model.logits(hidden[:1].detach())
        if not logits.requires_grad:
            raise ConfigError(
                given=f"{self._model.name}, whose loss depends on no parameter that requires a "
                "gradient",
                required="a trained parameter that the forward uses",
                source="the model that was passed",
                change="call unmerge_adapter() on merged adapters, or train parameters in use",
            )

    def _evaluate(self, live: _Live, chunk: int) -> None:
        with torch.no_grad():
            hidden = self._hidden(live)
        losses = token_losses(
            self._model.logits, hidden, live.inputs.labels, max_tile_tokens=self._max_tile_tokens
        )
        self._loss_sum += float(losses.sum())
        if self.token_losses:
            slices = self._plan.chunks[chunk].slices
            for piece, rows in zip(slices, live.inputs.slices, strict=True):
                self.token_losses[piece.seq_id][piece.start : piece.stop] = losses[rows]

    def _run_to_last_kv(self, live: _Live) -> None:
        live.cell.stops_at_last_kv = True
        with torch.no_grad(), suppress(KVReady):
            self._hidden(live)

    def _hidden(self, live: _Live) -> Tensor:
        before = RNGState.read(self._model.device) if self._trains else None
        live.cell.layers.clear()
        try:
            hidden = self._model.hidden(live.inputs.input_ids, live.inputs.position_ids, live.cell)
        except KVReady:
            self._require_each_layer(live)
            raise
        finally:
            if before is not None and not self.has_drawn:
                self.has_drawn = not before.equals(RNGState.read(self._model.device))
        self._require_each_layer(live)
        return hidden

    def _require_each_layer(self, live: _Live) -> None:
        """LayerDrop skips layers in some forwards only, which the self-check need not have met."""
        require_each_layer(self._model.name, live.cell.layers, self._model.num_layers)

    def _open(self, chunk: int) -> _Live:
        inputs = chunk_inputs(self._plan.chunks[chunk], self._sequences, self._model.device)
        pieces = chunk_pieces(self._plan, chunk, inputs.slices)
        cell = Cell(inputs.slices, pieces, self._store, self._backend, self._model.num_layers)
        return _Live(cell, inputs)

    def _free_kv(self, chunk: int, stage: int) -> None:
        self._ledger.release("kv", chunk, stage)
        for seq_id, index in self._plan.links[chunk]:
            for layer in range(self._model.num_layers):
                self._store.free(seq_id, layer, index)


def piece_lens(plan: ChunkPlan) -> dict[int, list[int]]:
    """Tokens of each piece of each cut sequence."""
    lens: dict[int, list[int]] = {}
    for seq_id, group in plan.groups.items():
        pieces = [s for c in group for s in plan.chunks[c].slices if s.seq_id == seq_id]
        lens[seq_id] = [piece.num_tokens for piece in pieces]
    return lens


def chunk_pieces(plan: ChunkPlan, chunk: int, rows: tuple[slice, ...]) -> tuple[Piece, ...]:
    index_of = dict(plan.links[chunk])
    return tuple(
        Piece(
            where, s.seq_id, index_of[s.seq_id], index_of[s.seq_id] < len(plan.groups[s.seq_id]) - 1
        )
        for s, where in zip(plan.chunks[chunk].slices, rows, strict=True)
        if s.seq_id in index_of
    )

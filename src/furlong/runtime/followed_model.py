"""A caller's model between calls: adapted, checked and divided, and again when it has changed."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from furlong.errors import ConfigError, LinkError, UnsupportedModelError
from furlong.models.attention import hooked
from furlong.models.causal_lm import CausalLM
from furlong.models.fingerprint import fingerprint
from furlong.models.held import Skip
from furlong.models.support import other_dropouts, refuse_attention_dropout
from furlong.models.wrappers import (
    bare_model,
    compiled_in_place,
    refuse_backward_hooks,
    refuse_placement,
)
from furlong.plan.plan import Chunk, ChunkPlan
from furlong.plan.rows import ChunkRows
from furlong.runtime.cells.layout import rows_on
from furlong.runtime.checks.self_check import self_check
from furlong.runtime.checks.surroundings import (
    device_type,
    left_out,
    refuse_autocast,
    refuse_call,
    refuse_mode,
)
from furlong.runtime.comms import Alone, Comms
from furlong.runtime.kept import Kept
from furlong.runtime.memory.pools import Storage
from furlong.runtime.parallel.agreement import gathered
from furlong.runtime.parallel.comms import ShardedRanks
from furlong.runtime.parallel.empty_passes import EmptyPasses
from furlong.runtime.parallel.exchange import AllToAll
from furlong.runtime.parallel.likeness import require_alike
from furlong.runtime.parallel.links import Parcel
from furlong.runtime.parallel.pipeline import open_pipeline, stage_heights
from furlong.runtime.parallel.ranks import Ranks, ranks_given, require_stages
from furlong.runtime.parallel.sharding import one_step, shard
from furlong.runtime.precision import compute_parameters

# By the model itself, weakly: a model that is forgotten takes its buffers with it, and its copies
# and saved files hold nothing of ours.
_KEPT: WeakKeyDictionary[nn.Module, Kept] = WeakKeyDictionary()
_HELD_ELSEWHERE = (
    "the weights are divided among the processes now, but something still holds them whole: an "
    "optimizer that was made before the engine trains nothing. Make the engine first"
)

_AS_WRITTEN = (
    "what torch.compile made of the whole model, or of layers with states, is not run: chunks go "
    "through single layers, which run compiled where layer.compile() was called on them"
)


class FollowedModel:
    """The model of one engine. `model` is its adapter, as of the last `follow`."""

    model: CausalLM

    def __init__(
        self,
        given: nn.Module,
        *,
        max_seq_len: int | None,
        compute_dtype: torch.dtype | None,
        storage: Storage | None,
        ranks: Ranks | None = None,
        process_group: ProcessGroup | None = None,
        needs_head: bool = True,
    ) -> None:
        """`ranks`, or a `process_group` of replicas: the processes that call it together; None for
        one alone. `needs_head`: see `CausalLM`."""
        self.given, self.storage, self._needs_head = given, storage, needs_head
        self.max_seq_len, self.compute_dtype = max_seq_len, compute_dtype
        self.kept = _KEPT.setdefault(bare_model(given), Kept())
        self.ranks = ranks_given(ranks, process_group, device_type(given))
        self._fingerprint: tuple[int, int] | None = None
        self._notes: set[str] = set()

    @contextmanager
    def alone(self, *, takes_autocast: bool = False) -> Iterator[None]:
        """Refuse a second call on the same model, and modes in which nothing can be recorded.

        A caller's autocast is off within: the dtypes are the engine's own, unless that takes it.
        """
        refuse_mode(self.given)
        if not takes_autocast:
            refuse_autocast(self.given, self.compute_dtype)
        if self.kept.ranks is not None and self.kept.process != os.getpid():
            raise ConfigError(
                given="a model of several processes, in a fork of one of them",
                required="the process that has made the engine: both would read from the same "
                "connections",
                source="a process that was forked after furlong.Engine was made",
                change="call the engine in the process that made it, or fork before",
            )
        with self.kept.running() as is_free:
            if not is_free:
                raise ConfigError(
                    given="a second forward_backward on a model while the first one runs",
                    required="one call at a time on each model",
                    source="another thread, a hook of the model, or a thread that ran at a fork",
                    change="call them one after the other",
                )
            base = bare_model(self.given)
            _refuse_rivals(base, self.kept)
            with (
                hooked(base, refuse_call),
                torch.autocast(device_type(self.given), enabled=False),
            ):
                yield

    def follow(self, *, notes: bool = True) -> None:
        """Adapt to the model as it is now; check it if that is new, and divide it among the ranks
        if that is not done. `notes`: warn of what nobody does."""
        base = bare_model(self.given)
        for message in left_out(self.given, base, is_shared=self.ranks is not None):
            if notes:
                self.note(message)
        now = fingerprint(base)
        if now == self._fingerprint:
            return
        self._require_own_shards(base)
        if self._fingerprint is None or now[0] != self._fingerprint[0]:
            self._fingerprint = None  # an adapter of something else is not to be met again
            refuse_placement(base)
            refuse_backward_hooks(base)
            self.model = CausalLM(
                self.given, max_seq_len=self.max_seq_len, needs_head=self._needs_head
            )
            if self.ranks is not None:
                _refuse_compiled(self.model)
                require_stages(self.ranks.pp, self.model.num_layers)
            in_place = len(compiled_in_place(base))
            if hasattr(self.given, "_orig_mod") or in_place > len(self.model.compiled):
                self.note(_AS_WRITTEN)
            self.kept.open_pools(self.model.device, self.storage)
        elif base.training:
            refuse_attention_dropout(base)
        self._check_once(now, (self.model.num_layers,))
        self._fingerprint = now
        if self.ranks is not None and self.kept.ranks is None:
            self._shard(self.ranks)

    def require_checked(self, heights: tuple[int, ...]) -> None:
        """Check the model in stages of `heights` layers against its own forward, if that is new."""
        self._check_once(self._fingerprint, heights)

    @contextmanager
    def computing(
        self, *, regathers: bool = False, returned: dict[int, Tensor] | None = None
    ) -> Iterator[None]:
        """Within it the weights are in the compute dtype; `regathers`: see `one_step`, `returned`:
        see `compute_parameters`."""
        if self._is_sharded:
            with one_step(self.model.base, regathers=regathers):
                yield
            return
        dtype = self.compute_dtype
        unchanged = [] if dtype is None else self.model.stays_float32(dtype)
        with compute_parameters(self.model.model, dtype, unchanged=unchanged, returned=returned):
            yield

    @property
    def rank(self) -> int:
        """Number of the plan's list that this process obeys."""
        return self.ranks.plan_rank if self.ranks else 0

    @property
    def process(self) -> int:
        """Its number in the pool."""
        return self.ranks.process if self.ranks else 0

    @property
    def exchange(self) -> AllToAll | None:
        """The exchange with the others of the pool."""
        return self.kept.exchange_of(self.ranks)

    @property
    def heights(self) -> tuple[int, ...]:
        """Layers of each stage of the pipeline."""
        return self.kept.heights

    @property
    def num_frozen_layers(self) -> int:
        """First layers in which, and below which, no process trains anything. A collective."""
        own = self.model.num_frozen_layers
        return own if self.ranks is None else min(n for (n,) in gathered(self.ranks, [own]))

    def by_first(self, number: int) -> int:
        """The number of the first process, on all. A collective."""
        return number if self.ranks is None else gathered(self.ranks, [number])[0][0]

    def rows_of(self, plan: ChunkPlan) -> Callable[[Chunk], ChunkRows]:
        """The rows of each chunk of a plan that this process has."""
        return rows_on(self.model, plan, self.process, self.exchange)

    def comms(self, plan: ChunkPlan | None = None) -> Comms:
        """The comms with other ranks, for one plan; without one for sums alone."""
        if self.ranks is None:
            return Alone()
        layers = self.model.layers if self._is_sharded else ()
        pipeline = self.kept.pipeline
        messages = (pipeline.links, self._parcel(plan)) if pipeline and plan else None
        own = self.exchange
        pool = partial(EmptyPasses, self.model, own, self.rank, self.process) if own else None
        return ShardedRanks(self.model.base, layers, self.ranks, messages, pool)

    def require_settled(self) -> None:
        """Raise LinkError if an earlier step ended in the middle of what processes do together."""
        if not self.kept.is_settled:
            raise LinkError(
                "an earlier step of this model ended with an error while other processes waited "
                "for this one: end all processes and start them again"
            )

    @contextmanager
    def settling(self, comms: Comms) -> Iterator[None]:
        """Within it runs a step with these comms."""
        self.kept.is_settled = False
        try:
            yield
        finally:
            self.kept.is_settled = comms.is_settled

    def adding_up_tied(self) -> AbstractContextManager[None]:
        """Within it runs a step; afterwards a weight of two stages has the gradient of both."""
        pipeline = self.kept.pipeline
        return pipeline.tied.adding_up(self.model) if pipeline else nullcontext()

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """This process's parameters that another stage has, too, and counts."""
        pipeline = self.kept.pipeline
        return pipeline.tied.counted_elsewhere(self.model) if pipeline else []

    def note(self, message: str) -> None:
        """Warn once per engine."""
        if message not in self._notes:
            self._notes.add(message)
            warnings.warn(message, stacklevel=4)

    @property
    def _is_sharded(self) -> bool:
        return self.ranks is not None and self.ranks.shard_mesh.size() > 1 and bool(self.kept.ranks)

    def _parcel(self, plan: ChunkPlan) -> Parcel:
        """The form of a plan's messages."""
        model, rows_of = self.model, self.rows_of(plan)
        dtypes = (p.dtype for p in model.base.parameters() if p.is_floating_point())
        return Parcel(
            model.config.hidden_size, self.compute_dtype or next(dtypes), model.device,
            lambda chunk: rows_of(chunk).num_rows,
        )  # fmt: skip

    def _check_once(self, now: object, heights: tuple[int, ...]) -> None:
        key = self._key(now, heights)
        if key not in self.kept.checked:
            with self.computing():
                self_check(self.model, self.kept.backend, heights)
            self.kept.checked.add(key)

    def _key(self, now: object, heights: tuple[int, ...]) -> tuple[object, ...]:
        return now, self.compute_dtype, self.max_seq_len, heights

    def _shard(self, ranks: Ranks) -> None:
        """Divide the weights; what was checked whole is checked."""
        model, dtype = self.model, self.compute_dtype
        require_alike(model, ranks, dtype)
        if ranks.shard_mesh.size() > 1:
            _require_layers(model)
            unchanged = [] if dtype is None else model.stays_float32(dtype)
            layers = [layer for layer in model.layers if not isinstance(layer, Skip)]
            whole = [weakref.ref(p) for p in model.base.parameters() if p.requires_grad]
            shard(model.base, layers, ranks.shard_mesh, dtype, unchanged=unchanged)
            if whole and all(parameter() is not None for parameter in whole):
                self.note(_HELD_ELSEWHERE)
            self._fingerprint = fingerprint(model.base)
            self.kept.checked.add(self._key(self._fingerprint, (model.num_layers,)))
        if ranks.pp > 1:
            self.kept.pipeline = open_pipeline(ranks, model)
            self.kept.heights = stage_heights(ranks, model)
        self.kept.ranks, self.kept.compute_dtype = ranks, dtype

    def _require_own_shards(self, base: nn.Module) -> None:
        """Raise ConfigError for weights that others have divided, or this engine otherwise."""
        kept, whole = self.kept, [n for n, p in base.named_parameters() if type(p) is nn.Parameter]
        if kept.ranks is None:
            return
        if kept.ranks != self.ranks or kept.compute_dtype != self.compute_dtype:
            what = f"weights divided among {kept.ranks.num_processes} processes for a compute_dtype"
            raise ConfigError(
                given=f"{what} of {kept.compute_dtype}",
                required="an engine with the same ranks and the same compute_dtype",
                source="an earlier furlong.Engine of this model",
                change="pass that engine's ranks and compute_dtype, or load the model again",
            )
        if self._is_sharded and whole:
            raise ConfigError(
                given=f"the parameter {whole[0]}, put into a model whose weights are divided",
                required="all parameters in the model when the engine is made",
                source="a change of the model after furlong.Engine was made",
                change="add adapters first, then make the engine, then the optimizer",
            )


def _refuse_rivals(base: nn.Module, own: Kept) -> None:
    """Raise ConfigError where another thread runs a call on another model that would meet this
    one's: by their config, or by the random numbers that both replay."""
    for reference in _KEPT.keyrefs():
        other = reference()
        kept = _KEPT.get(other) if other is not None else None
        if other is None or kept is None or kept.thread in (None, threading.get_ident()):
            continue
        if not _configs(base).isdisjoint(_configs(other)):
            what, change = "which shares its config", "copy.deepcopy the config for one of them"
        elif _draws(base, own) or _draws(other, kept):
            what, change = "and one of the two draws dropout or jitter", "run one after the other"
        else:
            continue
        raise ConfigError(
            given=f"a call on a model while another thread runs one on another, {what}",
            required="calls that share neither a config, in which attention is furlong's for the "
            "length of one, nor the process's random numbers, which both replay",
            source="two threads of one process",
            change=f"{change}, or give each model a process of its own",
        )


def _draws(model: nn.Module, kept: Kept) -> bool:
    """Whether a forward draws random numbers, as far as its modules and past ones tell."""
    return bool(other_dropouts(model)) or (kept.has_drawn and model.training)


def _configs(model: nn.Module) -> set[int]:
    return {id(module.config) for module in model.modules() if hasattr(module, "config")}


def _refuse_compiled(model: CausalLM) -> None:
    """Raise UnsupportedModelError for compiled layers on several processes."""
    if model.compiled:
        raise UnsupportedModelError(
            given=f"{model.name} with layers that are compiled in place, on several processes",
            required="layers that run as they are written, whose weights processes gather",
            source="layer.compile()",
            change="leave it out, or train in one process",
        )


def _require_layers(model: CausalLM) -> None:
    """Raise UnsupportedModelError for a decoder whose layers could not be gathered one by one."""
    try:
        _ = model.layers
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            given=error.given,
            required="a decoder with one list of its layers, for weights that processes share",
            source="the model's modules",
            change="train it in one process",
        ) from error

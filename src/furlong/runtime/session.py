"""A caller's model between calls: adapted, checked and divided, and again when it has changed.

It has changed when its fingerprint has: when it was resized, adapted, moved, cast, configured or
switched. Torch's modes are looked at before each call: refused or, as an autocast, entered again
for a pass.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from furlong.errors import (
    ConfigError,
    ElsewhereError,
    LinkError,
    UnsupportedModelError,
    in_four_parts,
    reason_of,
)
from furlong.kv.arena import Arena
from furlong.kv.pools import Pools, Storage, is_lane
from furlong.models.attention import called_within, hooked
from furlong.models.decoder import HFDecoder
from furlong.models.fused import Agreed
from furlong.models.placeholders import PlaceholderLayer
from furlong.models.quantized import settle
from furlong.models.support import (
    COMPILED_CALL,
    bare_model,
    other_dropouts,
    refuse_attention_dropout,
    refuse_state,
    refuse_trained,
)
from furlong.ops.backends.select import ProbedBackend
from furlong.ops.sequence_parallel import AllToAll
from furlong.plan.plan import Chunk, ChunkPlan
from furlong.plan.rows import ChunkRows
from furlong.runtime.cell import rows_on
from furlong.runtime.check import Agree, self_check
from furlong.runtime.distributed.comms import Comms, Pipeline, open_pipeline
from furlong.runtime.distributed.consensus import each_of, gathered, require_equal, together
from furlong.runtime.distributed.failures import is_lost, leave, lost
from furlong.runtime.distributed.fsdp import one_layer_at_a_time, one_step, shard
from furlong.runtime.distributed.mesh import Ranks, ranks_given, require_stages
from furlong.runtime.distributed.p2p import Parcel
from furlong.runtime.precision import added_gradients, compute_parameters
from furlong.runtime.rng import RNGState, independent_draws, replayed


@dataclass
class ModelState:
    """State of one model: its buffers, the kernels that were probed, the checks that it passed."""

    pools: Pools | None = None
    backend: ProbedBackend = field(default_factory=ProbedBackend)
    checked: set[tuple[Any, ...]] = field(default_factory=set)
    agreed: Agreed = field(default_factory=dict)
    keeps_written: bool = False
    """Whether chunks with fused modules have failed a check that those without have passed."""
    thread: int | None = None
    """The thread of the call that runs."""
    pooled: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever takes memory of the pools or gives it back: a call, or a `sweep`."""
    ranks: Ranks | None = None
    """The processes among which the weights are divided, for good."""
    pipeline: Pipeline | None = None
    """The links to other stages, where the ranks have several."""
    exchange: AllToAll | None = None
    """That of the pool, where the ranks have pools."""
    trained_layers: range | None = None
    """The layers that this process of a pipeline has trained."""
    is_settled: bool = True
    """Whether nothing of an earlier step is left under way between the processes."""
    compute_dtype: torch.dtype | None = None
    """The dtype in which divided weights are gathered."""
    copies: torch.cuda.Stream | None = None
    """That on which weights come from CPU memory to the GPU of a process that is alone."""
    room_bytes: int | None = None
    """Bytes of the device that calls with a keep of auto may use, measured at the first one."""
    num_calls: int = 0
    """Calls of token values and hidden states, the same on all processes."""
    dropped: deque[Callable[[], None]] = field(default_factory=deque)
    """Ends of calls whose values nobody holds any more."""

    def drop(self, end: Callable[[], None]) -> None:
        """Give back what a call holds: at once, or when the call that runs now is over."""
        self.dropped.append(end)
        self.sweep()

    def sweep(self) -> None:
        """Give back what was dropped, unless a call runs. A pool's own thread, in which the garbage
        collector may drop values, leaves that to others: it would wait for itself."""
        if is_lane():
            return
        while self.dropped and self.pooled.acquire(blocking=False):
            try:
                while self.dropped:
                    self.dropped.popleft()()
            finally:
                self.pooled.release()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it a call of this thread runs; calls of other threads wait, on any model. Raises
        ConfigError within another call on this one."""
        self.refuse_nested()
        try:
            with _CALLS, self.pooled:  # a sweep of another thread is over soon
                self.thread = threading.get_ident()
                try:
                    yield
                finally:
                    self.thread = None
        finally:
            self.sweep()

    def refuse_nested(self) -> None:
        """Raise ConfigError within another call on this model."""
        if self.is_inside:
            raise ConfigError(
                given="a call of furlong on a model while another one runs",
                required="one call at a time on each model",
                source="a hook of the model, or a function of its values",
                change="call them one after the other",
            )

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in the call that runs."""
        return self.thread == threading.get_ident()

    def close(self) -> None:
        """Give back the memory, threads and files of the pools, and the groups between stages; the
        next call opens its own."""
        if self.pools is not None:
            storage = self.pools.storage
            self.pools.close()
            self.pools = Pools(Arena(self.pools.arena.device, poison=storage.poison), storage)
        self.close_links()

    def close_links(self) -> None:
        """End the groups between stages."""
        if self.pipeline is not None:
            self.pipeline.links.close()
            self.pipeline = None

    @property
    def opened(self) -> Pools:
        """The pools, which `open_pools` has made."""
        assert self.pools is not None
        return self.pools

    def open_pools(self, device: torch.device, storage: Storage | None) -> None:
        """Make the pools of a device; anew if the device, the given storage or the process, by a
        fork, is another one."""
        if self.pools is not None:
            storage = storage or self.pools.storage
            is_own = self.pools.process == os.getpid()
            if is_own and self.pools.arena.device == device and self.pools.storage == storage:
                return
            if is_own:
                self.pools.close()
        storage = storage or Storage()
        self.pools = Pools(Arena(device, poison=storage.poison), storage)


# By the model itself, weakly: a model that is forgotten takes its buffers with it, and its copies
# and saved files hold nothing of ours.
_STATES: WeakKeyDictionary[nn.Module, ModelState] = WeakKeyDictionary()
# Held by the thread whose calls run: configs, in which attention is furlong's meanwhile, may be of
# several models, and the generators that a call replays are the process's.
_CALLS = threading.RLock()
_CHANGED, _UNLINKED = 1, 2
"""Bits that a process brings to a call: its model is new to it, its pipeline has no links."""
_CHECK, _PROBE = 1, 2
"""Bits of what a process has not done yet with a model that is new on any."""
_HELD_ELSEWHERE = (
    "the weights are divided among the processes now, but something still holds them whole: an "
    "optimizer that was made before the engine trains nothing. Make the engine first"
)


class Session:
    """A model as one engine calls it, with the settings of its calls. `model` is its adapter, as of
    the last `call`."""

    model: HFDecoder

    def __init__(
        self,
        given: nn.Module,
        *,
        max_seq_len: int | None,
        compute_dtype: torch.dtype | None,
        storage: Storage | None,
        ranks: Ranks | None = None,
        process_group: ProcessGroup | None = None,
        is_entered: bool = False,
        offload_weights: bool = False,
    ) -> None:
        """`ranks`, or a `process_group` of replicas: the processes that call it together; None for
        one alone. `is_entered`: see `HFDecoder`; the head is then the caller's.
        `offload_weights`: see `Engine`."""
        self.offload_weights = offload_weights
        self.given, self.storage, self._is_entered = given, storage, is_entered
        self.max_seq_len, self.compute_dtype = max_seq_len, compute_dtype
        self.state = _STATES.setdefault(bare_model(given), ModelState())
        self.ranks: Ranks | None = None
        self.ranks = ranks_given(ranks, process_group, self.autocast_kind, offload_weights)
        self._fingerprint: tuple[int, int, int] | None = None

    @contextmanager
    def alone(self, *, takes_autocast: bool = False) -> Iterator[None]:
        """Refuse a second call on the same model, and modes in which nothing can be recorded.

        A caller's autocast is off within: the dtypes are the engine's own, unless that takes it.
        """
        refuse_mode()
        if not takes_autocast:
            refuse_autocast(self.given, self.autocast_kind, self.compute_dtype)
        with (
            self.state.running(),
            hooked(bare_model(self.given), refuse_call),
            torch.autocast(self.autocast_kind, enabled=False),
        ):
            yield

    @contextmanager
    def call(self, place: str, *, takes_autocast: bool = False) -> Iterator[None]:
        """Within it a call runs, of all processes if there are several, on the model as it is now:
        adapted and, if it is new, checked and divided among the ranks. See `alone`.

        Where one process refuses it, all do. Raises LinkError if an earlier call ended in the
        middle of what processes do together. `place`: see `together`.
        """
        self.state.refuse_nested()
        if self.ranks is not None and not self.state.is_settled:  # alone it is another thread's
            raise LinkError(
                in_four_parts(
                    given="an earlier call on this model, which ended with an error while other "
                    "processes waited for this one",
                    required="processes that have taken every step together",
                    source="the error of that call, here or on another process",
                    change="end all processes and start them again",
                )
            )
        with self.heard(place), ExitStack() as stack:
            base, now = bare_model(self.given), (0, 0, 0)

            def enter() -> int:
                nonlocal now
                stack.enter_context(self.alone(takes_autocast=takes_autocast))
                now = fingerprint(base)
                self.state.open_pools(self.device, self.storage)
                lacks_links = self.ranks is not None and self.ranks.pp > 1
                lacks_links = lacks_links and self.state.pipeline is None
                return _CHANGED * (now != self._fingerprint) + _UNLINKED * lacks_links

            news = each_of(self.ranks, enter, place)
            if any(own & _CHANGED for own in news):
                self._adapt(base, now)
            if self.ranks is not None and any(own & _UNLINKED for own in news):
                self.state.close_links()
                self.state.pipeline = open_pipeline(self.ranks, self.model)
            yield

    @contextmanager
    def heard(self, place: str) -> Iterator[None]:
        """Tell other processes of an error in a call where they wait for this one, and raise
        LinkError where this one waits for them in vain."""
        if (ranks := self.ranks) is None:
            yield
            return
        try:
            yield
        except BaseException as error:
            if self.state.is_settled and isinstance(error, Exception) and not is_lost(error):
                raise  # all have heard of it
            self.state.is_settled = False
            pipeline = self.state.pipeline
            groups = [*ranks.groups, *(pipeline.links.groups if pipeline is not None else ())]
            if is_lost(error) and not isinstance(error, LinkError):
                raise lost(groups, error, place) from error
            leave(f"left it by {reason_of(error)}", groups)  # a LinkError has left a word
            raise

    def _adapt(self, base: nn.Module, now: tuple[int, int, int]) -> None:
        """Adapt to the model, which is new on this process or on another one."""
        together(self.ranks, partial(self._wrap, base, now))
        if self.ranks is not None:
            settings = {"max_seq_len": str(self.max_seq_len), "mode": _mode(base)}
            require_equal(
                self.model, self.ranks, self.compute_dtype, settings, module_facts(base),
                are_known=self.state.ranks is not None,
            )  # fmt: skip
        ranks = self.ranks if self.state.ranks is None else None
        if ranks is not None and self.offload_weights:  # they are checked where they come to
            self._shard(ranks)
            ranks, now = None, fingerprint(base)
        self.require_checked((self.model.num_layers,), now)
        self._fingerprint = now
        if ranks is not None:
            self._shard(ranks)
            self._fingerprint = fingerprint(base)  # what was checked whole is checked
            self.state.checked.add(self._key(self._fingerprint, (self.model.num_layers,)))

    def _wrap(self, base: nn.Module, now: tuple[int, int, int]) -> None:
        """Make the adapter of a model, or keep it where nothing changed but modes."""
        self._require_own_shards(base)
        if self._fingerprint is None or now[0] != self._fingerprint[0]:
            self._fingerprint = None  # an adapter of something else is not to be met again
            settle(base)
            refuse_state(base)
            self.model = HFDecoder(
                self.given,
                max_seq_len=self.max_seq_len,
                needs_head=not self._is_entered,
                is_entered=self._is_entered,
                device=self.device,
            )
            self.model.agreed = self.state.agreed
            if self.state.keeps_written:
                self.model.fused = []
            if self.ranks is not None:
                require_stages(self.ranks.pp, self.model.num_layers)
        elif base.training:
            refuse_attention_dropout(base)
        if self.model.compiled:
            refuse_compiled(self.model, self.ranks)

    @contextmanager
    def computing(
        self,
        plan: ChunkPlan | None = None,
        returned: dict[int, Tensor] | None = None,
        decoder: HFDecoder | None = None,
    ) -> Iterator[None]:
        """Within it the passes of a plan run, or with None such as give no gradients: weights in
        the compute dtype, attention furlong's, draws of this process. Gradients are added to
        `.grad`, or end in `returned`; see `compute_parameters`. `decoder`: the adapter that runs,
        if not the newest: a model that was switched between two phases has another one by then.
        """
        model, trains = self.model.model, plan is not None and bool(plan.trained)
        with ExitStack() as stack:
            if trains:
                refuse_trained(model, hooks=returned is None)
            if plan is not None and trains and returned is None:
                if self.state.pipeline is not None:
                    stack.enter_context(self.state.pipeline.adding_up(self.model))
                stack.enter_context(added_gradients(model, keeps_zeros=plan.sampled))
            stack.enter_context(self._weights(returned, plan))
            stack.enter_context((decoder or self.model).installed())
            if self.ranks is not None and self.ranks.num_processes > 1:
                # masks of dropout must not be the same on all
                number = dist.get_rank(self.ranks.group)
                stack.enter_context(independent_draws(number, self.model.device))
            yield

    def _weights(
        self, returned: dict[int, Tensor] | None = None, plan: ChunkPlan | None = None
    ) -> AbstractContextManager[None]:
        """Within it the weights are in the compute dtype, and come as the plan says."""
        if self._is_sharded:
            gathers = plan is not None and plan.regathers
            return one_step(self.model.base, self.model.layers if gathers else ())
        dtype = self.compute_dtype
        unchanged = [] if dtype is None else self.model.stays_float32(dtype)
        return compute_parameters(self.model.model, dtype, unchanged=unchanged, returned=returned)

    def records(self) -> bool:
        """Whether a forward has something for autograd to record: a trained parameter, or what a
        hook adds to a frozen model, as one token tells. Call it within `call`."""
        if any(parameter.requires_grad for parameter in self.model.model.parameters()):
            return True
        if self.ranks is not None or not torch.is_grad_enabled():
            return False
        device = self.model.device
        with replayed(RNGState.read(device), device):
            token = torch.zeros(1, dtype=torch.int64, device=device)
            return self.model.whole_hidden(token).requires_grad

    @property
    def device(self) -> torch.device:
        """Where it computes: where the weights are between calls, unless they are offloaded."""
        if self.offload_weights and self.ranks is not None:
            return self.ranks.device
        where = (parameter.device for parameter in self.given.parameters())
        return next(where, torch.device("cpu"))

    @property
    def autocast_kind(self) -> str:
        """The type of its device, "cpu" where that knows no autocast."""
        kind = self.device.type
        return kind if torch.amp.is_autocast_available(kind) else "cpu"

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
        """The exchange with the others of a pool, always the same one; None without others."""
        if self.ranks is None or self.ranks.sp == 1:
            return None
        self.state.exchange = self.state.exchange or AllToAll(self.ranks.place_groups)
        return self.state.exchange

    @property
    def num_frozen_layers(self) -> int:
        """First layers in which, and below which, no process trains anything. A collective."""
        own = self.model.num_frozen_layers
        return own if self.ranks is None else min(n for (n,) in gathered(self.ranks, [own]))

    def rows_of(self, plan: ChunkPlan) -> Callable[[Chunk], ChunkRows]:
        """The rows of each chunk of a plan that this process has."""
        return rows_on(self.model, plan, self.process)

    def comms(self, plan: ChunkPlan) -> Comms:
        """The comms with other ranks, for one plan."""
        model, messages = self.model, None
        if self.state.pipeline is not None:
            rows_of = self.rows_of(plan)
            dtypes = (p.dtype for p in model.base.parameters() if p.is_floating_point())
            parcel = Parcel(
                model.config.hidden_size, self.compute_dtype or next(dtypes), model.device,
                lambda chunk: rows_of(chunk).num_rows,
            )  # fmt: skip
            messages = self.state.pipeline.links, parcel
        is_alone = self.ranks is not None and self.ranks.num_processes == 1
        if self.offload_weights and is_alone and model.device.type == "cuda":
            self.state.copies = self.state.copies or torch.cuda.Stream(model.device)
        return Comms(self.ranks, model, messages, self.state.copies)

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """This process's parameters that another stage has, too, and counts."""
        pipeline, weight = self.state.pipeline, self.model.tied_weight
        is_second = pipeline is not None and pipeline.is_second
        return [weight] if is_second and weight is not None else []

    @property
    def _is_sharded(self) -> bool:
        ranks = self.state.ranks
        return ranks is not None and ranks.divides

    def require_checked(
        self, heights: tuple[int, ...], now: tuple[int, int, int] | None = None
    ) -> None:
        """Check the model in stages of `heights` layers against its own forward, if that is new on
        any process. `now`: its fingerprint, by default that of the last `call`."""
        now = now or self._fingerprint
        assert now is not None
        key = self._key(now, heights)
        lacks = _CHECK * (key not in self.state.checked)
        lacks += _PROBE * ("probed" not in vars(self.model))
        lacking = each_of(self.ranks, lambda: lacks)
        if not any(lacking):
            return
        if any(own & _PROBE for own in lacking):  # all run the same passes, which gather
            vars(self.model).pop("probed", None)

        is_new = any(own & _CHECK for own in lacking)
        ranks, fault = self.ranks, "another process found an error with faster ones"

        def check() -> bool:
            """Return whether the model fails with fused modules."""
            nonlocal fault
            try:
                with self._weights(), ExitStack() as stack:
                    agree: Agree = dict
                    dtype = None
                    if ranks is not None and self._is_sharded:
                        place = "the start-up self-check"
                        opened = one_layer_at_a_time(self.model.base, ranks, place)
                        dtype, agree = self.compute_dtype, stack.enter_context(opened)
                    if is_new:
                        backend = self.state.backend
                        self_check(self.model, backend, heights, dtype, agree)
                    _ = self.model.probed  # an adapter that is new finds its mixers in a forward
            except (UnsupportedModelError, ElsewhereError) as error:
                if isinstance(error, LinkError) or not self.model.fused:
                    raise
                if isinstance(error, UnsupportedModelError):
                    fault = reason_of(error)
                return True
            return False

        if any(each_of(ranks, check)):  # then all keep what their modules compute
            self.model.fused, is_new = [], True
            together(ranks, check)
            self.state.keeps_written = True
            words = f"{self.model.name} keeps its own norms and adapters in chunks: {fault}"
            warnings.warn(words, stacklevel=2)
        self.state.checked.add(key)

    def _key(self, now: tuple[int, int, int], heights: tuple[int, ...]) -> tuple[object, ...]:
        return now[:2], self.compute_dtype, self.max_seq_len, heights, self._is_entered

    def _shard(self, ranks: Ranks) -> None:
        """Divide the weights."""
        model = self.model
        whole = [weakref.ref(p) for p in model.base.parameters() if p.requires_grad]
        share = partial(divide, model, ranks, self.compute_dtype, offload=self.offload_weights)
        together(ranks, share)
        if ranks.divides and whole and all(parameter() is not None for parameter in whole):
            warnings.warn(_HELD_ELSEWHERE, stacklevel=5)

    def _require_own_shards(self, base: nn.Module) -> None:
        """Raise ConfigError for weights that others have divided, or this engine otherwise."""
        ranks, dtype = self.state.ranks, self.state.compute_dtype
        if ranks is None:
            return
        if ranks != self.ranks or dtype != self.compute_dtype:
            raise ConfigError(
                given=f"weights divided among {ranks.num_processes} processes "
                f"for a compute_dtype of {dtype}",
                required="an engine with the same ranks and the same compute_dtype",
                source="an earlier furlong.Engine of this model",
                change="pass that engine's ranks and compute_dtype, or load the model again",
            )
        whole = (name for name, p in base.named_parameters() if type(p) is nn.Parameter)
        put_in = next(whole, None) if self._is_sharded else None
        if put_in is not None:
            raise ConfigError(
                given=f"the parameter {put_in}, put into a model whose weights are divided",
                required="all parameters in the model when the engine is made",
                source="a change of the model after furlong.Engine was made",
                change="add adapters first, then make the engine, then the optimizer",
            )


def divide(
    model: HFDecoder, ranks: Ranks, compute_dtype: torch.dtype | None, *, offload: bool = False
) -> None:
    """Divide a model's weights among the processes of its stage, for good. On meta, before they are
    read, each process has a place for its share of them. Engines of it are given the same `ranks`
    and `compute_dtype`; see `fsdp.shard`, for `offload` too."""
    if ranks.divides:
        unchanged = [] if compute_dtype is None else model.stays_float32(compute_dtype)
        layers = [x for x in model.layers if not isinstance(x, PlaceholderLayer)]
        ends = [module for module in model.ends if module is not None]
        shard(
            model.base, layers, ends, ranks.shard_mesh, compute_dtype,
            unchanged=unchanged, offload=offload,
        )  # fmt: skip
    state = _STATES.setdefault(model.base, ModelState())
    state.ranks, state.compute_dtype = ranks, compute_dtype


def fingerprint(model: nn.Module) -> tuple[int, int, int]:
    """Hashes of everything but the weights' values on which the adapter depends, of the modes on
    which its check depends besides, which modules train, and of which weights do.

    The first is of the config, of every module with its type, its active adapters, the code of its
    forward and of hooks, and whether a compiled call is in it, and of the shape, dtype and device
    of every parameter. Comparable within one process.
    """
    config: Any = getattr(model, "config", None)
    text = json.dumps(config.to_dict(), default=str, sort_keys=True) if config is not None else ""
    modules = tuple(
        (id(module), type(module), _adapters(module), *_put_in(module, vars(module)))
        for module in model.modules()
    )
    weights = tuple((p.shape, p.dtype, p.device) for p in model.parameters())
    kernel = getattr(config, "_attn_implementation", None)
    modes = hash(tuple(module.training for module in model.modules()))
    trained = hash(tuple(p.requires_grad for p in model.parameters()))
    return hash((text, kernel, modules, weights)), modes, trained


def module_facts(model: nn.Module) -> dict[str, str]:
    """Return the modes, hooks, forwards and adapters of a model's modules by name, in words that
    can be compared between processes, which `fingerprint` cannot."""
    facts = {}
    for name, module in model.named_modules():
        where = name or "the model"
        hooks = [
            f"{kind[1:-1]} {_code_in_words(hook)}"
            for kind in HOOKS
            for hook in vars(module)[kind].values()
            if not str(getattr(hook, "__module__", "")).startswith(("torch.", "furlong."))
        ]
        facts[f"mode of {where}"] = _mode(module)
        facts[f"hooks of {where}"] = ", ".join(hooks) or "none"
        facts[f"forward of {where}"] = _code_in_words(module.forward)
        facts[f"adapters of {where}"] = "{} (disabled: {})".format(*_adapters(module))
    return facts


def _code_in_words(function: Any) -> str:
    """The name and a checksum of a function's code; of what is no function, its type."""
    code = _code(function)
    if not isinstance(code, CodeType):
        return f"{code.__module__}.{code.__qualname__}"
    # constants of other kinds are repeated otherwise by each process
    plain = [x for x in code.co_consts if isinstance(x, int | float | str | bytes | None)]
    text = repr((code.co_names, plain)).encode() + code.co_code
    return f"{code.co_qualname} {crc32(text):x}"


def _mode(module: nn.Module) -> str:
    return "training" if module.training else "evaluation"


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _put_in(module: nn.Module, attributes: dict[str, Any]) -> tuple[Any, ...]:
    """The code of a module's forward and hooks, by its value: an address may come again, and a hook
    that is put in for each step is the same. And whether a compiled call was set on it."""
    hooks = (tuple(map(_code, attributes[kind].values())) for kind in HOOKS)
    return *hooks, _code(module.forward), attributes.get(COMPILED_CALL) is not None


def _code(function: Any) -> Any:
    return getattr(function, "__code__", type(function))


def adapter_states(model: nn.Module) -> tuple[Any, ...]:
    """The active adapters of every module of peft, whether they are disabled, and what of them is
    merged into the weights."""
    return tuple(
        (*_adapters(module), tuple(module.__dict__.get("merged_adapters") or ()))
        for module in model.modules()
        if "_active_adapter" in module.__dict__ or "merged_adapters" in module.__dict__
    )


def _adapters(module: nn.Module) -> tuple[str, bool]:
    """The active adapters of a module of peft, and whether they are disabled."""
    disabled = bool(module.__dict__.get("_disable_adapters", False))
    return str(getattr(module, "_active_adapter", "")), disabled


def refuse_mode() -> None:
    """Raise ConfigError for a mode of torch around a call in which nothing can be recorded."""
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            given="torch.inference_mode around furlong",
            required="tensors that autograd may record, also in buffers that later calls use",
            source="the caller's code",
            change="use torch.no_grad, which is all that backward=False needs",
        )
    if torch._C._are_functorch_transforms_active():
        raise ConfigError(
            given="a transform of torch.func (grad, vmap, jvp) around furlong",
            required="autograd's own backward, which walks the chunks",
            source="the caller's code",
            change="use loss.backward() or torch.autograd.grad, of the model's own parameters",
        )


def refuse_call(module: nn.Module, _: object) -> None:
    """A hook of a model during a call of ours, which never calls it whole."""
    raise called_within(module)


def refuse_autocast(model: nn.Module, kind: str, compute_dtype: torch.dtype | None) -> None:
    """Raise ConfigError for an autocast around a call to another dtype than that of the compute."""
    if torch.is_autocast_enabled(kind):
        wanted = torch.get_autocast_dtype(kind)
        computing = {compute_dtype or p.dtype for p in model.parameters() if p.is_floating_point()}
        if computing != {wanted}:
            raise ConfigError(
                given=f"torch.autocast to {wanted} around a model of "
                + ", ".join(sorted(map(str, computing))),
                required="one dtype of the compute, which the engine sets itself",
                source="the caller's torch.autocast",
                change=f"pass compute_dtype={wanted} and leave autocast out",
            )


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast of a caller, to be entered again: around passes, and around the head."""

    kind: str
    dtype: torch.dtype
    enabled: bool

    @staticmethod
    def captured(kind: str) -> Autocast:
        return Autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def __call__(self) -> AbstractContextManager[object]:
        # casts that were made without a graph would have none in a pass with one
        return torch.autocast(self.kind, self.dtype, self.enabled, cache_enabled=False)


def untrainable(model: HFDecoder) -> ConfigError:
    """The refusal of a step that nothing is trained in, on no process."""
    return ConfigError(
        given=f"{model.name} without a parameter that requires a gradient",
        required="at least one trainable parameter",
        source="the model that was passed",
        change="model.requires_grad_(True), add adapters, or pass backward=False",
    )


def refuse_compiled(model: HFDecoder, ranks: Ranks | None) -> None:
    """Raise UnsupportedModelError for compiled layers whose weights FSDP2 gathers, or with dropout:
    a graph of its own for passes without gradients need not draw what a recompute draws."""
    dropouts = other_dropouts(model.base)
    if ranks is not None or dropouts:
        beside, change = "on several processes", "train in one process"
        if ranks is None:
            beside, change = f"and dropout ({next(iter(dropouts))})", "dropout"
        elif ranks.num_processes == 1:
            beside, change = "whose weights are in CPU memory", "keep them on the device"
        raise UnsupportedModelError(
            given=f"{model.name} with layers that are compiled in place, {beside}",
            required="layers that draw nothing, whole in one process",
            source="layer.compile(), or model.compile of a run",
            change=f"leave it out, or {change}",
        )

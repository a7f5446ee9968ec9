"""A caller's model between calls: wrapped and checked again whenever it has changed, sharded once.

Each call computes the model's fingerprint (see `runtime.scan`). If the fingerprint differs from the
previous call's, the model has changed: it was resized, moved or cast, its config was edited, or
adapters or modes were added or switched. Torch's modes, such as inference_mode, are tested at each
call. They are refused; only an autocast may be entered again around each pass.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

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
    bare_model,
    other_dropouts,
    refuse_attention_dropout,
    refuse_state,
    refuse_trained,
    unwrapped,
)
from furlong.ops.backends.select import ProbedBackend
from furlong.ops.sequence_parallel import AllToAll
from furlong.plan.plan import Chunk, ChunkPlan
from furlong.plan.rows import ChunkRows
from furlong.runtime.batch import require_type
from furlong.runtime.cell import rows_on
from furlong.runtime.check import Agree, self_check
from furlong.runtime.distributed.comms import Comms, Pipeline, open_pipeline
from furlong.runtime.distributed.consensus import (
    Facts,
    agree,
    all_gather_ints,
    require_equal_models,
    run_on_all,
)
from furlong.runtime.distributed.failures import is_lost, leave, lost
from furlong.runtime.distributed.fsdp import one_layer_at_a_time, one_step, reshard, shard
from furlong.runtime.distributed.mesh import Ranks, ranks_given, require_stages
from furlong.runtime.distributed.p2p import Parcel
from furlong.runtime.precision import added_gradients, compute_parameters
from furlong.runtime.rng import RNGState, independent_draws, replayed
from furlong.runtime.scan import Fingerprint, ModelScan, mode_of, module_facts, scan


@dataclass
class ModelState:
    """State of one model, shared by its engines: pools, probed kernels, passed checks, groups."""

    pools: Pools | None = None
    backend: ProbedBackend = field(default_factory=ProbedBackend)
    checked: set[tuple[Any, ...]] = field(default_factory=set)
    agreed: Agreed = field(default_factory=dict)
    keeps_written: bool = False
    """Whether the self-check failed with fused modules and passed without them."""
    thread: int | None = None
    """Thread of the running call, if any."""
    pooled: threading.Lock = field(default_factory=threading.Lock)
    """Held while memory of the pools is allocated or freed: by a call, or by `sweep`."""
    ranks: Ranks | None = None
    """The processes that the weights are sharded over; never changes once set."""
    pipeline: Pipeline | None = None
    """Links to other stages, with pp > 1."""
    exchange: AllToAll | None = None
    """All-to-all of the sequence-parallel group, with sp > 1."""
    trained_layers: range | None = None
    """With pp > 1, the layers that this process has trained."""
    is_broken: bool = False
    """Whether an earlier call ended with an error while other processes waited for this one."""
    compute_dtype: torch.dtype | None = None
    """The dtype that sharded weights are gathered in."""
    copies: torch.cuda.Stream | None = None
    """Stream of copies of offloaded weights to the GPU, on a single process."""
    room_bytes: int | None = None
    """Device bytes that calls with keep="auto" may use, measured at the first one."""
    num_calls: int = 0
    """Number of token_values and hidden_states calls, equal on all processes."""
    dropped: deque[Callable[[], None]] = field(default_factory=deque)
    """Functions that free calls whose outputs were garbage-collected."""

    def drop(self, end: Callable[[], None]) -> None:
        """Call `end`, which frees the tensors of a call whose outputs are no longer used: now, or
        after the running call if there is one."""
        self.dropped.append(end)
        self.sweep()

    def sweep(self) -> None:
        """Call the functions in `dropped`, which free tensors of earlier calls, unless a call is
        running.

        In a pool's thread nothing is done. The garbage collector may run there, but freeing tensors
        would wait for that same thread."""
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
        """Context manager for a call: calls of other threads wait, on any model. Raises ConfigError
        inside another call on this model."""
        self.refuse_nested()
        try:
            with _CALLS, self.pooled:  # another thread's sweep is short
                self.thread = threading.get_ident()
                try:
                    yield
                finally:
                    self.thread = None
        finally:
            self.sweep()

    def refuse_nested(self) -> None:
        """Raise ConfigError inside another call on this model."""
        if self.is_inside:
            raise ConfigError(
                given="a call of furlong on a model while another one runs",
                required="one call at a time on each model",
                source="a hook of the model, or a function of its values",
                change="call them one after the other",
            )

    @property
    def is_inside(self) -> bool:
        """Whether the running call is this thread's."""
        return self.thread == threading.get_ident()

    def close(self) -> None:
        """Free the pools' memory, threads and files, and the groups between stages; the next call
        opens new ones."""
        if self.pools is not None:
            storage = self.pools.storage
            self.pools.close()
            self.pools = Pools(Arena(self.pools.arena.device, poison=storage.poison), storage)
        self.close_links()

    def close_links(self) -> None:
        """Destroy the process groups between stages."""
        if self.pipeline is not None:
            self.pipeline.links.close()
            self.pipeline = None

    @property
    def opened(self) -> Pools:
        """The pools that `open_pools` created."""
        assert self.pools is not None
        return self.pools

    def open_pools(self, device: torch.device, storage: Storage | None) -> None:
        """Create pools, unless this process has created some for this device and storage."""
        if self.pools is not None:
            storage = storage or self.pools.storage
            is_own = self.pools.process == os.getpid()
            if is_own and self.pools.arena.device == device and self.pools.storage == storage:
                return
            if is_own:
                self.pools.close()
        storage = storage or Storage()
        self.pools = Pools(Arena(device, poison=storage.poison), storage)


# Keyed weakly by model: buffers are freed with the model, and its copies and saved files contain
# no state of furlong.
_STATES: WeakKeyDictionary[nn.Module, ModelState] = WeakKeyDictionary()
# One call at a time per process: a call sets the attention implementation in a config, which models
# may share, and it replays the process's random generators.
_CALLS = threading.RLock()
_CHANGED, _UNLINKED = 1, 2
"""Bits exchanged at a call: the model's fingerprint has changed; the pipeline has no links."""
_CHECK, _PROBE = 1, 2
"""Bits of work to do with a model that is new on some process: self-check; probing forward."""
_HELD_ELSEWHERE = (
    "the weights are divided among the processes now, but something still holds them whole: an "
    "optimizer that was made before the engine trains nothing. Make the engine first"
)


class Session:
    """One model with the settings of one engine. Each `call` sets `model`, the wrapper of the
    caller's model `given`."""

    model: HFDecoder
    scan: ModelScan
    """The model as the current call finds it."""
    frozen_layers: list[int]
    """Number of first layers without a trained parameter, of each process."""
    trains: bool
    """Whether any process trains a parameter."""

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
        """
        Args:
            given: The caller's model.
            ranks: The processes that make each call together. If the processes are replicas only,
                `process_group` may be given instead. Without both: a single process.
            is_entered: See `HFDecoder`. If True, the caller computes the head.
            max_seq_len, compute_dtype, storage, offload_weights: See `Engine`.
        """
        if storage is not None:
            require_type(storage, Storage)
        if process_group is not None:
            change = "pass dist.group.WORLD, or what dist.new_group returns to its members"
            require_type(process_group, ProcessGroup, change)
        self.offload_weights = offload_weights
        self.given, self.storage, self.is_entered = given, storage, is_entered
        self.max_seq_len, self.compute_dtype = max_seq_len, compute_dtype
        self.state = _STATES.setdefault(bare_model(given), ModelState())
        self.ranks: Ranks | None = None
        self.ranks = ranks_given(ranks, process_group, self.autocast_kind, offload_weights)
        self._fingerprint: Fingerprint | None = None

    @contextmanager
    def alone(self, *, takes_autocast: bool = False) -> Iterator[None]:
        """Context manager for a call on this process: disables autocast, and refuses further calls
        on this model. Raises ConfigError inside another call, inference_mode or a torch.func
        transform, and for a caller's autocast to another dtype than the compute dtype. With
        `takes_autocast` any autocast is accepted; the user of this method enters it around each
        pass."""
        refuse_mode()
        base, kind = unwrapped(self.given), self.autocast_kind
        with self.state.running(), hooked(base, refuse_call):
            if self._is_sharded:
                reshard(base)  # a direct call of the model leaves weights gathered
            self.scan = scan(self.given, base)
            try:
                if not takes_autocast:
                    refuse_autocast(self.scan.parameters, kind, self.compute_dtype)
                with torch.autocast(kind, enabled=False):
                    yield
            finally:
                vars(self).pop("scan", None)  # it would keep modules that a caller replaces

    @contextmanager
    def call(
        self,
        place: str,
        read: Callable[[], tuple[Any, Facts, Any]] = lambda: (None, {}, None),
        *,
        takes_autocast: bool = False,
    ) -> Iterator[tuple[Any, list[Any]]]:
        """Context manager for a call that all processes make together. If the model has changed on
        any process, it is first wrapped and checked again (and sharded, the first time).

        `read` runs on each process, and returns (result, facts, value) as for `consensus.agree`;
        `place`, too, is described there. Yields (result of `read` on this process, value of each
        process). If the model had changed, or links between stages were missing, `read` runs once
        more after they are set up.

        If one process raises an error, all do. Raises LinkError if an earlier call failed inside a
        collective.
        """
        self.state.refuse_nested()
        if self.state.is_broken:
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

            def enter() -> tuple[Any, Facts, tuple[int, Any]]:
                stack.enter_context(self.alone(takes_autocast=takes_autocast))
                self.state.open_pools(self.device, self.storage)
                lacks_links = self.ranks is not None and self.ranks.pp > 1
                lacks_links = lacks_links and self.state.pipeline is None
                news = _CHANGED * (self.scan.fingerprint != self._fingerprint)
                news += _UNLINKED * lacks_links
                if news:
                    return None, {}, (news, None)
                made, facts, value = read()
                return made, facts, (0, value)

            made, each = agree(self.ranks, enter, place)
            values = [value for _, value in each]
            if any(news & _CHANGED for news, _ in each):
                self._adapt()
            if self.ranks is not None and any(news & _UNLINKED for news, _ in each):
                self.state.close_links()
                self.state.pipeline = open_pipeline(self.ranks, self.model)
            if any(news for news, _ in each):
                made, values = agree(self.ranks, read, place)
            yield made, values

    @contextmanager
    def heard(self, place: str, *, by_all: bool = True) -> Iterator[None]:
        """Context manager: an error inside is written to the process group's store, and connections
        are closed, so that processes that wait for this one raise, too. Raises LinkError if the
        error is a lost connection. With `by_all`, all processes raise other errors anyway, so only
        a lost connection or an interrupt is treated like this."""
        if (ranks := self.ranks) is None or ranks.num_processes == 1:
            yield
            return
        try:
            yield
        except BaseException as error:
            is_agreed = by_all and not self.state.is_broken
            if is_agreed and isinstance(error, Exception) and not is_lost(error):
                raise
            self.state.is_broken = True
            pipeline = self.state.pipeline
            groups = [*ranks.groups, *(pipeline.links.groups if pipeline is not None else ())]
            if is_lost(error) and not isinstance(error, LinkError):
                raise lost(groups, error, place) from error
            leave(f"left it by {reason_of(error)}", groups)  # the first reason stays
            raise

    def _adapt(self) -> None:
        """Wrap, compare, check and shard the model, which has changed on some process."""
        run_on_all(self.ranks, self._wrap)
        if self.ranks is not None:
            base = self.model.base
            settings = {"max_seq_len": str(self.max_seq_len), "mode": mode_of(base)}
            require_equal_models(
                self.model, self.ranks, self.compute_dtype, settings, module_facts(base),
                are_known=self.state.ranks is not None,
            )  # fmt: skip
        ranks = self.ranks if self.state.ranks is None else None
        if ranks is not None and self.offload_weights:  # check on the compute device
            self._shard(ranks)
            ranks = None
        heights = (self.model.num_layers,)
        trains = any(parameter.requires_grad for parameter in self.scan.parameters)

        def read() -> tuple[None, Facts, tuple[int, int, bool]]:
            # only stages ask for frozen layers; not every decoder holds a list of its layers
            is_cut = self.ranks is not None and self.ranks.pp > 1
            num_frozen = self.model.num_frozen_layers if is_cut else 0
            return None, {}, (self.lacks(heights), num_frozen, trains)

        _, each = agree(self.ranks, read)
        self.require_checked(heights, [lacks for lacks, *_ in each])
        self.frozen_layers = [num_layers for _, num_layers, _ in each]
        self.trains = any(trains for *_, trains in each)
        own = [int(self.model.events is not None)]
        of_all = all_gather_ints(self.ranks, own) if self.ranks is not None else [own]
        self.is_recurrent = any(n for (n,) in of_all)
        if ranks is not None:
            self._shard(ranks)  # needs no second check
            self.state.checked.add(self._key((self.model.num_layers,)))
        self._fingerprint = self.scan.fingerprint

    def _wrap(self) -> None:
        """Wrap the model; keep the wrapper if only modes or `requires_grad` have changed."""
        base = self.scan.modules[0]
        self._require_own_shards(base)
        if self._fingerprint is None or self.scan.fingerprint[0] != self._fingerprint[0]:
            self._fingerprint = None  # after an error the old adapter must not be used
            settle(bare_model(self.given))
            refuse_state(base)
            self.model = HFDecoder(
                self.given,
                max_seq_len=self.max_seq_len,
                needs_head=not self.is_entered,
                is_entered=self.is_entered,
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
        """Context manager for passes: weights in the compute dtype, furlong's attention installed,
        and draws that differ between processes.

        Args:
            plan: The plan to run; None for passes without gradients.
            returned: Where gradients go instead of `.grad`; see `compute_parameters`.
            decoder: The wrapper to install, by default `model`. The second phase of token values
                passes the wrapper of its forward: the model may have been wrapped anew meanwhile.
        """
        found, trains = self.scan, plan is not None and bool(plan.trained)
        with ExitStack() as stack:
            if trains:
                refuse_trained(
                    self.model.model, found.modules, found.parameters, hooks=returned is None
                )
            if plan is not None and trains and returned is None:
                if self.state.pipeline is not None:
                    stack.enter_context(self.state.pipeline.adding_up(self.model))
                stack.enter_context(added_gradients(found.parameters, keeps_zeros=plan.sampled))
            stack.enter_context(self._weights(returned, plan))
            stack.enter_context((decoder or self.model).installed(found.modules))
            if self.ranks is not None and self.ranks.num_processes > 1:
                # dropout masks must differ between processes
                number = dist.get_rank(self.ranks.group)
                stack.enter_context(independent_draws(number, self.model.device))
            yield

    def _weights(
        self, returned: dict[int, Tensor] | None = None, plan: ChunkPlan | None = None
    ) -> AbstractContextManager[None]:
        """Context manager: use weights in the compute dtype, gathered as the plan says."""
        if self._is_sharded:
            gathers = plan is not None and plan.regathers
            return one_step(self.model.base, self.model.layers if gathers else ())
        dtype = self.compute_dtype
        unchanged = [] if dtype is None else self.model.stays_float32(dtype)
        return compute_parameters(self.scan.modules, dtype, unchanged=unchanged, returned=returned)

    def records(self) -> bool:
        """Whether autograd builds a graph in a forward of the model. It does if a parameter is
        trained. On a single process, with grad mode on, it also does if a hook makes hidden states
        require gradients, which is tested by a forward of one token. Use it inside `call`."""
        if any(parameter.requires_grad for parameter in self.scan.parameters):
            return True
        if self.ranks is not None or not torch.is_grad_enabled():
            return False
        device = self.model.device
        with replayed(RNGState.read(device), device):
            token = torch.zeros(1, dtype=torch.int64, device=device)
            return self.model.whole_hidden(token).requires_grad

    @property
    def device(self) -> torch.device:
        """The compute device: that of the weights, unless they are offloaded."""
        if self.offload_weights and self.ranks is not None:
            return self.ranks.device
        where = (parameter.device for parameter in self.given.parameters())
        return next(where, torch.device("cpu"))

    @property
    def autocast_kind(self) -> str:
        """The device type for autocast; "cpu" if the device has none."""
        kind = self.device.type
        return kind if torch.amp.is_autocast_available(kind) else "cpu"

    @property
    def rank(self) -> int:
        """Index of the plan's list of actions that this process runs."""
        return self.ranks.plan_rank if self.ranks else 0

    @property
    def process(self) -> int:
        """Number of this process in its sequence-parallel group."""
        return self.ranks.process if self.ranks else 0

    @property
    def exchange(self) -> AllToAll | None:
        """All-to-all of the sequence-parallel group, created once; None for a group of one."""
        if self.ranks is None or self.ranks.sp == 1:
            return None
        self.state.exchange = self.state.exchange or AllToAll(self.ranks.place_groups)
        return self.state.exchange

    def rows_of(self, plan: ChunkPlan) -> Callable[[Chunk], ChunkRows]:
        """Return a function from a chunk of the plan to its rows on this process."""
        return rows_on(self.model, plan, self.process)

    def comms(self, plan: ChunkPlan) -> Comms:
        """Return the messages and collectives of this process for one plan."""
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
        """Replicated parameters (tied embeddings) that another stage adds to the gradient norm."""
        pipeline, weight = self.state.pipeline, self.model.tied_weight
        is_second = pipeline is not None and pipeline.is_second
        return [weight] if is_second and weight is not None else []

    @property
    def _is_sharded(self) -> bool:
        ranks = self.state.ranks
        return ranks is not None and ranks.divides

    def lacks(self, heights: tuple[int, ...]) -> int:
        """Return which checks this process has not made for stages of `heights` layers, as a sum: 1
        for the self-check, 2 for the forward that finds the model's recurrent mixers."""
        lacks = _CHECK * (self._key(heights) not in self.state.checked)
        return lacks + _PROBE * ("probed" not in vars(self.model))

    def require_checked(self, heights: tuple[int, ...], lacking: Sequence[int]) -> None:
        """Run the self-check for stages of `heights` layers, unless all processes have passed it.
        `lacking` has the result of `lacks` of each process. A collective, unless all are 0.

        If the check fails with fused modules, it runs again without them. If it then passes, the
        model keeps its own modules, with a warning."""
        key = self._key(heights)
        if not any(lacking):
            return
        if any(own & _PROBE for own in lacking):  # passes gather weights, so all run the same ones
            vars(self.model).pop("probed", None)

        is_new = any(own & _CHECK for own in lacking)
        ranks, fault = self.ranks, "another process found an error with faster ones"

        def check() -> bool:
            """Run the self-check here. Return True if it failed with fused modules, False if it
            passed. Raise its error if the model has no fused modules."""
            nonlocal fault
            try:
                with self._weights(), ExitStack() as stack:
                    agree: Agree = dict
                    dtype = None
                    if ranks is not None and self._is_sharded:
                        place = "the start-up self-check"
                        opened = one_layer_at_a_time(self.model.base, ranks, place)
                        dtype, agree = self.compute_dtype, stack.enter_context(opened)
                        head: Any = self.model.ends[1]
                        if self.is_entered and isinstance(head, FSDPModule):
                            head.unshard()  # FSDP2 expects what no pass uses to have been gathered
                    if is_new:
                        backend = self.state.backend
                        self_check(self.model, backend, heights, dtype, agree)
                    _ = self.model.probed  # a forward in which a new adapter finds recurrent mixers
            except (UnsupportedModelError, ElsewhereError) as error:
                if isinstance(error, LinkError) or not self.model.fused:
                    raise
                if isinstance(error, UnsupportedModelError):
                    fault = reason_of(error)
                return True
            return False

        _, fails = agree(ranks, lambda: (None, {}, check()))
        if any(fails):  # then all processes go without fused modules
            self.model.fused, is_new = [], True
            run_on_all(ranks, check)
            self.state.keeps_written = True
            words = f"{self.model.name} keeps its own norms and adapters in chunks: {fault}"
            warnings.warn(words, stacklevel=2)
        self.state.checked.add(key)

    def _key(self, heights: tuple[int, ...]) -> tuple[object, ...]:
        now = self.scan.fingerprint[:2]
        return now, self.compute_dtype, self.max_seq_len, heights, self.is_entered

    def _shard(self, ranks: Ranks) -> None:
        """Shard the weights; warn if other objects still hold them whole."""
        whole = [weakref.ref(p) for p in self.scan.parameters if p.requires_grad]
        del self.scan  # it holds them, too

        def share() -> None:
            divide(self.model, ranks, self.compute_dtype, offload=self.offload_weights)
            self.scan = scan(self.given, self.model.base)

        run_on_all(ranks, share)
        if ranks.divides and whole and all(parameter() is not None for parameter in whole):
            warnings.warn(_HELD_ELSEWHERE, stacklevel=5)

    def _require_own_shards(self, base: nn.Module) -> None:
        """Raise ConfigError for weights sharded for other ranks or another compute dtype."""
        ranks, dtype = self.state.ranks, self.state.compute_dtype
        if ranks is None:
            return
        if ranks != self.ranks or dtype != self.compute_dtype:
            raise ConfigError(
                given=f"weights divided among {ranks.num_processes} processes "
                f"for a compute_dtype of {dtype}",
                required="an engine with the same ranks and the same compute_dtype",
                source="an earlier furlong.Engine or furlong.chunked of this model",
                change="pass that engine's ranks and compute_dtype, or load the model again",
            )
        whole = (name for name, p in base.named_parameters() if type(p) is nn.Parameter)
        put_in = next(whole, None) if self._is_sharded else None
        if put_in is not None:
            raise ConfigError(
                given=f"the parameter {put_in}, put into a model whose weights are divided",
                required="all parameters in the model when its weights are divided",
                source="a change of the model after furlong.Engine or furlong.chunked",
                change="add adapters first, then call that, then make the optimizer",
            )


def divide(
    model: HFDecoder, ranks: Ranks, compute_dtype: torch.dtype | None, *, offload: bool = False
) -> None:
    """Shard a model's weights over the processes of its stage, permanently. A model on meta is
    sharded before its weights are read. Later engines need the same `ranks` and `compute_dtype`.
    `offload`: see `fsdp.shard`."""
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


def refuse_mode() -> None:
    """Raise ConfigError inside inference_mode or a torch.func transform."""
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
    """Forward pre-hook: refuse a user's call of the model while a call of furlong runs."""
    raise called_within(module)


def refuse_autocast(
    parameters: Iterable[nn.Parameter], kind: str, compute_dtype: torch.dtype | None
) -> None:
    """Raise ConfigError for a caller's autocast to another dtype than the compute dtype."""
    if torch.is_autocast_enabled(kind):
        wanted = torch.get_autocast_dtype(kind)
        computing = {compute_dtype or p.dtype for p in parameters if p.is_floating_point()}
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
    """A caller's autocast. A call of this object enters it again, around a pass or the head."""

    kind: str
    dtype: torch.dtype
    enabled: bool

    @staticmethod
    def captured(kind: str) -> Autocast:
        return Autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def __call__(self) -> AbstractContextManager[object]:
        # a cast cached in a pass without a graph would have no graph in the next one
        return torch.autocast(self.kind, self.dtype, self.enabled, cache_enabled=False)


def untrainable(model: HFDecoder) -> ConfigError:
    """Return the error of a step in which no process trains a parameter."""
    return ConfigError(
        given=f"{model.name} without a parameter that requires a gradient",
        required="at least one trainable parameter",
        source="the model that was passed",
        change="model.requires_grad_(True), add adapters, or pass backward=False",
    )


def refuse_compiled(model: HFDecoder, ranks: Ranks | None) -> None:
    """Raise UnsupportedModelError for compiled layers with FSDP2 or with dropout: a graph
    compiled for no_grad may draw other random numbers than the recompute."""
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

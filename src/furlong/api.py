"""Entry points of a training loop: `forward_backward`, and `Engine`, which keeps its settings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Unpack
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from furlong.errors import ConfigError
from furlong.models.causal_lm import CausalLM
from furlong.models.fingerprint import fingerprint
from furlong.models.wrappers import bare_model, refuse_placement
from furlong.plan.values import Backward, ChunkPlan
from furlong.planners.options import ChunkOptions
from furlong.planners.orders.one_device import plan_on_device
from furlong.planners.sampling.plans import sampled
from furlong.runtime.chunk_inputs import labelled_chunks
from furlong.runtime.comms import Alone
from furlong.runtime.executor import Executor
from furlong.runtime.inputs import (
    ShiftedSequence,
    check_compute_dtype,
    check_ranges,
    count_valid_tokens,
    divisor_of,
    no_data,
    require_options,
    require_plan,
    require_seq_lens,
    shift_labels,
    whole_number,
)
from furlong.runtime.kept import Kept
from furlong.runtime.pools import Storage
from furlong.runtime.precision import compute_parameters, made_gradients
from furlong.runtime.recorder import Measuring
from furlong.runtime.result import StepResult
from furlong.runtime.self_check import self_check
from furlong.runtime.surroundings import (
    device_type,
    drawn,
    left_out,
    refuse_mode,
    refuse_untrainable,
)


def _nothing() -> None:
    """The watch of a caller who gave none: it lets every action pass."""


# By the model itself, weakly: a model that is forgotten takes its buffers with it, and its copies
# and saved files hold nothing of ours.
_KEPT: WeakKeyDictionary[nn.Module, Kept] = WeakKeyDictionary()


class Engine:
    """A model ready for chunk-wise training, with the settings of its calls."""

    def __init__(
        self,
        model: nn.Module,
        *,
        max_seq_len: int | None = None,
        compute_dtype: torch.dtype | None = None,
        storage: Storage | None = None,
    ) -> None:
        """`max_seq_len`: the run's longest sequence, needed by RoPE of type longrope only.
        `compute_dtype`: the dtype in which float32 weights compute (None: as they are).
        `storage`: bounds and folder of the tiers host and disk; a later engine of the same model
        may set others, None leaves them.

        Raises UnsupportedModelError, by name, for a model that cannot be trained exactly. A model
        is checked against its own forward on first use, and again when its modules, its config,
        its dtype or its device have changed.
        """
        check_compute_dtype(compute_dtype)
        self.compute_dtype = compute_dtype
        self.max_seq_len = None if max_seq_len is None else whole_number(max_seq_len, "max_seq_len")
        self._given, self._storage = model, storage
        self._kept = _KEPT.setdefault(bare_model(model), Kept())
        self._fingerprint: int | None = None
        self._notes: set[str] = set()
        with self._alone():
            self._follow_model()

    def plan(
        self, seq_lens: Sequence[int], options: ChunkOptions, *, backward: bool = True
    ) -> ChunkPlan:
        """The plan of a batch with sequences of `seq_lens` tokens; without backward it evaluates.
        Where `options` sample, a draw in which no chunk is known to have labels.

        Raises ConfigError for lengths that are no whole numbers and for what is no `ChunkOptions`.
        """
        lens = require_seq_lens(seq_lens)
        with self._alone():
            self._follow_model()
            return self._plan(lens, options, backward=backward)

    def run(
        self,
        plan: ChunkPlan,
        sequences: Sequence[Mapping[str, Tensor]],
        num_valid_tokens: int | None = None,
        **measuring: Unpack[Measuring],
    ) -> StepResult:
        """Obey a plan, of this engine or of a file, with sequences of the lengths it was made for.

        `measuring`: see `Measuring`; the other arguments and the outcome are as in
        `furlong.forward_backward`. Raises PlanError for a plan that breaks a rule or needs other
        ranks, DataError for sequences of other lengths.
        """
        shifted = shift_labels(sequences)
        require_plan(plan, shifted)
        with self._alone():
            self._follow_model()
            return self._obey(plan, shifted, num_valid_tokens, **measuring)

    def forward_backward(
        self,
        sequences: Sequence[Mapping[str, Tensor]],
        options: ChunkOptions,
        num_valid_tokens: int | None = None,
        backward: bool = True,
        *,
        watch: Callable[[], None] = _nothing,
    ) -> StepResult:
        """See `furlong.forward_backward`, and `run` of `Executor` for `watch`."""
        shifted = shift_labels(sequences)
        if not shifted:
            raise no_data("no sequences", "at least one sequence")
        with self._alone():
            self._follow_model()
            lens = [len(s.input_ids) for s in shifted]
            plan = self._plan(lens, options, backward=backward, shifted=shifted)
            return self._obey(plan, shifted, num_valid_tokens, watch=watch)

    def _plan(
        self,
        seq_lens: Sequence[int],
        options: ChunkOptions,
        *,
        backward: bool,
        shifted: Sequence[ShiftedSequence] = (),
    ) -> ChunkPlan:
        """`shifted`: the sequences, whose labels decide with which probability a chunk is drawn."""
        require_options(options)
        is_cut = options.order == "layer-first"
        plan = plan_on_device(
            seq_lens, options,
            num_layers=self.model.num_layers, backward=backward,
            frozen_layers=self.model.num_frozen_layers if is_cut and backward else 0,
        )  # fmt: skip
        sampling = options.sampling
        if sampling is None or not backward:
            return plan
        if sampling.seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
            sampling = replace(sampling, seed=seed)
        return sampled(plan, sampling, labelled_chunks(plan, shifted) if shifted else ())

    def _obey(
        self,
        plan: ChunkPlan,
        shifted: Sequence[ShiftedSequence],
        num_valid_tokens: int | None,
        watch: Callable[[], None] = _nothing,
        **measuring: Unpack[Measuring],
    ) -> StepResult:
        own_valid_tokens = count_valid_tokens(shifted)
        divisor = divisor_of(num_valid_tokens, own_valid_tokens)
        backward = any(isinstance(a, Backward) for actions in plan.actions for a in actions)
        model = self.model
        check_ranges(
            shifted, num_input_ids=model.num_input_ids, vocab_size=model.vocab_size,
            longest_tokens=model.longest_tokens,
        )  # fmt: skip
        if backward:
            refuse_untrainable(model)
        if len(plan.stages) > 1:
            assert self._fingerprint is not None
            self._check_once(self._fingerprint, plan.stages)
        pools = self._kept.opened
        pools.reset_peaks()
        made = made_gradients(model.model, keeps_zeros=plan.sampled) if backward else nullcontext()
        with made, self._computing(), model.installed():
            executor = Executor(
                model, plan, shifted,
                num_valid_tokens=divisor, backend=self._kept.backend, pools=pools,
                comms=Alone(), **measuring,
            )  # fmt: skip
            loss_sum, timeline = executor.run(watch)
        if backward and executor.has_drawn:
            self._note(drawn(model))
        losses = tuple(losses.cpu() for losses in executor.token_losses)
        return StepResult(
            loss_sum / divisor, loss_sum, own_valid_tokens, timeline, losses, plan,
            host_bytes=pools.peak_bytes("host"), disk_bytes=pools.peak_bytes("disk"),
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is an engine of the model's copy, with buffers and checks of its own."""
        return partial(
            type(self), max_seq_len=self.max_seq_len, compute_dtype=self.compute_dtype,
            storage=self._storage,
        ), (self._given,)  # fmt: skip

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse a second call on the same model, and modes in which nothing can be recorded.

        A caller's autocast is off within: the dtypes are the engine's own.
        """
        refuse_mode(self._given, self.compute_dtype)
        if not self._kept.busy.acquire(blocking=False):
            raise ConfigError(
                given="a second forward_backward on a model while the first one runs",
                required="one call at a time on each model",
                source="another thread, a hook of the model, or a thread that ran at a fork",
                change="call them one after the other, or give each thread a model of its own",
            )
        try:
            with torch.autocast(device_type(self._given), enabled=False):
                yield
        finally:
            self._kept.busy.release()

    def _follow_model(self) -> None:
        """Adapt to the model as it is now; check it if that is new."""
        base = bare_model(self._given)
        for message in left_out(self._given, base):
            self._note(message)
        now = fingerprint(base)
        if now == self._fingerprint:
            return
        refuse_placement(base)
        self.model = CausalLM(self._given, max_seq_len=self.max_seq_len)
        self._kept.open_pools(self.model.device, self._storage)
        self._check_once(now, (self.model.num_layers,))
        self._fingerprint = now

    def _check_once(self, fingerprint: int, heights: tuple[int, ...]) -> None:
        """Check the model in stages of `heights` layers against its own forward, if that is new."""
        key = fingerprint, self.compute_dtype, self.max_seq_len, heights
        if key not in self._kept.checked:
            with self._computing():
                self_check(self.model, self._kept.backend, heights)
            self._kept.checked.add(key)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        dtype = self.compute_dtype
        unchanged = [] if dtype is None else self.model.stays_float32(dtype)
        with compute_parameters(self.model.model, dtype, unchanged=unchanged):
            yield

    def _note(self, message: str) -> None:
        """Warn once per engine."""
        if message not in self._notes:
            self._notes.add(message)
            warnings.warn(message, stacklevel=4)


def forward_backward(
    model: nn.Module,
    sequences: Sequence[Mapping[str, Tensor]],
    options: ChunkOptions | None = None,
    num_valid_tokens: int | None = None,
    backward: bool = True,
    *,
    max_seq_len: int | None = None,
    compute_dtype: torch.dtype | None = None,
    storage: Storage | None = None,
) -> StepResult:
    """Loss and exact gradients of a global batch, computed chunk by chunk.

    model: a Hugging Face causal decoder, also compiled or with adapters of peft.
    sequences: one dict per sequence, {"input_ids": (T,) int64, "labels": (T,) int64}, unpadded;
        labels are unshifted as in transformers, -100 where there is none.
    num_valid_tokens: the divisor of the summed loss; default: the labelled tokens of this call.
        With the count of a global batch, several calls add up to that batch's gradients exactly.
    backward: False evaluates: no gradients.
    max_seq_len, compute_dtype, storage: see `Engine`.

    Gradients of sum(loss) / num_valid_tokens are added to the parameters' `.grad`. Train mode,
    requires_grad and the attention implementation are afterwards as before, also after an error
    (then part of the gradients may have been added). Raises UserError for what the caller can mend.

    Buffers and the start-up check's outcome live as long as the model.
    """
    engine = Engine(model, max_seq_len=max_seq_len, compute_dtype=compute_dtype, storage=storage)
    return engine.forward_backward(sequences, options or ChunkOptions(), num_valid_tokens, backward)

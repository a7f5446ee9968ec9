"""Entry points of a training loop: `forward_backward`, and `Engine`, which keeps its settings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Unpack
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from furlong.errors import ConfigError, in_short
from furlong.kv.pools import Storage
from furlong.models.decoder import HFDecoder
from furlong.ops.loss import label_losses
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import by_cost
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas
from furlong.runtime.batch import (
    WEIGHTS,
    Batch,
    ShiftedSequence,
    batch_of,
    join_prompts,
    refused_data,
    require_seq_lens,
    require_type,
    shift_labels,
    whole_number,
)
from furlong.runtime.distributed.consensus import each_of, require_same, together
from furlong.runtime.distributed.fsdp import clip_gradients
from furlong.runtime.distributed.mesh import Ranks
from furlong.runtime.head import LossHead
from furlong.runtime.profile import Measuring
from furlong.runtime.session import Session
from furlong.runtime.step import (
    StepResult,
    batch_for,
    drawn_seed,
    facts_of,
    planned_batch,
    planner_of,
    read_sequences,
    take_step,
    with_draw,
)
from furlong.runtime.two_phase import (
    Gradients,
    may_share,
    token_values,
)
from furlong.values import TokenFunction, log_prob, require_function


def _nothing() -> None:
    """The watch of a caller who gave none: it lets every action pass."""


def _extras(token_loss: TokenFunction | None) -> tuple[str, ...] | None:
    """The `extras` of `shift_labels` for a loss."""
    if token_loss is None:
        return (WEIGHTS,)
    require_function(token_loss, "token_loss")
    return None


class Engine:
    """A model ready for chunk-wise training, with the settings of its calls."""

    def __init__(
        self,
        model: nn.Module,
        *,
        max_seq_len: int | None = None,
        compute_dtype: torch.dtype | None = None,
        storage: Storage | None = None,
        ranks: Ranks | None = None,
        process_group: ProcessGroup | None = None,
        offload_weights: bool = False,
    ) -> None:
        """`max_seq_len`: the run's longest sequence, needed by RoPE of type longrope only.
        `compute_dtype`: the dtype in which float32 weights compute (None: as they are).
        `storage`: bounds and folder of the CPU memory and disk; a later engine of the same model
        may set others, None leaves them.
        `ranks`: the processes of one run (`runtime.distributed.mesh.make_ranks`), each with the
        same model, or in a pipeline with what its stage has of it (`models.build.build_model`); or
        `process_group`, for replicas alone. Those of a stage divide its weights by FSDP2, for good:
        make the optimizer after the engine. Every call is then one of all processes.
        `offload_weights`: weights, gradients and what an optimizer keeps of them lie in CPU memory,
        and come to the device where the plan has an Unshard; needs a process group, of one process
        too.

        Raises UnsupportedModelError, by name, for a model that cannot be trained exactly. A model
        is checked against its own forward on first use, and again when its modules, its config,
        its dtype or its device have changed.
        """
        is_float = isinstance(compute_dtype, torch.dtype) and compute_dtype.is_floating_point
        if compute_dtype is not None and not is_float:
            raise ConfigError(
                given=f"compute_dtype {in_short(repr(compute_dtype), 60)}",
                required="a floating-point dtype of torch, or None",
                source="the arguments of furlong.Engine or forward_backward",
                change="pass compute_dtype=torch.bfloat16, or leave it out",
            )
        self.compute_dtype = compute_dtype
        self.max_seq_len = None if max_seq_len is None else whole_number(max_seq_len, "max_seq_len")
        self._session = Session(
            model,
            max_seq_len=self.max_seq_len, compute_dtype=compute_dtype, storage=storage,
            ranks=ranks, process_group=process_group, offload_weights=offload_weights,
        )  # fmt: skip
        num_processes = dist.get_world_size() if dist.is_initialized() else 1
        if num_processes > 1 and self._session.ranks is None:
            warnings.warn(
                f"{num_processes} processes: gradients are this process's own and nobody adds them "
                "up", stacklevel=2,
            )  # fmt: skip
        with self._session.call("the making of an engine"):
            pass

    @property
    def model(self) -> HFDecoder:
        """The model's adapter."""
        return self._session.model

    @property
    def ranks(self) -> Ranks | None:
        """The processes that call this engine together; None where one is alone."""
        return self._session.ranks

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """This process's parameters that another one has, too, and counts."""
        return self._session.counted_elsewhere

    def reads(self, plan: ChunkPlan) -> list[int]:
        """The sequences of a plan of which this process reads tokens or labels."""
        with self._session.alone():
            return read_sequences(plan, self._session.rank, self._session.rows_of(plan))

    def clip_gradients(self, max_norm: float | None) -> float:
        """The L2 norm of the gradients of all processes, which call it together; above `max_norm`
        (None: no bound) they are scaled down to it."""
        place, ranks = "a call of clip_gradients", self.ranks
        with self._session.heard(place):
            if ranks is not None:  # who has a gradient adds up norms with others
                owned = {
                    f"stage {ranks.stage}, gradient of {name}": parameter.grad is not None
                    for name, parameter in self.model.model.named_parameters()
                }
                each = each_of(ranks, lambda: crc32(repr(owned).encode()), place)
                of_stage = [each[i - i % (ranks.dp * ranks.sp)] for i in range(len(each))]
                if each != of_stage:
                    require_same(ranks, owned, None)
            return clip_gradients(
                self.model.model.parameters(), max_norm, self.ranks,
                counted_elsewhere=self.counted_elsewhere,
            )  # fmt: skip

    def close(self) -> None:
        """Give back what calls on this model, also those of a `furlong.chunked` one, keep for the
        next call: memory, threads, the file, and the groups between stages, for which all processes
        call it. A later call takes its own. What lives between a forward and its backward stays."""
        with self._session.alone():
            self._session.state.close()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
            if hasattr(torch.accelerator, "empty_host_cache"):  # pinned; not every torch can
                torch.accelerator.empty_host_cache()

    def plan(
        self, seq_lens: Sequence[int], options: ChunkOptions, *, backward: bool = True
    ) -> ChunkPlan:
        """The plan of a batch with sequences of `seq_lens` tokens; without backward it evaluates.
        Where `options` sample, a draw in which no chunk is known to have labels. Replicas get about
        equal tokens each, a pool divides every chunk, a pipeline goes in state-aware 1F1B.

        Raises ConfigError for lengths that are no whole numbers and for what is no `ChunkOptions`.
        """
        lens = require_seq_lens(seq_lens)
        with self._session.call("a call of plan"):
            ranks = self._session.ranks
            planner = planner_of(self._session, options, backward=backward)

            def make() -> ChunkPlan:
                if ranks is None:
                    return planner(lens, None)
                dealt = by_cost(lens, ranks.dp)
                return join_replicas(
                    [planner([lens[i] for i in own], None) for own in dealt], dealt, lens
                )

            plan = together(ranks, make)
            seed = drawn_seed(plan, options)
            if ranks is not None:
                facts = {"the plan's checksum": plan.checksum, **facts_of(options, backward)}
                seed = require_same(ranks, facts, seed)[0]
            return with_draw(plan, options, seed)

    def run(
        self,
        plan: ChunkPlan,
        sequences: Sequence[Mapping[str, Tensor]] | Mapping[int, Mapping[str, Tensor]],
        num_valid_tokens: int | None = None,
        *,
        token_loss: TokenFunction | None = None,
        weights: Sequence[float] | None = None,
        watch: Callable[[], None] = _nothing,
        **measuring: Unpack[Measuring],
    ) -> StepResult:
        """Obey a plan, of this engine or of a file, with sequences of the lengths it was made for.

        `sequences`: those of the whole batch, or a mapping of `seq_id` to each whose tokens this
        process reads, which a middle stage does of none; then `num_valid_tokens`, of the whole
        batch, is required. `token_loss`: see `forward_backward`. `weights`: by sequence of the
        plan, how often its loss counts in the gradient; losses are told as they are. `watch`: see
        `run` of `Executor`; `measuring`: see `Measuring`; the outcome is as in
        `furlong.forward_backward`. Raises PlanError for a plan that breaks a rule or is of other
        ranks, DataError for sequences of other lengths and for weights of a plan that samples.
        """
        session = self._session
        with session.call("a call of run"):

            def read() -> Batch:
                extras = _extras(token_loss)
                return batch_for(session, plan, sequences, extras=extras, weights=weights)

            batch = together(session.ranks, read)
            head = partial(LossHead, function=token_loss or label_losses)
            return take_step(session, plan, batch, num_valid_tokens, watch, head=head, **measuring)

    def forward_backward(
        self,
        sequences: Sequence[Mapping[str, Tensor] | ShiftedSequence],
        options: ChunkOptions,
        num_valid_tokens: int | None = None,
        backward: bool = True,
        *,
        token_loss: TokenFunction | None = None,
        share_prompts: bool = False,
        watch: Callable[[], None] = _nothing,
    ) -> StepResult:
        """See `furlong.forward_backward`, and `run` of `Executor` for `watch`.

        `token_loss`: a function as in `furlong.values`, whose values (t,) are summed in the place
        of the cross-entropy. Sequences may then hold more tensors (T, ...), which it gets as
        extras, and leave labels out (the ids). With `token_weights` (T,) each loss counts that
        often; the divisor is the number of labels still. `share_prompts`: see `token_values`; the
        plan then follows from the tokens, and not from their lengths alone.

        On several replicas each passes its own sequences, the same on all its processes; the
        outcome is that of all, numbered replica by replica.
        """
        session = self._session
        with session.call("a call of forward_backward"):

            def read() -> Batch:
                extras = _extras(token_loss)
                needs_labels = token_loss is None
                shifted = shift_labels(sequences, extras=extras, needs_labels=needs_labels)
                if not shifted:
                    raise refused_data("no sequences", "at least one", "leave such a call out")
                require_type(options, ChunkOptions)
                shares = share_prompts and not options.sampling and may_share(session)
                return join_prompts(shifted, options.size) if shares else batch_of(shifted)

            plan, batch, _ = planned_batch(session, options, read, backward=backward)
            head = partial(LossHead, function=token_loss or label_losses)
            return take_step(session, plan, batch, num_valid_tokens, watch, head=head)

    def token_values(
        self,
        sequences: Sequence[Mapping[str, Tensor]],
        options: ChunkOptions,
        fn: TokenFunction | None = None,
        *,
        gradients: Gradients = "returned",
        share_prompts: bool = True,
        watch: Callable[[], None] = _nothing,
    ) -> list[Tensor]:
        """Values of each sequence's tokens, (T,) or (T, k), that a loss may be made of: its
        `backward` walks the chunks, as exactly as `forward_backward`.

        `sequences`: as there, where labels may be left out (the ids), and with any more tensors
        (T, ...), which `fn` gets as extras. `fn`: see `furlong.values`; default its `log_prob()`.
        Entry t is about token t; entry 0 and tokens without a label are 0. `gradients`: returned to
        autograd, or added to `.grad` without a second copy, of which an error leaves a part in a
        `.grad` that was there. Between forward and backward lives what `options.keep` says of all
        sequences of the call, and no graph (`num_retained` is 0). Under `torch.no_grad` there is no
        graph at all. A tensor that `fn` closes over gets no gradient but what is added to its
        `.grad`.

        `share_prompts`: sequences whose first tokens are equal, at least a chunk of them, share
        their computation, on one device. It changes no value but by rounding. `watch`: see `run` of
        `Executor`.
        """
        return token_values(
            self._session, sequences, options, fn or log_prob(), gradients,
            share_prompts=share_prompts, watch=watch,
        )  # fmt: skip

    def hidden_states(
        self,
        sequences: Sequence[Mapping[str, Tensor]],
        options: ChunkOptions,
        *,
        gradients: Gradients = "returned",
        share_prompts: bool = True,
    ) -> list[Tensor]:
        """Final hidden states (T, D) of each sequence, for a head of the caller's own; see
        `token_values`. Labels are not needed."""
        return token_values(
            self._session, sequences, options, None, gradients, share_prompts=share_prompts
        )


def forward_backward(
    model: nn.Module,
    sequences: Sequence[Mapping[str, Tensor] | ShiftedSequence],
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
        labels are unshifted as in transformers, -100 where there is none. Or what
        `furlong.integrations.unpad` makes of a padded or packed batch.
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

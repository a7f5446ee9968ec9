"""The API for training loops: `forward_backward`, and `Engine`, which keeps a model and the
settings of its calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack
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
from furlong.runtime.distributed.consensus import Facts, agree, all_gather_ints, require_same
from furlong.runtime.distributed.fsdp import clip_gradients
from furlong.runtime.distributed.mesh import Ranks
from furlong.runtime.head import LossHead
from furlong.runtime.precision import refuse_float16
from furlong.runtime.profile import Measuring
from furlong.runtime.routing import RouterLoads
from furlong.runtime.session import Session
from furlong.runtime.step import (
    StepResult,
    batch_for,
    drawn_seed,
    facts_of,
    facts_of_run,
    own_plan,
    planner_of,
    read_sequences,
    require_checked,
    take_step,
    whole_plan,
    with_draw,
)
from furlong.runtime.two_phase import (
    GradientMode,
    may_share,
    token_values,
)
from furlong.values import TokenFunction, log_prob, require_function


def _nothing() -> None:
    """The default `watch`: does nothing."""


def _extras(token_loss: TokenFunction | None) -> tuple[str, ...] | None:
    """Return the names of the extra per-token tensors that a sequence may have; None if it may have
    any. `token_loss`: a function that reads extras; with None, only token weights are allowed."""
    if token_loss is None:
        return (WEIGHTS,)
    require_function(token_loss, "token_loss")
    return None


class Engine:
    """A model prepared for training in chunks, with the settings of its calls."""

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
        """Wrap a model, check it against its own forward and, with ranks, shard it.

        The check is repeated when the model's modules, config, dtype or device change.

        Args:
            max_seq_len: The run's longest sequence in tokens; required by longrope RoPE only. With
                `backward=False` it may exceed the positions of a model with RoPE.
            compute_dtype: The dtype that float32 weights compute in; None: each weight's dtype.
            storage: Limits and folder for CPU memory and disk. A later engine of the same model may
                change it; None keeps it.
            ranks: The processes of a run (`runtime.distributed.mesh.make_ranks`). Each has the same
                model or, in a pipeline, its stage's part (`models.build.build_model`). FSDP2 shards
                weights within a stage, permanently: create the optimizer after the engine. Every
                call is then made by all processes together.
            process_group: Instead of `ranks`, for data-parallel replicas.
            offload_weights: Keep weights, gradients and optimizer states in CPU memory; weights are
                copied to the device where the plan has an Unshard. Requires `ranks` or
                `process_group`, also on one process.

        Raises:
            UnsupportedModelError: For a model that cannot be trained exactly, with the reason.
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
        """The wrapped model, as the engine runs it in chunks."""
        return self._session.model

    @property
    def ranks(self) -> Ranks | None:
        """The processes that call this engine together; None for a single process."""
        return self._session.ranks

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Parameters that this process leaves out of the gradient norm, because another pipeline
        stage has a replica (tied embeddings) and adds it."""
        return self._session.counted_elsewhere

    @property
    def adds_router_loss(self) -> bool:
        """Whether the model adds a router loss to its cross-entropy (`output_router_logits`)."""
        return self.model.router_rule is not None

    def loads_of(self, evaluated: StepResult) -> RouterLoads | None:
        """Return the `loads` of an evaluation, for the step that trains on the same batch. All
        processes call it together. Raises ConfigError if the model drew random numbers."""
        ranks, has_drawn = self.ranks, int(evaluated.has_drawn)
        if any(n for (n,) in all_gather_ints(ranks, [has_drawn])) if ranks else has_drawn:
            raise ConfigError(
                given="a router loss and a model that draws random numbers in train mode (dropout, "
                "jitter or sampling)",
                required="no draws: fractions are counted in one forward, gradients computed in "
                "another",
                source="the model's config, or model.lora.dropout",
                change="set its dropouts and its jitter to 0, or output_router_logits to False",
            )
        return evaluated.loads

    @property
    def may_share(self) -> bool:
        """Whether sequences with equal first tokens may share their computation."""
        return may_share(self._session)

    def reads(self, plan: ChunkPlan) -> list[int]:
        """Return the seq_ids of a plan whose tokens or labels this process reads."""
        return read_sequences(plan, self._session.rank, self._session.rows_of(plan))

    def clip_gradients(self, max_norm: float | None) -> float:
        """Clip gradients to a global L2 norm of `max_norm` (None: do not clip); return the norm
        before clipping. All processes call it together."""
        place, ranks = "a call of clip_gradients", self.ranks
        with self._session.heard(place):
            if ranks is not None:  # norms are all-reduced, so all must have the same gradients
                owned = {
                    f"stage {ranks.stage}, gradient of {name}": parameter.grad is not None
                    for name, parameter in self.model.model.named_parameters()
                }
                checksum = crc32(repr(owned).encode())
                _, each = agree(ranks, lambda: (None, {}, checksum), place)
                of_stage = [each[i - i % (ranks.dp * ranks.sp)] for i in range(len(each))]
                if each != of_stage:
                    require_same(ranks, owned)
            return clip_gradients(
                self.model.model.parameters(), max_norm, self.ranks,
                counted_elsewhere=self.counted_elsewhere,
            )  # fmt: skip

    def close(self) -> None:
        """Free what calls on this model, also through `furlong.chunked`, keep for the next call:
        memory, threads, a file and process groups. The next call creates them again. With several
        pipeline stages, all processes call this. Tensors that a forward has kept for its backward
        stay."""
        with self._session.alone():
            self._session.state.close()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
            if hasattr(torch.accelerator, "empty_host_cache"):  # pinned; not every torch can
                torch.accelerator.empty_host_cache()

    def plan(
        self, seq_lens: Sequence[int], options: ChunkOptions, *, backward: bool = True
    ) -> ChunkPlan:
        """Return the plan of a batch with sequences of `seq_lens` tokens.

        Replicas get about equal numbers of tokens, sequence-parallel groups divide every chunk, and
        pipelines run state-aware 1F1B.

        Args:
            seq_lens: Tokens of each sequence of the batch, of all replicas.
            options: How to chunk. With sampling, chunks are drawn as if none had labels.
            backward: False plans an evaluation.

        Raises:
            ConfigError: For lengths that are not positive integers, or options of another type.
        """
        lens = require_seq_lens(seq_lens)

        def make() -> tuple[ChunkPlan, Facts, int | None]:
            planner = planner_of(self._session, options, backward=backward)
            if (ranks := self._session.ranks) is None:
                plan = planner(lens, None)
                return plan, {}, drawn_seed(plan, options)
            dealt = by_cost(lens, ranks.dp)
            plan = join_replicas(
                [planner([lens[i] for i in own], None) for own in dealt], dealt, lens
            )
            facts = {"the plan's checksum": plan.checksum, **facts_of(options, backward)}
            return plan, facts, drawn_seed(plan, options)

        with self._session.call("a call of plan", make) as (plan, seeds):
            return with_draw(plan, options, seeds[0])

    def run(
        self,
        plan: ChunkPlan,
        sequences: Sequence[Mapping[str, Tensor]] | Mapping[int, Mapping[str, Tensor]],
        num_valid_tokens: int | None = None,
        *,
        token_loss: TokenFunction | None = None,
        weights: Sequence[float] | None = None,
        loads: RouterLoads | None = None,
        watch: Callable[[], None] = _nothing,
        **measuring: Unpack[Measuring],
    ) -> StepResult:
        """Run a plan on a batch: compute the loss and, unless the plan is an evaluation, add
        gradients to `.grad`.

        Args:
            plan: A plan for sequences of these lengths: made by the method `plan`, or read from a
                file.
            sequences: All sequences of the batch, or a mapping from seq_id to those that this
                process reads (see `reads`); then `num_valid_tokens` is required.
            num_valid_tokens: The divisor of the loss, for the whole batch.
            token_loss: See `forward_backward`.
            weights: Factor of each sequence's loss in the gradient; reported losses are unweighted.
            loads: For a model with a router loss and a plan with backwards: the `loads` of the
                result of an evaluation of the same batch, which gives the fractions of tokens.
            watch: Called after each action; an error that it raises ends the step.
            measuring: See `runtime.profile.Measuring`.

        Returns:
            The result, as of `furlong.forward_backward`.

        Raises:
            PlanError: For a plan that breaks a rule, or was made for other ranks.
            DataError: For sequences of other lengths, or weights with a plan that samples.
        """
        return self.run_made(
            lambda: (plan, sequences), num_valid_tokens, token_loss=token_loss, weights=weights,
            loads=loads, watch=watch, **measuring,
        )  # fmt: skip

    def run_made(
        self,
        make: Callable[[], tuple[ChunkPlan, Any]],
        num_valid_tokens: int | None = None,
        *,
        token_loss: TokenFunction | None = None,
        weights: Sequence[float] | None = None,
        loads: RouterLoads | None = None,
        watch: Callable[[], None] = _nothing,
        **measuring: Unpack[Measuring],
    ) -> StepResult:
        """Make a plan and its sequences on every process, then run the plan as `run` does.

        Args:
            make: Returns the plan and the sequences. If it raises an error on one process, every
                process raises an error. It is called once more if a process finds that its model
                has changed.
            num_valid_tokens, token_loss, weights, loads, watch, measuring: See `run`.
        """
        session = self._session

        def read() -> tuple[tuple[ChunkPlan, Batch], Facts, int]:
            plan, sequences = make()
            extras = _extras(token_loss)
            batch = batch_for(session, plan, sequences, extras=extras, weights=weights)
            if plan.trained:
                refuse_float16(session.scan.parameters, session.compute_dtype)
            facts = facts_of_run(session, plan, batch, num_valid_tokens)
            return (plan, batch), facts, session.lacks(plan.stages)

        with session.call("a call of run", read) as ((plan, batch), lacking):
            require_checked(session, plan, lacking)
            head = partial(LossHead, function=token_loss or label_losses)
            return take_step(
                session, plan, batch, num_valid_tokens, watch, head=head, loads=loads, **measuring
            )

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
        """Compute loss and gradients of a batch; see `furlong.forward_backward`.

        With several replicas, each replica passes its own sequences, the same on all its processes.
        The result covers all replicas, with sequences numbered replica by replica.

        Args:
            token_loss: A function as in `furlong.values`, whose values (t,) are summed instead of
                the cross-entropy. Sequences may then contain more tensors (T, ...), which it gets
                as extras, and omit labels (default: input_ids).
            share_prompts: See `token_values`; the plan then depends on tokens, not lengths only.
            watch: See `run`.

        A sequence's `token_weights` (T,) multiply each token's loss; the sum is still divided by
        the number of labels.
        """
        session = self._session
        loads: RouterLoads | None = None
        if isinstance(sequences, Iterator):
            sequences = list(sequences)
        if backward and self.adds_router_loss:
            loads = self.loads_of(
                self.forward_backward(
                    sequences, options, num_valid_tokens, backward=False,
                    token_loss=token_loss, watch=watch,
                )
            )  # fmt: skip

        def read() -> Batch:
            if backward:
                refuse_float16(session.scan.parameters, session.compute_dtype)
            extras = _extras(token_loss)
            needs_labels = token_loss is None
            shifted = shift_labels(sequences, extras=extras, needs_labels=needs_labels)
            if not shifted:
                raise refused_data("no sequences", "at least one", "leave such a call out")
            require_type(options, ChunkOptions)
            shares = share_prompts and not options.sampling and may_share(session)
            shares = shares and not self.adds_router_loss
            return join_prompts(shifted, options.size) if shares else batch_of(shifted)

        make = partial(own_plan, session, options, read, num_valid_tokens, backward=backward)
        with session.call("a call of forward_backward", make) as (own, each):
            plan, batch, _ = whole_plan(session, options, own, each)
            head = partial(LossHead, function=token_loss or label_losses)
            return take_step(session, plan, batch, num_valid_tokens, watch, head=head, loads=loads)

    def token_values(
        self,
        sequences: Sequence[Mapping[str, Tensor]],
        options: ChunkOptions,
        fn: TokenFunction | None = None,
        *,
        gradients: GradientMode = "returned",
        share_prompts: bool = True,
        watch: Callable[[], None] = _nothing,
    ) -> list[Tensor]:
        """Return differentiable values of each sequence's tokens, from which any loss may be
        computed.

        The backward of this loss runs the backward of each chunk; the gradients are as exact as
        those of `forward_backward`. Between forward and backward, the tensors named by
        `options.keep` are kept for all sequences. Graphs are not kept (`num_retained` counts as 0).
        Under `torch.no_grad` the values have no graph.

        Args:
            sequences: As in `forward_backward`; labels may be omitted (default: input_ids), and
                further tensors (T, ...) are passed to `fn` as extras.
            fn: See `furlong.values`; default: its `log_prob()`. Gradients of tensors captured by
                `fn` are accumulated in their `.grad`; autograd does not return them.
            gradients: "returned" to autograd, or "added" to `.grad` without a second copy. With
                "added", an error may leave part of a gradient in an existing `.grad`.
            share_prompts: Sequences of a replica with equal first tokens, at least a chunk of them,
                share their computation. Values change by rounding only.
            watch: See `run`.

        Returns:
            (T,) or (T, k) for each sequence. Entry t is about token t; entry 0, and tokens without
            a label, are 0.
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
        gradients: GradientMode = "returned",
        share_prompts: bool = True,
    ) -> list[Tensor]:
        """Return differentiable final hidden states (T, D) of each sequence, for a custom head; see
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
    """Compute loss and exact gradients of a global batch, chunk by chunk.

    Gradients of sum(loss) / num_valid_tokens are added to the parameters' `.grad`. The model's
    train mode, requires_grad and attention implementation are the same after the call as before it,
    also if the call ends with an error. An error may leave part of the gradients in `.grad`.
    Buffers and the result of the start-up check are kept for later calls, as long as the model
    exists.

    Args:
        model: A Hugging Face causal decoder, also compiled or with peft adapters.
        sequences: One dict per sequence, {"input_ids": (T,) int64, "labels": (T,) int64}, unpadded;
            labels are unshifted as in transformers, -100 for none. Or the result of
            `furlong.integrations.unpad` for a padded or packed batch.
        options: How to chunk; default: `ChunkOptions()`.
        num_valid_tokens: The divisor of the summed loss; default: the number of labels in this
            call. With the count of a global batch, several calls add up to that batch's exact
            gradients.
        backward: False evaluates, without gradients.
        max_seq_len, compute_dtype, storage: See `Engine`.

    Raises:
        UserError: For models, data and options that are refused, with what to change.
    """
    engine = Engine(model, max_seq_len=max_seq_len, compute_dtype=compute_dtype, storage=storage)
    return engine.forward_backward(sequences, options or ChunkOptions(), num_valid_tokens, backward)

"""Entry points of a training loop: `forward_backward`, and `Engine`, which keeps its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from furlong.models.causal_lm import CausalLM
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import by_cost
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas
from furlong.runtime.batch import PlannedSequences, among, read_sequences
from furlong.runtime.followed_model import FollowedModel
from furlong.runtime.inputs import (
    ShiftedSequence,
    check_compute_dtype,
    count_valid_tokens,
    no_data,
    require_seq_lens,
    shift_labels,
    whole_number,
)
from furlong.runtime.memory.pools import Storage
from furlong.runtime.parallel.norm import clip_gradients
from furlong.runtime.parallel.planning import Planned, planned, planned_together
from furlong.runtime.parallel.ranks import Ranks, not_copied
from furlong.runtime.parallel.recovery import made_together
from furlong.runtime.plans import planner_of, with_draw
from furlong.runtime.recorder import Measuring
from furlong.runtime.result import StepResult
from furlong.runtime.step import take_step
from furlong.runtime.tokens.inputs import bare_inputs
from furlong.runtime.tokens.loss import own_loss, weighted_batch
from furlong.runtime.tokens.two_phases import Gradients
from furlong.runtime.tokens.values import hidden_states, token_values
from furlong.values import TokenFunction, log_prob


def _nothing() -> None:
    """The watch of a caller who gave none: it lets every action pass."""


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
    ) -> None:
        """`max_seq_len`: the run's longest sequence, needed by RoPE of type longrope only.
        `compute_dtype`: the dtype in which float32 weights compute (None: as they are).
        `storage`: bounds and folder of the tiers host and disk; a later engine of the same model
        may set others, None leaves them.
        `ranks`: the processes of one run (`runtime.parallel.ranks.make_ranks`), each with the same
        model, or in a pipeline with what its stage has of it (`models.build.build_model`); or
        `process_group`, for replicas alone. Those of a stage divide its weights by FSDP2, for good:
        make the optimizer after the engine. Every call is then one of all processes.

        Raises UnsupportedModelError, by name, for a model that cannot be trained exactly. A model
        is checked against its own forward on first use, and again when its modules, its config,
        its dtype or its device have changed.
        """
        check_compute_dtype(compute_dtype)
        self.compute_dtype = compute_dtype
        self.max_seq_len = None if max_seq_len is None else whole_number(max_seq_len, "max_seq_len")
        self._followed = FollowedModel(
            model,
            max_seq_len=self.max_seq_len, compute_dtype=compute_dtype, storage=storage,
            ranks=ranks, process_group=process_group,
        )  # fmt: skip
        with self._followed.alone():
            self._followed.follow()

    @property
    def model(self) -> CausalLM:
        """The model's adapter."""
        return self._followed.model

    @property
    def ranks(self) -> Ranks | None:
        """The processes that call this engine together; None where one is alone."""
        return self._followed.ranks

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """This process's parameters that another one has, too, and counts."""
        return self._followed.counted_elsewhere

    def reads(self, plan: ChunkPlan) -> list[int]:
        """The sequences of a plan of which this process reads tokens or labels."""
        with self._followed.alone():
            self._followed.follow()
            return read_sequences(plan, self._followed.rank, self._followed.rows_of(plan))

    def clip_gradients(self, max_norm: float | None) -> float:
        """The L2 norm of the gradients of all processes, which call it together; above `max_norm`
        (None: no bound) they are scaled down to it."""
        return clip_gradients(
            self.model.model.parameters(), max_norm, self.ranks,
            counted_elsewhere=self.counted_elsewhere,
        )  # fmt: skip

    def free(self) -> None:
        """Give back the memory, the threads and the file that calls on this model, also those of a
        `furlong.chunked` one, keep for the next call; that takes its own. What lives between a
        forward and its backward stays. Pinned host memory stays in torch's cache."""
        with self._followed.alone():
            self._followed.kept.free()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def plan(
        self, seq_lens: Sequence[int], options: ChunkOptions, *, backward: bool = True
    ) -> ChunkPlan:
        """The plan of a batch with sequences of `seq_lens` tokens; without backward it evaluates.
        Where `options` sample, a draw in which no chunk is known to have labels. Replicas get about
        equal tokens each, a pool divides every chunk, a pipeline goes in state-aware 1F1B.

        Raises ConfigError for lengths that are no whole numbers and for what is no `ChunkOptions`.
        """
        lens = require_seq_lens(seq_lens)
        with self._followed.alone():
            self._followed.follow()
            ranks = self._followed.ranks
            make = planner_of(self._followed, options, backward=backward)
            if ranks is None:
                return with_draw(self._followed, make(lens), options)
            dealt = by_cost(lens, ranks.dp)
            plans = [make([lens[i] for i in own]) for own in dealt]
            return with_draw(self._followed, join_replicas(plans, dealt, lens), options)

    def run(
        self,
        plan: ChunkPlan,
        sequences: Sequence[Mapping[str, Tensor]] | Mapping[int, Mapping[str, Tensor]],
        num_valid_tokens: int | None = None,
        *,
        weights: Sequence[float] | None = None,
        watch: Callable[[], None] = _nothing,
        **measuring: Unpack[Measuring],
    ) -> StepResult:
        """Obey a plan, of this engine or of a file, with sequences of the lengths it was made for.

        `sequences`: those of the whole batch, or a mapping of `seq_id` to each whose tokens this
        process reads, which a middle stage does of none; then `num_valid_tokens`, of the whole
        batch, is required. `weights`: by sequence of the plan, how often its loss counts in the
        gradient; losses are told as they are. `watch`: see `run` of `Executor`; `measuring`: see
        `Measuring`; the outcome is as in `furlong.forward_backward`. Raises PlanError for a plan
        that breaks a rule or is of other ranks, DataError for sequences of other lengths and for
        weights of a plan that samples.
        """
        followed = self._followed
        with followed.alone():
            followed.follow()
            find = partial(weighted_batch, followed, plan, sequences, weights)
            return take_step(followed, find, num_valid_tokens, watch, **measuring)

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
        of the cross-entropy, in one process. Sequences may then hold more tensors (T, ...), which
        it gets as extras. With `token_weights` (T,) each loss counts that often; the divisor is the
        number of labels still. `share_prompts`: see `token_values`; the plan then follows from the
        tokens, and not from their lengths alone.

        On several replicas each passes its own sequences, the same on all its processes; the
        outcome is that of all, numbered replica by replica.
        """
        shifted: list[ShiftedSequence] = []
        find = partial(own_loss, self._followed, sequences, token_loss, share_prompts=share_prompts)
        loss = made_together(self._followed.ranks, find)
        with self._followed.alone():
            self._followed.follow()
            loss = loss and loss.joined(self._followed, options)
            forks = loss.batch.joined.forks if loss else None
            planner = planner_of(self._followed, options, backward=backward, forks=forks)

            def make() -> Planned:
                shifted[:] = shift_labels(sequences) if loss is None else loss.sequences
                if not shifted:
                    raise no_data("no sequences", "at least one sequence")
                return planned(planner([len(s.input_ids) for s in shifted]), shifted)

            ranks, num_copies = self._followed.ranks, 1
            if ranks is None:
                found, own = make(), range(len(shifted))
            else:
                found, own = planned_together(ranks, make)
                num_copies = ranks.sp * ranks.pp
            plan = with_draw(self._followed, found.plan, options, found.labelled)
            num_labels = count_valid_tokens(shifted)
            if ranks is not None:
                labels = torch.tensor(num_labels, device=self.model.device)
                num_labels = int(self._followed.comms().add_up(labels)) // num_copies
            every = among(dict(zip(own, shifted, strict=True)), len(plan.seq_lens))
            batch = PlannedSequences(plan, every, num_labels, loss.head if loss else None)
            return take_step(self._followed, lambda: batch, num_valid_tokens, watch)

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
        autograd, or added to `.grad` without a second copy. Between forward and backward lives what
        `options.keep` says of all sequences of the call, and no graph (`num_retained` is 0). Under
        `torch.no_grad` there is no graph at all. A tensor that `fn` closes over gets no gradient
        but what is added to its `.grad`.

        `share_prompts`: sequences whose first tokens are equal, at least a chunk of them, share
        their computation. It changes no value but by rounding. `watch`: see `run` of `Executor`.
        """
        return token_values(
            self._followed, sequences, options, fn or log_prob(), gradients,
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
        return hidden_states(
            self._followed, bare_inputs(sequences), options, gradients,
            share_prompts=share_prompts,
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is an engine of the model's copy, with buffers and checks of its own. Raises
        ConfigError where several processes call it."""
        followed = self._followed
        if followed.ranks is not None:
            raise not_copied(followed.ranks.num_processes)
        return partial(
            type(self), max_seq_len=self.max_seq_len, compute_dtype=self.compute_dtype,
            storage=followed.storage,
        ), (followed.given,)  # fmt: skip


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

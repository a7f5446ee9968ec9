"""Entry points of a training loop: `forward_backward`, and `Engine`, which keeps its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from furlong.models.causal_lm import CausalLM
from furlong.plan.values import ChunkPlan
from furlong.planners.chunks.balance import by_cost
from furlong.planners.options import ChunkOptions
from furlong.planners.orders.one_device import plan_on_device
from furlong.planners.orders.replicas import join_replicas
from furlong.planners.sampling.plans import sampled
from furlong.runtime.batch import Batch, among
from furlong.runtime.chunk_inputs import labelled_chunks
from furlong.runtime.followed_model import FollowedModel
from furlong.runtime.inputs import (
    ShiftedSequence,
    check_compute_dtype,
    count_valid_tokens,
    no_data,
    require_options,
    require_seq_lens,
    shift_labels,
    whole_number,
)
from furlong.runtime.parallel.planning import planned_together, require_replicas
from furlong.runtime.parallel.ranks import Ranks
from furlong.runtime.pools import Storage
from furlong.runtime.recorder import Measuring
from furlong.runtime.result import StepResult
from furlong.runtime.step import batch_for, take_step
from furlong.runtime.token_inputs import bare_inputs
from furlong.runtime.token_loss import own_loss
from furlong.runtime.token_values import hidden_states, token_values
from furlong.runtime.two_phases import Gradients
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

    def plan(
        self, seq_lens: Sequence[int], options: ChunkOptions, *, backward: bool = True
    ) -> ChunkPlan:
        """The plan of a batch with sequences of `seq_lens` tokens; without backward it evaluates.
        Where `options` sample, a draw in which no chunk is known to have labels. Replicas get about
        equal tokens each.

        Raises ConfigError for lengths that are no whole numbers and for what is no `ChunkOptions`.
        """
        lens = require_seq_lens(seq_lens)
        with self._followed.alone():
            self._followed.follow()
            ranks = self._followed.ranks
            if ranks is None:
                return self._plan(lens, options, backward=backward)
            require_replicas(ranks)
            dealt = by_cost(lens, ranks.dp)
            plans = [
                self._plan([lens[i] for i in own], options, backward=backward) for own in dealt
            ]
            return join_replicas(plans, dealt, lens)

    def run(
        self,
        plan: ChunkPlan,
        sequences: Sequence[Mapping[str, Tensor]] | Mapping[int, Mapping[str, Tensor]],
        num_valid_tokens: int | None = None,
        *,
        watch: Callable[[], None] = _nothing,
        **measuring: Unpack[Measuring],
    ) -> StepResult:
        """Obey a plan, of this engine or of a file, with sequences of the lengths it was made for.

        `sequences`: those of the whole batch, or a mapping of `seq_id` to each whose tokens this
        process reads, which a middle stage does of none; then `num_valid_tokens`, of the whole
        batch, is required. `measuring`: see
        `Measuring`; the other arguments and the outcome are as in `furlong.forward_backward`.
        Raises PlanError for a plan that breaks a rule or is of other ranks, DataError for sequences
        of other lengths.
        """
        followed = self._followed
        with followed.alone():
            followed.follow()
            find = partial(batch_for, followed, plan, sequences)
            return take_step(followed, find, num_valid_tokens, watch, **measuring)

    def forward_backward(
        self,
        sequences: Sequence[Mapping[str, Tensor]],
        options: ChunkOptions,
        num_valid_tokens: int | None = None,
        backward: bool = True,
        *,
        token_loss: TokenFunction | None = None,
        watch: Callable[[], None] = _nothing,
    ) -> StepResult:
        """See `furlong.forward_backward`, and `run` of `Executor` for `watch`.

        `token_loss`: a function as in `furlong.values`, whose values (t,) are summed in the place
        of the cross-entropy, in one process. Sequences may then hold more tensors (T, ...), which
        it gets as extras. With `token_weights` (T,) each loss counts that often; the divisor is the
        number of labels still.

        On several replicas each passes its own sequences; the outcome is that of all, numbered
        replica by replica.
        """
        shifted: list[ShiftedSequence] = []
        loss = own_loss(self._followed, sequences, token_loss)

        def make() -> ChunkPlan:
            shifted[:] = shift_labels(sequences) if loss is None else loss.sequences
            if not shifted:
                raise no_data("no sequences", "at least one sequence")
            lens = [len(s.input_ids) for s in shifted]
            return self._plan(lens, options, backward=backward, shifted=shifted)

        with self._followed.alone():
            self._followed.follow()
            ranks, plan = self._followed.ranks, None
            if ranks is None:
                plan, own = make(), range(len(shifted))
            else:
                plan, own = planned_together(ranks, make)
            labels = torch.tensor(count_valid_tokens(shifted), device=self.model.device)
            num_labels = int(self._followed.comms().add_up(labels))
            every = among(dict(zip(own, shifted, strict=True)), len(plan.seq_lens))
            batch = Batch(plan, every, num_labels, loss.head if loss else None)
            return take_step(self._followed, lambda: batch, num_valid_tokens, watch)

    def token_values(
        self,
        sequences: Sequence[Mapping[str, Tensor]],
        options: ChunkOptions,
        fn: TokenFunction | None = None,
        *,
        gradients: Gradients = "returned",
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
        """
        return token_values(self._followed, sequences, options, fn or log_prob(), gradients)

    def hidden_states(
        self,
        sequences: Sequence[Mapping[str, Tensor]],
        options: ChunkOptions,
        *,
        gradients: Gradients = "returned",
    ) -> list[Tensor]:
        """Final hidden states (T, D) of each sequence, for a head of the caller's own; see
        `token_values`. Labels are not needed."""
        return hidden_states(self._followed, bare_inputs(sequences), options, gradients)

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

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is an engine of the model's copy, with buffers and checks of its own."""
        followed = self._followed
        return partial(
            type(self), max_seq_len=self.max_seq_len, compute_dtype=self.compute_dtype,
            storage=followed.storage, ranks=followed.ranks,
        ), (followed.given,)  # fmt: skip


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

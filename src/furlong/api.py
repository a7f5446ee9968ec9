"""What a training loop calls: `forward_backward`, and `Engine`, which keeps what outlives it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from furlong.errors import DataError
from furlong.kv.arena import Arena
from furlong.models.causal_lm import CausalLM
from furlong.models.support import other_dropouts
from furlong.ops.backend import Backend
from furlong.ops.choose import choose_backend
from furlong.plan.values import ChunkPlan
from furlong.planners.chunkflow import plan_chunkflow
from furlong.planners.options import ChunkOptions
from furlong.runtime.executor import Executor
from furlong.runtime.inputs import count_valid_tokens, shift_labels
from furlong.runtime.precision import compute_parameters
from furlong.runtime.self_check import self_check
from furlong.timeline import Timeline

_CHECKED = "_furlong_checked"


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: float
    """The summed loss divided by the divisor."""
    loss_sum: float
    num_valid_tokens: int
    """Tokens with a label in this call."""
    timeline: Timeline
    token_losses: tuple[Tensor, ...] = ()
    """Of an evaluation (backward=False): one (T,) float64 tensor per sequence, on the CPU. Entry t
    is the loss of token t + 1 given those up to t; 0 where that has no label."""
    plan: ChunkPlan | None = None
    """What the timeline is of."""


class Engine:
    """A model ready for chunk-wise training; holds the adapter and the K,V arena across steps."""

    def __init__(
        self,
        model: nn.Module,
        *,
        max_seq_len: int | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """`max_seq_len`: the run's longest sequence, needed by RoPE of type longrope only.
        `compute_dtype`: the dtype in which float32 weights compute (None: as they are).

        Raises UnsupportedModelError, by name, for a model that cannot be trained exactly; a model
        is checked once, on first use, against its own forward.
        """
        self.model = CausalLM(model, max_seq_len=max_seq_len)
        self.compute_dtype = compute_dtype
        self._arena = Arena(self.model.device)
        parameter = next(model.parameters())
        dtype = compute_dtype or parameter.dtype
        self._backend: Backend = choose_backend(self.model.device, dtype, _head_dim(self.model))
        if not model.__dict__.get(_CHECKED, False):
            with compute_parameters(model, compute_dtype):
                self_check(self.model, self._backend)
            model.__dict__[_CHECKED] = True

    def forward_backward(
        self,
        sequences: Sequence[Mapping[str, Tensor]],
        options: ChunkOptions,
        num_valid_tokens: int | None = None,
        backward: bool = True,
    ) -> StepResult:
        """See `furlong.forward_backward`."""
        if not sequences:
            raise _no_data("no sequences", "at least one sequence")
        shifted = shift_labels(sequences)
        own_valid_tokens = count_valid_tokens(shifted)
        divisor = own_valid_tokens if num_valid_tokens is None else num_valid_tokens
        if divisor <= 0:
            raise _no_data("no token with a label to divide the loss by", "at least one label")
        plan = plan_chunkflow(
            [len(s.input_ids) for s in shifted], options,
            num_layers=self.model.num_layers, backward=backward,
        )  # fmt: skip
        dropouts = other_dropouts(self.model.model)
        if dropouts and backward:
            name, probability = next(iter(dropouts.items()))
            warnings.warn(
                f"{len(dropouts)} dropout modules are active ({name}: {probability}); what they "
                "draw depends on how the batch is cut into chunks",
                stacklevel=3,
            )
        with compute_parameters(self.model.model, self.compute_dtype), self.model.installed():
            executor = Executor(
                self.model, plan, shifted,
                num_valid_tokens=divisor, backend=self._backend, arena=self._arena,
            )  # fmt: skip
            loss_sum, timeline = executor.run()
        losses = tuple(executor.token_losses)
        return StepResult(loss_sum / divisor, loss_sum, own_valid_tokens, timeline, losses, plan)


def forward_backward(
    model: nn.Module,
    sequences: Sequence[Mapping[str, Tensor]],
    options: ChunkOptions | None = None,
    num_valid_tokens: int | None = None,
    backward: bool = True,
    *,
    max_seq_len: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> StepResult:
    """Loss and exact gradients of a global batch, computed chunk by chunk.

    model: a Hugging Face causal decoder, also with LoRA adapters of peft.
    sequences: one dict per sequence, {"input_ids": (T,) int64, "labels": (T,) int64}, unpadded;
        labels are unshifted as in transformers, -100 where there is none.
    num_valid_tokens: the divisor of the summed loss; default: the labelled tokens of this call.
        With the count of a global batch, several calls add up to that batch's gradients exactly.
    backward: False evaluates: no gradients.
    max_seq_len, compute_dtype: see `Engine`.

    Gradients of sum(loss) / num_valid_tokens are added to the parameters' `.grad`. Train mode,
    requires_grad and the attention implementation are afterwards as before, also after an error
    (then part of the gradients may have been added). Raises UserError for what the caller can mend.
    """
    engine = Engine(model, max_seq_len=max_seq_len, compute_dtype=compute_dtype)
    return engine.forward_backward(sequences, options or ChunkOptions(), num_valid_tokens, backward)


def _head_dim(model: CausalLM) -> int:
    config = model.config
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def _no_data(given: str, required: str) -> DataError:
    return DataError(
        given=given, required=required, source="the arguments of forward_backward",
        change="leave batches without labels out, or pass num_valid_tokens",
    )  # fmt: skip

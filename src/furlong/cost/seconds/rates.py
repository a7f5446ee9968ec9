"""Seconds of chunk passes through one stage, for all chunks of a table at once.

One pass on one process of a pool:

    linear + max(all-to-alls, local attention) + shared attention + waits for streamed K,V

The all-to-alls of slices on several processes, one for every size of places, hide behind the
attention of slices on one (Skrull, Eq. 2). A pool is as slow as its slowest process. Efficiencies
saturate with the process's tokens; under tensor parallelism with tokens / tp_size, since each
device's matrices are that much narrower.

    C chunks, S processes of a pool
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from furlong.cost.devices.hardware import Efficiency, HardwareSpec
from furlong.cost.devices.links import Link
from furlong.cost.memory.training import Training
from furlong.cost.seconds.chunks import Array, ChunkTable
from furlong.cost.seconds.flops import ATTENTION_BACKWARD, StageFlops
from furlong.cost.shapes.shape import ModelShape
from furlong.plan.passes import Pass
from furlong.plan.segments import NUM_HOT

Work = Literal["forward", "to last kv", "first layers", "backward", "head", "head and back"]
"""to last kv: up to the last layer's K,V projection; first layers: forward of that many; head and
back: the language model head and the loss with their gradients."""


@dataclass(frozen=True, slots=True)
class Part:
    """Work of one kind that a pass does."""

    work: Work
    layers: int = 0
    """Number of the "first layers"."""
    remembered: int = 0
    """First layers whose attention does not run: its results are handed back."""


def parts_of(what: Pass, height: int) -> tuple[Part, ...]:
    """The parts that the executor runs for a pass over a stage of `height` layers."""
    match what.computes:
        case "nothing":
            return ()
        case "to last kv":
            return (Part("to last kv", remembered=what.remembered),)
        case "values" | "graph":
            head = (Part("head"),) if what.loss else ()
            return (Part("forward", remembered=what.remembered), *head)
        case "backward":
            head = (Part("head and back"),) if what.loss else ()
            layers, known = what.recompute_layers, what.remembered
            again = (Part("first layers", layers, known),) if layers else ()
            return (Part("backward"), *head, *again)


@dataclass(frozen=True)
class StageRates:
    """The seconds of passes through one stage."""

    shape: ModelShape
    hardware: HardwareSpec
    training: Training
    flops: StageFlops
    table: ChunkTable
    sp_links: Mapping[int, Link]
    """size of a place -> the link of its all-to-all."""
    tp_link: Link
    stream: Link | None = None
    """Link over which K,V come, if not from the device."""
    segment_tokens: int = 8192
    """Tokens of a segment of K,V, which travels as one."""
    lora_per_token: int = 0
    """Forward FLOPs of the stage's adapters."""
    saved_per_token: tuple[float, ...] = ()
    """Bytes that the graph of each layer saves."""
    logits_per_token: float = 0.0
    """Bytes of logits, with their gradients."""

    def seconds(self, part: Part) -> Array:
        """(S, C) one part of a pass over the stage, on every process."""
        flops, lora, kind, layers = self.flops, self.lora_per_token, part.work, part.layers
        height = len(flops.windows)
        if kind in ("head", "head and back"):
            passes = 1 if kind == "head" else 2 if self.training.lora is not None else 3
            passed = self.logits_per_token * (1 / 3 if kind == "head" else 1)
            of_head: Array = self._linear(flops.head_per_token * passes) + self._passed(passed)
            return of_head
        if kind == "backward":
            frozen = self.training.lora is not None
            linear: float = flops.linear_per_token * (1 if frozen else 2) + 2 * lora
            return self._of_layers(linear, 2 * sum(self.saved_per_token), part, height)
        linear = {
            "forward": flops.linear_per_token + lora,
            "to last kv": flops.linear_per_token + lora - flops.tail_per_token,
            "first layers": sum(flops.layer_linear_per_token[:layers])
            + lora * layers / max(1, height),
        }[kind]
        num_layers = layers if kind == "first layers" else height
        return self._of_layers(linear, self._saved(part), part, num_layers)

    def _saved(self, part: Part) -> float:
        """Bytes per token that a forward passes."""
        saved, flops = self.saved_per_token, self.flops
        if part.work == "first layers":
            return sum(saved[: part.layers])
        if part.work == "to last kv" and saved:
            return sum(saved) - saved[-1] * flops.tail_per_token / flops.layer_linear_per_token[-1]
        return sum(saved)

    def _attending(self, part: Part) -> tuple[int | None, ...]:
        """Windows of the layers whose attention runs."""
        windows = self.flops.windows
        match part.work:
            case "forward":
                return windows[part.remembered :]
            case "to last kv":
                return windows[part.remembered : -1]
            case "first layers":
                return windows[part.remembered : part.layers]
            case "backward":
                return windows
            case _:
                return ()

    def _of_layers(
        self, linear_per_token: float, passed_per_token: float, part: Part, num_layers: int
    ) -> Array:
        attending, backward = self._attending(part), part.work == "backward"
        seconds = self._compute_s(linear_per_token, attending, backward)
        seconds += num_layers * self._tp_s()
        seconds += self._passed(passed_per_token)
        hardware, times = self.hardware, 2 if backward else 1
        launched = times * (
            hardware.layer_launch_s * num_layers * (self.table.tokens > 0)
            + hardware.slice_launch_s * len(attending) * self.table.num_slices
        )
        if part.work != "first layers":
            launched += hardware.pass_launch_s * (self.table.tokens > 0)
        if hardware.hides_launches:
            return np.maximum(seconds, launched)
        seconds += launched
        return seconds

    def _passed(self, bytes_per_token: float) -> Array:
        """(S, C) seconds of kernels that only pass bytes."""
        tokens = self.table.tokens / self.training.tp_size
        return tokens * bytes_per_token / self.hardware.activation_bytes_per_s

    def _linear(self, flops_per_token: float) -> Array:
        eff, tp = self.hardware.linear, self.training.tp_size
        tokens = self.table.tokens
        rate = self.hardware.peak_flops_per_s * eff.best
        return np.where(tokens > 0, flops_per_token * (tokens / tp + eff.half_tokens) / rate, 0.0)

    def _attention_rate(self, eff: Efficiency) -> Array:
        """(S, C) attended keys per second of one layer's forward."""
        tokens, tp = np.maximum(self.table.tokens, 1e-9), self.training.tp_size
        reached = eff.best * (tokens / tp) / (tokens / tp + eff.half_tokens)
        return self.hardware.peak_flops_per_s * reached * tp / self.flops.attention_per_key

    def _compute_s(
        self, linear_per_token: float, attending: tuple[int | None, ...], backward: bool = False
    ) -> Array:
        """(S, C) seconds of a pass; `attending`: windows of the layers whose attention runs."""
        work = ATTENTION_BACKWARD if backward else 1.0
        eff = self.hardware.attention_backward if backward else self.hardware.attention_forward
        per_second = self._attention_rate(eff) / work
        counts, table = Counter(attending), self.table
        linear = self._linear(linear_per_token)
        local, shared = (
            sum((n * keys[w] for w, n in counts.items()), np.zeros_like(linear))
            for keys in (table.local_keys, table.shared_keys)
        )
        seconds = linear + shared / per_second
        seconds += np.maximum(local / per_second, len(attending) * self._all_to_all_s())
        if self.stream is not None and attending:
            own = linear / len(attending)
            for window, count in counts.items():
                seconds += count * self._stall_s(window, own, per_second, backward)
        return seconds

    def _all_to_all_s(self) -> Array:
        """(S, C) the all-to-alls of one layer, four for every size of the process's places: q, k, v
        in, the output back."""
        total = np.zeros_like(self.table.tokens)
        width = 2 * self.shape.q_size + 2 * self.shape.kv_size
        token_bytes = width * self.training.compute_bytes / self.training.tp_size
        for size, tokens in self.table.exchanged_tokens.items():
            link, share = self.sp_links[size], token_bytes * (size - 1) / size**2
            seconds = 4 * link.latency_s + tokens * (share / link.bytes_per_s)
            total += np.where(tokens > 0, seconds, 0.0)
        return total

    def _tp_s(self) -> Array:
        """(S, C) two all-gathers and two reduce-scatters of hidden states per layer (Megatron)."""
        tp = self.training.tp_size
        if tp == 1:
            return np.zeros_like(self.table.tokens)
        moved = self.table.tokens * self.shape.hidden_size * self.training.compute_bytes
        per_call = self.tp_link.latency_s + moved * (tp - 1) / tp / self.tp_link.bytes_per_s
        return np.where(self.table.tokens > 0, 4 * per_call, 0.0)

    def _stall_s(
        self, window: int | None, own_s: Array, per_second: Array, backward: bool
    ) -> Array:
        """(S, C) seconds that one layer waits for its prefix, cut into blocks (FPDT's two buffers:
        the first block loads while the layer's own part computes)."""
        tokens = self.table.prefix_tokens[window]
        blocks = np.maximum(np.ceil(tokens / self.segment_tokens), 1)
        load = self._loads_s(window, backward) / blocks
        block = self.table.prefix_keys[window] / per_second / blocks
        waited = np.maximum(own_s, load) + (blocks - 1) * np.maximum(block, load) + block
        stall: Array = np.maximum(waited - own_s - blocks * block, 0.0) * (tokens > 0)
        return stall

    def _loads_s(self, window: int | None, backward: bool) -> Array:
        """(S, C) seconds that one layer's prefix takes to arrive, in whole segments."""
        tokens = self.table.prefix_tokens[window]
        if self.stream is None:
            return np.zeros_like(tokens)
        training = self.training
        segments = np.ceil(tokens / self.segment_tokens)
        # gradients of all segments but the newest come in, and go out on the other direction
        cold = np.maximum(segments - NUM_HOT, 0) * backward
        each = self.segment_tokens * 2 * self.shape.kv_size / training.tp_size
        loaded = each * (segments * training.compute_bytes + cold * training.kv_gradient_bytes)
        seconds: Array = (segments + cold) * self.stream.latency_s
        seconds += loaded / self.stream.bytes_per_s
        return seconds

"""Seconds of chunk passes through one stage, for all chunks of a table at once.

One pass on one process of a pool:

    linear + max(all-to-alls, local attention) + shared attention + waits for streamed K,V

The fixed time of matrices is that of reading them: of experts those that some token of a process
visits. The all-to-alls of slices on several processes, one for every size of places, hide behind
the attention of slices on one (Skrull, Eq. 2). A pool is as slow as its slowest process.
Efficiencies saturate with the process's tokens; under tensor parallelism with tokens / tp_size,
since each device's matrices are that much narrower.

    P parts, C chunks, S processes of a pool
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from furlong.cost.devices.hardware import Efficiency, HardwareSpec
from furlong.cost.devices.links import Link
from furlong.cost.memory.training import Training
from furlong.cost.seconds.chunks import Array, ChunkTable
from furlong.cost.seconds.flops import ATTENTION_BACKWARD, StageFlops
from furlong.cost.seconds.terms import Terms
from furlong.cost.shapes.shape import ModelShape
from furlong.plan.passes import Pass
from furlong.plan.segments import NUM_HOT

Work = Literal["forward", "to last kv", "first layers", "backward", "head", "head and back"]
"""to last kv: up to the last layer's K,V projection; first layers: forward of that many; head and
back: the language model head and the loss with their gradients."""


@dataclass(frozen=True, slots=True)
class PassPart:
    """Work of one kind that a pass does."""

    work: Work
    layers: int = 0
    """Number of the "first layers"."""
    remembered: int = 0
    """First layers whose attention does not run: its results are handed back."""


def parts_of(what: Pass, height: int) -> tuple[PassPart, ...]:
    """The parts that the executor runs for a pass over a stage of `height` layers."""
    match what.computes:
        case "nothing":
            return ()
        case "to last kv":
            return (PassPart("to last kv", remembered=what.remembered),)
        case "values" | "graph":
            head = (PassPart("head"),) if what.loss else ()
            return (PassPart("forward", remembered=what.remembered), *head)
        case "backward":
            head = (PassPart("head and back"),) if what.loss else ()
            layers, known = what.recompute_layers, what.remembered
            again = (PassPart("first layers", layers, known),) if layers else ()
            return (PassPart("backward"), *head, *again)


@dataclass(frozen=True)
class StageRates:
    """The seconds of passes through one stage."""

    shape: ModelShape
    hardware: HardwareSpec
    training: Training
    flops: StageFlops
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
    _terms: dict[tuple[PassPart, ...], Terms] = field(default_factory=dict, compare=False)

    def seconds(self, parts: tuple[PassPart, ...], table: ChunkTable) -> Array:
        """(P, S, C) parts of a pass over the stage, on every process."""
        waits_s: Array | float = 0.0
        if self.stream is not None:
            waits_s = np.stack([self._waits_s(part, table) for part in parts])
        if parts not in self._terms:
            self._terms[parts] = self._terms_of(parts)
        return self._terms[parts].seconds(table, waits_s)

    def _terms_of(self, parts: Sequence[PassPart]) -> Terms:
        """Factors of the sums of a table in the seconds of some parts."""
        hardware, tp = self.hardware, self.training.tp_size
        rate = hardware.peak_flops_per_s * hardware.linear.best
        linear, passed = np.array([self._per_token(part) for part in parts], float).T
        layers = np.array([self._num_layers(part) for part in parts])
        attending = [self._attending(part) for part in parts]
        called = np.array([len(layers) for layers in attending])
        keys = [*map(self._key_s, parts)]
        seen = self.flops.windows
        times = np.array([2 if part.work == "backward" else 1 for part in parts])
        passes = np.array([part.work in ("forward", "to last kv", "backward") for part in parts])
        tp_call_s, tp_token_s = self._tp_s()
        return Terms(
            token_s=(linear / rate + passed / hardware.activation_bytes_per_s) / tp
            + layers * tp_token_s,
            process_s=linear * hardware.linear.half_tokens / rate + layers * tp_call_s,
            idle_s=self._idle_s(parts),
            key_s={
                window: np.array(
                    [
                        sum(some[layer] for layer in layers if seen[layer] == window)
                        for layers, some in zip(attending, keys, strict=True)
                    ]
                )
                for window in dict.fromkeys(seen)
            },
            half_tokens=np.array([self._attention(part).half_tokens * tp for part in parts]),
            exchanges=called,
            launch_s=times * hardware.layer_launch_s * layers + hardware.pass_launch_s * passes,
            call_s=times * hardware.slice_launch_s * called,
            exchange_s={
                size: (4 * link.latency_s, self._exchange_s(size))
                for size, link in self.sp_links.items()
            },
            hides_launches=hardware.hides_launches,
        )

    def _per_token(self, part: PassPart) -> tuple[float, float]:
        """FLOPs of matrices, and bytes of saved tensors that pass, per token."""
        flops, lora, height = self.flops, self.lora_per_token, len(self.flops.windows)
        frozen = self.training.lora is not None
        match part.work:
            case "head":
                return flops.head_per_token, self.logits_per_token / 3
            case "head and back":
                return flops.head_per_token * (2 if frozen else 3), self.logits_per_token
            case "backward":
                linear = flops.linear_per_token * (1 if frozen else 2) + 2 * lora
                return linear, 2 * sum(self.saved_per_token)
            case "first layers":
                linear = sum(flops.layer_linear_per_token[: part.layers])
                return linear + lora * part.layers / max(1, height), self._saved(part)
            case _:
                left_out = flops.tail_per_token if part.work == "to last kv" else 0
                return flops.linear_per_token + lora - left_out, self._saved(part)

    def _idle_s(self, parts: Sequence[PassPart]) -> dict[float, Array]:
        """share of experts that a token does not visit -> (P,) seconds of reading those."""
        hardware, frozen = self.hardware, self.training.lora is not None
        read_s = hardware.linear.half_tokens / hardware.peak_flops_per_s / hardware.linear.best
        found: dict[float, Array] = {}
        for number, part in enumerate(parts):
            layers = self._num_layers(part) - (part.work == "to last kv")
            times = 2 if part.work == "backward" and not frozen else 1
            for unvisited, flops in self.flops.layer_idle[:layers]:
                if flops:
                    own = found.setdefault(unvisited, np.zeros(len(parts)))
                    own[number] += times * flops * read_s
        return found

    def _num_layers(self, part: PassPart) -> int:
        """Layers that the part passes; none behind the last."""
        if part.work in ("head", "head and back"):
            return 0
        return part.layers if part.work == "first layers" else len(self.flops.windows)

    def _saved(self, part: PassPart) -> float:
        """Bytes per token that a forward passes."""
        saved, flops = self.saved_per_token, self.flops
        if part.work == "first layers":
            return sum(saved[: part.layers])
        if part.work == "to last kv" and saved:
            return sum(saved) - saved[-1] * flops.tail_per_token / flops.layer_linear_per_token[-1]
        return sum(saved)

    def _attending(self, part: PassPart) -> list[int]:
        """Layers of the stage whose attention runs."""
        height = len(self.flops.windows)
        match part.work:
            case "forward":
                layers = range(part.remembered, height)
            case "to last kv":
                layers = range(part.remembered, height - 1)
            case "first layers":
                layers = range(part.remembered, part.layers)
            case "backward":
                layers = range(height)
            case _:
                layers = range(0)
        return [layer for layer in layers if self.flops.attention_per_key[layer]]

    def _attention(self, part: PassPart) -> Efficiency:
        backward = part.work == "backward"
        return self.hardware.attention_backward if backward else self.hardware.attention_forward

    def _key_s(self, part: PassPart) -> list[float]:
        """Seconds of an attended key in each layer, at the best efficiency."""
        times = ATTENTION_BACKWARD if part.work == "backward" else 1.0
        rate = self.hardware.peak_flops_per_s * self._attention(part).best
        times /= self.training.tp_size * rate
        return [times * flops for flops in self.flops.attention_per_key]

    def _exchange_s(self, size: int) -> float:
        """Seconds per token of a place's slices in the exchanges of one layer, without latencies:
        q and the output stay within an inner group, K,V of the process's heads come from the whole
        place (all-to-all with gathered keys: DeepSpeed Ulysses' heads within LoongTrain's second
        dimension, whose ring is replaced). The backward moves as much: dO in, then dq, and dK,dV
        from every inner group."""
        shape, inner = self.shape, self.shape.inner_size(size)
        element = self.training.compute_bytes / self.training.tp_size
        q_bytes = 2 * shape.q_size / size * (inner - 1) / inner * element
        kv_bytes = 2 * shape.kv_size * shape.kv_share(size) * (size - 1) / size * element
        link = self.sp_links[size]
        near = self.sp_links.get(inner, link)
        return q_bytes / near.bytes_per_s + kv_bytes / link.bytes_per_s

    def _tp_s(self) -> tuple[float, float]:
        """Two all-gathers and two reduce-scatters of hidden states per layer (Megatron): what does
        not grow, and what each token adds."""
        tp = self.training.tp_size
        if tp == 1:
            return 0.0, 0.0
        moved = self.shape.hidden_size * self.training.compute_bytes * (tp - 1) / tp
        return 4 * self.tp_link.latency_s, 4 * moved / self.tp_link.bytes_per_s

    def _waits_s(self, part: PassPart, table: ChunkTable) -> Array:
        """(S, C) seconds that the part waits for streamed K,V."""
        attending, tokens = self._attending(part), table.tokens
        total = np.zeros_like(tokens)
        if not attending:
            return total
        hardware, tp = self.hardware, self.training.tp_size
        rate = hardware.peak_flops_per_s * hardware.linear.best
        matrices = np.where(tokens > 0, tokens / tp + hardware.linear.half_tokens, 0.0)
        own_s = self._per_token(part)[0] * matrices / rate / len(attending)
        slower = 1 + self._attention(part).half_tokens * tp / np.maximum(tokens, 1e-9)
        key_s, windows = self._key_s(part), self.flops.windows
        for (window, each), count in Counter((windows[i], key_s[i]) for i in attending).items():
            keys_s = table.prefix_keys[window] * each * slower
            load_s = self._loads_s(table.prefix_tokens[window], part.work == "backward")
            total += count * self._stall_s(table.prefix_tokens[window], own_s, keys_s, load_s)
        return total

    def _stall_s(self, tokens: Array, own_s: Array, keys_s: Array, load_s: Array) -> Array:
        """(S, C) seconds that one layer waits for its prefix, cut into blocks (FPDT's two buffers:
        the first block loads while the layer's own part computes)."""
        blocks = np.maximum(np.ceil(tokens / self.segment_tokens), 1)
        load, block = load_s / blocks, keys_s / blocks
        waited = np.maximum(own_s, load) + (blocks - 1) * np.maximum(block, load) + block
        stall: Array = np.maximum(waited - own_s - blocks * block, 0.0) * (tokens > 0)
        return stall

    def _loads_s(self, tokens: Array, backward: bool) -> Array:
        """(S, C) seconds that one layer's prefix takes to arrive, in whole segments."""
        assert self.stream is not None
        training = self.training
        segments = np.ceil(tokens / self.segment_tokens)
        # gradients of all segments but the newest come in, and go out on the other direction
        cold = np.maximum(segments - NUM_HOT, 0) * backward
        each = self.segment_tokens * self.shape.stored_size / training.tp_size
        loaded = each * (segments * training.compute_bytes + cold * training.kv_gradient_bytes)
        seconds: Array = (segments + cold) * self.stream.latency_s
        seconds += loaded / self.stream.bytes_per_s
        return seconds

"""MemoryRules: everything that decides a plan's bytes but the plan."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.cost.memory.activations import Activations
from furlong.cost.memory.cells import StageBytes, stage_bytes
from furlong.cost.memory.heap import NO_HEAP, Heap
from furlong.cost.memory.training import Training
from furlong.cost.shapes.shape import ModelShape

# by whether the device is a CPU, where a tile of the loss also has a most
_TILE_LOGITS = {False: 2**27, True: 2**22}
_LEAST_TILE_TOKENS = {False: 64, True: 128}
_MOST_CPU_TILE_TOKENS = 256
_STAGING_BYTES, _NUM_LARGEST = 2**25, 5


@dataclass(frozen=True)
class MemoryRules:
    """A model, its training, and the devices that run it."""

    shape: ModelShape
    training: Training
    device_budget_bytes: int
    activations: Activations | None = None
    """Tensors that a layer saves; None: those of transformers' modules (`activations.eager`)."""
    activation_factor: float = 1.0
    """Measured over counted bytes of a graph."""
    overhead_bytes: int = 0
    """Bytes of a framework's own, counted as buffers all through the step."""
    heap: Heap = NO_HEAP
    """The C library's; the bytes that it holds are counted as buffers, too."""
    whole_logits: bool = False
    """Whether the loss holds the logits of a whole chunk and not of a tile (other frameworks)."""
    device_type: str = "cuda"
    """Type, cuda or cpu: it decides how large segments of the store and tiles of the loss are."""

    @property
    def tile_tokens(self) -> int | None:
        """Rows of a tile of the loss, as `ops.loss` cuts it; None where it is not cut."""
        if self.whole_logits:
            return None
        on_cpu = self.device_type == "cpu"
        tokens = max(_TILE_LOGITS[on_cpu] // self.shape.vocab_size, _LEAST_TILE_TOKENS[on_cpu])
        return min(tokens, _MOST_CPU_TILE_TOKENS) if on_cpu else tokens

    def cell(self, stages: tuple[int, ...], stage: int) -> StageBytes:
        """Bytes per token of a cell of one stage."""
        return stage_bytes(
            self.shape, stages, stage, self.training, self.activations, self.activation_factor
        )

    def staging_bytes(self, largest: float) -> float:
        """Bytes of the device's buffers for the tier host, as `kv.pools` sizes them by the largest
        tensor that goes there; a CPU computes on what lies there."""
        if self.device_type == "cpu" or not largest:
            return 0.0
        return max(_STAGING_BYTES, _NUM_LARGEST * largest)

    def loss_bytes(self, cell: StageBytes, num_tokens: float, *, backward: bool) -> float:
        """Bytes of the logits of a tile; in a backward with the gradient of the head."""
        tile = min(num_tokens, self.tile_tokens or num_tokens)
        logits = cell.logit * self.shape.vocab_size * tile
        return logits + (cell.head_gradient if backward else 0.0)

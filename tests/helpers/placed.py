"""Run plans with sequences on places of a pool, one process at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from furlong.kv.arena import Arena
from furlong.kv.pools import Pools, Storage
from furlong.models.decoder import HFDecoder
from furlong.ops.sequence_parallel import Exchange
from furlong.plan.plan import FIRST_PROCESS, Backward, Chunk, ChunkPlan
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import assemble, stages_of, walk_groups
from furlong.runtime.distributed.comms import Comms
from furlong.testing import TokenSequences
from helpers.executors import executor_of


class OfAPool(Comms):
    """Comms for a test that sums the gradients of a pool itself; `add_up` sums over the pool."""

    def __init__(self, add_up: Callable[[Tensor], Tensor] = Tensor.clone) -> None:
        super().__init__()
        self.add_up = add_up  # type: ignore[method-assign]

    def accept(self, plan: ChunkPlan) -> None:
        """Accept a plan of a pool, too."""
        self._last_backwards = {a.stage: a for a in plan.actions[0] if isinstance(a, Backward)}
        self._passing = ((),) * len(plan.stages)


def plan_of(
    lens: Sequence[int], chunks: Sequence[Chunk], sp_size: int, options: ChunkOptions, *,
    num_layers: int, backward: bool = True,
) -> ChunkPlan:  # fmt: skip
    """Return the checked plan of one rank over chunks on places, all in one group."""
    stages = stages_of(num_layers, options)
    walk = walk_groups([range(len(chunks))], stages, options, backward=backward)
    return assemble(lens, [chunks], stages, [walk], offload=options.offloading, sp_size=sp_size)


def on_one(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the same chunks on a single process."""
    return [Chunk(tuple(replace(s, place=FIRST_PROCESS) for s in chunk.slices)) for chunk in chunks]


def obey(
    model: nn.Module, plan: ChunkPlan, sequences: TokenSequences, exchange: Exchange | None,
    process: int = 0, add_up: Callable[[Tensor], Tensor] = Tensor.clone,
) -> tuple[float, list[Tensor]]:  # fmt: skip
    """Run a plan. Return the summed loss and the token losses; gradients of this process's rows are
    added to `.grad`."""
    whole = HFDecoder(model)
    pools = Pools(Arena(whole.device, poison=True), Storage(poison=True))
    with whole.installed():
        executor = executor_of(
            whole, plan, sequences, pools=pools, comms=OfAPool(add_up), process=process,
            exchange=exchange,
        )  # fmt: skip
        loss_sum, _ = executor.run()
    assert pools.arena.taken_bytes == pools.lower_bytes == 0
    pools.close()
    return loss_sum, executor.token_losses

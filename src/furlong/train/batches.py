"""Global batches on the processes of a run: plans, made ahead of time, and gradients.

The sequences of a batch are divided among the replicas. One process of each replica plans the
replica's sequences, so planning takes as long for many replicas as for one. All processes exchange
the plans of the replicas, and each joins these plans to one plan of the batch. Planning and
exchange run in a thread, with collectives in a separate group, while the previous batch trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from furlong.data.loader import TrainBatch
from furlong.data.tokenize import IGNORE_INDEX
from furlong.errors import ElsewhereError, reason_of
from furlong.plan.plan import ChunkPlan, Layout
from furlong.planners.candidates import CHUNKS
from furlong.planners.chunks import by_cost
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import gathered_first, join_kept, plan_replica
from furlong.planners.search import BatchPlans
from furlong.planners.spaco import num_drawn, sampled
from furlong.runtime.batch import Batch, join_prompts, shift_labels
from furlong.runtime.distributed.mesh import allow_time
from furlong.train.processes import ALONE, Processes, limit_of_step

if TYPE_CHECKING:
    from furlong.api import Engine
    from furlong.runtime.step import StepResult


WorkOf = Callable[[Sequence[int]], Sequence[float]]
"""Maps sequence lengths to the quantity to balance over replicas, such as FLOPs."""

Seconds = Callable[[ChunkPlan], float]
"""Predicts the seconds of a plan's step."""


class Wanted(NamedTuple):
    """Key by which the plan of a batch is requested. The key holds all values that the plan depends
    on."""

    seq_lens: tuple[int, ...]
    options: ChunkOptions
    backward: bool = True
    forks: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """`Forks`, as pairs, of sequences that are joined to trees."""

    @classmethod
    def of(cls, batch: TrainBatch, options: ChunkOptions, *, backward: bool = True) -> Wanted:
        """Return the key of a batch. The options in the key have no `sample`, as chunks are sampled
        after planning."""
        return cls(batch.seq_lens, replace(options, sample=None), backward)

    def joined(self, batch: Batch) -> Wanted:
        """Return the key for the sequences that `batch` has joined."""
        lens = tuple(len(tree.input_ids) for tree in batch.planned)
        forks = tuple((seq_id, tuple(own)) for seq_id, own in batch.forks.items())
        return self._replace(seq_lens=lens, forks=forks)


class Planned(NamedTuple):
    """The plan of a batch, the names of the planners that made the plan, and the predicted step
    time."""

    method: str
    """Names of the replicas' planners; see `planners.search`."""
    plan: ChunkPlan
    step_s: float = 0.0
    """Predicted seconds of the slowest replica; 0 without a prediction."""


@dataclass(frozen=True)
class BatchPlanner:
    """Plans a global batch: divides its sequences among the replicas and plans each replica's part.

    A replica is one device, a sequence-parallel group that divides each chunk, or a pipeline. The
    pipeline runs state-aware 1F1B. If one of the other planners (`alternatives`) makes a plan that
    is predicted to be faster, or if the run names a method, the replica runs the plan of
    `alternatives`. If there are fewer sequences than replicas, the replicas without a sequence run
    a chunk of padding (a dummy chunk).
    """

    layout: Layout
    work: WorkOf
    num_layers: int
    stages: Sequence[int] = ()
    """Layers of each pipeline stage."""
    frozen_layers: int = 0
    alternatives: BatchPlans | None = None
    seconds: Seconds = lambda plan: 0.0

    def plan(self, wanted: Wanted) -> Planned:
        """Plan the sequences of all replicas in this process. Return the plan of the whole
        batch."""
        num_replicas = len(self._dealt(wanted))
        return self.joined(wanted, [self.own(wanted, replica) for replica in range(num_replicas)])

    def own(self, wanted: Wanted, replica: int) -> Planned:
        """Return the plan of the sequences of one replica. The plan numbers these sequences from
        0."""
        options = wanted.options
        seq_ids, all_forks = self._dealt(wanted)[replica], dict(wanted.forks)
        seq_lens = [wanted.seq_lens[seq_id] for seq_id in seq_ids]
        forks = {n: all_forks[i] for n, i in enumerate(seq_ids) if i in all_forks}
        is_cut = self.layout.pp > 1 or options.order == "layer-first"
        frozen = self.frozen_layers if is_cut and wanted.backward else 0
        plan = plan_replica(
            seq_lens, options, num_layers=self.num_layers, stages=self.stages,
            sp_size=self.layout.sp, backward=wanted.backward, frozen_layers=frozen, forks=forks,
        )  # fmt: skip
        method = CHUNKS
        if self.alternatives is not None and wanted.backward and not forks:
            method, plan = self.alternatives.best_plan(
                seq_lens, plan, options, frozen_layers=frozen
            )
        return Planned(method, plan, self.seconds(gathered_first(plan)))

    def most_work(self, wanted: Wanted) -> float:
        """Return the work of the replica that has most. A tree counts as one sequence of all its
        tokens, which is more than it takes."""
        work = self.work(wanted.seq_lens)
        return max(sum(work[seq_id] for seq_id in own) for own in self._dealt(wanted))

    def joined(self, wanted: Wanted, found: Sequence[Planned]) -> Planned:
        """Join the plans `found` of the replicas to one plan of the batch, and check it."""
        plans = [own.plan for own in found]
        plan = join_kept(plans, self._dealt(wanted), wanted.seq_lens, self.layout.dp)
        methods = ", ".join(dict.fromkeys(own.method for own in found))
        return Planned(methods, plan, max(own.step_s for own in found))

    def _dealt(self, wanted: Wanted) -> Sequence[Sequence[int]]:
        """Return a list of seq_ids for each replica that gets at least one sequence. A single
        device gets all sequences, in batch order."""
        if self.layout.num_devices == 1:
            return [range(len(wanted.seq_lens))]
        return by_cost(self.work(wanted.seq_lens), min(self.layout.dp, len(wanted.seq_lens)))


class SharedPlans:
    """Plans of the batches of a run, made in a thread of each process. All processes must request
    the plans in the same order."""

    def __init__(self, processes: Processes, replica: int | None, planner: BatchPlanner) -> None:
        """`replica`: number of the replica whose sequences this process plans; None if it plans for
        no replica. All processes must call this together."""
        self._processes, self._replica, self.planner = processes.apart(), replica, planner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plans")
        self._coming: dict[Wanted, Future[Planned]] = {}
        self.waited_s = 0.0
        """Seconds that the last `get` waited."""

    def expect(self, wanted: Wanted) -> None:
        """Start to make a plan that `get` will return later."""
        if wanted not in self._coming:
            self._coming[wanted] = self._thread.submit(self._make, wanted)

    def get(self, wanted: Wanted) -> Planned:
        """Return the plan of a batch, equal on all processes. A collective. Raises ElsewhereError
        if another process could not plan its replica's sequences."""
        started_s = time.perf_counter()
        self.expect(wanted)
        # plans expected before chunks shrank are never requested
        for other in [own for own in self._coming if own.options != wanted.options]:
            del self._coming[other]
        try:
            return self._coming.pop(wanted).result()
        finally:
            self.waited_s = time.perf_counter() - started_s

    def drop(self, wanted: Wanted) -> None:
        """Forget the plan of a batch, if `get` has not returned the plan already."""
        self._coming.pop(wanted, None)

    def close(self) -> None:
        """Stop the thread, once all plans that `expect` has started are made."""
        self._thread.shutdown()

    def _make(self, wanted: Wanted) -> Planned:
        own: Planned | Exception | None = None
        if self._replica is not None and self._replica < len(wanted.seq_lens):
            try:
                own = self.planner.own(wanted, self._replica)
            except Exception as error:
                own = error
        told = reason_of(own) if isinstance(own, Exception) else own
        # in the order of their replicas, as `make_ranks` numbers processes
        found = [made for made in self._processes.each(told) if made is not None]
        if isinstance(own, Exception):
            raise own
        if reason := next((made for made in found if isinstance(made, str)), ""):
            raise ElsewhereError(f"no plan of another process ({reason})")
        plans = [made for made in found if isinstance(made, Planned)]
        planned = self.planner.joined(wanted, plans)
        assert planned.plan.checksum >= 0  # cached now, so that the step does not wait for it
        return planned


class BatchEngine:
    """Computes losses and gradients of global batches. The processes of a run share the plan of
    each batch. In a run of one process without `Ranks` (process groups), the engine plans by
    itself."""

    def __init__(
        self,
        engine: Engine,
        processes: Processes = ALONE,
        work: WorkOf = lambda seq_lens: seq_lens,
        stages: Sequence[int] = (),
        alternatives: BatchPlans | None = None,
        seconds: Seconds = lambda plan: 0.0,
        tree_tokens: int = 0,
    ) -> None:
        """
        Args:
            work: Maps sequence lengths to the quantity to balance over replicas; default: tokens.
            stages: Number of layers of each pipeline stage.
            alternatives: Other planners that a replica may use if they are faster.
            seconds: Predicts the time of a replica's plan, for timeouts.
            tree_tokens: Most tokens of a tree of sequences that begin with equal tokens, which are
                computed once; 0: no sequences are joined.
        """
        self.engine, self.processes, self.tree_tokens = engine, processes, tree_tokens
        self.method: str | None = None
        """Names of the planners of the last plan; None without ranks."""
        self._plans: SharedPlans | None = None
        if engine.ranks is not None:
            model, ranks = engine.model, engine.ranks
            frozen = processes.each(model.num_frozen_layers)
            layout = Layout(ranks.dp, ranks.sp, ranks.pp)
            planner = BatchPlanner(
                layout, work, model.num_layers, stages, min(frozen), alternatives, seconds
            )
            own = ranks.replica if ranks.process == ranks.stage == 0 else None
            self._plans = SharedPlans(processes, own, planner)

    @property
    def model(self) -> nn.Module:
        """The transformers model."""
        return self.engine.model.model

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return self.engine.model.device

    @property
    def is_alone(self) -> bool:
        """Whether the engine has no `Ranks`: this process computes whole batches by itself."""
        return self._plans is None

    @property
    def waited_s(self) -> float | None:
        """Seconds that the last step waited for its plan; None if the engine has no `Ranks`."""
        return None if self._plans is None else self._plans.waited_s

    def expect(self, batch: TrainBatch, options: ChunkOptions) -> None:
        """Start to plan a batch in the background, before `compute` trains on the batch."""
        if self._plans is not None and batch.num_valid_tokens:
            if self.engine.adds_router_loss:  # see `compute`
                self._plans.expect(self._wanted(batch, options, backward=False)[0])
            self._plans.expect(self._wanted(batch, options, backward=True)[0])

    def compute(
        self,
        batch: TrainBatch,
        options: ChunkOptions,
        *,
        backward: bool = True,
        weights: Sequence[float] | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Return a batch's losses and, with `backward`, compute the gradients of the mean loss.

        The result covers the whole batch on all processes.

        Args:
            weights: Factor of each sequence's loss in the gradient; ignored without `Ranks`.
            watch: Called after each action; an error that it raises ends the step.

        Raises:
            ElsewhereError: If another process fails before the step.
            LinkError: If another process fails during the step.
        """
        if self._plans is None:
            divisor = batch.num_valid_tokens if backward else None
            return self.engine.forward_backward(
                batch.tensors(), options, divisor, backward, watch=watch
            )
        loads = None
        if backward and self.engine.adds_router_loss:
            loads = self.engine.loads_of(self.compute(batch, options, backward=False, watch=watch))
        plans, made = self._plans, list[ChunkPlan]()
        # before the first exchange, in which a process with a new model waits for the others' plan
        wanted, joined = self._wanted(batch, options, backward=backward)
        plans.expect(wanted)

        def make() -> tuple[ChunkPlan, Batch | Mapping[int, Mapping[str, Tensor]]]:
            if not made:
                self.method, plan, step_s = plans.get(wanted)
                allow_time(limit_of_step(step_s))
                made.append(with_drawn_chunks(plan, batch, options) if backward else plan)
            return made[0], joined or batch.part(self.engine.reads(made[0]))

        try:
            return self.engine.run_made(
                make, batch.num_valid_tokens, weights=weights, loads=loads, watch=watch
            )
        finally:  # another process may have refused before this one took its plan
            plans.drop(wanted)

    def _wanted(
        self, batch: TrainBatch, options: ChunkOptions, *, backward: bool
    ) -> tuple[Wanted, Batch | None]:
        """Return the key of a batch's plan. If sequences that begin alike are joined, the key is of
        the trees, and the second result is the batch that has them; else it is None.

        All processes read the whole batch for that, and come to one result. Nothing is joined if
        the replica with most work would get more: two sequences of a tree are on one replica."""
        wanted = Wanted.of(batch, options, backward=backward)
        if self._plans is None or not self.tree_tokens or not self.engine.may_share:
            return wanted, None
        joined = join_prompts(shift_labels(batch.tensors()), options.size, self.tree_tokens)
        trees, most_work = wanted.joined(joined), self._plans.planner.most_work
        is_less = len(trees.seq_lens) < len(wanted.seq_lens)
        if is_less and most_work(trees) <= most_work(wanted):
            return trees, joined
        return wanted, None

    def share(self, num_sequences: int) -> range:
        """Return the indices of the sequences whose token losses this process sums. All processes
        know all token losses, and each sequence is summed by one process."""
        return range(self.processes.launch.number, num_sequences, self.processes.num_processes)

    def close(self) -> None:
        """Stop the planning thread, once all plans that it has begun are made."""
        if self._plans is not None:
            self._plans.close()


def step_options(options: ChunkOptions, step: int) -> ChunkOptions:
    """Return the options with a sampling seed that depends only on the run's seed and the step, so
    that a repeated step, also after a resume, samples the same chunks."""
    sampling = options.sampling
    if sampling is None:
        return options
    return replace(options, sample=replace(sampling, seed=((sampling.seed or 0) << 32) + step))


def drawn_share(plan: ChunkPlan | None) -> float | None:
    """Return the share of a plan's chunks that have a gradient, 0 to 1: the sampled chunks of cut
    sequences and all chunks of whole sequences. Return None for a plan without sampling."""
    if plan is None or not plan.sampled:
        return None
    return num_drawn(plan) / len(plan.chunks)


def with_drawn_chunks(plan: ChunkPlan, batch: TrainBatch, options: ChunkOptions) -> ChunkPlan:
    """Return the plan without the backwards of those chunks of cut sequences that are not sampled.
    If `options.sampling` is None, return the plan itself. The samples depend on the labels of the
    whole batch, so all processes sample the same chunks."""
    if options.sampling is None:
        return plan
    return sampled(plan, options.sampling, _labelled(plan, batch))


def _labelled(plan: ChunkPlan, batch: TrainBatch) -> set[int]:
    """Return the indices of the chunks that hold a part of a cut sequence and predict a labelled
    token."""
    found = set()
    for index in {chunk for group in plan.groups.values() for chunk in group}:
        for piece in plan.chunks[index].slices:
            labels = batch.sequences[piece.seq_id].labels[piece.start + 1 : piece.stop + 1]
            if np.any(labels != IGNORE_INDEX):
                found.add(index)
    return found

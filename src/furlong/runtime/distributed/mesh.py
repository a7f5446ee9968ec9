"""The coordinates of a process: pipeline stage, replica, place in a sequence-parallel group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from math import prod

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from furlong.errors import ConfigError
from furlong.plan.plan import place_sizes
from furlong.planners.layouts import require_replicate
from furlong.runtime.distributed.failures import is_lost, lost


@dataclass(frozen=True, slots=True)
class Ranks:
    """The coordinates of this process, and its process groups.

    Processes are numbered with the pipeline stage as outermost axis, then the replica, and the
    number in the sequence-parallel group (called the pool) as innermost axis. So processes of a
    pool have consecutive numbers.
    """

    mesh: DeviceMesh
    """All processes, with axes pp, dp, sp0, sp1, ...; the sp sizes multiply to `sp`."""
    group: ProcessGroup
    """All processes of the run."""
    pp: int
    dp: int
    sp: int
    stage: int
    replica: int
    process: int
    """Number of this process in its pool, from 0."""
    place_groups: Mapping[int, ProcessGroup]
    """Size -> the aligned subgroup of the pool of that size with this process, for sizes >= 2."""
    stage_group: ProcessGroup
    """All processes of this stage, which reduce its gradients together."""
    shard_mesh: DeviceMesh
    """The processes of this stage, on one axis (FSDP) or on (replicate, part) (HSDP). Weights are
    sharded along the last axis."""
    replicate: int = 1
    """Number of copies of the weights (torchtitan's dp_replicate)."""
    is_forced: bool = False
    """Whether a single process uses process groups and FSDP2, for offloaded weights."""

    @property
    def plan_rank(self) -> int:
        """Index in `ChunkPlan.actions` of the list that this process runs: `replica * pp + stage`.
        All processes of a sequence-parallel group run the same list."""
        return self.replica * self.pp + self.stage

    @property
    def num_processes(self) -> int:
        return self.dp * self.sp * self.pp

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        kind = self.mesh.device_type
        is_gpu = kind == "cuda"
        return torch.device(kind, torch.cuda.current_device()) if is_gpu else torch.device(kind)

    @property
    def divides(self) -> bool:
        """Whether FSDP2 shards the weights of this stage."""
        return self.is_forced or self.stage_group.size() > 1

    @property
    def groups(self) -> list[ProcessGroup]:
        """All process groups of this process; the first one is that of all processes."""
        meshes = self.mesh.get_all_groups(), self.shard_mesh.get_all_groups()
        own = (self.group, self.stage_group, *self.place_groups.values(), *meshes[0], *meshes[1])
        return list(dict.fromkeys(own))

    def facts_device(self, group: ProcessGroup) -> str:
        """Return the device type on which a group exchanges small facts: the CPU if the group has a
        CPU backend, because a GPU would first finish its queued work."""
        return "cpu" if "cpu:" in dist.get_backend_config(group) else self.mesh.device_type

    def replica_of(self, process: int) -> int:
        """Return the number of the replica that a process of the run belongs to."""
        return process // self.sp % self.dp


def make_ranks(dp: int, sp: int, pp: int, device_type: str, replicate: int = 1) -> Ranks:
    """Return the ranks of a run. Every process calls it with equal sizes after init_process_group.

    Args:
        dp: Number of replicas; each trains different sequences.
        sp: Processes of a sequence-parallel group, which divide each sequence.
        pp: Pipeline stages.
        device_type: "cuda" or "cpu".
        replicate: Copies of the weights (HSDP, torchtitan's dp_replicate). Weights are gathered
            among the processes of a copy, gradients are also all-reduced between copies. It
            divides `dp`.

    Raises:
        ConfigError: On all, if sizes differ between processes, or multiply to another world size.
    """
    world = dist.group.WORLD
    assert world is not None
    sizes = dp, sp, pp, replicate
    each: list[tuple[int, ...]] = [sizes] * world.size()
    try:
        dist.all_gather_object(each, sizes)
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise lost([world], error, "a call of make_ranks") from error
    for process, given in enumerate(each):
        if given != each[0]:
            raise ConfigError(
                given=f"dp, sp, pp, replicate = {given} on process {process}, {each[0]} on process"
                " 0",
                required="the same sizes on all processes",
                source="the calls of make_ranks",
                change="pass the same sizes on all processes",
            )
    require_sizes(dp, sp, pp, world.size())
    require_replicate(dp, replicate)
    pool = _pool_axes(sp)
    names = tuple(f"sp{index}" for index in range(len(pool)))
    mesh = init_device_mesh(device_type, (pp, dp, *pool), mesh_dim_names=("pp", "dp", *names))
    places = {
        prod(pool[first:]): _flat(mesh, names[first:], f"place{prod(pool[first:])}")
        for first in reversed(range(len(pool)))
    }
    for size in place_sizes(sp)[1:]:
        if size not in places:  # such as 3 and 6 in a pool of 12: not nested in the axes
            own_sizes, names_of = (pp * dp * sp // size, size), ("apart", "place")
            apart = init_device_mesh(device_type, own_sizes, mesh_dim_names=names_of)
            places[size] = apart["place"]
    weights = of_stage = _flat(mesh, ("dp", *names), "shard")
    if replicate > 1:  # each copy is sharded among neighbouring processes
        of_groups = init_device_mesh(
            device_type, (pp, replicate, dp * sp // replicate),
            mesh_dim_names=("stage", "replicate", "part"),
        )  # fmt: skip
        weights = of_groups["replicate", "part"]
    stage, replica, *own = mesh.get_coordinate() or []
    return Ranks(
        mesh, world, pp, dp, sp, stage, replica,
        process=sum(at * prod(pool[axis + 1 :]) for axis, at in enumerate(own)),
        place_groups={size: place.get_group() for size, place in places.items()},
        stage_group=of_stage.get_group(), shard_mesh=weights, replicate=replicate,
    )  # fmt: skip


def require_sizes(dp: int, sp: int, pp: int, num_processes: int) -> None:
    """Raise ConfigError unless dp x sp x pp is the number of processes."""
    product = dp * sp * pp
    if min(dp, sp, pp) < 1 or product != num_processes:
        raise ConfigError(
            given=f"dp {dp} x sp {sp} x pp {pp} = {product} on {num_processes} processes",
            required="sizes of at least 1 that multiply to the number of processes",
            source="the sizes of parallel and the world size of torchrun",
            change=f"start {product} processes (torchrun --nproc-per-node), or change the sizes"
            if min(dp, sp, pp) > 0
            else "set each size to 1 or more",
        )


def require_stages(pp: int, num_layers: int) -> None:
    """Raise ConfigError if a model has fewer layers than stages. The number of attention heads does
    not bound `sp`: with more processes than heads, K,V are gathered."""
    if pp > num_layers:
        raise ConfigError(
            given=f"pp {pp} for a model of {num_layers} layers",
            required="at most as many stages as layers",
            source="the sizes of parallel and the model's config",
            change=f"set pp to {num_layers} or less",
        )


def ranks_of_group(group: ProcessGroup, device_type: str) -> Ranks:
    """Return data-parallel ranks for an existing process group."""
    mesh = DeviceMesh.from_group(group, device_type, mesh_dim_names=("dp",))
    size = group.size()
    return Ranks(mesh, group, 1, size, 1, 0, group.rank(), 0, {}, group, mesh)


def gpu_of(number: int, num_local: int) -> torch.device:
    """Return the GPU of local rank `number` of `num_local`. Raises ConfigError if there are fewer
    GPUs."""
    num_gpus = torch.cuda.device_count()
    if number >= num_gpus:
        raise ConfigError(
            given=f"{num_local} processes on a machine with {num_gpus} GPUs",
            required="at most one process per GPU",
            source="the number of processes that were started",
            change=f"torchrun --nproc-per-node {num_gpus}",
        )
    return torch.device("cuda", number)


def ranks_given(
    ranks: Ranks | None,
    process_group: ProcessGroup | None,
    device_type: str,
    offloads: bool = False,
) -> Ranks | None:
    """Return the ranks that an engine uses: `ranks`, or data-parallel ranks of `process_group`.
    Return None for a single process, unless FSDP2 is to offload its weights.

    Raises ConfigError if both `ranks` and `process_group` are given, or if `offloads` (weights are
    offloaded) and neither is given."""
    if ranks is not None and process_group is not None:
        raise ConfigError(
            given="ranks and a process_group",
            required="one of them",
            source="the arguments of the call",
            change="leave process_group out: the ranks have their own groups",
        )
    if process_group is not None:
        ranks = ranks_of_group(process_group, device_type)
    if offloads:
        if ranks is None:
            raise ConfigError(
                given="offload_weights without ranks and without a process_group",
                required="one of them: FSDP2 brings weights from CPU memory, on one process too",
                source="the arguments of the call",
                change="pass process_group=dist.group.WORLD behind dist.init_process_group(), or "
                "leave offload_weights out",
            )
        return replace(ranks, is_forced=True)
    return ranks if ranks is not None and (ranks.is_forced or ranks.num_processes > 1) else None


def time_limit(group: ProcessGroup) -> timedelta | None:
    """Return the timeout of a group's operations, None if its backends have none."""
    backends = (group._get_backend(device) for device in group._device_types)
    found = (getattr(getattr(own, "options", None), "_timeout", None) for own in backends)
    return min((limit for limit in found if limit is not None), default=None)


def allow_time(limit: timedelta) -> None:
    """Raise the timeout of all groups of this process to at least `limit`, from now on. Groups of a
    mesh start with their backend's default, not with the world's timeout."""
    for group in [*dist.distributed_c10d._world.pg_map]:
        if (own := time_limit(group)) is not None and own < limit:
            dist.distributed_c10d._set_pg_timeout(limit, group)


def _pool_axes(sp: int) -> tuple[int, ...]:
    """Return the sizes of the mesh axes that a sequence-parallel group of `sp` processes is divided
    into: `8 -> (2, 2, 2)`, `24 -> (3, 2, 2, 2)`. The last n axes together have 2**n processes; if
    `sp` is no power of two, the first axis has the remaining factor."""
    sizes = [n for n in place_sizes(sp) if n & (n - 1) == 0 or n == sp]  # 24: 1, 2, 4, 8, 24
    return tuple(b // a for a, b in pairwise(sizes))[::-1]


def _flat(mesh: DeviceMesh, names: tuple[str, ...], name: str) -> DeviceMesh:
    """Return the part of a mesh along the axes `names`, flattened to one axis."""
    return mesh[names]._flatten(name) if len(names) > 1 else mesh[names[0]]

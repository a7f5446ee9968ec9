"""Weights sharded by FSDP2: gathered where the plan says, gradients reduced once per step.

Each layer is an FSDP2 group, and so are the embedding and the head unless they are tied. The root
module (the model) has the other parameters, which stay gathered for the whole step. Every pass
enters through a registered FSDP2 forward method. FSDP2 does not gather or free by itself: the
plan's Unshard and Reshard do, so no collective depends on the number of chunks. Each process
accumulates gradients over all chunks. They are reduced once, in the last backward of each stage.

In a sequence-parallel group, plans with `plan.regathers` gather with every pass: FSDP2 gathers each
layer before its pass and frees it afterwards. Each backward then reduces the gradients of its
layers within the group, and the last backward also reduces them over replicas.

Weights are gathered in the compute dtype. Gradients of a chunk arrive in that dtype and are added
to float32 sums at once, as in `runtime.precision` for unsharded weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from furlong.errors import UnsupportedModelError
from furlong.models.attention import patched
from furlong.models.quantized import packed_linears
from furlong.models.support import add_fsdp_method
from furlong.runtime.distributed.consensus import exchange, report
from furlong.runtime.distributed.failures import is_lost
from furlong.runtime.distributed.mesh import Ranks


def shard(
    base: nn.Module,
    layers: Sequence[nn.Module],
    ends: Sequence[nn.Module],
    mesh: DeviceMesh,
    compute_dtype: torch.dtype | None = None,
    *,
    unchanged: Sequence[nn.Parameter] = (),
    offload: bool = False,
) -> None:
    """Shard a model's weights over a mesh, whose processes call this together.

    Its parameters become DTensors, so create the optimizer afterwards.

    Args:
        layers: The decoder layers, each gathered by itself.
        ends: Embedding and head, unless they are tied.
        compute_dtype: The dtype that weights are gathered in; None: the parameters'.
        unchanged: Parameters that must not compute in `compute_dtype`. FSDP2 cannot exempt them: if
            `compute_dtype` is given, there must be none.
        offload: Keep shards, their gradients and optimizer states in CPU memory (pinned for a
            GPU).

    Raises:
        UnsupportedModelError: For models that FSDP2 cannot shard.
    """
    dtype = _refuse_indivisible(base, (*layers, *ends), unchanged if compute_dtype else ())
    # reduce_dtype is also the dtype of the sums over chunks
    wide = torch.promote_types(compute_dtype or dtype, torch.float32)
    policy = MixedPrecisionPolicy(compute_dtype, wide, cast_forward_inputs=False)
    place = CPUOffloadPolicy(mesh.device_type == "cuda") if offload else OffloadPolicy()
    whole = {linear.weight for linear in packed_linears(base).values()}  # codes are not sharded
    for module in (*layers, *ends, base):
        fully_shard(
            module, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=place,
            ignored_params=whole,
        )  # fmt: skip
    register_fsdp_forward_method(base, add_fsdp_method(base))
    # those of others, such as furlong.chunked, come behind FSDP2's, the last one so far
    hooks: Any = base._forward_hooks
    hooks.move_to_end(next(reversed(hooks)), last=False)
    for part in sharded_modules(base):
        # transformers looks up key renames by class and module name
        kind, (_, _, plain, *_) = type(part), type(part).__mro__
        kind.__name__, kind.__module__ = plain.__name__, plain.__module__
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other
        if adds_unused():
            # a parameter unused on one process must still join the reduce-scatter
            part.set_reduce_scatter_unused_params(True, recurse=False)
        # by default a backward prefetches the previous group, whatever the plan says
        part.set_modules_to_backward_prefetch([part])


def adds_unused() -> bool:
    """Whether FSDP2 can reduce parameters that no backward has reached (torch >= 2.13). Otherwise
    such parameters are given zero gradients while they are gathered."""
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def sharded_modules(base: nn.Module) -> list[FSDPModule]:
    """Return the model's FSDP2 modules, the root among them."""
    return [module for module in base.modules() if isinstance(module, FSDPModule)]


def reshard(base: nn.Module) -> None:
    """Free all gathered weights, also those whose gather is unfinished."""
    reshard_modules(sharded_modules(base))


def reshard_modules(modules: Iterable[FSDPModule]) -> None:
    """Free the gathered weights of some modules; see `reshard`."""
    for module in modules:
        end_gather(module)
        module.reshard()


@contextmanager
def one_step(base: nn.Module, passing: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Context manager for a step. Inside, gathered weights are kept until `reshard_modules` frees
    them, and gradients are accumulated on this process until `adding_up` reduces them. Only the
    layers in `passing` are gathered and freed in each pass.

    On exit, also after an error, all weights are sharded again. After an error, gradients that were
    not reduced are dropped.
    """
    if not isinstance(base, FSDPModule):
        yield
        return
    base.set_requires_gradient_sync(False)
    base.set_is_last_backward(False)
    base.set_reshard_after_forward(False)
    base.set_reshard_after_backward(False)
    try:
        own = [module for module in passing if isinstance(module, FSDPModule)]
        with freed_behind_passes(own), _gathered_ahead(own):
            yield
    except BaseException:
        _forget(base)
        raise
    finally:
        reshard(base)  # weights left gathered by an evaluation would hide later gradients
        for own in (group for module in sharded_modules(base) for group in _groups(module)):
            own._post_forward_indices.clear()  # both grow with each pass of an evaluation
            getattr(own.comm_ctx, "post_forward_order", []).clear()


@contextmanager
def freed_behind_passes(modules: Sequence[FSDPModule]) -> Iterator[None]:
    """Context manager: FSDP2 gathers these modules before each pass, and frees them after it."""
    with ExitStack() as stack:
        for module in modules:
            for setting in (module.set_reshard_after_forward, module.set_reshard_after_backward):
                setting(True, recurse=False)
                stack.callback(setting, False, recurse=False)
        yield


@contextmanager
def _gathered_ahead(modules: Sequence[FSDPModule]) -> Iterator[None]:
    """Context manager: in a backward pass, gather the next module's weights while the current
    module's backward runs. A backward visits `modules` in reverse.

    FSDP2 would start this gather only after an earlier gradient reduction. A forward has no
    reductions, so it needs no change."""
    for before, module in pairwise(modules):
        module.set_modules_to_backward_prefetch([before])
    try:
        yield
    finally:
        for module in modules:
            module.set_modules_to_backward_prefetch([module])


@contextmanager
def one_layer_at_a_time(
    base: nn.Module, ranks: Ranks, place: str
) -> Iterator[Callable[[Mapping[str, float]], dict[str, float]]]:
    """Context manager for passes of a check, which have no plan: each FSDP2 group is gathered
    before its pass and freed afterwards, and the root stays gathered. Use it inside `one_step`.

    Before each gather, and on exit, the processes of the stage tell each other whether one has
    failed; if so, all raise. So all of them must run the same passes, and must decide by equal
    numbers. For this the context manager yields a function: from {name: number of this process} it
    returns {name: maximum over the processes}. `place`: see `consensus.agree`.
    """
    group, goes_on = ranks.stage_group, True

    def agree(own: Sequence[float] = ()) -> list[Sequence[float]]:
        nonlocal goes_on
        goes_on = False
        each = exchange(ranks, own, place, group)
        goes_on = True
        return each

    def gather(own: Any, plain: Callable[..., None], async_op: bool = False) -> None:
        if own._all_gather_result is None and not own.is_unsharded:
            agree()
        plain(async_op)

    def highest(numbers: Mapping[str, float]) -> dict[str, float]:
        rows = torch.tensor(agree([*numbers.values()]), dtype=torch.float64)
        return dict(zip(numbers, rows.amax(0).tolist(), strict=True))  # amax propagates NaN

    root: object = base
    layers = [module for module in sharded_modules(base) if module is not root]
    with ExitStack() as stack:
        for module in sharded_modules(base):
            for own in _groups(module):
                stack.enter_context(patch.object(own, "unshard", partial(gather, own, own.unshard)))
        stack.enter_context(freed_behind_passes(layers))
        try:
            yield highest
            agree()
        except Exception as error:
            if goes_on and not is_lost(error):  # join the agreement that others wait in
                report(ranks, error, place, group)
            raise


@contextmanager
def whole(base: nn.Module, name: str) -> Iterator[None]:
    """Context manager: gather the FSDP2 group that has the weights of the named module."""
    path = name.split(".")
    owners = (base.get_submodule(".".join(path[:n])) for n in range(len(path), -1, -1))
    owner = next((module for module in owners if isinstance(module, FSDPModule)), None)
    if owner is None:
        yield
        return
    owner.unshard()
    yield
    if owner is not base:
        owner.reshard()


def whole_weight(weight: Tensor, ranks: Ranks) -> Tensor:
    """Return the whole weight, as the last stage has it, without a graph. A collective."""
    own = weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()
    if ranks.pp > 1:
        own = own.clone(memory_format=torch.contiguous_format)
        dist.broadcast(own, group=ranks.mesh["pp"].get_group(), group_src=ranks.pp - 1)
    return own


def gradient_of_replicas(gradient: Tensor, weight: Tensor, ranks: Ranks) -> Tensor:
    """Return the sum over replicas of the gradient of a whole weight, divided as the weight is.
    All processes of a replica pass the same gradient. A collective."""
    total = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
    if ranks.dp > 1:
        total = total.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ranks.mesh["dp"].get_group())
    total = total.to(weight.dtype)
    if not isinstance(weight, DTensor):
        return total
    mesh, copies = weight.device_mesh, [Replicate()] * weight.device_mesh.ndim
    of_all = DTensor.from_local(total, mesh, copies, run_check=False)
    return of_all.redistribute(placements=weight.placements)


def end_forward(base: nn.Module) -> None:
    """End the model's forward for FSDP2, if one has begun, so that weights can be freed."""
    if isinstance(base, FSDPModule):
        state: Any = base._get_fsdp_state()
        if state._training_state == TrainingState.FORWARD:
            state._post_forward(base, (), None)


@contextmanager
def passed_over(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager: FSDP2 does nothing in forwards of these modules themselves, in which the
    caller has put whole weights: it neither gathers nor notes what a backward would have to do."""
    changes: list[tuple[Any, str, Any]] = []
    for module in modules:
        if isinstance(module, FSDPModule):
            own = vars(module._get_fsdp_state())
            changes.append((own, "_training_state", TrainingState.PRE_BACKWARD))
            several = "_fsdp_param_groups" in own
            changes.append((own, "_fsdp_param_groups", []) if several
                           else (own, "_fsdp_param_group", None))  # fmt: skip
    with patched(changes):
        yield


@contextmanager
def adding_up(
    modules: Sequence[FSDPModule], *, is_complete: bool = True, is_last: bool = False
) -> Iterator[None]:
    """Context manager: a backward pass inside reduce-scatters the gradients of `modules`.

    Args:
        is_complete: Whether to all-reduce the gradients between HSDP replicas, too. Pass False if a
            later backward of the step adds to these gradients.
        is_last: Whether this is the last backward of the step. The root is then among `modules`.
    """
    for module in modules:
        _fill_sums(module)
        if not adds_unused():
            _give_zeros(module)
        module.set_requires_gradient_sync(True, recurse=False)
        module.set_requires_all_reduce(is_complete, recurse=False)
        module.set_is_last_backward(is_last)
    yield
    for module in modules:  # a further backward would reduce them again
        module.set_requires_gradient_sync(False, recurse=False)


def end_gather(module: FSDPModule) -> None:
    """Wait for the module's gather if no pass has waited for it. Otherwise the next unshard would
    return the weights of this gather, which may be outdated by then. A gather that failed, because
    another process did, is dropped."""
    for group in _groups(module):
        try:
            group.wait_for_unshard()
        except RuntimeError:
            group._all_gather_result = None


def _fill_sums(module: FSDPModule) -> None:
    """Give zeros as gradients to trained parameters of a module that have none, if another one has
    a gradient that is summed in float32: FSDP2 cannot reduce a mixture of dtypes.

    This happens in a plan of one chunk: only the head's parameters have sums, because logits are
    computed in tiles."""
    own = [p for p in _divided(module) if hasattr(p, "_unsharded_param")]
    if all(p.unsharded_accumulated_grad is None for p in own):
        return
    for parameter in own:
        weight = parameter._unsharded_param
        if weight.requires_grad and parameter.unsharded_accumulated_grad is None:
            zeros = torch.zeros_like(weight, dtype=parameter.reduce_dtype)
            parameter.unsharded_accumulated_grad = zeros


def _forget(base: Any) -> None:
    """Reset FSDP2 after an error inside a pass, and drop the gradients of the step."""
    for module in sharded_modules(base):
        end_gather(module)
    if base._get_fsdp_state()._is_root and hasattr(base, "reset_iter_state"):  # it has been entered
        base.reset_iter_state()
    for parameter in (p for module in sharded_modules(base) for p in _divided(module)):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def _give_zeros(module: FSDPModule) -> None:
    """Set zero gradients on gathered parameters that no backward has reached: FSDP2 would leave
    them out of the reduce-scatter, though other processes may use them."""
    for parameter in _divided(module):
        gathered = getattr(parameter, "_unsharded_param", None)
        if gathered is None or not gathered.requires_grad:
            continue
        if parameter.unsharded_accumulated_grad is None and gathered.grad is None:
            gathered.grad = torch.zeros_like(gathered)


def _divided(module: FSDPModule) -> list[Any]:
    """Return FSDP2's records (FSDPParam) of a module's parameters."""
    return [parameter for group in _groups(module) for parameter in group.fsdp_params]


def _groups(module: FSDPModule) -> list[Any]:
    """Return FSDP2's parameter groups (FSDPParamGroup) of a module."""
    state: Any = module._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 at most one
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return groups


def _refuse_indivisible(
    base: nn.Module, layers: Sequence[nn.Module], unchanged: Sequence[nn.Parameter]
) -> torch.dtype:
    """Return the dtype of the trained parameters. Raise UnsupportedModelError if FSDP2 cannot shard
    the model: for trained parameters of several dtypes, a scalar, a weight that two layers share, a
    hook on a parameter, or parameters in `unchanged`."""
    names = {id(parameter): name for name, parameter in base.named_parameters()}
    trained = {p.dtype for p in base.parameters() if p.requires_grad}
    scalar = next((n for n, p in base.named_parameters() if not p.ndim), None)
    shared = _shared_between(base, layers)
    hooked = next((n for n, p in base.named_parameters() if p._backward_hooks), None)
    if len(trained) > 1:
        what = f"trains parameters of {len(trained)} dtypes: {', '.join(map(str, trained))}"
    elif scalar is not None:
        what = f"has the parameter {scalar}, a single number"
    elif shared is not None:
        what = f"uses {shared} in more than one layer"
    elif hooked is not None:
        what = f"has a hook on {hooked}, which would see no gradient"
    elif unchanged:
        what = f"computes in float32 with {names[id(unchanged[0])]}, whatever the compute dtype"
    else:
        return next(iter(trained), torch.float32)
    raise UnsupportedModelError(
        given=f"{type(base).__name__} {what}",
        required="parameters of at least one axis, each of one layer or beside all of them, "
        "trained in one dtype, for weights that several processes share",
        source="the model that was passed, and the number of processes",
        change="train in one process"
        if shared is not None
        else "freeze or cast the parameter, or train in one process",
    )


def _shared_between(base: nn.Module, layers: Sequence[nn.Module]) -> str | None:
    """Return the name of a parameter that is shared by two layers, or by a layer and the rest of
    the model: FSDP2 would gather and reduce it twice. None if there is none."""
    own = {id(layer) for layer in layers}
    prefixes = [f"{name}." for name, module in base.named_modules() if id(module) in own]
    seen: dict[int, str] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        group = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        if seen.setdefault(id(parameter), group) != group:
            return name
    return None


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    ranks: Ranks | None = None,
    *,
    counted_elsewhere: Collection[nn.Parameter] = (),
) -> float:
    """Clip gradients to a global L2 norm of `max_norm` (None: do not clip); return the norm before
    clipping, equal on all processes. A collective.

    `counted_elsewhere`: replicated parameters (tied embeddings) that another stage adds to the
    norm.
    """
    clipped = list(parameters)
    elsewhere = {id(parameter) for parameter in counted_elsewhere}
    norm = get_total_norm(
        [p.grad for p in clipped if p.grad is not None and id(p) not in elsewhere]
    )
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if ranks is not None and ranks.pp > 1:
        # without gradients the norm is a CPU tensor, but the group reduces on the device
        square = norm.to(clipped[0].device).double().square()
        dist.all_reduce(square, group=ranks.mesh["pp"].get_group())
        norm = square.sqrt()
    if max_norm is not None:
        clip_grads_with_norm_(clipped, max_norm, norm)
    return float(norm)

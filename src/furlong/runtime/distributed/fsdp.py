"""Weights that several processes share, by FSDP2: gathered where the plan says so, gradients added
up once.

Each layer is a group of its own, and so are the embedding and the head unless they are one weight;
the root, which is the model itself, has the rest. Every pass enters through the method that FSDP2
knows. FSDP2 frees and gathers nothing by itself: the plan's Unshard and Reshard do, so that no
collective depends on the number of chunks. What the root has is whole all through the step.
Gradients are added up on each process over all chunks, and over the processes once: in the last
backward of each stage.

Where a plan's passes gather, which a pool does that obeys one list, FSDP2 gathers each layer when a
pass comes to it, and frees it behind that. Each backward then adds the gradients of its layers up
within the pool, the last one over replicas too.

Weights are gathered in the compute dtype. The gradients of a chunk arrive in that dtype and are
added to float32 sums at once, as `runtime.precision` does it for weights that are whole.
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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from furlong.errors import UnsupportedModelError
from furlong.models.quantized import packed_linears
from furlong.models.support import add_fsdp_method
from furlong.runtime.distributed.consensus import FINE, failure_of, gathered, outcome_of
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
    """Divide a model's weights among the processes of a mesh, which call it together.

    Its parameters are then DTensors, of which each process holds a part: an optimizer is made after
    it. `ends`: the embedding and the head, where they share no weight. `compute_dtype`: the dtype
    in which weights are gathered (None: as they are). `unchanged`: parameters that must not compute
    in it. `offload`: parts, their gradients and so the optimizer's state lie in CPU memory, pinned
    for a GPU; what is gathered comes from there. Raises UnsupportedModelError for what FSDP2 cannot
    divide.
    """
    dtype = _refuse_indivisible(base, (*layers, *ends), unchanged if compute_dtype else ())
    # reduce_dtype is that of the sums over chunks, too
    wide = torch.promote_types(compute_dtype or dtype, torch.float32)
    policy = MixedPrecisionPolicy(compute_dtype, wide, cast_forward_inputs=False)
    place = CPUOffloadPolicy(mesh.device_type == "cuda") if offload else OffloadPolicy()
    whole = {linear.weight for linear in packed_linears(base).values()}  # codes stay everywhere
    for module in (*layers, *ends, base):
        fully_shard(
            module, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=place,
            ignored_params=whole,
        )  # fmt: skip
    register_fsdp_forward_method(base, add_fsdp_method(base))
    for part in sharded_modules(base):
        # by the names of its class and module transformers knows what files call otherwise
        kind, (_, _, plain, *_) = type(part), type(part).__mro__
        kind.__name__, kind.__module__ = plain.__name__, plain.__module__
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        if adds_unused():
            # what is unused on one process must not be missing in a sum with others
            part.set_reduce_scatter_unused_params(True, recurse=False)
        # by itself a backward would gather the group that ran before, whatever the plan says
        part.set_modules_to_backward_prefetch([part])


def adds_unused() -> bool:
    """Whether FSDP2 adds up what a backward has not reached (from torch 2.13 on). Else it is given
    zeros, which are whole gradients."""
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def sharded_modules(base: nn.Module) -> list[FSDPModule]:
    """The modules whose weights are gathered and whose gradients are added up together."""
    return [module for module in base.modules() if isinstance(module, FSDPModule)]


def reshard(base: nn.Module) -> None:
    """Free all whole weights that have been gathered, or are being gathered."""
    reshard_modules(sharded_modules(base))


def reshard_modules(modules: Iterable[FSDPModule]) -> None:
    """Free those of some modules."""
    for module in modules:
        end_gather(module)
        module.reshard()


@contextmanager
def one_step(base: nn.Module, passing: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Within it gradients stay on their process until `adding_up`, and weights that have been
    gathered until `reshard_modules`; those of the layers `passing` come and go with each pass.

    On exit, also after an error, all weights are divided again. An error forgets the gradients that
    were not added up.
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
        reshard(base)  # left gathered by an evaluation they would hide gradients of later steps
        for own in (group for module in sharded_modules(base) for group in _groups(module)):
            own._post_forward_indices.clear()  # else both grow with each pass of an evaluation
            getattr(own.comm_ctx, "post_forward_order", []).clear()


@contextmanager
def freed_behind_passes(modules: Sequence[FSDPModule]) -> Iterator[None]:
    """Within it FSDP2 gathers the weights of these modules when a pass comes to each, and frees
    them behind it."""
    with ExitStack() as stack:
        for module in modules:
            for setting in (module.set_reshard_after_forward, module.set_reshard_after_backward):
                setting(True, recurse=False)
                stack.callback(setting, False, recurse=False)
        yield


@contextmanager
def _gathered_ahead(modules: Sequence[FSDPModule]) -> Iterator[None]:
    """Within it a backward gathers each of these modules while that behind it runs: by themselves
    gathers wait for the reduction before them. Forwards have none between their gathers."""
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
    """Gather each group when a pass comes to it, and free it behind the pass: for a check, which no
    plan tells when. The root stays whole. Use it inside `one_step`.

    The processes of the stage agree before each gather, and at the end, that none of them has
    failed: where one has, all raise. So they must run the same passes, and what they decide by must
    be equal. The yielded function returns the highest of each number that they give it. `place`:
    see `consensus.together`.
    """
    group, goes_on = ranks.stage_group, True

    def agree() -> None:
        nonlocal goes_on
        goes_on = False
        if (failure := failure_of(ranks, FINE, group, place=place)) is not None:
            raise failure
        goes_on = True

    def gather(own: Any, plain: Callable[..., None], async_op: bool = False) -> None:
        if own._all_gather_result is None and not own.is_unsharded:
            agree()
        plain(async_op)

    def highest(numbers: Mapping[str, float]) -> dict[str, float]:
        agree()
        bits = torch.tensor([*numbers.values()], dtype=torch.float64).view(torch.int64)
        rows = torch.tensor(gathered(ranks, bits.tolist(), group)).view(torch.float64)
        return dict(zip(numbers, rows.amax(0).tolist(), strict=True))  # NaN where one has it

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
            if goes_on and not is_lost(error):  # others are about to agree
                failure_of(ranks, outcome_of(error), group, place=place)
            raise


@contextmanager
def whole(base: nn.Module, name: str) -> Iterator[None]:
    """Within it the weights of a module, by its name, are here, with all of its group."""
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


@contextmanager
def adding_up(
    modules: Sequence[FSDPModule], *, is_complete: bool = True, is_last: bool = False
) -> Iterator[None]:
    """Within it a backward adds the gradients of these modules up over the processes. Unless
    `is_complete`, a later one adds to them, and groups that each hold all weights (HSDP) add theirs
    up then. `is_last`: the root is among them, and no backward follows."""
    for module in modules:
        _fill_sums(module)
        if not adds_unused():
            _give_zeros(module)
        module.set_requires_gradient_sync(True, recurse=False)
        module.set_requires_all_reduce(is_complete, recurse=False)
        module.set_is_last_backward(is_last)
    yield
    for module in modules:  # any further backward would add them up again
        module.set_requires_gradient_sync(False, recurse=False)


def end_gather(module: FSDPModule) -> None:
    """Wait for a gather that no pass has waited for: the next one would hand out its weights, which
    are old by then. One that failed, with the process that it came from, is dropped."""
    for group in _groups(module):
        try:
            group.wait_for_unshard()
        except RuntimeError:
            group._all_gather_result = None


def _fill_sums(module: FSDPModule) -> None:
    """Give all trained parameters of a module a sum over chunks where one has it: FSDP2 adds up no
    mixture of dtypes. With one chunk the head alone has a sum, of its tiles."""
    own = [p for p in _divided(module) if hasattr(p, "_unsharded_param")]
    if all(p.unsharded_accumulated_grad is None for p in own):
        return
    for parameter in own:
        weight = parameter._unsharded_param
        if weight.requires_grad and parameter.unsharded_accumulated_grad is None:
            zeros = torch.zeros_like(weight, dtype=parameter.reduce_dtype)
            parameter.unsharded_accumulated_grad = zeros


def _forget(base: Any) -> None:
    """Bring FSDP2 back from the middle of a pass, without the gradients of the step."""
    for module in sharded_modules(base):
        end_gather(module)
    if base._get_fsdp_state()._is_root and hasattr(base, "reset_iter_state"):  # it has been entered
        base.reset_iter_state()
    for parameter in (p for module in sharded_modules(base) for p in _divided(module)):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def _give_zeros(module: FSDPModule) -> None:
    """Give gradients of zeros to gathered parameters that no backward has reached so far: FSDP2
    leaves others out of its sum, where they are unused on this process only."""
    for parameter in _divided(module):
        gathered = getattr(parameter, "_unsharded_param", None)
        if gathered is None or not gathered.requires_grad:
            continue
        if parameter.unsharded_accumulated_grad is None and gathered.grad is None:
            gathered.grad = torch.zeros_like(gathered)


def _divided(module: FSDPModule) -> list[Any]:
    """FSDP2's own records of a module's parameters."""
    return [parameter for group in _groups(module) for parameter in group.fsdp_params]


def _groups(module: FSDPModule) -> list[Any]:
    """FSDP2's own records of what a module gathers together."""
    state: Any = module._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 at most one
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return groups


def _refuse_indivisible(
    base: nn.Module, layers: Sequence[nn.Module], unchanged: Sequence[nn.Parameter]
) -> torch.dtype:
    """The dtype of the trained parameters; raises UnsupportedModelError."""
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
    """The name of a parameter that two groups have, or one and what is beside all of them: they
    would be gathered and added up apart."""
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
    """The L2 norm of all gradients before clipping, the same on all processes, which call it
    together; above `max_norm` (None: no bound) they are scaled down to it.

    `counted_elsewhere`: parameters that another stage has, too, and counts.
    """
    clipped = list(parameters)
    elsewhere = {id(parameter) for parameter in counted_elsewhere}
    norm = get_total_norm(
        [p.grad for p in clipped if p.grad is not None and id(p) not in elsewhere]
    )
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if ranks is not None and ranks.pp > 1:
        # of no gradients it lies on the CPU, where others of the group do not wait
        square = norm.to(clipped[0].device).double().square()
        dist.all_reduce(square, group=ranks.mesh["pp"].get_group())
        norm = square.sqrt()
    if max_norm is not None:
        clip_grads_with_norm_(clipped, max_norm, norm)
    return float(norm)

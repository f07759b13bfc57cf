"""Private names of torch that this package uses, read in torch 2.9, 2.13 and 2.15, each with what happens without it.

No other module of the package uses them; CI checks that. Attributes of the objects of DDP and of FSDP1 are read where
those backends compute with them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

# torch documents dispatch modes under this name and has no other, so nothing takes its place.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from accel_state.errors import BackendError

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

    BatchNorm = _BatchNorm
    RunningNorm = _NormBase
else:
    BatchNorm = getattr(nn.modules.batchnorm, "_BatchNorm", None) or nn.BatchNorm1d.__base__
    # The base class of batch and instance normalisations.
    RunningNorm = getattr(nn.modules.batchnorm, "_NormBase", None) or BatchNorm.__base__

_ACCUMULATED = "_post_accumulate_grad_hooks"
#: Called in place of a unit's collective, with torch's method and that method's arguments.
Around = Callable[..., Any]


def _multiply_each(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def _clamp_each(tensors: Sequence[torch.Tensor], least: float, most: float) -> None:
    for tensor in tensors:
        tensor.clamp_(least, most)


def _clamp_together(tensors: Sequence[torch.Tensor], least: float, most: float) -> None:
    torch._foreach_clamp_min_(list(tensors), least)
    torch._foreach_clamp_max_(list(tensors), most)


multiply: Callable[[Sequence[torch.Tensor], float | torch.Tensor], None]
multiply = getattr(torch, "_foreach_mul_", _multiply_each)
"""Multiplication of such tensors in place."""

clamp: Callable[[Sequence[torch.Tensor], float, float], None]
clamp = (
    _clamp_together if hasattr(torch, "_foreach_clamp_min_") and hasattr(torch, "_foreach_clamp_max_") else _clamp_each
)
"""Clamping of such tensors to a range, in place."""


def norms_of(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Returns the norm of each tensor, computed in ``dtype`` (None: its own) without copies in it.

    In one launch for tensors of one device and dtype, by ``_foreach_norm``; one by one in a torch without it.
    """
    together = getattr(torch, "_foreach_norm", None)
    if together is None or not tensors:
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    return list(together(tensors, order, dtype=dtype))


def accumulation_hooks(parameter: torch.Tensor) -> MutableMapping[int, Callable[..., Any]]:
    """Returns the hooks of ``register_post_accumulate_grad_hook`` by id, ``_post_accumulate_grad_hooks``.

    Empty without hooks, and in a torch that keeps them elsewhere.
    """
    hooks: MutableMapping[int, Callable[..., Any]] | None = getattr(parameter, _ACCUMULATED, None)
    return {} if hooks is None else hooks


def move_accumulation_hooks(parameter: torch.Tensor, successor: torch.Tensor) -> None:
    """Gives a successor the ``accumulation_hooks`` of a parameter, in the same mapping: handles still remove them."""
    hooks = accumulation_hooks(parameter)
    if hooks:
        setattr(successor, _ACCUMULATED, hooks)


def shard_of(dtensor: Any) -> Any:
    """Returns this rank's tensor of a DTensor, ``_local_tensor``; None if it is not one, or has it elsewhere."""
    return getattr(dtensor, "_local_tensor", None)


def loads_as_torch_does(kind: type[nn.Module]) -> bool:
    """Whether modules of a class load their own tensors as ``nn.Module`` does, by ``_load_from_state_dict``.

    False in a torch without it, where every module then loads all of a state by itself.
    """
    own = getattr(nn.Module, "_load_from_state_dict", None)
    return own is not None and getattr(kind, "_load_from_state_dict", None) is own


def saves_as_torch_does(module: nn.Module) -> bool:
    """Whether no code of a module or its hooks sees the values of its own tensors in ``state_dict``.

    False in a torch without ``_save_to_state_dict`` and ``_state_dict_hooks``; the values are then detached.
    """
    own = getattr(nn.Module, "_save_to_state_dict", None)
    kind = type(module)
    return (
        own is not None
        and getattr(kind, "_save_to_state_dict", None) is own
        and kind.state_dict is nn.Module.state_dict
        and not getattr(module, "_state_dict_hooks", True)
    )


def is_of_fsdp2(function: object) -> bool:
    """Whether torch's FSDP2 defines a function; False if it moves from ``torch.distributed.fsdp._fully_shard``."""
    module: str = getattr(function, "__module__", None) or ""
    return module.startswith("torch.distributed.fsdp._fully_shard")


def unit_collectives(gather: Around, reduce: Around) -> tuple[Any, Any] | None:
    """Returns torch's all-gather and reduce-scatter of FSDP2 units, each called as ``gather(torch's, *arguments)``.

    They are of torch's ``DefaultAllGather`` and ``DefaultReduceScatter``, because a unit lets only those allocate from
    the process group. None without these classes: a unit then keeps its own, whose errors name no rank.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
    except ImportError:
        return None

    class ExplainedAllGather(DefaultAllGather):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return gather(super().__call__, *args, **kwargs)

    class ExplainedReduceScatter(DefaultReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return reduce(super().__call__, *args, **kwargs)

    return ExplainedAllGather(), ExplainedReduceScatter()


def unit_groups(module: nn.Module) -> Iterable[Any]:
    """Returns torch's ``FSDPParamGroup``s of an FSDP2 unit; none of another module.

    By ``_get_fsdp_state``, whose state has ``_fsdp_param_groups``, and before torch 2.13 one ``_fsdp_param_group``.

    Raises:
        BackendError: this torch keeps them elsewhere.
    """
    get = getattr(module, "_get_fsdp_state", None)
    if get is None:
        return ()
    state = get()
    groups: Iterable[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        try:
            groups = () if state._fsdp_param_group is None else (state._fsdp_param_group,)
        except AttributeError:
            raise BackendError(
                f"torch {torch.__version__} keeps the parameters of FSDP2 units elsewhere than torch 2.9 to 2.15; use "
                "one of these, or strategy='ddp'"
            ) from None
    return groups


def unit_parameters(module: nn.Module) -> Iterable[Any]:
    """Returns torch's ``FSDPParam`` of each parameter of an FSDP2 unit; none of another module."""
    return [entry for group in unit_groups(module) for entry in group.fsdp_params]


def is_within_backward(root: nn.Module) -> bool:
    """Whether a backward of an FSDP2 root has begun and has not ended, by ``post_backward_final_callback_queued``.

    False in a torch without it, whose next forward then continues a backward that failed.
    """
    get = getattr(root, "_get_fsdp_state", None)
    context = None if get is None else getattr(get(), "_state_ctx", None)
    return bool(getattr(context, "post_backward_final_callback_queued", False))


def end_flat_backward(root: Any, flat_parameters: Iterable[Any]) -> None:
    """Resets an FSDP1 root and its units after a backward that failed, by ``_post_backward_final_callback``.

    torch expects a gradient of each of the ``flat_parameters`` marked ``_post_backward_called``, which may lack.
    A torch without the callback takes the next forward for a recomputation of that backward.
    """
    try:
        from torch.distributed.fsdp._runtime_utils import _post_backward_final_callback
    except ImportError:
        return
    for parameter in flat_parameters:
        parameter._post_backward_called = False
    _post_backward_final_callback(root, root)


def joined_units(units: Sequence[Any], axes: Collection[str]) -> None:
    """Makes FSDP2 units one tree with a root that is never called, by ``_lazy_init``, as its first call would.

    ``units``: the root first. ``axes``: degrees of the axes over which they are sharded, for the error.

    Raises:
        BackendError: this torch does not have it, or does not have what ``reduce_unit_gradients`` calls.
    """
    try:
        initialise = units[0]._get_fsdp_state()._lazy_init
    except AttributeError:
        raise _without_unit_calls("FSDPState._lazy_init", axes) from None
    group = next((group for unit in units for group in unit_groups(unit)), None)
    for name in () if group is None else ("post_backward", "finalize_backward"):
        if not hasattr(group, name):
            raise _without_unit_calls(f"FSDPParamGroup.{name}", axes)
    initialise()


def reduce_unit_gradients(units: Iterable[Any]) -> None:
    """Reduces the full gradients of FSDP2 units that no backward hook has reduced.

    By ``post_backward`` and ``finalize_backward`` of each group, as ``torch.distributed.pipelining`` does.

    ``joined_units`` refuses a torch without them.

    Collective: every rank of the units' meshes must call this.
    """
    groups = [group for unit in units for group in unit_groups(unit)]
    for group in groups:
        group.post_backward()
    for group in groups:
        group.finalize_backward()


def _without_unit_calls(name: str, axes: Collection[str]) -> BackendError:
    return BackendError(
        f"torch {torch.__version__} has no {name}, as torch 2.13 has, by which stages are sharded; nearest: "
        f"dp_replicate_size instead of {' and '.join(axes)}"
    )


@contextmanager
def replaced_all_gathers(root: nn.Module, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which each all-gather of a sharded model is what ``replace`` makes of it.

    Units keep it as ``_all_gather_comm``. An error resets the state of the iteration: torch would otherwise take the
    next forward for a nested one, whose backward waits for no reduction. Needs torch 2.13, ``reset_iter_state``.
    """
    groups = [group for module in root.modules() for group in unit_groups(module)]
    before = [group._all_gather_comm for group in groups]
    for group, comm in zip(groups, before, strict=True):
        group._all_gather_comm = replace(comm)
    try:
        yield
    except Exception:
        model: Any = root
        if model._get_fsdp_state()._is_root is not None:  # otherwise no forward has begun
            model.reset_iter_state()
        raise
    finally:
        for group, comm in zip(groups, before, strict=True):
            group._all_gather_comm = comm


def repair_first_messages(stage: Any) -> None:
    """Makes the first messages of a ``PipelineStage`` to its neighbours such that they arrive.

    By ``_get_init_p2p_neighbors_ops``, which in torch 2.9 sends an int64 where a float32 is received, and before torch
    2.13 sends a message from a rank to itself where two stages on a V are neighbours, which gloo refuses. torch 2.15
    does not have it: there the schedule sends these messages, one kind and none within a rank.
    """
    make = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if make is None:
        return

    def made() -> list[Any]:
        ops = [op for op in make() if op.group_peer != stage.group_rank]
        for op in ops:
            op.tensor = torch.zeros(1, dtype=torch.float32, device=op.tensor.device)
        return ops

    stage._get_init_p2p_neighbors_ops = made


def hands_over_within_ranks(schedule: type[Any]) -> bool:
    """Whether a schedule gives activations from one stage of a rank to another without a message.

    Those of torch's ``_PipelineScheduleRuntime`` do; in torch 2.9 a rank sends itself a message, which gloo refuses.
    """
    return any(kind.__name__ == "_PipelineScheduleRuntime" for kind in schedule.__mro__)


def leave_out_backwards(schedule: Any, forwards: Collection[str]) -> None:
    """Leaves the forwards of a schedule with several stages on a rank; a stage on a V would look for its backward.

    ``forwards``: names of the kinds of its actions. By ``pipeline_order_with_comms``.

    Raises:
        BackendError: this torch does not have it.
    """
    orders = getattr(schedule, "pipeline_order_with_comms", None)
    if orders is None:
        raise BackendError(
            f"torch {torch.__version__} keeps the actions of {type(schedule).__name__} elsewhere than torch 2.11 to "
            "2.15; use one of these, or schedule='1f1b'"
        )
    for rank, actions in orders.items():
        orders[rank] = [one for one in actions if one.computation_type.name in forwards]


def guard_shape_inference(stage: Any, guard: Callable[[Callable[[], Any], Sequence[torch.Tensor]], Any]) -> None:
    """Makes the backward by which a ``PipelineStage`` finds shapes, ``_compute_input_grads``, run in a guard.

    ``guard`` is called with the function that computes it and with the inputs. A torch without the method is left as it
    is: an error in this backward then reaches other ranks by their timeout only.
    """
    run = getattr(stage, "_compute_input_grads", None)
    if run is not None:
        stage._compute_input_grads = lambda outputs, inputs, *rest: guard(lambda: run(outputs, inputs, *rest), inputs)


def trust_known_shapes(stage: Any) -> None:
    """Makes a ``PipelineStage`` with examples of its input and result not ask other ranks whether they know theirs.

    By ``_warmup_backward_result``, which receives the answer. A torch without it (2.9, and 2.15 in a fake group) uses
    examples without asking.
    """
    if hasattr(stage, "_warmup_backward_result"):
        stage._warmup_backward_result = lambda received_result=None: torch.ones(1, dtype=torch.int32)


def full_parameter(entry: Any) -> torch.Tensor | None:
    """Returns the full parameter of an ``FSDPParam``, ``_unsharded_param``; None before it was gathered."""
    full: torch.Tensor | None = getattr(entry, "_unsharded_param", None)
    return full


def leave_out_of_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Adds parameters to those of a model that DDP, which reads them there, neither broadcasts nor reduces.

    Without the attribute DDP broadcasts them, and reports what it cannot.
    """
    known: Any = model
    known._ddp_params_and_buffers_to_ignore = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *names]

"""Private names of DeepSpeed and torch that this package uses, each with what happens without it.

Those of DeepSpeed were read in 0.19.8, those of torch in 2.9, 2.13 and 2.15. No other module of the package uses them;
CI checks that. Names without a substitute are checked as soon as DeepSpeed has been imported, or an engine exists.
Version counters of tensors (``_version``) and the dictionaries of modules (``_parameters``) are read where parameters
are compared or listed: torch has no public name by which either costs as little.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from accel_state.errors import BackendError

VERSION = "0.19.8"
# Of DeepSpeed's engine: called when a backward reaches the outputs of a forward (once, and for each output), and at its
# end; whether a backward of the engine runs.
_ONCE, _EACH, _END = "_backward_prologue", "_backward_prologue_per_tensor", "_backward_epilogue"
_RUNNING = "_running_engine_backward"
# Of stage 3: the all-gather of the coordinator of parameters.
_GATHER = "_PartitionedParameterCoordinator__all_gather_params_"


def check_names(deepspeed: Any) -> None:
    """Raises BackendError for a DeepSpeed without the names that have no substitute."""
    for name in (_ONCE, _EACH, _END):
        _check_name(deepspeed.DeepSpeedEngine, name)


def _check_name(engine: Any, name: str) -> None:
    """Raises BackendError for an engine, or a class of engines, without the attribute."""
    if not hasattr(engine, name):
        version = getattr(sys.modules.get("deepspeed"), "__version__", "")
        raise BackendError(
            f"deepspeed {version} has no DeepSpeedEngine.{name}, by which backwards are told apart; install deepspeed "
            f"{VERSION}; nearest without it: strategy='fsdp'"
        )


# ----------------------------------------------------------------------------------------------------- the engine


def replace_prologues(
    engine: Any, once: Callable[[], None], each: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[], None]:
    """Replaces the methods that a backward calls when it reaches the outputs of a forward; returns the first one.

    ``once`` is called in the first backward through each forward, ``each`` with the gradient of each output.

    Raises:
        BackendError: engines of this DeepSpeed do not say whether one of their backwards runs.
    """
    _check_name(engine, _RUNNING)
    begin: Callable[[], None] = getattr(engine, _ONCE)
    engine.__dict__[_ONCE], engine.__dict__[_EACH] = once, each
    return begin


def restore_prologues(engine: Any) -> None:
    """Undoes ``replace_prologues``."""
    for name in (_ONCE, _EACH):
        engine.__dict__.pop(name, None)


def in_own_backward(engine: Any) -> bool:
    """Whether ``backward`` of the engine runs, or ``joined_backward``."""
    return bool(getattr(engine, _RUNNING))


@contextmanager
def joined_backward(engine: Any) -> Iterator[None]:
    """Context of another engine's backward that goes through this engine, too."""
    setattr(engine, _RUNNING, True)
    try:
        yield
        getattr(engine, _END)()
    finally:
        setattr(engine, _RUNNING, False)


@contextmanager
def partitioned_as_given() -> Iterator[None]:
    """Context in which stage 3 partitions parameters in their own dtype, by ``_set_dtype`` of its ``Init``.

    DeepSpeed 0.19.8 otherwise uses bf16 on devices that do not compute in fp16, and rounds parameters that it writes to
    disk. Does nothing in a DeepSpeed without the method.
    """
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Owner

    there = getattr(Owner, "_set_dtype", None)
    if there is None:
        yield
        return

    def set_dtype(self: Any, ds_config: Any, dtype: torch.dtype | None) -> None:
        if dtype is None:
            there(self, ds_config, dtype)
        else:
            self.dtype = dtype

    Owner._set_dtype = set_dtype
    try:
        yield
    finally:
        Owner._set_dtype = there


# ------------------------------------------------------------------------------------------- groups and references


def open_tensor_parallel_groups(size: int) -> None:
    """Creates DeepSpeed's tensor-parallel groups of ``size`` neighbouring ranks, by ``_init_tp_mesh_device``.

    Collective: every rank of the group must call this.

    Raises:
        BackendError: this DeepSpeed does not have it.
    """
    from deepspeed.utils import groups

    create = getattr(groups, "_init_tp_mesh_device", None)
    if create is None:
        raise BackendError(f"this DeepSpeed creates tensor-parallel groups in another way; install deepspeed {VERSION}")
    create(tensor_model_parallel_size=size)


def forget_groups() -> None:
    """Drops DeepSpeed's references to the groups that it derived from the default group.

    By ``_release_process_group_references``. A DeepSpeed without it keeps them until the process ends.
    """
    from deepspeed.utils import groups

    forget = getattr(groups, "_release_process_group_references", None)
    if forget is not None:
        forget(None)


# ------------------------------------------------------------------------------------------------------- ZeRO


def share_memory(optimizer: Any, own: Iterable[torch.Tensor]) -> None:
    """Makes the optimizer of stage 1 or 2 step the model's own memory where it has dtype and device of the master copy.

    ``own``: this rank's slice of each group in the model. DeepSpeed's records of the slices are made anew, by
    ``_link_all_hp_params``; without it the optimizer keeps its copy.
    """
    relink = getattr(optimizer, "_link_all_hp_params", None)
    if relink is None:
        return
    for flat, here in zip(optimizer.single_partition_of_fp32_groups, own, strict=True):
        if (here.dtype, here.device) == (flat.dtype, flat.device):
            flat.data = here.data
    relink()


def replace_gathers(coordinator: Any, gather: Callable[..., None]) -> Callable[..., None] | None:
    """Replaces the all-gather of stage 3; returns DeepSpeed's own, None if this DeepSpeed has another one."""
    own: Callable[..., None] | None = getattr(coordinator, _GATHER, None)
    if own is not None:
        coordinator.__dict__[_GATHER] = gather
    return own


def restore_gathers(coordinator: Any) -> None:
    """Undoes ``replace_gathers``."""
    coordinator.__dict__.pop(_GATHER, None)


def partition_slice(optimizer: Any, index: int, key: int, rank: int, size: int) -> torch.Tensor:
    """Returns a parameter's slice of the buffer in which a group of stage 1 or 2 accumulates its partition in fp32.

    By ``_get_compact_grad_partition_slice``, which makes the buffer if there is none.

    Raises:
        BackendError: this DeepSpeed does not have it.
    """
    get = getattr(optimizer, "_get_compact_grad_partition_slice", None)
    if get is None:
        raise BackendError(
            "this DeepSpeed accumulates partitions in another way, so that no accumulation window can be resumed; "
            f"install deepspeed {VERSION}; nearest: a checkpoint after an optimizer step"
        )
    found: torch.Tensor = get(index, rank, key, size)
    return found


# -------------------------------------------------------------------------------------------------------- torch


def is_accumulating(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the running backward accumulates into any parameter; ``torch.autograd.grad`` accumulates into none.

    By ``_will_engine_execute_node``, and True in a torch without it.
    """
    runs = getattr(torch._C, "_will_engine_execute_node", None)
    if runs is None:
        return True
    with torch.enable_grad():
        nodes = [get_gradient_edge(parameter).node for parameter in parameters if parameter.requires_grad]
    try:
        return any(map(runs, nodes))
    except RuntimeError:  # for a parameter whose gradient torch.autograd.grad returns
        return False


def extensions_root() -> Path:
    """Returns torch's default folder of compiled extensions, by ``_get_build_directory``; without it its parent."""
    from torch.utils import cpp_extension

    folder = getattr(cpp_extension, "_get_build_directory", None)
    return Path(cpp_extension.get_default_build_root()) if folder is None else Path(folder("x", verbose=False)).parent

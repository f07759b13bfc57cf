"""Private names of DeepSpeed that this package uses, each with what is done without it.

Read in DeepSpeed 0.19.8. ``check`` compares them with the installed version when DeepSpeed is imported, and every
function here has a fallback, so that a version without the name loses what the name is for, and nothing else.
"""

import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from inspect import getclosurevars
from typing import Any

import torch

from accel_state.logging import get_logger

READ_IN = "0.19.8"
_log = get_logger(__name__)

_STAGE_1 = "deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"
_STAGE_3 = "deepspeed.runtime.zero.parameter_offload", "DeepSpeedZeRoOffload"
_COORDINATOR = "deepspeed.runtime.zero.parameter_offload", "PartitionedParameterCoordinator"
_GROUPS = "deepspeed.utils", "groups"
_FETCHES = "deepspeed.runtime.zero", "partitioned_param_coordinator"

LINK = "_link_all_hp_params"
NUMBER = "_register_deepspeed_module"
RELEASED = "_PartitionedParameterCoordinator__params_to_release"
FORGET = "_release_process_group_references"
OPEN_LAYERS = "_init_tp_mesh_device"
COMPARE = "assert_ints_same_as_other_ranks"
# Each name with its owner, and what a version without it loses.
NAMES: Mapping[str, tuple[tuple[str, str], str]] = {
    LINK: (_STAGE_1, "stages 1 and 2 in fp32 keep a second copy of this rank's weights"),
    NUMBER: (_STAGE_3, "stage 3 fails if ranks have built different numbers of modules in it before"),
    RELEASED: (_COORDINATOR, "parameters of a released stage 3 model stay in memory"),
    FORGET: (_GROUPS, "a process cannot train in a second process group"),
    OPEN_LAYERS: (_GROUPS, "tensor parallelism is refused"),
    COMPARE: (_FETCHES, "ranks that compute different modules at stage 3 may hang instead of raising an error"),
}


@cache
def check() -> None:
    """Warns of the names that the installed DeepSpeed lacks."""
    for name, (owner, loss) in NAMES.items():
        if not hasattr(_owner(owner), name):
            _log.warning("DeepSpeed has no %s, as %s had: %s", name, READ_IN, loss)


def _owner(place: tuple[str, str]) -> Any:
    return getattr(import_module(place[0]), place[1], None)


def share_weights(optimizer: Any) -> None:
    """Makes an optimizer of stage 1 or 2 update the model's memory, where that has its dtype and device.

    Without ``_link_all_hp_params``, by which DeepSpeed finds weights again that have moved, they stay a copy.
    """
    link: Callable[[], None] | None = getattr(optimizer, LINK, None)
    if optimizer.cpu_offload or link is None:
        return
    groups = zip(optimizer.parallel_partitioned_bit16_groups, optimizer.real_dp_process_group, strict=True)
    for flat, (pieces, group) in zip(optimizer.single_partition_of_fp32_groups, groups, strict=True):
        own = pieces[torch.distributed.get_rank(group)]
        if (own.dtype, own.device) == (flat.dtype, flat.device):
            flat.data = own.data
    link()


def module_counter() -> list[int]:
    """Returns the counter by which stage 3 numbers modules, a default argument; without it one that nothing reads."""
    register = getattr(_owner(_STAGE_3), NUMBER, None)
    defaults = getattr(register, "__defaults__", None)
    return defaults[0] if defaults and isinstance(defaults[0], list) else [0]


def forget_parameters() -> None:
    """Empties the cache of the parameters that layers of stage 3 release, which keeps models alive."""
    if _COORDINATOR[0] not in sys.modules:
        return
    releasing = getattr(_owner(_COORDINATOR), RELEASED, None)
    cached = None if releasing is None else getclosurevars(releasing).nonlocals.get("func")
    clear: Callable[[], None] | None = getattr(cached, "cache_clear", None)
    if clear is not None:
        clear()


def skip_comparison() -> Callable[[], None]:
    """Replaces DeepSpeed's comparison of stage 3's modules; returns a function that undoes that.

    Only ranks whose modules have changed take part in it, and would wait for the others. ``zero.arrivals`` compares on
    all ranks before each step.
    """
    owner = _owner(_FETCHES)
    compare = getattr(owner, COMPARE, None)
    if compare is None:
        return lambda: None
    setattr(owner, COMPARE, lambda numbers: None)
    return lambda: setattr(owner, COMPARE, compare)


def forget_groups() -> None:
    """Drops the groups that DeepSpeed derived from the default process group."""
    forget = getattr(_owner(_GROUPS), FORGET, None)
    if forget is not None:
        forget(None)


def open_tensor_parallel_groups(size: int) -> bool:
    """Creates the tensor-parallel groups, a collective on the first call; returns False without the name."""
    make = getattr(_owner(_GROUPS), OPEN_LAYERS, None)
    if make is not None:
        make(tensor_model_parallel_size=size)
    return make is not None

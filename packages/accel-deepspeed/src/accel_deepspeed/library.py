"""DeepSpeed itself: whether it is installed, which device it uses, its process groups, and its compiled operations."""

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from inspect import getclosurevars
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from accel_state.environment import patch_environment
from accel_state.errors import BackendError

if TYPE_CHECKING:
    from accel_state.session import Session

EXTRA = "accel-backends[deepspeed]"
# A kernel for inference that DeepSpeed otherwise compiles whenever it opens its communication on CPUs.
_SHM = "deepspeed_shm_comm"
_STALE_AFTER = 600.0
_COMPARES = "assert_ints_same_as_other_ranks"
# What DeepSpeed sets in the environment when it is imported.
_SETS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_DEVICES = ("cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu")


def installed() -> bool:
    """Whether DeepSpeed can be imported, without importing it."""
    return find_spec("deepspeed") is not None


def library(device_type: str = "") -> ModuleType:
    """The package ``deepspeed``, imported now and not before, for devices of a type.

    Left to look for itself, it changes the environment of the process.

    Raises:
        BackendError: it is not installed, or cannot be imported.
    """
    if not installed():
        raise BackendError(
            f"strategy 'deepspeed' needs the package deepspeed, which is not installed: install {EXTRA}; nearest "
            "without it: strategy='fsdp', which shards the same"
        )
    variables = {name: os.environ.get(name, value) for name, value in _SETS.items()}
    if device_type in _DEVICES:
        variables["DS_ACCELERATOR"] = os.environ.get("DS_ACCELERATOR", device_type)
    try:
        with patch_environment(**variables):
            import deepspeed
            from deepspeed.accelerator import get_accelerator

            get_accelerator()
    except Exception as error:
        raise BackendError(f"deepspeed is installed and cannot be imported: {error}") from error
    module: ModuleType = deepspeed
    return module


def use_device(session: "Session") -> None:
    """Makes DeepSpeed use the session's type of device.

    Raises:
        BackendError: DeepSpeed is set to use another.
    """
    from deepspeed.accelerator import get_accelerator, set_accelerator

    wanted, found = session.device.type, get_accelerator().device_name()
    if wanted == found:
        return
    if wanted == "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())
        return
    raise BackendError(
        f"this process trains on {wanted}, and DeepSpeed chose {found}"
        + (f" because DS_ACCELERATOR={os.environ['DS_ACCELERATOR']}" if "DS_ACCELERATOR" in os.environ else "")
        + f"; set DS_ACCELERATOR={wanted}"
    )


def open_group_of_one(session: "Session") -> bool:
    """A process group for a single process that has none, which DeepSpeed needs; whether it was opened now."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    if dist.is_initialized():
        return False
    dist.init_process_group(session.device.collective_backend, store=HashStore(), rank=0, world_size=1)
    return True


def open_communication(session: "Session", user: object) -> None:
    """Gives DeepSpeed the default process group for ``user``; what it kept of an earlier one is dropped first."""
    import torch.distributed as dist
    from deepspeed import comm, ops
    from deepspeed.comm import comm as state

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    world = dist.group.WORLD
    if state.cdb is None or getattr(state.cdb, "accel_world", None) is not world:
        _forget_communication()
        ops.__compatible_ops__[_SHM] = False
        with local_rank(session):
            comm.init_distributed(
                dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False, timeout=session.timeout
            )
        state.cdb.accel_world = world
        state.cdb.accel_users = WeakSet()
        state.cdb.accel_undo = _with_local_rank(session)
    state.cdb.accel_users.add(user)


def _with_local_rank(session: "Session") -> ExitStack:
    """Sets the variable of the local rank while stage 3 compares its first forwards between ranks.

    Only some launchers set it, and nothing does in a program without a launcher. Closing the result undoes all changes.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
    from deepspeed.runtime.zero import utils

    undo = ExitStack()
    for name in ("assert_lst_len_same_as_other_ranks", "get_lst_from_rank0"):
        compare = getattr(utils, name)
        undo.callback(setattr, utils, name, compare)
        setattr(utils, name, local_rank(session)(compare))
    # It compares the modules of a forward on those ranks only that computed others than before: they would wait for
    # the rest, and rank 0 would continue without an error. ``deepspeed_gathers`` compares on all of them.
    undo.callback(setattr, coordinator, _COMPARES, getattr(coordinator, _COMPARES))
    setattr(coordinator, _COMPARES, lambda numbers: None)
    return undo


def close_communication(user: object) -> None:
    """Removes the process group from DeepSpeed unless others than ``user`` use it; the group itself stays open."""
    from deepspeed.comm import comm as state

    users = getattr(state.cdb, "accel_users", None)
    if users is None:  # not opened here
        return
    users.discard(user)
    if not users:
        _forget_communication()


def forget_module(module: object) -> None:
    """Drops DeepSpeed's references to a model of stage 3, which would keep its engine until the process ends.

    A list of DeepSpeed holds each model and is never shortened, and a cache holds what its layers release in a step.
    """
    stage3 = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if stage3 is None:
        return
    stage3.FWD_MODULE_STACK[:] = [one for one in stage3.FWD_MODULE_STACK if one is not module]
    releasing = stage3.PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    getclosurevars(releasing).nonlocals["func"].cache_clear()


def _forget_communication() -> None:
    """Drops the process group, the groups that DeepSpeed made of it, and what stage 3 left in torch."""
    from deepspeed.comm import comm as state
    from deepspeed.runtime.zero import partition_parameters as stage3
    from deepspeed.utils import groups
    from torch.nn import functional

    groups._release_process_group_references(None)
    getattr(state.cdb, "accel_undo", ExitStack()).close()
    state.cdb = None
    # Graphs of ranks that had an engine of stage 3, and of those that had none, would be reduced in another order.
    if functional.linear is stage3.zero3_linear_wrap:
        functional.linear = stage3.InsertPostInitMethodToModuleSubClasses.linear_bk


@contextmanager
def local_rank(session: "Session") -> Iterator[None]:
    """Within it, the variable from which DeepSpeed reads the local rank is set."""
    with patch_environment(LOCAL_RANK=str(session.local_rank)):
        yield


# ------------------------------------------------------------------------------------------- compiled operations


def compiler_problem() -> str | None:
    """Why DeepSpeed's operations cannot be compiled here; None if they can."""
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        return "there is no C++ compiler on PATH"
    from torch.utils.cpp_extension import is_ninja_available

    return None if is_ninja_available() else "there is no ninja on PATH"


def extensions_folder() -> Path:
    """Where compiled operations are kept: ``TORCH_EXTENSIONS_DIR``, or torch's default."""
    from torch.utils.cpp_extension import _get_build_directory

    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path(_get_build_directory("x", verbose=False)).parent


def drop_stale_lock(folder: Path, *, older_than: float = _STALE_AFTER) -> bool:
    """Removes the lock that a killed build left in ``folder``, for which every later build would wait without end.

    Returns whether there was one older than ``older_than`` seconds.
    """
    lock = folder / "lock"
    try:
        stale = time.time() - lock.stat().st_mtime > older_than
    except OSError:
        return False
    if stale:
        lock.unlink(missing_ok=True)
    return stale


# What to do where an operation cannot be compiled; DISK is the one for states on NVMe, which takes libaio besides.
DISK = "AsyncIOBuilder"
_INSTEAD = {DISK: "libaio-dev, a compiler and ninja, or offload to 'cpu'"}
_INSTEAD_OF_OPTIMIZER = (
    "a compiler and ninja, or use an optimizer that is not DeepSpeed's ('zero_force_ds_cpu_optimizer': false)"
)


@contextmanager
def own_ninja() -> Iterator[None]:
    """Within it, programs beside this Python are found first: another version of ninja would build everything anew."""
    with patch_environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"):
        yield


def build_operation(name: str) -> Any:
    """Compiles and loads one operation (``CPUAdamBuilder``, say), or loads it where that was done before.

    A minute of one core's time the first time, ten for states on a disk.

    Raises:
        BackendError: it cannot be compiled here.
    """
    library("cpu")
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(name)
    if builder is None:
        raise BackendError(f"DeepSpeed has no operation {name} for {get_accelerator().device_name()}")
    folder = extensions_folder() / builder.name
    if drop_stale_lock(folder):
        logging.getLogger(__name__).warning("removed the lock that a killed build had left in %s", folder)
    instead = f"install {_INSTEAD.get(name, _INSTEAD_OF_OPTIMIZER)}"
    with own_ninja():
        problem = None if (folder / f"{builder.name}.so").exists() else compiler_problem()
        if problem is not None:
            raise BackendError(f"DeepSpeed's operation {builder.name} has to be compiled, and {problem}; {instead}")
        try:
            return builder.load()
        except (RuntimeError, ImportError, OSError, ValueError) as error:
            raise BackendError(
                f"DeepSpeed's operation {builder.name} cannot be compiled: {error}; {instead}"
            ) from error

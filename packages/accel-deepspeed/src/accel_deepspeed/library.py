"""The DeepSpeed library: import, device type, process groups, and compiled ops."""

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from accel_deepspeed.private import check_names, extensions_root, forget_groups
from accel_state.environment import patch_environment
from accel_state.errors import BackendError

if TYPE_CHECKING:
    from accel_state.session import Session

EXTRA = "accel-deepspeed[deepspeed]"
# Inference op that DeepSpeed otherwise compiles whenever it opens its communication on CPUs.
_SHM = "deepspeed_shm_comm"
_STALE_AFTER = 600.0
_COMPARES = "assert_ints_same_as_other_ranks"
# Environment variables that DeepSpeed sets when it is imported.
_SETS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_DEVICES = ("cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu")


def installed() -> bool:
    """Whether DeepSpeed is installed; does not import it."""
    return find_spec("deepspeed") is not None


def library(device_type: str = "") -> ModuleType:
    """Imports and returns the package ``deepspeed`` for a device type.

    The device type is preset during the import, because DeepSpeed's own detection changes the process's environment.

    Raises:
        BackendError: DeepSpeed is not installed, or cannot be imported.
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
    check_names(deepspeed)
    module: ModuleType = deepspeed
    return module


def use_device(session: "Session") -> None:
    """Makes DeepSpeed use the session's device type.

    Raises:
        BackendError: DeepSpeed has chosen another device type.
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


def open_communication(session: "Session", user: object) -> None:
    """Passes the default process group to DeepSpeed for ``user``; drops DeepSpeed's state of an earlier group first."""
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
    """Sets LOCAL_RANK while stage 3 compares its first forwards between ranks.

    Only some launchers set the variable. Closing the result undoes all changes.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
    from deepspeed.runtime.zero import utils

    undo = ExitStack()
    for name in ("assert_lst_len_same_as_other_ranks", "get_lst_from_rank0"):
        compare = getattr(utils, name)
        undo.callback(setattr, utils, name, compare)
        setattr(utils, name, local_rank(session)(compare))
    # DeepSpeed compares the modules of a forward only on ranks whose modules changed since the last one: they would
    # wait for the other ranks, and rank 0 would continue without an error. ``zero.gather_order`` compares on all ranks.
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
    """Drops DeepSpeed's references to a stage 3 model, which otherwise keep its engine alive until the process ends.

    A list of DeepSpeed's holds every model and is never shortened, and a cache holds the parameters that layers
    release.
    """
    stage3 = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if stage3 is None:
        return
    stage3.FWD_MODULE_STACK[:] = [one for one in stage3.FWD_MODULE_STACK if one is not module]
    _clear_caches(stage3.PartitionedParameterCoordinator)


def _clear_caches(owner: type) -> None:
    """Clears the caches that decorators have put around methods of a class."""
    for method in vars(owner).values():
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


def _forget_communication() -> None:
    """Drops the process group, the groups that DeepSpeed derived from it, and stage 3's patches of torch."""
    from deepspeed.comm import comm as state
    from deepspeed.runtime.zero import partition_parameters as stage3
    from torch.nn import functional

    forget_groups()
    getattr(state.cdb, "accel_undo", ExitStack()).close()
    state.cdb = None
    # Otherwise ranks with and without an earlier stage 3 engine would have different graphs, and other reduction
    # orders.
    if functional.linear is stage3.zero3_linear_wrap:
        functional.linear = stage3.InsertPostInitMethodToModuleSubClasses.linear_bk


@contextmanager
def local_rank(session: "Session") -> Iterator[None]:
    """Context in which LOCAL_RANK is the index of the session's device, as which DeepSpeed reads it.

    The two differ where a scheduler shows each rank one GPU, or the device was chosen. A device without an index, a CPU
    for example, has the local rank.
    """
    index = session.device.index
    with patch_environment(LOCAL_RANK=str(session.local_rank if index is None else index)):
        yield


# ------------------------------------------------------------------------------------------- compiled operations


def compiler_problem() -> str | None:
    """Returns why DeepSpeed's ops cannot be compiled here; None if they can."""
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        return "there is no C++ compiler on PATH"
    from torch.utils.cpp_extension import is_ninja_available

    return None if is_ninja_available() else "there is no ninja on PATH"


def extensions_folder() -> Path:
    """Returns the folder of compiled ops: ``TORCH_EXTENSIONS_DIR``, or torch's default."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else extensions_root()


def drop_stale_lock(folder: Path, *, older_than: float = _STALE_AFTER) -> bool:
    """Removes the lock that a killed build left in ``folder``, for which every later build would wait forever.

    Returns whether there was a lock older than ``older_than`` seconds.
    """
    lock = folder / "lock"
    try:
        stale = time.time() - lock.stat().st_mtime > older_than
    except OSError:
        return False
    if stale:
        lock.unlink(missing_ok=True)
    return stale


# Advice for ops that cannot be compiled; DISK is the op for states on NVMe, which also needs libaio.
DISK = "AsyncIOBuilder"
_INSTEAD = {DISK: "libaio-dev, a compiler and ninja, or offload to 'cpu'"}
_INSTEAD_OF_OPTIMIZER = (
    "a compiler and ninja, or use an optimizer that is not DeepSpeed's ('zero_force_ds_cpu_optimizer': false)"
)


@contextmanager
def own_ninja() -> Iterator[None]:
    """Context with this Python's folder first in PATH, because another version of ninja would rebuild every op."""
    with patch_environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"):
        yield


@contextmanager
def known_processor() -> Iterator[None]:
    """Context in which DeepSpeed has py-cpuinfo look at the processor once per process.

    A look takes more than a second, in a process of its own, and one optimizer on the host takes three of them.
    """
    try:
        import cpuinfo
    except ImportError:  # DeepSpeed then reads lscpu
        yield
        return
    before, cpuinfo.get_cpu_info = cpuinfo.get_cpu_info, _processor
    try:
        yield
    finally:
        cpuinfo.get_cpu_info = before


@cache
def _processor() -> Any:
    from cpuinfo import cpuinfo

    return cpuinfo.get_cpu_info()


def build_operation(name: str) -> Any:
    """Compiles and loads an op (``CPUAdamBuilder``, for example), or loads it if it was compiled before.

    DeepSpeed keeps the device type of its first import, so that is CUDA if there is such a device, although some ops
    run on the host. Compilation takes a minute of one core, ten minutes for the op for states on disk.

    Raises:
        BackendError: the op cannot be compiled here.
    """
    library("cuda" if torch.cuda.is_available() else "cpu")
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(name)
    if builder is None:
        raise BackendError(f"DeepSpeed has no operation {name} for {get_accelerator().device_name()}")
    folder = extensions_folder() / builder.name
    if drop_stale_lock(folder):
        logging.getLogger(__name__).warning("removed the lock that a killed build had left in %s", folder)
    instead = f"install {_INSTEAD.get(name, _INSTEAD_OF_OPTIMIZER)}"
    with own_ninja(), known_processor():
        problem = None if (folder / f"{builder.name}.so").exists() else compiler_problem()
        if problem is not None:
            raise BackendError(f"DeepSpeed's operation {builder.name} has to be compiled, and {problem}; {instead}")
        try:
            return builder.load()
        except (RuntimeError, ImportError, OSError, ValueError) as error:
            raise BackendError(
                f"DeepSpeed's operation {builder.name} cannot be compiled: {error}; {instead}"
            ) from error

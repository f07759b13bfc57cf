"""Private names of torch that this package uses, read in torch 2.9, 2.13 and 2.15, each with what happens without it.

No other module of the package uses a private name of torch; CI checks that.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

_Method = TypeVar("_Method", bound=Callable[..., Any])


def default_store() -> "Store":
    """Returns the store of the rendezvous, ``distributed_c10d._get_default_store``.

    Raises:
        ImportError: this torch does not have it, and has no other access to the store.
    """
    from torch.distributed import distributed_c10d

    get = getattr(distributed_c10d, "_get_default_store", None)
    if get is None:
        raise ImportError(
            f"torch {torch.__version__} has no torch.distributed.distributed_c10d._get_default_store; use torch 2.9 to "
            "2.15, which have it"
        )
    store: Store = get()
    return store


def is_open(group: "ProcessGroup") -> bool:
    """Whether ``group`` is not destroyed, by ``distributed_c10d._world``; without it, whether any group is open."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return False
    known: Mapping[Any, Any] | None = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", None)
    return known is None or group in known


_OF_GROUPS = ("_new_process_group_helper", "_get_default_timeout", "_get_default_group", "_world")


def new_group(ranks: Sequence[int], own: int, backend: Any, name: Any, timeout: timedelta | None) -> "ProcessGroup":
    """Opens a group of ``ranks``, in which this process is rank ``own``, under a name that all of them know.

    By ``distributed_c10d._new_process_group_helper``, because ``new_group`` derives the name from the groups that the
    process created before. Without it by ``new_group``: ranks that created other groups then wait for one another.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    helper, default_timeout, default_group, world = (getattr(c10d, one, None) for one in _OF_GROUPS)
    if helper is None or default_timeout is None or default_group is None or world is None:
        made: Any = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)
        return made  # type: ignore[no-any-return]
    group: ProcessGroup
    group, _ = helper(
        len(ranks),
        own,
        list(ranks),
        backend,
        default_store(),
        name,
        timeout=default_timeout(backend) if timeout is None else timeout,
        device_id=default_group().bound_device_id,
    )
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def backends_by_device(group: "ProcessGroup") -> list[Any]:
    """Returns the backends of a group, one for each device type, by ``ProcessGroup._get_backend``.

    Empty without ``_get_backend`` and ``_device_types``: timeouts are then not read, and NCCL is not aborted.
    """
    found: list[Any] = []
    get: Any = getattr(group, "_get_backend", None)
    for device in () if get is None else getattr(group, "_device_types", ()):
        try:
            found.append(get(torch.device(device)))
        except RuntimeError:
            continue
    return found


def flight_recorders() -> list[Callable[[], str]]:
    """Returns the functions of ``torch._C._distributed_c10d`` that dump flight recorders as JSON, if it has any."""
    module = getattr(torch._C, "_distributed_c10d", None)
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    return [dump for dump in (getattr(module, name, None) for name in names) if dump is not None]


def device_flight_recorder() -> Callable[[], str] | None:
    """Returns the function that dumps NCCL's flight recorder as JSON; None if this process has no CUDA context.

    Without ``_dump_nccl_trace_json`` a wait for a CUDA device is not seen.
    """
    if not torch.cuda.is_initialized():
        return None
    return getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace_json", None)


def timeout_of(backend: object) -> Any:
    """Returns the timeout of a backend's collectives, ``Backend.options._timeout``; None if it does not have that."""
    return getattr(getattr(backend, "options", None), "_timeout", None)


_FLATTEN = getattr(torch._utils, "_flatten_dense_tensors", None)
_UNFLATTEN = getattr(torch._utils, "_unflatten_dense_tensors", None)


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates tensors as one vector, by ``torch._utils``; by ``torch.cat`` without it. One becomes a view."""
    if _FLATTEN is None:
        return torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)
    flat: torch.Tensor = _FLATTEN(tensors)
    return flat


def unflatten(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns views of ``flat`` in the shapes of ``like``, by ``torch._utils``; by ``torch.split`` without it."""
    if _UNFLATTEN is None:
        rows = flat.split([tensor.numel() for tensor in like])
        return [row.view(tensor.shape) for row, tensor in zip(rows, like, strict=True)]
    views: Sequence[torch.Tensor] = _UNFLATTEN(flat, like)
    return views


def untraced(method: _Method, *, callees: bool = True) -> _Method:
    """Excludes a method from dynamo's tracing, by ``torch._disable_dynamo``; ``callees``: what it calls, too.

    The first call of what that returns imports the compiler, which takes seconds, and so does the public
    ``torch.compiler.disable``, used without it. Until something else has imported the compiler, nothing is traced, and
    the method is called as it is.
    """
    disable: Any = getattr(torch, "_disable_dynamo", None)
    excluded = None if disable is None else disable(method, recursive=callees)

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        return (excluded or torch.compiler.disable(method, recursive=callees))(*args, **kwargs)

    return cast(_Method, called)

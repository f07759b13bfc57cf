"""Communication hooks of DDP: reductions of gradient buckets other than an all-reduce in the bucket's dtype."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from accel_state.enums import DDPCommunicationHookType as DDPCommunicationHookType
from accel_state.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel

Hook = Callable[[Any, Any], "Future[torch.Tensor]"]


HALVES: Mapping[str, torch.dtype] = MappingProxyType({"fp16": torch.float16, "bf16": torch.bfloat16})


def hook_name(value: object, what: str = "comm_hook") -> str:
    """Returns the name of a hook that is given as a string or an enum member.

    Raises:
        ConfigError: an unknown name, or a wrapper that is not "no" or a half-precision dtype.
    """
    name = str(getattr(value, "value", value)).lower()
    known = DDPCommunicationHookType.list() if what == "comm_hook" else ["no", *HALVES]
    if name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(f"{what} {value!r} is not one of {', '.join(known)}{hint}")
    return name


def register_comm_hook(
    model: "DistributedDataParallel", hook: str, wrapper: str, options: Mapping[str, Any], *, group: Any = None
) -> None:
    """Registers the named communication hook on a DDP model, wrapped in ``wrapper``'s conversion of dtype."""
    if hook == "no":
        return
    state: Any = group
    if hook in HALVES:
        function = reduce_in(HALVES[hook])
    else:
        state, function = _power_sgd(hook, options, group)
    if wrapper != "no":
        function = wrapped_in(HALVES[wrapper], function)
    model.register_comm_hook(state, function)


def reduce_in(dtype: torch.dtype) -> Hook:
    """Returns a hook that averages buckets in ``dtype``, on every collective backend (torch's bf16 hook refuses gloo).

    The state is the process group. Buckets are divided before the sum, so that half-precision sums do not overflow.
    """

    def hook(group: Any, bucket: Any) -> "Future[torch.Tensor]":
        own = bucket.buffer()
        real = torch.view_as_real(own) if own.is_complex() else own
        sent = real.to(dtype).div_(dist.get_world_size(group))
        work = dist.all_reduce(sent, group=group, async_op=True)
        return _then_copy(work.get_future(), real, own)

    return _typed(hook)


def wrapped_in(dtype: torch.dtype, inner: Hook) -> Hook:
    """Returns a hook that runs ``inner`` on the bucket in ``dtype`` and converts the result back."""

    def hook(state: Any, bucket: Any) -> "Future[torch.Tensor]":
        own = bucket.buffer()
        bucket.set_buffer(own.to(dtype))
        return _then_copy(inner(state, bucket), own, own)

    return _typed(hook)


def _then_copy(future: Any, target: torch.Tensor, bucket: torch.Tensor) -> "Future[torch.Tensor]":
    """Copies a result into ``target``, which shares its memory with ``bucket``; the future of ``bucket``."""

    def take(done: Any) -> torch.Tensor:
        value = done.value()
        target.copy_(value[0] if isinstance(value, (list, tuple)) else value)
        return bucket

    result: Future[torch.Tensor] = future.then(take)
    return result


def _typed(hook: Hook) -> Hook:
    """Sets the hook's annotations to the real types, which DDP compares; they are imported at run time only here."""
    hook.__annotations__ = {"bucket": cast(Any, dist).GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return hook


def _power_sgd(hook: str, options: Mapping[str, Any], group: Any) -> tuple[Any, Hook]:
    import inspect

    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    known = [name for name in inspect.signature(power.PowerSGDState).parameters if name != "process_group"]
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"comm_state_option {name!r} is not one of {', '.join(known)}{hint}")
    state = power.PowerSGDState(group, **options)
    if hook == "power_sgd":
        return state, power.powerSGD_hook
    from accel_backends.ddp.power_sgd import batched_power_sgd

    return state, _typed(batched_power_sgd)

"""Communication hooks of DDP: reductions of gradient buckets other than an all-reduce in the bucket's dtype."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from accel_backends.ops.fqn import named_parameters
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
    """Registers the named communication hook on a DDP model, wrapped in ``wrapper``'s conversion of dtype.

    Raises:
        ConfigError: an unknown option, or a parameter that PowerSGD cannot compress.
    """
    if hook == "no":
        return
    state: Any = group
    if hook in HALVES:
        function = reduce_in(HALVES[hook])
    else:
        _check_compressible(model, hook)
        state, function = _power_sgd(hook, options, group, half=wrapper == "fp16")
    if wrapper != "no":
        function = wrapped_in(HALVES[wrapper], function)
    model.register_comm_hook(state, function)


def reduce_in(dtype: torch.dtype) -> Hook:
    """Returns a hook that averages buckets in ``dtype``, on every collective backend (torch's bf16 hook refuses gloo).

    The state is the process group. Buckets are divided before the sum, so that half-precision sums do not overflow.
    """

    def hook(group: Any, bucket: Any) -> "Future[torch.Tensor]":
        own = bucket.buffer()
        real = _real(own)
        sent = real.to(dtype).div_(dist.get_world_size(group))
        work = dist.all_reduce(sent, group=group, async_op=True)
        return _then_copy(work.get_future(), real, own)

    return _typed(hook)


def wrapped_in(dtype: torch.dtype, inner: Hook) -> Hook:
    """Returns a hook that runs ``inner`` on the bucket in ``dtype`` and converts the result back."""

    def hook(state: Any, bucket: Any) -> "Future[torch.Tensor]":
        own = bucket.buffer()
        real = _real(own)
        bucket.set_buffer(real.to(dtype))
        return _then_copy(inner(state, bucket), real, own)

    return _typed(hook)


def _real(bucket: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(bucket) if bucket.is_complex() else bucket


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


def begin_anew(model: "DistributedDataParallel") -> bool:
    """Drops what PowerSGD hooks have kept of earlier steps, as in a new process; returns whether there are such hooks.

    The next steps, ``start_powerSGD_iter`` of them, reduce gradients in full.
    """
    states: list[Any] = [state for _, state in model._comm_hooks if hasattr(state, "error_dict")]
    for state in states:
        state.iter = 0
        for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            memory.clear()
    return bool(states)


def _check_compressible(model: "DistributedDataParallel", hook: str) -> None:
    for name, parameter in named_parameters(model).items():
        whole = hook == "power_sgd" and (parameter.dim() == 0 or parameter.numel() == 0)
        if parameter.requires_grad and (whole or parameter.is_complex()):
            what = f"of shape {tuple(parameter.shape)}" if whole else "complex"
            raise ConfigError(
                f"{name} is {what}, which comm_hook={hook!r} cannot compress; nearest: comm_hook='bf16'"
                + (", or 'batched_power_sgd'" if whole and not parameter.is_complex() else "")
            )


def _power_sgd(hook: str, options: Mapping[str, Any], group: Any, *, half: bool) -> tuple[Any, Hook]:
    import inspect

    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    from accel_backends.ddp.power_sgd import LEAST, LEAST_HALF, batched_power_sgd, recovering

    known = [name for name in inspect.signature(power.PowerSGDState).parameters if name != "process_group"]
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"comm_state_option {name!r} is not one of {', '.join(known)}{hint}")
    if hook == "batched_power_sgd":
        return power.PowerSGDState(group, **options), _typed(recovering(batched_power_sgd))
    least = LEAST_HALF if half else LEAST
    state = power.PowerSGDState(group, **{"orthogonalization_epsilon": least, **options})
    return state, _typed(recovering(power.powerSGD_hook))

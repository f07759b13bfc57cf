"""Stand-in for the CUDA functions that megatron-core 0.16.1 calls, for tests on CPU ranks only.

megatron-core creates tensors on "cuda", asks for the current CUDA device, and compares the type names of tensors.
Within ``cuda_on_cpu`` these calls mean the CPU. Results under it prove schedules, groups, conversions and numbers, not
kernels.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
ALL_GATHER = torch.distributed.all_gather


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def _called_by_megatron() -> bool:
    frame = sys._getframe(2)
    while frame is not None and ("torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return frame is not None and "megatron/core" in frame.f_code.co_filename


class _OnCPU(TorchFunctionMode):
    """Replaces the device "cuda" by the CPU in calls of torch's functions."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(one) else one for one in args)
        if function is torch.Tensor.type and len(args) == 1 and not kwargs and _called_by_megatron():
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Returns numbers of tokens as they are once the host has them: megatron-core leaves those of the CPU alone."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Gathers tensors of several sizes, too, by broadcasts, as NCCL does and gloo does not."""
    if len({one.shape for one in outputs}) == 1:
        return ALL_GATHER(outputs, tensor, group, async_op)
    for rank, one in enumerate(outputs):
        if rank == group.rank():
            one.copy_(tensor)
        torch.distributed.broadcast(one, group=group, group_src=rank)
    return None


def _reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], *args: Any, group: Any = None) -> None:
    """Reduces tensors of several sizes, too."""
    for rank, one in enumerate(inputs):
        total = one.clone()
        torch.distributed.reduce(total, *args, group=group, group_dst=rank)
        if rank == group.rank():
            output.copy_(total)


class _Stream:
    """A CUDA stream, of which the CPU has one: what is submitted to it has been computed."""

    def wait_stream(self, *other: Any) -> "_Stream":
        """Returns at once; stands for an event, too."""
        return self

    synchronize = record_event = wait_event = wait_stream


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Context in which megatron-core runs on the CPU."""
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    def nothing(*args: Any, **options: Any) -> None:
        return None

    replaced: dict[str, Callable[..., Any]] = {
        "current_device": lambda: CPU,
        "synchronize": nothing,
        "empty_cache": nothing,
        "get_rng_state": lambda *args, **options: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **options: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "Stream": _Stream,
        "current_stream": _Stream,
        "stream": nullcontext,
    }
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(patch.object(torch.cuda, name, function))
        stack.enter_context(patch.object(torch.distributed, "all_gather", _all_gather))
        stack.enter_context(patch.object(torch.distributed, "reduce_scatter", _reduce_scatter))
        stack.enter_context(patch.object(random, "_lazy_init", nothing))
        stack.enter_context(patch.object(random, "_get_cuda_rng_state", lambda *args, **options: torch.get_rng_state()))
        stack.enter_context(
            patch.object(random, "_set_cuda_rng_state", lambda state, *args, **options: torch.set_rng_state(state))
        )
        # megatron-core keeps the stream for the process, in which a test on a GPU may follow.
        stack.enter_context(patch.object(dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None))
        stack.enter_context(patch.object(dispatcher, "maybe_move_tensor_to_cpu", _on_host))
        stack.enter_context(_OnCPU())
        yield

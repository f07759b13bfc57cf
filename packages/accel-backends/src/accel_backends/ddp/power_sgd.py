"""Batched PowerSGD, one low-rank matrix for all gradients of a bucket; recovery of both PowerSGDs after a bad step.

Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019, algorithm
1. torch has an implementation with the name batched PowerSGD, which in torch 2.13 raises in its first compressed step.
Options and state are those of torch's ``PowerSGDState``.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.futures import Future


LEAST, LEAST_HALF = 1e-15, 2.0**-24
"""Norm in fp32, and in fp16, below which a factor counts as zero: torch divides by norms, and zero has no direction."""
_NUDGE, _NUDGE_HALF = 1e-12, LEAST_HALF
"""What is added to each element of a factor, by which a factor of zeros has a norm above the least."""


def recovering(inner: Callable[[Any, Any], "Future[torch.Tensor]"]) -> Callable[[Any, Any], "Future[torch.Tensor]"]:
    """Returns a PowerSGD hook that goes on after gradients of nan, or of zero.

    Otherwise nan of one step, an overflow in fp16 for example, would stay in the errors, and be in all later gradients;
    and the factors of a matrix whose gradient was zero in one step would be zero from there on, so that its gradients
    would never be sent again.
    """

    def hook(state: Any, bucket: Any) -> "Future[torch.Tensor]":
        index = bucket.index()
        if (error := state.error_dict.get(index)) is not None:
            error.nan_to_num_(0.0, 0.0, 0.0)
        if (factors := state.q_memory_dict.get(index)) is not None:
            factors.nan_to_num_(0.0, 0.0, 0.0).add_(_NUDGE_HALF if factors.dtype is torch.float16 else _NUDGE)
        return inner(state, bucket)

    return hook


def batched_power_sgd(state: Any, bucket: Any) -> "Future[torch.Tensor]":
    """Averages a bucket as a low-rank matrix; by a plain all-reduce in the first ``start_powerSGD_iter`` steps.

    The bucket is reshaped to a square matrix, padded with zeros. With ``use_error_feedback`` the error of the
    approximation is added to the next step's bucket. Factors are kept between steps (``warm_start``), or drawn anew
    from the same seed on all ranks.
    """
    own, index = bucket.buffer(), bucket.index()
    done: Future[torch.Tensor] = torch.futures.Future(devices=future_devices(own.device))
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        done.set_result(_mean(own, state.process_group))
        return done
    size = own.numel()
    side = math.ceil(math.sqrt(size))
    matrix = own.new_zeros(side * side)
    matrix[:size] = own
    if state.use_error_feedback and index in state.error_dict:
        matrix += state.error_dict[index]
    square = matrix.view(side, side)
    right = _right_factor(state, index, side, own)
    left = _orthogonal(_mean(square @ right, state.process_group), state.orthogonalization_epsilon)
    right = _mean(square.t() @ left, state.process_group)
    state.q_memory_dict[index] = right
    approximation = left @ right.t()
    if state.use_error_feedback:
        state.error_dict[index] = (square - approximation).view(-1)
    own.copy_(approximation.view(-1)[:size])
    state.maybe_increase_iter(bucket)
    done.set_result(own)
    return done


def future_devices(device: torch.device) -> list[int | str | torch.device]:
    """Returns the devices that a future of a tensor has to know, so that readers on other streams wait for the value.

    CPUs have no streams, and torch refuses them.
    """
    return [] if device.type == "cpu" else [device]


def _right_factor(state: Any, index: int, side: int, like: torch.Tensor) -> torch.Tensor:
    """Returns the initial right factor of the power iteration, equal on all ranks, with orthogonal columns."""
    if state.warm_start and index in state.q_memory_dict:
        factor: torch.Tensor = state.q_memory_dict[index]
    else:
        draw = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
        factor = torch.randn(side, min(side, state.matrix_approximation_rank), generator=draw).to(like)
    return _orthogonal(factor, state.orthogonalization_epsilon)


def _orthogonal(matrix: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Returns an orthonormal basis of the columns by QR, in fp32 for half precision, which QR does not support."""
    wide = matrix.float() if matrix.dtype.itemsize < 4 else matrix
    if epsilon:
        wide = wide + epsilon
    columns: torch.Tensor = torch.linalg.qr(wide).Q
    return columns.to(matrix.dtype)


def _mean(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    tensor = tensor.div_(dist.get_world_size(group))
    dist.all_reduce(tensor, group=group)
    return tensor

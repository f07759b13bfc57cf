"""Autocast as GPUs have it, in a trace on the CPU, whose autocast computes other operations in fp32."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accel_planner.private import WIDENING_SOFTMAX, mapped

# Operations whose inputs CUDA's autocast converts to fp32, which autograd then keeps (AT_FORALL_FP32 in
# ATen/autocast_mode.h of torch 2.13; XPU's list is the same). A name that this torch does not have is left out.
_FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""
# Operations whose outputs it makes fp32 (AT_FORALL_FP32_SET_OPT_DTYPE).
_FP32_OUTPUT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
# Operations whose inputs the CPU's autocast converts to fp32, and CUDA's does not. The parts of a composite are looked
# up in the lists again: cross_entropy_loss is log_softmax, with an fp32 output and no fp32 input.
_ONLY_ON_CPUS = """
    cross_entropy_loss avg_pool3d max_pool3d adaptive_avg_pool3d max_unpool2d max_unpool3d reflection_pad1d
    reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
"""
# Device types whose autocast is the CPU's, or unlike CUDA's.
_OTHERS = ("cpu", "xla")


@contextmanager
def autocast_lists_of(device_type: str) -> Iterator[None]:
    """Makes autocast on the CPU treat operations as autocast on ``device_type`` does, in this process."""
    if device_type in _OTHERS:
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # Of overriding kernels that the CPU's autocast has.
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name in _FP32.split():
            _register(library, name, _with_inputs)
        for name in _FP32_OUTPUT.split():
            _register(library, name, _with_output)
        for name in _ONLY_ON_CPUS.split():
            _register(library, name, lambda _: torch.library.fallthrough_kernel)
    try:
        yield
    finally:
        del library  # its kernels with it


def _register(library: Any, name: str, kernel: Callable[[Any], Callable[..., Any]]) -> None:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    if operation is not None:
        library.impl(name, kernel(operation), "AutocastCPU")


def _with_inputs(operation: Any) -> Callable[..., Any]:
    """Returns the kernel that converts inputs to fp32."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        wide_args, wide_kwargs = mapped(_widened, (args, kwargs))
        with torch.autocast("cpu", enabled=False):
            return operation(*wide_args, **wide_kwargs)

    return kernel


def _with_output(operation: Any) -> Callable[..., Any]:
    """Returns the kernel that computes an fp32 output, unless the call names a dtype."""
    softmax = WIDENING_SOFTMAX.get(operation)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        named = kwargs.get("dtype") is not None or (softmax is not None and args[2:] not in ((), (None,)))
        with torch.autocast("cpu", enabled=False):
            if named or not _is_eligible(args[0]):
                return operation(*args, **kwargs)
            if softmax is None:
                return operation(*args, **{**kwargs, "dtype": torch.float32})
            if args[0].dtype == torch.float16:
                return softmax(*args[:2], True)
            return operation(*args[:2], torch.float32)

    return kernel


def _widened(value: Any) -> Any:
    return value.float() if _is_eligible(value) else value


def _is_eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64

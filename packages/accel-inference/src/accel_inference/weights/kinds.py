"""Kinds of weights: plain tensors, and quantized ones that consist of several tensors or have scales in their layer."""

from collections.abc import Mapping

from torch import Tensor

from accel_inference.weights.sources import HostWeight, Weight
from accel_state.errors import CheckpointMismatchError
from accel_state.pytree.composite import inner_tensors

_OF_BITSANDBYTES = ("quant_state", "SCB")
"""Attributes of quantized weights, one of which each kind has."""


def check_kinds(targets: Mapping[str, Tensor], sources: Mapping[str, Weight]) -> None:
    """Refuses weights that would be put where the model has quantized ones of another kind.

    Those of bitsandbytes, which have their scales beside them, are refused in any case. A plain weight of the model
    takes a quantized tensor of torchao, as it does from a quantized state dict.

    Raises:
        CheckpointMismatchError: names them.
    """
    both = [name for name in sources if name in targets]
    if scaled := [name for name in both if any(hasattr(targets[name], one) for one in _OF_BITSANDBYTES)]:
        raise CheckpointMismatchError(
            f"{', '.join(scaled[:8])} of the model are quantized by bitsandbytes, whose layers keep the scales. Load a "
            "quantized state with model.load_state_dict; weights in full precision, or a quantized state into an empty "
            "model, with load_and_quantize_model(model, config, weights_location=...)"
        )
    if apart := [name for name in both if _has_scales_beside(name, sources)]:
        raise CheckpointMismatchError(
            f"{', '.join(apart[:8])} of the checkpoint are quantized by bitsandbytes, and the model's are not. Load "
            "them into an empty model with load_and_quantize_model(model, config, weights_location=...)"
        )
    differ = [
        f"{name} is {kind_text(source)} in the checkpoint and {kind_text(HostWeight(targets[name]))} in the model"
        for name, source in ((name, sources[name]) for name in both)
        if inner_tensors(targets[name]) and _layout(source) != _layout(HostWeight(targets[name]))
    ]
    if differ:
        raise CheckpointMismatchError(
            f"quantized in another way, nothing was loaded: {'; '.join(differ[:8])}. Quantize the model as it was when "
            "it was saved, or load full precision into an empty model with load_and_quantize_model"
        )


def _has_scales_beside(name: str, sources: Mapping[str, Weight]) -> bool:
    return f"{name}.absmax" in sources or f"{name.removesuffix('weight')}SCB" in sources


def kind_text(weight: Weight) -> str:
    """The class of a weight that consists of several tensors, with their dtypes and shapes, for an error message."""
    inner = _layout(weight)
    if not inner or not isinstance(weight, HostWeight):
        return f"one tensor in {str(weight.dtype).removeprefix('torch.')}"
    parts = ", ".join(f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}" for name, shape, dtype in inner[1:])
    return f"{inner[0][0]} ({parts})"


def _layout(weight: Weight) -> list[tuple[str, tuple[int, ...], object]]:
    """Class and inner tensors of a weight; empty if it is one tensor."""
    if not isinstance(weight, HostWeight) or not (inner := inner_tensors(weight.tensor)):
        return []
    parts = [(name, tuple(one.shape), one.dtype) for name, one in inner.items()]
    return [(type(weight.tensor).__qualname__, (), None), *parts]

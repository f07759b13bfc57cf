"""Layers that are one matrix: which dim of the weight holds the inputs, and which the outputs."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class Matrix:
    """Sizes of a linear layer, and the dims of its weight that hold its inputs and outputs."""

    inputs: int
    outputs: int
    input_dim: int
    output_dim: int


def matrix_of(module: nn.Module) -> Matrix | None:
    """Matrix of a linear layer; None if the module is no linear layer with a floating-point weight of two dims.

    Linear layers are ``nn.Linear`` (weight outputs x inputs) and transformers' ``Conv1D`` (weight inputs x outputs),
    which is known by its attributes, so that transformers need not be installed. Quantised layers have a weight of
    another dtype or shape.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2 or not weight.is_floating_point():
        return None
    rows, columns = weight.shape
    if isinstance(module, nn.Linear):
        return Matrix(inputs=columns, outputs=rows, input_dim=1, output_dim=0)
    if type(module).__name__ == "Conv1D" and getattr(module, "nf", None) == columns:
        return Matrix(inputs=rows, outputs=columns, input_dim=0, output_dim=1)
    return None

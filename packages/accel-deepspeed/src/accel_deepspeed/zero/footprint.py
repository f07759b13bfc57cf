"""Tensors in which an engine keeps parameters, gradients and optimizer state of one rank."""

from typing import Any

import torch

from accel_backends.ops.footprint import Held, states_of
from accel_deepspeed.engine.engine import Prepared


def held_by(prepared: Prepared) -> Held:
    """Returns all tensors of an engine, those in host memory included."""
    engine = prepared.engine
    parameters: list[torch.Tensor] = []
    for parameter in engine.module.parameters():
        part = getattr(parameter, "ds_tensor", None)
        # At stage 3 this rank's partition, and the full tensor of small parameters that DeepSpeed keeps gathered.
        parameters += [parameter.data] if part is None else [part, parameter.data]
    flats = [] if prepared.parts is None else prepared.parts.flats()
    gradients = [] if prepared.gradients is None else [*prepared.gradients.pending()]
    gradients += [flat.grad for flat in flats if flat.grad is not None]
    states = [] if prepared.optimizer is None else states_of(prepared.optimizer)
    return Held(parameters, gradients, [*flats, *states], _reserved(engine.optimizer))


def _reserved(optimizer: Any) -> list[torch.Tensor]:
    """Returns stage 3's persistent buffers: the gradient buffer and the reduction buckets."""
    found = [getattr(optimizer, "grad_partitions_flat_buffer", None)]
    found += [getattr(bucket, "buffer", None) for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    return [one for one in found if isinstance(one, torch.Tensor)]

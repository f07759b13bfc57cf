"""The tensors in which an engine keeps what one rank trains."""

from typing import Any

import torch

from accel_backends.ops.footprint import Held, states_of
from accel_deepspeed.engine.engine import Prepared


def held_by(prepared: Prepared) -> Held:
    """All of them; what an engine keeps on the host is among them."""
    engine = prepared.engine
    parameters: list[torch.Tensor] = []
    for parameter in engine.module.parameters():
        part = getattr(parameter, "ds_tensor", None)
        # At stage 3 its part, and the whole where DeepSpeed keeps small ones gathered.
        parameters += [parameter.data] if part is None else [part, parameter.data]
    flats = [] if prepared.parts is None else prepared.parts.flats()
    gradients = [] if prepared.gradients is None else [*prepared.gradients.pending()]
    gradients += [flat.grad for flat in flats if flat.grad is not None]
    states = [] if prepared.optimizer is None else states_of(prepared.optimizer)
    return Held(parameters, gradients, [*flats, *states], _reserved(engine.optimizer))


def _reserved(optimizer: Any) -> list[torch.Tensor]:
    """Stage 3's buffers, which are made once: of gradients, and of what is on its way to other ranks."""
    found = [getattr(optimizer, "grad_partitions_flat_buffer", None)]
    found += [getattr(bucket, "buffer", None) for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    return [one for one in found if isinstance(one, torch.Tensor)]

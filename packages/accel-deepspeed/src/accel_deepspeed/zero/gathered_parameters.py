"""Context with the full parameters of an engine, to read or change them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from accel_backends.ops.fqn import named_parameters
from accel_deepspeed.checkpoint.state_dicts import put_part
from accel_deepspeed.engine.engine import Prepared
from accel_deepspeed.tensor_parallel.shards import full_of_shard, is_cut, shard_of_full


@contextmanager
def full_parameters(prepared: Prepared, *, writeback: bool) -> Iterator[None]:
    """Context in which parameters are full on every rank, in the compute dtype.

    Changes reach the optimizer's master weights; every rank has to make the same changes. Unmodified parameters keep
    the precision of their master weights instead of being rounded through the compute dtype.

    Collective: every rank of the group must call this.
    """
    prepared.edits.carry()
    parameters = list(named_parameters(prepared.engine).values())
    sharded = any(hasattr(parameter, "ds_id") for parameter in parameters)
    if sharded:
        from deepspeed.runtime.zero import GatheredParameters

        gathering = GatheredParameters(parameters, modifier_rank=0 if writeback else None)
    else:
        gathering = nullcontext()
    with gathering, torch.no_grad():
        before = [parameter.detach().clone() for parameter in parameters]
        with _put_together(parameters), torch.enable_grad():
            yield
        if writeback:
            _carry_over(prepared, parameters, before)
        else:
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
    prepared.edits.forget()


@contextmanager
def _put_together(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """Context in which tensor-parallel shards are replaced by full parameters; each shard is written back."""
    cut = [(parameter, parameter.data) for parameter in parameters if is_cut(parameter)]
    for parameter, part in cut:
        parameter.data = full_of_shard(parameter, part)
    try:
        yield
    finally:
        for parameter, part in cut:
            part.copy_(shard_of_full(parameter, parameter.data).view(part.shape))
            parameter.data = part


def _carry_over(prepared: Prepared, parameters: list[torch.nn.Parameter], before: list[torch.Tensor]) -> None:
    parts = prepared.parts
    if parts is None:
        return
    for parameter, value in zip(parameters, before, strict=True):
        if parts.holds(parameter) and not torch.equal(parameter.detach(), value):
            put_part(parts, parameter, parameter.detach().float())

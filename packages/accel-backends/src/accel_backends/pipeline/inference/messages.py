"""Nested values that go from one rank of a pipeline to another: their structure first, then the tensors."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from accel_state.collectives.pickled import broadcast_pickled, receive_pickled, send_pickled
from accel_state.collectives.tensors import broadcast
from accel_state.errors import BackendError
from accel_state.pytree.operations import (
    get_data_structure,
    is_tensor_information,
    leaves_of,
    recursively_apply,
    send_to_device,
)
from accel_state.session import Session

_PLAIN = (torch.Tensor, str, int, float, bool, type(None), torch.dtype, torch.device)


def send_nested(value: Any, destination: int, group: dist.ProcessGroup) -> list[tuple[dist.Work, torch.Tensor]]:
    """Sends a nested value to rank ``destination`` of the group, which must call ``receive_nested``.

    Returns:
        What must be waited for, with the tensors that are read until then.
    """
    send_pickled(get_data_structure(value), destination, group)
    pending = []
    for tensor in _tensors(value):
        sent = tensor.contiguous()
        pending.append((cast(dist.Work, dist.isend(sent, group=group, group_dst=destination)), sent))
    return pending


def receive_nested(source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Receives a value that rank ``source`` of the group passes to ``send_nested``; its tensors are on ``device``."""
    value = _empty(receive_pickled(source, group), device)
    for tensor in _tensors(value):
        dist.recv(tensor, group=group, group_src=source)
    return value


def sent_from(source: int, value: Any, session: Session, *, what: str) -> Any:
    """Sends a nested value of rank ``source`` to all ranks of a session, whose devices then have its tensors.

    ``what`` names the value in an error.

    Raises:
        BackendError: a leaf is neither a tensor nor a plain value; on every rank.

    Collective: every rank of the session must call this.
    """
    group, device = cast(dist.ProcessGroup, session.group), session.device.torch
    own = session.rank == source
    strange = _strange(value) if own else None
    given = send_to_device(value, device) if own and strange is None else None
    header, strange = broadcast_pickled((get_data_structure(given), strange), source, group)
    if strange is not None:
        raise BackendError(
            f"a model in a pipeline has {what} of class {strange}, which cannot be sent from rank {source} to other "
            "ranks; nearest: tensors, numbers and strings, also in lists and dicts"
        )
    if not own:
        given = _empty(header, device)
    broadcast(_tensors(given), source, group=group)
    return given


def _strange(value: Any) -> str | None:
    """Class of the first leaf that is neither a tensor nor a plain value."""
    return next((type(leaf).__name__ for leaf in leaves_of(value) if not isinstance(leaf, _PLAIN)), None)


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def _empty(structure: Any, device: torch.device) -> Any:
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype, device=device),
        structure,
        test_type=is_tensor_information,
    )

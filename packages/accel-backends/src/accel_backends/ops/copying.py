"""Refusal of ``copy.deepcopy`` for sharded models, which neither torch nor DeepSpeed can copy."""

from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

from torch import nn

from accel_state.errors import BackendError

_COPY = "__deepcopy__"


def refuse_copies(modules: Iterable[nn.Module], kind: str, backend: str) -> None:
    """Makes ``copy.deepcopy`` of these modules raise BackendError, which describes alternatives for weight averaging.

    Args:
        modules: the prepared model and its units.
        kind: class name of the user's model.
        backend: name of the backend.
    """
    for module in modules:
        module.__dict__[_COPY] = partial(_refuse, kind, backend)


def _refuse(kind: str, backend: str, memo: Any) -> NoReturn:
    raise BackendError(
        f"copy.deepcopy of a {kind} that backend {backend!r} has prepared, of which every rank holds a part; copy the "
        "bare model before prepare (or give it to torch's AveragedModel) and update the copy within "
        "accelerator.full_parameters(model, writeback=False); or build one from accelerator.get_state_dict(model)"
    )

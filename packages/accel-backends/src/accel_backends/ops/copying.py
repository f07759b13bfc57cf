"""Copies of models that are spread over ranks, which torch and DeepSpeed cannot make."""

from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

from torch import nn

from accel_state.errors import BackendError

_COPY = "__deepcopy__"


def refuse_copies(modules: Iterable[nn.Module], kind: str, backend: str) -> None:
    """Makes ``copy.deepcopy`` of these modules raise BackendError, with what works for averages of weights.

    Args:
        modules: the prepared model and those of its modules that are gathered by themselves.
        kind: the class of the user's model.
        backend: the name of the backend.
    """
    for module in modules:
        module.__dict__[_COPY] = partial(_refuse, kind, backend)


def _refuse(kind: str, backend: str, memo: Any) -> NoReturn:
    raise BackendError(
        f"copy.deepcopy of a {kind} that backend {backend!r} has prepared, of which every rank holds a part; copy the "
        "bare model before prepare (or give it to torch's AveragedModel) and update the copy within "
        "accelerator.full_parameters(model, writeback=False); or build one from accelerator.get_state_dict(model)"
    )

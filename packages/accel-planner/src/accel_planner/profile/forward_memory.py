"""Memory beside the weights that each module of a model needs while it computes an inference forward."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from accel_backends.ops.fqn import innermost
from accel_planner import private
from accel_planner.errors import PlanError
from accel_planner.profile.example_inputs import Batch, call
from accel_planner.profile.memory_tracker import StorageWatch
from accel_planner.profile.models import fake_copy
from accel_precision.policy import PrecisionPolicy


def forward_memory(model: nn.Module, sample: Any, *, dtype: torch.dtype | None = None) -> dict[str, int]:
    """Bytes of inputs and activations that are live at most while each module computes, by name; the root is "".

    One forward without gradients on fake tensors: nothing is allocated or computed, and the model may be on the meta
    device. The numbers of a module include what its callers hold meanwhile. They are the ``activations`` of
    ``accel_inference.infer_auto_device_map``.

    Args:
        model: the model; modules that the forward does not call have no entry.
        sample: a batch as a loader yields it.
        dtype: dtype of floating-point weights and inputs; None: their own.

    Raises:
        PlanError: the model cannot be copied, or the batch does not fit it.
    """
    inner, mode = innermost(model), private.FakeTensorMode(allow_non_fake_inputs=True)

    def dtype_of(parameter: nn.Parameter) -> torch.dtype:
        return dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype

    copied = fake_copy(inner, mode, dtype_of, PrecisionPolicy.parse(None)).eval()
    batch = sample if isinstance(sample, Batch) else Batch(sample)
    with mode:
        value = batch.fake(dtype)
    leaves = [leaf for leaf in private.leaves(value) if isinstance(leaf, torch.Tensor)]
    known = [*copied.parameters(), *copied.buffers(), *leaves]
    with ExitStack() as hooks, mode, torch.no_grad(), StorageWatch(known) as watch:
        for name, module in copied.named_modules():
            hooks.callback(module.register_forward_pre_hook(_noting(watch, name, 1)).remove)
            hooks.callback(module.register_forward_hook(_noting(watch, name, -1)).remove)
        try:
            call(copied, value)
        except PlanError:
            raise
        except Exception as error:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
            raise PlanError(
                f"{type(inner).__name__} cannot be run with a batch of {shapes or 'no tensors'} "
                f"({type(error).__name__}: {error}); give a sample that fits it"
            ) from error
        return _peaks(watch.events, sum(leaf.untyped_storage().nbytes() for leaf in leaves))


def _noting(watch: StorageWatch, name: str, opened: int) -> Any:
    def note(*_: object) -> None:
        watch.note((name, opened))

    return note


def _peaks(events: Iterable[tuple[Any, int]], inputs: int) -> dict[str, int]:
    """The peak of live bytes between the begin and the end of each module."""
    found: dict[str, int] = {}
    computing: dict[str, int] = {}
    live = inputs
    for what, size in events:
        if isinstance(what, tuple):
            name, opened = what
            depth = computing.pop(name, 0) + opened
            if depth:
                computing[name] = depth
        else:
            live += size
        found |= {name: max(found.get(name, 0), live) for name in computing}
    return found

"""Outermost FSDP1 wrapper, whose forward raises errors that name the ranks that did not take part."""

from collections.abc import Callable
from functools import partial
from typing import Any, final
from weakref import WeakSet

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from accel_state.errors import BackendError
from accel_state.private import untraced
from accel_state.pytree.structure import map_leaves
from accel_state.watchdog.decorator import active, explain


@final
class ExplainedRoot(FullyShardedDataParallel):
    """torch's wrapper; if the all-gather of a unit fails, the error reports the other ranks' failures."""

    @partial(untraced, callees=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped model's forward.

        Raises:
            CollectiveError: another rank has failed or ended during the all-gather of a unit, with its reason.
        """
        try:
            return super().forward(*args, **kwargs)
        except Exception as error:
            watchdog = active()
            if watchdog is not None and watchdog.record.inside:  # units are recorded during their all-gather
                explain(error)
            raise


@final
class OneBackward:
    """Guard of an outermost wrapper with NO_SHARD, whose gradients torch reduces in one backward after each forward.

    Those of a further backward would be this rank's alone, and replicas would drift apart without an error. With other
    strategies the parameters are gone by then, which torch raises.
    """

    def __init__(self) -> None:
        self._backwards = 0
        self._reached = False

    def watch(self, module: torch.nn.Module, given: Any, output: Any) -> None:
        """Forward hook: a backward through the output is refused once another backward has ended."""
        if torch.is_grad_enabled():
            reach = partial(self._reach, self._backwards)
            map_leaves(lambda leaf: _hooked(leaf, reach), output)

    def finish(self) -> None:
        """Called after a backward."""
        if self._reached:
            self._backwards, self._reached = self._backwards + 1, False

    def _reach(self, before: int, gradient: torch.Tensor) -> None:
        if before != self._backwards:
            raise BackendError(
                "a backward has ended since the forward that this one goes through, and fsdp_version=1 with NO_SHARD "
                "reduces gradients over ranks in one backward after each forward. Add the losses of one forward up and "
                "call backward once in place of backward(retain_graph=True); call backward before the next forward; or "
                "use strategy='ddp', which reduces in each"
            )
        self._reached = True


def _hooked(leaf: Any, hook: Callable[[torch.Tensor], None]) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
        leaf.register_hook(hook)
    return leaf


def is_sharded(wrapped: FullyShardedDataParallel) -> bool:
    """Whether each rank has a shard of the parameters."""
    return wrapped.sharding_strategy is not ShardingStrategy.NO_SHARD


#: Units of wrapped models, which their hooks lead to.
Wrapped = WeakSet[FullyShardedDataParallel]


def reshard(units: Wrapped) -> None:
    """Frees the full parameters that a forward without backward has left, which the next forward would use.

    What was changed in the shards since then, by a script or by a step, would be missing in that forward.
    """
    for unit in units:
        handle: Any = unit._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        if hasattr(handle.flat_param, "_full_param_padded") and not handle.needs_unshard():  # since its first forward
            handle.reshard(True)
            handle.post_reshard()
            handle._prefetched = False


def allocate_outside_inference_mode(wrapped: FullyShardedDataParallel, *_: Any) -> None:
    """Forward pre-hook of an outermost wrapper: allocates what torch's first forward does, if that is of inference.

    torch keeps these tensors, and no later backward could use tensors of inference mode.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            wrapped.check_is_root()


def reshard_after_evaluation(*_: Any, units: Wrapped) -> None:
    """Forward hook of an outermost wrapper that reshards its units where no backward will."""
    if not torch.is_grad_enabled():
        reshard(units)


# The name of torch's class, because it appears in printed models.
ExplainedRoot.__name__ = ExplainedRoot.__qualname__ = FullyShardedDataParallel.__name__

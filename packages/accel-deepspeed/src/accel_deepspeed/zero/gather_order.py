"""Verification that all ranks of a stage 3 engine all-gather the same parameters in the same order."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import nn

from accel_deepspeed.private import replace_gathers, restore_gathers
from accel_state.errors import CollectiveMismatchError
from accel_state.watchdog.decorator import recorded

_KEPT = 256


@final
class Gathers:
    """Records every all-gather of one engine, and compares the records over ranks before a step.

    The watchdog records each all-gather, so that ranks that compute different modules raise an error with the modules'
    names instead of a hang. Different modules of the same size do not hang: each rank gets values of other parameters,
    which ``compare`` detects.

    Args:
        engine: engine of stage 3; two methods of its coordinator are replaced until ``remove``.
    """

    def __init__(self, engine: Any) -> None:
        self._names = {one.ds_id: name for name, one in engine.module.named_parameters()}
        self._device: torch.device = engine.device
        self._coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        self._run = replace_gathers(self._coordinator, self._gather)
        self._wait: Callable[[nn.Module, bool], None] = self._coordinator.fetch_sub_module
        self._coordinator.fetch_sub_module = self._fetch
        self._texts: dict[tuple[int, ...], str] = {}  # parameter names of each all-gather so far
        self._newest: deque[tuple[int, ...]] = deque(maxlen=_KEPT)
        self._count = self._digest = 0

    def remove(self) -> None:
        """Restores the coordinator's own methods."""
        restore_gathers(self._coordinator)
        self._coordinator.__dict__.pop("fetch_sub_module", None)

    def _fetch(self, module: nn.Module, forward: bool) -> None:
        """Replaces the method that waits for a module's all-gathers."""
        own = tuple([one.ds_id for one in module._parameters.values() if one is not None])  # type: ignore[attr-defined]
        _waits(self._wait, self._named(own), module, forward)

    def _gather(self, params: Iterable[nn.Parameter], forward: bool, quantize: bool = False) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        params = list(params)
        wanted = tuple(sorted(one.ds_id for one in params if one.ds_status == ZeroParamStatus.NOT_AVAILABLE))  # type: ignore[attr-defined]
        if not wanted:
            return
        self._newest.append(wanted)
        self._count += 1
        self._digest = hash((self._digest, wanted))
        assert self._run is not None
        _recorded(self._run, self._named(wanted), params, forward, quantize)

    def _named(self, wanted: tuple[int, ...]) -> str:
        text = self._texts.get(wanted)
        if text is None:
            text = ", ".join([self._names.get(one, f"parameter {one}") for one in wanted])
            self._texts[wanted] = text
        return text

    def compare(self, beside: torch.Tensor) -> torch.Tensor:
        """Compares the all-gathers since the last comparison; returns the maximum over ranks of ``beside``.

        Collective: every rank of the group must call this.

        Raises:
            CollectiveMismatchError: ranks gathered different parameters; raised on all ranks.
        """
        import torch.distributed as dist

        digests = torch.tensor([self._digest, -self._digest], device=self._device)
        mine = torch.cat([digests, beside.to(digests)])
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        high, low = mine[:2].tolist()
        if high != -low:
            self._refuse()
        self._newest.clear()
        self._count = self._digest = 0
        return mine[2:]

    def _refuse(self) -> None:
        import torch.distributed as dist

        everybodys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, (self._count, list(self._newest)))
        place = max(count - len(newest) for count, newest in everybodys)
        while len(there := {_at(one, place) for one in everybodys}) == 1 and there != {()}:
            place += 1
        lines = [
            f"  rank {rank}: {self._named(_at(one, place)) or 'nothing more'}" for rank, one in enumerate(everybodys)
        ]
        raise CollectiveMismatchError(
            "ranks computed different modules of an engine of ZeRO stage 3, so each gathered other parameters as its "
            f"#{place + 1} since the step before:\n" + "\n".join(lines) + "\nThis step was not taken. Name the class "
            "of the module that chooses in transformer_moe_cls_names, which gathers it as a whole on every rank, or "
            "use zero_stage=2, whose ranks may skip blocks"
        )


def _at(gathers: tuple[int, list[tuple[int, ...]]], place: int) -> tuple[int, ...]:
    """Returns the parameters of an all-gather by its number since the last comparison; empty if not recorded."""
    count, newest = gathers
    place -= count - len(newest)
    return newest[place] if 0 <= place < len(newest) else ()


@recorded("gather", lambda run, names, *call: names)
def _recorded(run: Callable[..., None], names: str, *call: Any) -> None:
    run(*call)


@recorded("fetch", lambda run, names, *call: names, shared=False)
def _waits(run: Callable[..., None], names: str, *call: Any) -> None:
    run(*call)

"""Edits of an engine's parameters by the training loop, copied to the tensors that its optimizer steps."""

from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accel_backends.ops.fqn import few, named_parameters
from accel_deepspeed.zero.partitions import Partitions
from accel_state.errors import BackendError
from accel_state.watchdog.decorator import recorded


@final
class Edits:
    """Finds parameters that were written to since the last check, by torch's version counters.

    Edits are copied to the optimizer's tensors, which have another dtype or device. Elements of a master weight that
    round to the parameter's value keep their precision. Writes that torch does not count (``parameter.data``) are seen
    only if the optimizer's tensor shares the parameter's memory: at stages 1 and 2 in fp32 without offloading.

    Args:
        engine: engine whose parameters are checked.
        parts: partitions of the optimizer's tensors; None: the optimizer updates the parameters themselves.
    """

    def __init__(self, engine: Any, parts: Partitions | None) -> None:
        self._parts = parts
        self._named = list(named_parameters(engine).items())
        # At stage 3 also this rank's partitions, which DeepSpeed writes after a gather with ``modifier_rank``.
        self._pieces = [getattr(parameter, "ds_tensor", None) for _, parameter in self._named]
        self._watched: list[torch.Tensor] = [parameter for _, parameter in self._named]
        self._watched += [piece for piece in self._pieces if piece is not None]
        self._copied = parts is not None or len(self._watched) > len(self._named)
        self.forget()
        self._handle = engine.register_forward_pre_hook(self._look) if self._watched[len(self._named) :] else None

    def remove(self) -> None:
        """Removes the hook."""
        if self._handle is not None:
            self._handle.remove()

    def _look(self, *_: object) -> None:
        """Forward pre-hook at stage 3, whose all-gathers would overwrite edited parameters."""
        self.carry()

    def forget(self) -> None:
        """Resets to the present version counters: all edits so far are in the optimizer's tensors."""
        self._seen = [one._version for one in self._watched]

    @torch.no_grad()
    def carry(self) -> None:
        """Copies edits since the last check to the optimizer's tensors and to this rank's partitions.

        Raises:
            BackendError: writes at stage 3 into parameters that were not gathered.
        """
        if not self._copied or [one._version for one in self._watched] == self._seen:
            return
        seen = {id(one): version for one, version in zip(self._watched, self._seen, strict=True)}
        lost: list[str] = []
        for (name, parameter), piece in zip(self._named, self._pieces, strict=True):
            changed = parameter._version != seen[id(parameter)]
            kept = piece is not None and piece._version != seen[id(piece)]
            if piece is None or (parameter.ds_persist and _is_here(parameter)):  # type: ignore[attr-defined]
                if changed or kept:
                    self._take(parameter, piece)
            elif kept:
                self._to_master(parameter, piece, whole=False)
            elif changed and _starts_at(parameter, piece) < parameter.ds_numel:  # type: ignore[attr-defined]
                lost.append(name)
        self.forget()
        if lost:
            raise BackendError(
                f"{few(lost, 3)} was written to while its values were spread over ranks (ZeRO stage 3), so that "
                "nothing changed; write on every rank alike within accelerator.full_parameters(model)"
            )

    def _take(self, parameter: nn.Parameter, piece: torch.Tensor | None) -> None:
        values = parameter.detach().reshape(-1)
        if piece is not None:
            start = _starts_at(parameter, piece)
            size = max(0, min(piece.numel(), values.numel() - start))
            piece.narrow(0, 0, size).copy_(values.narrow(0, min(start, values.numel()), size))
        self._to_master(parameter, values, whole=True)

    def _to_master(self, parameter: nn.Parameter, values: torch.Tensor, *, whole: bool) -> None:
        """Copies the values of a parameter (``whole``), or of this rank's partition, to the master weight."""
        if self._parts is None or not self._parts.holds(parameter):
            return
        with self._parts.held(parameter, changed=True) as part:
            if part.size and part.flat is not None:
                _round_to(part.of(part.flat), values.narrow(0, part.start if whole else 0, part.size))


def _is_here(parameter: Any) -> bool:
    """Whether a stage 3 parameter is gathered."""
    return bool(parameter.ds_status.name == "AVAILABLE")


def _starts_at(parameter: Any, piece: torch.Tensor) -> int:
    """Returns the offset of this rank's partition in the flattened parameter."""
    return piece.numel() * torch.distributed.get_rank(parameter.ds_process_group)


def _round_to(copy: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrites the elements of a master weight that do not round to these values."""
    if copy.data_ptr() == values.data_ptr():
        return
    values = values.to(copy.device)
    copy.copy_(torch.where(copy.to(values.dtype) == values, copy, values.to(copy.dtype)))


@final
class NativeLoads:
    """Calls of ``engine.load_checkpoint``, in which ``running`` is set; ``remove`` restores the engine's own method.

    DeepSpeed's checkpoints of stage 3 hold empty tensors in place of parameters, whose values are in the optimizer's
    partitions. Such tensors are loaded into parameters that are partitioned.
    """

    def __init__(self, engine: Any, edits: Edits) -> None:
        self.running = False
        self._engine, self._edits = engine, edits
        engine.load_checkpoint = self._load

    def _load(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the engine's own method; what it writes into parameters is no edit of the training loop."""
        self.running = True
        try:
            return type(self._engine).load_checkpoint(self._engine, *args, **kwargs)
        finally:
            self.running = False
            self._edits.forget()

    def remove(self) -> None:
        """Restores the engine's method."""
        self._engine.__dict__.pop("load_checkpoint", None)


def hook_loading(engine: Any, native: NativeLoads) -> list[RemovableHandle]:
    """Makes ``load_state_dict`` of the engine's modules gather at stage 3, and refuse ``assign=True`` at every stage.

    Parameters are gathered module by module, and rank 0's values are loaded, so all ranks have to call
    ``load_state_dict``. While ``native`` runs, DeepSpeed itself gathers what it loads.
    """
    handles = []
    for module in engine.module.modules():
        if any(parameter is not None for parameter in module._parameters.values()):
            handles += _hook(module, native)
    return handles


def _hook(module: nn.Module, native: NativeLoads) -> list[RemovableHandle]:
    open_: list[Any] = []

    def close(*_: object) -> None:
        while open_:
            open_.pop().__exit__(None, None, None)

    def before(inner: nn.Module, state: Any, prefix: str, metadata: Any, *_: object) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise BackendError(
                f"load_state_dict(assign=True) of {type(inner).__name__} would replace parameters that a DeepSpeed "
                "engine trains, and the engine would not use the new ones; leave assign out"
            )
        close()
        spread: list[Any] = [p for name, p in inner._parameters.items() if p is not None and prefix + name in state]
        spread = [one for one in spread if hasattr(one, "ds_id") and not _is_here(one)]
        if spread and not native.running:
            open_.append(_gather(spread, f"{prefix}*"))

    return [module.register_load_state_dict_pre_hook(before), module.register_load_state_dict_post_hook(close)]


@recorded("load_state_dict", lambda parameters, names: names)
def _gather(parameters: list[nn.Parameter], names: str) -> Any:
    from deepspeed.runtime.zero import GatheredParameters

    gathered = GatheredParameters(parameters, modifier_rank=0)
    gathered.__enter__()
    return gathered

"""Gradients of the most recent step, examined only after an anomaly of the loss."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch
from torch.optim import Optimizer

from accel_backends.private import norms_of

if TYPE_CHECKING:
    from accel_backends import Backend
    from accel_state.session import Session


@final
class StepGradients:
    """References to the gradients of an optimizer step, kept until the step is over, to compare their norms.

    Loops and engines clear gradients before the loss has been checked, so the tensors are kept until they have been
    examined or the next step is taken. Where a meter looks at a loss one step late, it takes ``squares`` in each step.

    If gradients are sharded (``spread``), results are summed over ranks, and all ranks must examine together.

    Args:
        backend: provides the gradients that this rank steps with.
        session: session of the ranks.
        names: the parameters to examine, by name.
        optimizers: those that are torch optimizers are observed when they step.
    """

    def __init__(
        self,
        backend: "Backend",
        session: "Session",
        *,
        names: Mapping[str, torch.Tensor],
        optimizers: Iterable[object],
    ) -> None:
        self._backend = backend
        self._session = session
        self._parameters = dict(names)
        self._held: dict[int, torch.Tensor] = {}
        self._usual: torch.Tensor | None = None
        shared = backend.layout.shared_degrees
        # Stages of a pipeline have other parameters on each rank, so that their norms are not added up.
        self.spread = (backend.layout.degrees[1] > 1 or shared.get("tp", 1) > 1) and shared.get("pp", 1) == 1
        self._handles = [
            backend.gradients.watch(optimizer, self._held.update)
            for optimizer in optimizers
            if isinstance(optimizer, Optimizer)
        ]

    def forget(self) -> None:
        """Drops the gradients at the end of a step."""
        self._held.clear()

    def note(self, squares: torch.Tensor | None = None) -> None:
        """Records ``squares``, or the current ones, as usual. Does not wait for a device, and is not a collective."""
        squares = self.squares() if squares is None else squares
        self._usual = self._usual if squares is None else squares

    def nonfinite(self, squares: torch.Tensor | None = None) -> str:
        """Names the first ten parameters whose gradients hold nan or inf; waits for devices.

        Args:
            squares: squared norms of an earlier step, to be examined in place of the current gradients.

        Collective: every rank of the group must call this. It is local if gradients are not sharded.
        """
        from accel_backends.ops.fqn import few

        if squares is not None:
            bad = (~squares.isfinite()).float()
        else:
            found = self._found()
            good = dict(zip(found, self._backend.gradients.finite(list(found.values())), strict=True))
            bad = torch.tensor([not good.get(name, True) for name in self._parameters], dtype=torch.float32)
        worst = self._summed(bad).tolist()
        return few([name for name, one in zip(self._parameters, worst, strict=True) if one], 10)

    def grown(self, squares: torch.Tensor | None = None, count: int = 3) -> str:
        """Names the parameters whose gradient norms grew most since ``note``, with the factors.

        Args:
            squares: squared norms to be compared; None: the current ones.
            count: number of parameters.

        Collective: every rank of the group must call this. It is local if gradients are not sharded.
        """
        nothing = torch.zeros(len(self._parameters))
        squares = self.squares() if squares is None else squares
        both = [nothing if one is None else one.to("cpu") for one in (self._usual, squares)]
        usual, now = self._summed(torch.stack(both)).nan_to_num(torch.inf, torch.inf).sqrt()
        times = {
            name: after / before if before else torch.inf
            for name, before, after in zip(self._parameters, usual.tolist(), now.tolist(), strict=True)
            if after and usual.any()
        }
        worst = sorted(times, key=lambda name: -times[name])[:count]
        return ", ".join(f"{name} (x {times[name]:.3g})" for name in worst)

    def _found(self) -> dict[str, torch.Tensor]:
        """Gradients (or shards of them) on this rank, by parameter name."""
        here = {name: self._held.get(id(one), one.grad) for name, one in self._parameters.items()}
        return {name: _local(one) for name, one in here.items() if one is not None}

    def squares(self) -> torch.Tensor | None:
        """Squared norm of this rank's shard of each parameter's gradient; None if there are no gradients."""
        found = self._found()
        if not found:
            return None
        norms = dict(zip(found, norms_in_fp32(list(found.values())), strict=True))
        device = next(iter(norms.values())).device
        nothing = torch.zeros((), device=device)
        return torch.stack([norms[n].to(device) if n in norms else nothing for n in self._parameters]).square()

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        return self._session.reduce(values.to(self._session.device.torch)).to("cpu") if self.spread else values.cpu()

    def remove(self) -> None:
        """Removes the hooks and drops the gradients."""
        for handle in self._handles:
            handle.remove()
        self.forget()


def norms_in_fp32(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns the 2-norm of each tensor in fp32; sums of halves are in fp32 too, without fp32 copies of the tensors.

    Sums of float64 are in float64.
    """
    if all(tensor.dtype.itemsize <= 4 for tensor in tensors):
        return norms_of(tensors, 2, torch.float32)
    wide = [torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype for tensor in tensors]
    return [norms_of([one], 2, dtype)[0].float() for one, dtype in zip(tensors, wide, strict=True)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    own: torch.Tensor = tensor.detach() if to_local is None else to_local().detach()
    return own.coalesce().values() if own.is_sparse else own

"""Comparison of the first gradients of parameters that are replicated in a tensor-parallel group."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from accel_backends.ops.fqn import few
from accel_state.errors import BackendError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Relative tolerance: sums of the same numbers differ by rounding; other samples or partial sums differ far more.
_NOISE = 1e-2


@final
class FirstGradients:
    """Measures the gradients of replicated parameters in the first backward, before ZeRO reduces them.

    A replicated weight that is applied to a shard (a norm within heads, for example) gets a partial gradient on each
    rank, as does any weight behind different random numbers. Without this check the replicas would diverge silently.

    Args:
        parameters: replicated parameters by FQN; frozen ones are ignored.
        group: the tensor-parallel group.
        session: all ranks, which raise together.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: "ProcessGroup", session: "ProcessGroup | None"
    ) -> None:
        self._names = [name for name, parameter in parameters.items() if parameter.requires_grad]
        self._group, self._session = group, session
        self._found: dict[int, torch.Tensor] = {}
        self._handles = [parameters[name].register_hook(self._note(place)) for place, name in enumerate(self._names)]

    def _note(self, place: int) -> Callable[[torch.Tensor], None]:
        def keep(gradient: torch.Tensor) -> None:
            values = gradient.detach().float()
            self._found[place] = torch.stack([torch.linalg.vector_norm(values), values.sum()])

        return keep

    def check(self, device: torch.device) -> None:
        """Compares the gradients over the tensor-parallel group, once.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: gradients differ; raised on all ranks.
        """
        import torch.distributed as dist

        self.remove()
        if not self._names:
            return
        nothing = torch.zeros(2, device=device)
        mine = torch.stack([self._found.get(place, nothing) for place in range(len(self._names))])
        low, high = mine.clone(), mine.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self._group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self._group)
        norms = high[:, 0]
        allowed = _NOISE * norms + 1e-6 * norms.max()
        differ = ((high - low).amax(1) > allowed).float()
        dist.all_reduce(differ, dist.ReduceOp.MAX, group=self._session)
        if differ.any():
            names = [name for name, far in zip(self._names, differ.tolist(), strict=True) if far]
            raise BackendError(
                f"tensor-parallel ranks have all of {few(names, 3)} and other gradients of it, so they would "
                "drift apart. If it is applied to a part of what is sharded (a norm within heads), give it "
                "grad_allreduce in tensor_parallel.partition_config, or 'replicated_with_grad_allreduce' in _tp_plan "
                "of the model; if not, these ranks computed on other samples or random numbers"
            )

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

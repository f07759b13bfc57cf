"""Gradients of DeepSpeed engines, for the backend's role."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel_backends.ops.clip import check_norm_type
from accel_backends.ops.fqn import named_parameters
from accel_backends.roles.gradients import Keep, ReplicatedGradients
from accel_deepspeed.tensor_parallel.shards import local_shape_of, shape_of, shard_of_full
from accel_deepspeed.zero.clipping import PartOfGradients, check_clip
from accel_state.errors import BackendError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_backends.core.backend import Backend
    from accel_deepspeed.engine.registry import Engines
    from accel_deepspeed.tensor_parallel.autotp import Layers
    from accel_deepspeed.zero.gradients import Factor, Gradients

_NORM, _VALUE = "clip_grad_norm_", "clip_grad_value_"


@final
class ZeroGradients(ReplicatedGradients):
    """Gradients that engines accumulate, which are partitioned over ranks from stage 1 on.

    They are averaged over the data-parallel ranks: all, divided by the size of a tensor-parallel group.
    """

    def __init__(
        self, backend: "Backend", engines: "Engines", layers: "Layers", open_communication: Callable[[], None]
    ) -> None:
        super().__init__(backend, ranks=backend.session.world_size // layers.size)
        self._engines, self._layers = engines, layers
        self._open_communication = open_communication

    @property
    def group(self) -> "ProcessGroup | None":
        """Data-parallel group: all ranks of the session, or with AutoTP those with the same shards of the layers.

        Collective on the first read: every rank of the group must call this.
        """
        if self._layers.size == 1:
            return super().group
        self._open_communication()
        return self._layers.data_group

    def reduce(self, model: nn.Module) -> None:
        """Does nothing: engines reduce when gradients are used."""

    def scale(self, models: Iterable[nn.Module], factor: "Factor") -> None:
        """Multiplies the accumulated gradients of engines, unreduced ones before their reduction."""
        for gradients in map(self._of, models):
            if gradients is not None and gradients.filled:
                gradients.scale(factor)

    def _of(self, model: nn.Module) -> "Gradients | None":
        """Returns the gradients of a model's engine; None without an engine that trains."""
        prepared = self._engines.find(model)
        return None if prepared is None else prepared.gradients

    def clip_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clips to ``max_norm`` and returns the norm over all ranks before clipping.

        The 2-norm of all parameters is clipped in the engine's next step, other norms and subsets of parameters at
        once.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: a norm that is not positive; parameters of no engine or of several; a clip that conflicts with
                ``gradient_clipping`` of the configuration; another norm or a subset of parameters together with
                experts, tensor parallelism, Muon, or gradients on disk.
        """
        check_norm_type(norm_type)
        prepared, chosen = self._engines.of_parameters(parameters, self.owned, _NORM)
        gradients = prepared.gradients
        assert gradients is not None
        limited = max_norm != math.inf
        usual = norm_type == 2 and chosen is None
        if limited:
            check_clip(prepared, max_norm, usual=usual)
        if not gradients.filled:
            return torch.zeros((), device=self.run.session.device.torch)
        part = None if usual else PartOfGradients(gradients, chosen, _NORM)
        norm = gradients.norm() if part is None else part.norm(norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise BackendError(f"the norm of the gradients is {norm.item()}, and error_if_nonfinite is set")
        if limited and part is None:
            gradients.clip(max_norm, norm)
        elif limited and part is not None:
            part.scale(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def norm_so_far(
        self, parameters: "torch.Tensor | Iterable[torch.Tensor]", models: Iterable[nn.Module], norm_type: float = 2.0
    ) -> torch.Tensor:
        """As every backend, divided by the engine's own loss scale.

        Raises:
            BackendError: parameters of no engine or of several.
        """
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        prepared, _ = self._engines.of_parameters(parameters, self.owned, _NORM)
        assert prepared.gradients is not None
        return super().norm_so_far(parameters, models, norm_type) / prepared.gradients.loss_scale

    def clip_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamps the gradients that this rank's optimizer updates.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: a negative limit; parameters of no engine or of several; gradients on disk (nvme).
        """
        if not clip_value >= 0.0:
            raise BackendError(f"clip_value is {clip_value}; expected a number >= 0")
        prepared, chosen = self._engines.of_parameters(parameters, self.owned, _VALUE)
        if prepared.gradients is not None and prepared.gradients.filled:
            PartOfGradients(prepared.gradients, chosen, _VALUE).limit(clip_value)

    def marks(self, model: nn.Module) -> object:
        """Returns the number of the engine's backwards."""
        gradients = self._of(model)
        return super().marks(model) if gradients is None else gradients.backwards

    def unreduced(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns accumulated gradients by FQN: this rank's unreduced ones, or the mean if reduced already."""
        gradients = self._of(model)
        return {} if gradients is None or not gradients.filled else gradients.held(named_parameters(gradients.engine))

    def outside_grad(self, model: nn.Module) -> bool:
        """Whether losses since the last step have given the engine gradients."""
        gradients = self._of(model)
        return gradients is not None and gradients.filled

    def full(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """As every backend; reduces unreduced gradients, and divides by the engine's own loss scale."""
        gradients = self._of(model)
        if gradients is None or not gradients.filled:
            return super().full(model)
        gradients.settle()
        return {name: held / gradients.loss_scale for name, held in super().full(model).items()}

    def set_unreduced(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Starts an accumulation window with the mean of the given gradients.

        Collective: every rank of the group must call this.
        """
        own = self._of(model)
        if own is None:
            return
        from accel_state.collectives.objects import all_gather_object

        present = {
            name for names in all_gather_object(sorted(gradients), group=self.run.session.group) for name in names
        }
        own.discard()
        if present:
            _begin_window(own, gradients, present)

    def drop(self, model: nn.Module) -> None:
        gradients = self._of(model)
        if gradients is not None:
            gradients.discard()

    def watch(self, optimizer: Optimizer, keep: Keep) -> RemovableHandle:
        """Calls ``keep`` with this rank's gradient shards, reduced and unclipped, before each step of the engine."""
        gradients = self._engines.of_optimizer(optimizer).gradients
        assert gradients is not None
        handle = RemovableHandle(gradients.watchers)
        gradients.watchers[handle.id] = keep
        return handle


def _begin_window(own: "Gradients", unreduced: Mapping[str, torch.Tensor], present: Collection[str]) -> None:
    """Starts an accumulation window with the mean of ``unreduced``; ``present``: names that any rank has.

    Collective: every rank of the group must call this.
    """
    import torch.distributed as dist

    device, dtype, ranks = own.engine.device, own.dtype, dist.get_world_size()
    for name, parameter in named_parameters(own.engine).items():
        if not parameter.requires_grad or (name not in present and own.order is None):
            continue  # without an order parameters hold gradients, and a gradient of zeros would count as present
        if name in unreduced:
            total = unreduced[name].to(device, dtype, copy=True)
        else:
            total = torch.zeros(shape_of(parameter), device=device, dtype=dtype)
        if name in present:
            own.presence.add([parameter])
            if ranks > 1:
                dist.all_reduce(total)
        own.begin(parameter, shard_of_full(parameter, total.div_(ranks)).view(local_shape_of(parameter)))
    own.begun()
    own.filled = True

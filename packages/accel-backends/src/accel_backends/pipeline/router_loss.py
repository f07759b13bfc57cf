"""Refusals of calls of a pipelined model that cannot have the load-balancing loss of its routers."""

from torch import nn

from accel_backends.parallel.pipeline.router_sums import Routers
from accel_backends.pipeline.config import PipelineParallelConfig
from accel_state.errors import BackendError

_SCHEDULE = "gpipe"


def check_routers(
    model: nn.Module, config: PipelineParallelConfig, *, training: bool, kind: type[BackendError] = BackendError
) -> Routers:
    """Routers of a model whose load-balancing loss a pipeline computes; ``kind`` of the error otherwise.

    Raises:
        BackendError: another loss than ``load_balancing_loss_func`` of transformers, or in training a schedule that
            begins backwards before all forwards are done, or a loss of the user.
    """
    name, option = type(model).__name__, "output_router_logits=True"
    routers = Routers.of(model)
    if routers is None:
        raise kind(
            f"{name} with {option}: its routers are on several pipeline stages, which compute the loss of models with "
            "router_aux_loss_coef, num_experts, num_experts_per_tok and transformers' load_balancing_loss_func; "
            "nearest: output_router_logits=False"
        )
    if training and config.loss_fn is not None:
        raise kind(
            f"{name} with {option} and loss_fn, which is called on the last stage and would see the routers of that "
            "stage only; nearest: labels instead of loss_fn, or output_router_logits=False"
        )
    if training and config.schedule != _SCHEDULE:
        raise kind(
            f"{name} with {option} and the schedule {config.schedule!r}: the gradient of the routers' loss needs the "
            "choices of all micro-batches, and this schedule begins backwards before it has computed all of them; "
            f'nearest: PipelineParallelConfig(schedule="{_SCHEDULE}"), or output_router_logits=False'
        )
    return routers

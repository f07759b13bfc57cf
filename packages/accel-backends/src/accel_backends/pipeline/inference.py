"""Pipelines for inference: the model's forward runs the schedule, with the arguments that rank 0 was called with."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn

from accel_backends.core.bundle import Bundle
from accel_backends.core.run import Run
from accel_backends.ops.fqn import innermost
from accel_backends.parallel.pipeline.causal_lm import CausalLM
from accel_backends.parallel.pipeline.split_points import balanced_split_points, check_undivided, split_of
from accel_backends.pipeline.backend import PipelineBackend
from accel_backends.pipeline.config import PipelineParallelConfig
from accel_backends.pipeline.model import PipelinedModel
from accel_precision.policy import PrecisionPolicy
from accel_state.collectives.objects import agree
from accel_state.collectives.pickled import broadcast_pickled
from accel_state.collectives.tensors import broadcast
from accel_state.errors import BackendError, PrepareError
from accel_state.parallelism.config import ParallelismConfig
from accel_state.pytree.operations import get_data_structure, initialize_tensors, send_to_device
from accel_state.pytree.structure import leaves_of
from accel_state.session import Session

_PLAIN = (torch.Tensor, str, int, float, bool, type(None), torch.dtype, torch.device)


def split_for_inference(
    model: nn.Module,
    session: Session,
    *,
    split_points: Sequence[str] | None = None,
    undivided: Collection[str] = (),
    num_microbatches: int | None = None,
    gather_output: bool = False,
) -> tuple[PipelinedModel, list[str]]:
    """Splits a model into one stage for each rank of a session, for inference.

    Args:
        model: a causal language model of transformers, with equal modules on all ranks; it keeps the modules of this
            rank's stage.
        session: two or more ranks, all of which become one pipeline.
        split_points: names of the blocks with which the second and later stages begin; None: stages whose parameters
            are about equally large.
        undivided: classes of modules that may not be divided.
        num_microbatches: equal micro-batches of each batch; None: one for each rank. A batch that does not divide is
            split into fewer.
        gather_output: whether all ranks receive the outputs; otherwise the rank of the last stage has them.

    Returns:
        The model to call, and the split points.

    Raises:
        PrepareError: the model cannot be split in this way, or ranks were given different arguments.
        CollectiveError: the same on other ranks.

    Collective: every rank of the session must call this.
    """
    problem, points, split, group = None, list[str](), list[int](), session.group
    try:
        if num_microbatches is not None and num_microbatches < 1:
            raise PrepareError(f"the number of micro-batches is {num_microbatches}; expected at least 1")
        whole, count = CausalLM.of(innermost(model)), session.world_size
        check_undivided(whole, undivided)
        points = balanced_split_points(whole, count) if split_points is None else list(split_points)
        split = split_of(whole, points, count)
    except PrepareError as error:
        problem = error
    given = agree(problem, group=group, note=(tuple(points), num_microbatches, gather_output))
    if len(set(given)) > 1:
        raise PrepareError(f"ranks split a model differently: (split points, micro-batches, gather) are {given}")
    config = PipelineParallelConfig(
        num_microbatches=num_microbatches,
        schedule="gpipe",
        split=split,
        outputs="all" if gather_output else "last",
    )
    run = Run(session, PrecisionPolicy.parse("no", device_type=session.device.type), ParallelismConfig(pp_size=count))
    prepared = PipelineBackend(run, config).prepare(Bundle([model], training=False))
    return cast(PipelinedModel, prepared.models[0]), points


@final
class FedByFirstRank:
    """A function of all ranks that is called with the arguments of rank 0, without gradients.

    Args:
        function: collective of the session's ranks.
        session: its ranks. Tensors are moved to its device, where other ranks receive them.
    """

    def __init__(self, function: Callable[..., Any], session: Session) -> None:
        self._function, self._session = function, session

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function; arguments of other ranks than 0 are not used.

        Raises:
            BackendError: rank 0 was given arguments that cannot be sent; on every rank.

        Collective: every rank of the session must call this.
        """
        args, kwargs = self._sent(args, kwargs)
        return self._function(*args, **kwargs)

    def _sent(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        group, device = cast(dist.ProcessGroup, self._session.group), self._session.device.torch
        first = self._session.rank == 0
        strange = _strange((*args, *kwargs.values())) if first else None
        given = send_to_device((tuple(args), dict(kwargs)), device) if first and strange is None else None
        header, strange = broadcast_pickled((get_data_structure(given), strange), 0, group)
        if strange is not None:
            raise BackendError(
                f"a model in a pipeline was called on rank 0 with an argument of class {strange}, which cannot be "
                "sent to other ranks; nearest: tensors, numbers and strings, also in lists and dicts"
            )
        if not first:
            given = send_to_device(initialize_tensors(header), device)
        broadcast([leaf for leaf in leaves_of(given) if isinstance(leaf, torch.Tensor)], group=group)
        return given


def _strange(values: Sequence[Any]) -> str | None:
    """Class of the first leaf that is neither a tensor nor a plain value."""
    return next((type(leaf).__name__ for leaf in leaves_of(values) if not isinstance(leaf, _PLAIN)), None)

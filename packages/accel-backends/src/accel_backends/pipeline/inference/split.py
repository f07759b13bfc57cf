"""Division of a model into one stage for each rank of a session, for inference."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from accel_backends.parallel.pipeline.call_order import CallOrder
from accel_backends.parallel.pipeline.inference_stage import InferenceStage, StageCut, is_close
from accel_backends.parallel.pipeline.split_points import balanced_split_points, check_undivided, stage_ranges
from accel_backends.pipeline.inference.messages import sent_from
from accel_backends.pipeline.inference.model import InferencePipeline, arguments_of, samples_of
from accel_backends.pipeline.micro_batches import split_batch
from accel_state.collectives.objects import agree
from accel_state.errors import PrepareError
from accel_state.pytree.operations import recursively_apply, send_to_device
from accel_state.session import Session


def split_for_inference(
    model: nn.Module,
    session: Session,
    *,
    example: tuple[Sequence[Any], Mapping[str, Any]] = ((), {}),
    split_points: Sequence[str] | None = None,
    undivided: Collection[str] = (),
    num_microbatches: int | None = None,
    gather_output: bool = False,
) -> tuple[InferencePipeline, list[str]]:
    """Splits a model into one stage for each rank of a session, for inference.

    One call of the full model in host memory shows in which order its modules run.

    Args:
        model: a model with lists of blocks that run once each, one after the other: a decoder, an encoder, or an
            encoder and a decoder; equal modules on all ranks. It keeps the modules of this rank's stage.
        session: two or more ranks, all of which become one pipeline.
        example: positional and other arguments of that call, of rank 0; empty: transformers' ``dummy_inputs``.
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
        BackendError: the example cannot be computed by a pipeline.
        CollectiveError: the same on other ranks.

    Collective: every rank of the session must call this.
    """
    group, count = cast(dist.ProcessGroup, session.group), session.world_size
    args, kwargs = sent_from(0, (tuple(example[0]), dict(example[1])), session, what="an argument")
    tensors = [*model.parameters(), *model.buffers()]
    problem, points, stage, most = None, list[str](), None, num_microbatches or count
    try:
        if num_microbatches is not None and num_microbatches < 1:
            raise PrepareError(f"the number of micro-batches is {num_microbatches}; expected at least 1")
        inputs = _example(model, args, kwargs)
        most = _most_microbatches(model, inputs, num_microbatches, count)
        order = _call_order(model, inputs)
        points = balanced_split_points(order, count) if split_points is None else list(split_points)
        ranges = stage_ranges(order, points, count)
        check_undivided(order, ranges, undivided)
        cut = StageCut.of(order, ranges, session.rank)
        stage = InferenceStage(cut, model.forward)
        stage.check(cut, inputs)
    except Exception as error:
        problem = error
    try:
        given = agree(problem, group=group, note=(tuple(points), most, gather_output))
        if len(set(given)) > 1:
            raise PrepareError(f"ranks split a model differently: (split points, micro-batches, gather) are {given}")
    except Exception:
        if stage is not None:
            stage.restore()
        raise
    assert stage is not None
    for tensor in tensors:  # one at a time is on the device, because the full model need not fit there
        sent = tensor.detach().to(session.device.torch).contiguous()
        dist.broadcast(sent, group=group, group_src=0)
        tensor.detach().copy_(sent)
    del tensors
    stage.release()
    model.to(session.device.torch)
    return InferencePipeline(model, stage, session, most, gather_output), points


def _example(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the call that shows the order of a model's modules, in the memory of the model."""
    if not args and not kwargs:
        kwargs = cast(Any, getattr(model, "dummy_inputs", {}))
        if not kwargs:
            raise PrepareError(
                f"{type(model).__name__} has no dummy_inputs, which models of transformers are called with to find the "
                "order of their blocks; nearest: example_args, the arguments of one call"
            )
    device = next((one.device for one in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    found: dict[str, Any] = send_to_device(arguments_of(model, args, kwargs), device)
    return found


def _call_order(model: nn.Module, inputs: Mapping[str, Any]) -> CallOrder:
    try:
        return CallOrder.of(model, partial(model.forward, **inputs))
    except PrepareError:
        raise
    except Exception as error:
        raise PrepareError(
            f"{type(model).__name__} could not be called with {', '.join(inputs)}, by which the order of its blocks is "
            f"found ({type(error).__name__}: {error}); nearest: example_args, the arguments of one call"
        ) from error


def _most_microbatches(model: nn.Module, inputs: Mapping[str, Any], asked: int | None, ranks: int) -> int:
    """Most micro-batches of a batch: 1 for a model in which the output of a sample depends on the other samples.

    Raises:
        PrepareError: more were asked for.
    """
    if asked == 1 or _is_split_by_samples(model, {key: one for key, one in inputs.items() if key != "labels"}):
        return asked or ranks
    if asked is not None:
        raise PrepareError(
            f"num_chunks={asked} with {type(model).__name__}, whose outputs for a sample depend on the other samples "
            "of its batch, so that micro-batches give other outputs; nearest: num_chunks=1"
        )
    return 1


def _is_split_by_samples(model: nn.Module, inputs: dict[str, Any]) -> bool:
    """Whether the outputs of the first sample alone are the first rows of those of a batch of two or more."""
    samples = samples_of(model, inputs)
    if samples == 1:
        inputs, samples = recursively_apply(_twice, inputs), 2
    with torch.no_grad():
        batch, alone = (model.forward(**one) for one in (inputs, split_batch(inputs, samples, samples)[0]))
    return is_close(alone, recursively_apply(_first_row, batch), digits=0.5)


def _twice(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor]) if tensor.ndim and tensor.shape[0] == 1 else tensor


def _first_row(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1] if tensor.ndim else tensor

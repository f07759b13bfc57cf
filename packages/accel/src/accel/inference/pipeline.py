"""Inference with a model whose stages are on the ranks of a pipeline."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from accel.state import PartialState
from accel_state.errors import PrepareError


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: str | Sequence[str] | None = None,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Splits a model into one stage for each rank; its calls run the pipeline.

    A model has lists of blocks that run once each, one after the other: a decoder, an encoder, or both. One call in
    host memory shows in which order a model runs its modules.

    Every rank calls the model, which computes the arguments of rank 0, without gradients; those of other ranks are not
    used and may be left out. A rank keeps the parameters of its own stage. ``generate`` of causal language models
    decodes greedily, on all ranks. With one rank the model stays as it is.

    Args:
        model: in host memory, with equal modules on all ranks; it is set to evaluation.
        split_points: names of the blocks with which the second and later stages begin, as ``"model.layers.2"``;
            "auto": stages whose parameters are about equally large.
        no_split_module_classes: names of classes of modules that may not be divided. Blocks never are.
        example_args: arguments of the call that shows the order of the modules. It is then made with the stages too, so
            that what a pipeline does not compute raises its error here. Empty, with no ``example_kwargs``: the
            ``dummy_inputs`` of models of transformers.
        example_kwargs: further arguments of that call.
        num_chunks: equal micro-batches of each batch; None: one for each rank. A batch that does not divide is split
            into fewer, and one with ``labels`` is not split, because the loss is that of the batch.
        gather_output: whether every rank receives the outputs; otherwise the last rank has them, and other ranks
            receive None.

    Returns:
        The model itself, whose ``forward`` is replaced. Its attributes are those of Accelerate: ``hf_split_points``
        (the names), ``pippy_stage`` (the stage of this rank) and ``_original_forward``.

    Raises:
        PrepareError: the model cannot be split in this way.
        BackendError: the example cannot be computed by a pipeline.
        CollectiveError: the same on other ranks.

    Collective: every rank must call this, and the model.
    """
    points = None if split_points == "auto" else _names("split_points", split_points)
    undivided = [] if no_split_module_classes is None else _names("no_split_module_classes", no_split_module_classes)
    session = PartialState().session
    model.eval()
    original = model.forward
    if session.world_size == 1:
        if points:
            raise PrepareError(f"split_points={list(points)} with one process, which has one stage; launch more")
        model.to(session.device.torch)
        found: list[str] = []
    else:
        from accel_backends.pipeline.inference.model import FedByFirstRank
        from accel_backends.pipeline.inference.split import split_for_inference

        pipelined, found = split_for_inference(
            model,
            session,
            example=(example_args, example_kwargs or {}),
            split_points=points,
            undivided=undivided,
            num_microbatches=num_chunks,
            gather_output=gather_output,
        )
        model.forward = FedByFirstRank(pipelined, session)
        if hasattr(model, "generate"):
            object.__setattr__(model, "generate", FedByFirstRank(pipelined.generate, session))
        object.__setattr__(model, "pippy_stage", pipelined.stage)
    object.__setattr__(model, "hf_split_points", found)
    object.__setattr__(model, "_original_forward", original)
    if example_args or example_kwargs:
        model(*example_args, **(example_kwargs or {}))
    return model


def _names(argument: str, given: Any) -> list[str]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise PrepareError(f"{argument} is {given!r}; expected a name or a list of names")
    return list(names)

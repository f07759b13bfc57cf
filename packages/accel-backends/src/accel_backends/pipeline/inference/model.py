"""Model whose stages are on the ranks of a pipeline for inference."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn

from accel_backends.parallel.pipeline.faults import Faults
from accel_backends.parallel.pipeline.inference_stage import InferenceStage
from accel_backends.pipeline.generation import Decoding, decode_greedily
from accel_backends.pipeline.inference.messages import receive_nested, send_nested, sent_from
from accel_backends.pipeline.micro_batches import largest_divisor, named_arguments, split_batch
from accel_state.errors import BackendError
from accel_state.pytree.operations import flatten, leaves_of, unflatten
from accel_state.session import Session


@final
class InferencePipeline:
    """A model whose stages are on the ranks of a session, called on every rank.

    Args:
        model: the model, which has the modules of this rank's stage.
        stage: the stage.
        session: ranks of the pipeline.
        num_microbatches: most micro-batches of a batch.
        gather_output: whether all ranks receive the outputs.
    """

    def __init__(
        self, model: nn.Module, stage: InferenceStage, session: Session, num_microbatches: int, gather_output: bool
    ) -> None:
        self.stage, self._model, self._session = stage, model, session
        self._num_microbatches, self._gather_output = num_microbatches, gather_output
        self._own_names = frozenset(inspect.signature(type(model).forward).parameters)

    @property
    def has_output(self) -> bool:
        """Whether this rank receives the outputs of calls."""
        return self._gather_output or self.stage.is_last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Computes a batch; the output is None where ``has_output`` is false.

        Raises:
            BackendError: arguments or an output that a pipeline does not have.
            CollectiveError: a stage of another rank failed; names the rank.

        Collective: every rank of the session must call this, with equal arguments.
        """
        output = self._run(arguments_of(self._model, args, kwargs))
        if self._gather_output:
            output = sent_from(self._session.world_size - 1, output, self._session, what="an output")
        return output.to_tuple() if kwargs.get("return_dict") is False and hasattr(output, "to_tuple") else output

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Decodes greedily with a causal language model, on every rank (see ``PipelinedModel.generate``).

        Raises:
            BackendError: an option that changes what is decoded, no number of tokens, or an encoder-decoder.

        Collective: every rank of the session must call this, with equal arguments.
        """
        if getattr(getattr(self._model, "config", None), "is_encoder_decoder", False):
            raise BackendError(
                f"generate of {type(self._model).__name__} over the stages of a pipeline, which decodes with causal "
                "language models only; nearest: model(input_ids, decoder_input_ids=...) for each token, or generate "
                "with the full model on one rank"
            )
        decoding = Decoding.of(self._model, max_new_tokens, options)
        return decode_greedily(self._next_tokens, self._own_names, input_ids, attention_mask, decoding)

    def _next_tokens(self, given: Mapping[str, Any]) -> torch.Tensor:
        output = self._run(arguments_of(self._model, (), given))
        found = output.logits[:, -1].argmax(-1) if self.stage.is_last else None
        tokens: torch.Tensor = sent_from(self._session.world_size - 1, found, self._session, what="an output")
        return tokens

    def _run(self, inputs: Mapping[str, Any]) -> Any:
        """Computes all micro-batches; returns the outputs on the last rank."""
        group, rank = cast(dist.ProcessGroup, self._session.group), self._session.rank
        samples = samples_of(self._model, inputs)
        count = 1 if "labels" in inputs else largest_divisor(samples, self._num_microbatches)
        faults, outputs, pending = Faults(), list[Any](), list[Any]()
        for number, part in enumerate(split_batch(inputs, samples, count)):
            received = {} if rank == 0 else receive_nested(rank - 1, group, self._session.device.torch)
            result = None
            if faults.error is None and received is not None:
                try:
                    result = self.stage.compute(received, part)
                except Exception as error:
                    faults.note(error, f"forward of micro-batch {number} of pipeline stage {rank}")
            if self.stage.is_last:
                outputs.append(result)
            else:
                pending += send_nested(result, rank + 1, group)
        for work, _ in pending:
            work.wait()
        joined = None
        if self.stage.is_last and faults.error is None and not any(one is None for one in outputs):
            try:
                joined = _joined(outputs, samples // count)
            except BackendError as error:
                faults.note(error, "outputs of the micro-batches")
        faults.agree(group)
        return joined


def samples_of(model: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Samples of a batch: rows of the model's main input, or of the first tensor.

    Raises:
        BackendError: no tensor was given.
    """
    main = inputs.get(getattr(model, "main_input_name", "input_ids"))
    tensors = [one for one in leaves_of((main, inputs)) if isinstance(one, torch.Tensor) and one.ndim]
    if not tensors:
        raise BackendError(
            f"a pipeline needs a tensor with a row for each sample, and {type(model).__name__} got "
            f"{', '.join(inputs) or 'no arguments'}"
        )
    return tensors[0].shape[0]


def arguments_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name, without a cache of keys and values, which stages do not keep."""
    given = named_arguments(model, args, kwargs)
    takes_cache = "use_cache" in inspect.signature(type(model).forward).parameters
    return {**given, "use_cache": False} if takes_cache else given


def _joined(parts: Sequence[Any], rows: int) -> Any:
    """Output of a batch from those of its micro-batches.

    Raises:
        BackendError: a tensor has no row for each sample.
    """
    if len(parts) == 1:
        return parts[0]
    _, structure = flatten(parts[0])
    columns = zip(*(leaves_of(part) for part in parts), strict=True)
    return unflatten([_column(column, rows, parts[0]) for column in columns], structure)


def _column(column: Sequence[Any], rows: int, output: Any) -> Any:
    first = column[0]
    if not isinstance(first, torch.Tensor):
        return first
    if not first.ndim or first.shape[0] != rows:
        raise BackendError(
            f"an output of {type(output).__name__} has the shape {tuple(first.shape)} for a micro-batch of {rows} "
            "samples, and is not joined over micro-batches; nearest: num_chunks=1"
        )
    return torch.cat(list(column))


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
        args, kwargs = sent_from(0, (args, kwargs), self._session, what="an argument")
        return self._function(*args, **kwargs)

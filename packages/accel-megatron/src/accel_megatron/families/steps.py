"""Train steps: forward step, loss and batch of each family, from which a user's own can be derived."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch.nn import functional

from accel_megatron.conversion.architecture import Architecture
from accel_megatron.families.family import IGNORED, TokenBatch, causal_mask
from accel_megatron.families.replicas import avg_losses_across_data_parallel_group
from accel_megatron.families.table import family_of
from accel_precision.convert import accumulation_dtype
from accel_state.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from accel_megatron.config import MegatronConfig

Parts = Iterator[Mapping[str, Any]]
"""Micro-batches: the keyword arguments of a call, each with its share of the samples."""


@final
@dataclass(frozen=True, slots=True)
class TrainStepArguments:
    """What a train step is built with.

    Attributes:
        plugin: options of the run.
        config: configuration of the Transformers model.
        architecture: of the model.
    """

    plugin: "MegatronConfig"
    config: Any
    architecture: Architecture


class AbstractTrainStep(ABC):
    """One forward step of Megatron-LM's schedule: a micro-batch, a call of the model, and a loss.

    A subclass is built as ``cls(args, **custom_train_step_kwargs)``, with ``TrainStepArguments``.

    Attributes:
        name: of the step.
        forward_step: takes the micro-batches and the model of a stage; returns its output, and a function of that
            output. That returns the loss and a dict of values to report; or the sum of losses, the number of tokens
            that it is divided by, and the dict.
        model_output_class: class of what a call returns, with ``loss`` and ``logits``; None: the loss alone.
    """

    forward_step: Callable[[Parts, Any], tuple[Any, Callable[[Any], Any]]]
    model_output_class: Any = None

    def __init__(self, name: str) -> None:
        self.name = name


class FamilyTrainStep(AbstractTrainStep):
    """Train step of a family, whose batch and loss may be functions of the plugin's.

    Attributes:
        args: what it was built with.
    """

    takes_functions: ClassVar[bool] = True

    def __init__(self, args: TrainStepArguments) -> None:
        super().__init__(type(self).__name__)
        self.args = args
        self.get_batch = args.plugin.custom_get_batch_function or self.get_batch_func()
        self.loss_func = args.plugin.custom_loss_function or self.get_loss_func()
        self.forward_step = self.get_forward_step_func()
        self.model_output_class = _output_class(args.architecture.family)

    @abstractmethod
    def get_batch_func(self) -> Callable[[Parts], Any]:
        """Returns the function that takes the next micro-batch."""

    @abstractmethod
    def get_loss_func(self) -> Callable[..., Any]:
        """Returns the function of a stage's output that computes the loss."""

    @abstractmethod
    def get_forward_step_func(self) -> Callable[[Parts, Any], tuple[Any, Callable[[Any], Any]]]:
        """Returns the forward step."""

    def _batch(self, parts: Parts) -> TokenBatch:
        return family_of(self.args.architecture).batch(self.args.architecture, **next(parts))


class GPTTrainStep(FamilyTrainStep):
    """Train step of causal language models.

    A batch is (tokens, labels, loss_mask, attention_mask, position_ids), with labels shifted by one token.
    """

    def get_batch_func(self) -> Callable[[Parts], Any]:
        """Returns the function that makes a batch of a call's arguments."""

        def get_batch(parts: Parts) -> tuple[torch.Tensor, ...]:
            batch = self._batch(parts)
            labels, loss_mask = _labels(batch)
            given = batch.tensors
            return given["ids"], labels, loss_mask, causal_mask(given["mask"]), given["positions"]

        return get_batch

    def get_loss_func(self) -> Callable[..., Any]:
        """Returns the mean of the losses of a micro-batch's tokens, of ``loss_mask`` and the losses."""
        return _mean_loss

    def get_forward_step_func(self) -> Callable[[Parts, Any], tuple[Any, Callable[[Any], Any]]]:
        """Returns the forward step."""

        def forward_step(parts: Parts, model: Any) -> tuple[Any, Callable[[Any], Any]]:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(parts)
            output = model(tokens, position_ids, attention_mask, labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step


class BertTrainStep(FamilyTrainStep):
    """Train step of masked language models.

    A batch is (tokens, types, sentence_order, loss_mask, labels, padding_mask); ``sentence_order`` is None without the
    head of pairs of sentences.
    """

    def get_batch_func(self) -> Callable[[Parts], Any]:
        """Returns the function that makes a batch of a call's arguments."""

        def get_batch(parts: Parts) -> tuple[torch.Tensor | None, ...]:
            batch = self._batch(parts)
            labels, loss_mask = _labels(batch)
            order = batch.terms[1].targets if len(batch.terms) > 1 else None
            return batch.tensors["ids"], batch.tensors["types"], order, loss_mask, labels, batch.tensors["mask"]

        return get_batch

    def get_loss_func(self) -> Callable[..., Any]:
        """Returns the sum of the means over words and over pairs, of ``loss_mask``, ``sentence_order`` and output."""

        def loss_func(loss_mask: torch.Tensor, sentence_order: torch.Tensor | None, output: Any) -> Any:
            losses, pairs = output
            loss, reported = _mean_loss(loss_mask, losses)
            if sentence_order is None:
                return loss, reported
            of_pairs = functional.cross_entropy(pairs.to(accumulation_dtype(pairs.dtype)), sentence_order.view(-1))
            return loss + of_pairs, {**reported, "sop loss": avg_losses_across_data_parallel_group([of_pairs])[0]}

        return loss_func

    def get_forward_step_func(self) -> Callable[[Parts, Any], tuple[Any, Callable[[Any], Any]]]:
        """Returns the forward step."""

        def forward_step(parts: Parts, model: Any) -> tuple[Any, Callable[[Any], Any]]:
            tokens, types, order, loss_mask, labels, padding_mask = self.get_batch(parts)
            output = model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask, order)

        return forward_step


class T5TrainStep(FamilyTrainStep):
    """Train step of encoders with decoders.

    A batch is (tokens_enc, tokens_dec, loss_mask, labels, enc_mask, dec_mask, enc_dec_mask).
    """

    def get_batch_func(self) -> Callable[[Parts], Any]:
        """Returns the function that makes a batch of a call's arguments."""

        def get_batch(parts: Parts) -> tuple[torch.Tensor, ...]:
            batch = self._batch(parts)
            labels, loss_mask = _labels(batch)
            given = batch.tensors
            masks = given["hidden"], given["later"], given["hidden"]
            return given["ids"], given["decoder_ids"], loss_mask, labels, *masks

        return get_batch

    def get_loss_func(self) -> Callable[..., Any]:
        """Returns the mean of the losses of a micro-batch's tokens, of ``loss_mask`` and the losses."""
        return _mean_loss

    def get_forward_step_func(self) -> Callable[[Parts, Any], tuple[Any, Callable[[Any], Any]]]:
        """Returns the forward step."""

        def forward_step(parts: Parts, model: Any) -> tuple[Any, Callable[[Any], Any]]:
            tokens_enc, tokens_dec, loss_mask, labels, enc_mask, dec_mask, enc_dec_mask = self.get_batch(parts)
            output = model(tokens_enc, tokens_dec, enc_mask, dec_mask, enc_dec_mask, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step


_STEPS: Mapping[str, type[FamilyTrainStep]] = {"gpt": GPTTrainStep, "bert": BertTrainStep, "t5": T5TrainStep}


def train_step_of(args: TrainStepArguments) -> Any:
    """Returns the train step that the plugin asks for; None without own functions, so that the family computes.

    Raises:
        ConfigError: a class whose objects have no ``forward_step``.
    """
    plugin = args.plugin
    if plugin.custom_train_step_class is not None:
        step = plugin.custom_train_step_class(args, **(plugin.custom_train_step_kwargs or {}))
        if not callable(getattr(step, "forward_step", None)):
            raise ConfigError(
                f"custom_train_step_class={type(step).__name__}: its objects have no function "
                "forward_step(data_iterator, model), which the schedule calls; nearest: a subclass of GPTTrainStep, "
                "BertTrainStep or T5TrainStep"
            )
        return step
    if plugin.custom_get_batch_function is None and plugin.custom_loss_function is None:
        return None
    return _STEPS[args.architecture.family](args)


def _labels(batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns labels, 0 where a token has none, and 1.0 where it has one.

    Raises:
        BackendError: a call without labels.
    """
    if not batch.terms:
        raise BackendError("a forward step of Megatron-LM needs labels; pass labels, or take custom_get_batch_function")
    targets = batch.terms[0].targets
    return targets.clamp(min=0), (targets != IGNORED).float()


def _mean_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (losses.to(accumulation_dtype(losses.dtype)) * loss_mask).sum() / loss_mask.sum()
    return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}


def _output_class(family: str) -> Any:
    from transformers import modeling_outputs

    names = {"gpt": "CausalLMOutput", "bert": "MaskedLMOutput", "t5": "Seq2SeqLMOutput"}
    return getattr(modeling_outputs, names[family])

"""A model whose stages are on the ranks of a pipeline, called as the user's own model is."""

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn

from accel_backends.ops.dtensor import local_of
from accel_backends.ops.fqn import WRAPS
from accel_backends.parallel.common_calls import CommonCalls
from accel_backends.parallel.pipeline.pipeline import ARGUMENTS, Pipeline
from accel_backends.parallel.pipeline.router_sums import RouterSums
from accel_backends.parallel.pipeline.shards import StageShards
from accel_backends.parallel.pipeline.stages import Feed
from accel_backends.parallel.router_loss import router_loss_asked
from accel_backends.parallel.sequence_inputs import SequenceInputs
from accel_backends.pipeline.config import PipelineParallelConfig
from accel_backends.pipeline.generation import Decoding, decode_greedily
from accel_backends.pipeline.held_gradients import HeldGradients
from accel_backends.pipeline.micro_batches import (
    batch_shape,
    check_divisible,
    largest_divisor,
    named_arguments,
    split_batch,
    token_weights,
    without_labels,
)
from accel_backends.pipeline.output import PipelineOutput, joined_outputs, sent_to_all
from accel_backends.pipeline.router_loss import check_routers
from accel_precision.scaler import LossScaler
from accel_state.collectives.objects import agree
from accel_state.errors import BackendError


@final
@dataclass(frozen=True, slots=True)
class TiedWeight:
    """The weight that embedding and head share, and the group of the two ranks that have it."""

    embedding: nn.Module
    group: dist.ProcessGroup
    is_first: bool

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that the embedding has now: a full one or a shard."""
        return cast(nn.Parameter, self.embedding.weight)


@final
class PipelinedModel(nn.Module):
    """Runs the schedule in each call: forwards and, in training, backwards of all micro-batches.

    In training the output has the loss only, the same on every rank, and its backward adds the gradients that the
    schedule has computed; a load-balancing loss of routers is in it, and beside it for reading. Without gradients the
    output has those of all micro-batches.

    Attributes:
        module: the user's model, with the modules of this rank's stages.
        pipeline: the stages.
        tied: weight of the first and the last stage; None if this rank has none of another rank.
        shards: sharding of the stages over ranks that compute on other tokens; None: parameters are full.
        sequences: sharding of sequences by context or sequence parallelism; None: they are full.
        experts: ranks among which the experts of this rank's stages are divided, and which therefore compute equally
            many micro-batches; None: experts are not divided.
        reduced: whether the next backward averages gradients over replicas of the pipeline.
        unreduced: whether a backward has added gradients that are not averaged yet.
    """

    def __init__(  # noqa: PLR0913 - what a rank has of one model
        self,
        module: nn.Module,
        pipeline: Pipeline,
        config: PipelineParallelConfig,
        *,
        loss_scale: LossScaler | None,
        tied: TiedWeight | None,
        shards: StageShards | None = None,
        sequences: SequenceInputs | None = None,
        experts: dist.ProcessGroup | None = None,
        calls: CommonCalls,
    ) -> None:
        super().__init__()
        self.module = module
        self.pipeline, self.tied, self.shards, self.sequences = pipeline, tied, shards, sequences
        self.experts, self._calls = experts, calls
        self.reduced, self.unreduced = True, False
        self._config, self._loss_scale = config, loss_scale
        self.__dict__[WRAPS] = "module"
        parameters = inspect.signature(type(module).forward).parameters
        self._own_names = {name for name, one in parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the schedule for one batch.

        Raises:
            BackendError: the batch does not divide into micro-batches, there is no loss in training, or only some ranks
                have labels.
            CollectiveError: the first two on other ranks; or one of the following that began its call before.
            CollectiveMismatchError: some ranks compute gradients and others do not, or some have labels for their shard
                of sequences in an evaluation.

        Collective: every rank of the group must call this.
        """
        given = named_arguments(self.module, args, kwargs)
        gradients, labelled = torch.is_grad_enabled(), self._has_labels(given)
        known = labelled or self._config.loss_fn is not None
        with self._calls.call(given, trains=self.training):
            if gradients and not self.training and self._config.loss_fn is None:
                self.pipeline.agree_on_labels(labelled)  # otherwise some ranks would train and others evaluate
            output = self._trained(given) if gradients and (self.training or known) else self._evaluated(given)
        return output.to_tuple() if kwargs.get("return_dict") is False else output

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state of this rank's stages, with a warning: a file of it is not the model."""
        warnings.warn(
            "state_dict() of a pipelined model has the stages of this rank only; accelerator.get_state_dict(model) "
            "gathers all stages, and accelerator.save_model writes them",
            stacklevel=2,
        )
        return super().state_dict(*args, **kwargs)

    def _divided(self, given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[float], tuple[int, int]]:
        """Micro-batches of a batch to train on, with their weights in its loss, and samples and tokens of each."""
        given = self._own_tokens(given)
        samples, tokens = batch_shape(given)
        count = self._num_microbatches
        check_divisible(samples, count)
        parts = split_batch(given, samples, count)
        weights = [1 / count] * count if self._config.loss_fn is not None else token_weights(parts)
        return parts, weights, (samples // count, tokens)

    def _trained(self, given: Mapping[str, Any]) -> PipelineOutput:
        asked = router_loss_asked(self.module, given)
        # Otherwise stages would wait for tokens, or for choices, of a rank that cannot run its batch.
        first = self.experts is not None or asked
        missing = self._missing_labels(given)
        try:
            if missing is not None:  # this rank runs the schedule as the others do, which wait for its messages
                given = {**given, "labels": without_labels(given)}
            routers = self._routers([self.pipeline.plan.together], training=True) if asked else None
            parts, weights, shape = self._divided(given)
        except Exception as error:
            with nullcontext() if first else self._gathered():
                self.pipeline.fail(missing or error)
        if first:
            self.pipeline.agree(missing, ARGUMENTS)
        loss_fn = self._config.loss_fn
        scale = 1.0 if self._loss_scale is None else self._loss_scale.current
        losses: dict[int, torch.Tensor] = {}

        def finish(number: int, output: Any) -> torch.Tensor:
            if not weights[number]:  # no token has a label, and the mean over none is nan
                loss = output.logits.float().sum() * 0.0
            else:
                loss = (output.loss if loss_fn is None else loss_fn(output, parts[number])) * weights[number]
            losses[number] = loss.detach()
            scaled: torch.Tensor = (loss.float() if loss.dtype.itemsize < 4 else loss) * scale
            return scaled

        parameters = list(self.module.parameters())
        if self.shards is None:
            trained = [parameter for parameter in parameters if parameter.requires_grad]
        else:
            trained = self.shards.trained_parameters
        check = None if self.experts is None else self._check_factor
        held = HeldGradients(trained, scale=scale, on_added=self._note_added, check=check)
        with held.collect(), self._gathered():
            self.pipeline.run(Feed(self._inputs(parts), shape, finish, routers), backward=True, error=missing)
            self._sum_tied()
        total = self._total(losses, routers).to(_loss_dtype(parameters))
        fields = {} if routers is None else {"aux_loss": routers.loss.to(total.dtype)}
        return PipelineOutput({"loss": held.loss(total), **fields}, training=True)

    @torch.no_grad()
    def _evaluated(self, given: Mapping[str, Any]) -> PipelineOutput:
        plan = self.pipeline.plan
        asked = router_loss_asked(self.module, given)
        routers = self._routers(self._evaluating_groups, training=False) if asked else None
        with self._gathered():
            parts, outputs = self._outputs(*self._divided_evenly(given), routers=routers)
        fields: dict[str, Any] = {}
        if self._has_labels(given) and self._config.loss_fn is None:
            weights = token_weights(parts)
            losses = {n: one.loss * weights[n] for n, one in outputs.items() if weights[n]}
            fields["loss"] = self._total(losses, routers).to(_loss_dtype(self.module.parameters()))
        if routers is not None:
            fields["aux_loss"] = routers.loss.to(_loss_dtype(self.module.parameters()))
        own = joined_outputs([outputs[number] for number in range(len(parts))]) if plan.has_last else {}
        if self.sequences is not None and plan.has_last:
            own = self.sequences.full(own)
        everywhere = self._config.outputs == "all"
        fields.update(sent_to_all(own, plan.last_rank, plan.group, plan.device) if everywhere else own)
        return PipelineOutput(fields)

    def _check_factor(self, factor: torch.Tensor) -> None:
        """Refuses a gradient of the loss that differs among the ranks whose tokens the experts have computed.

        The gradients of experts are sums over tokens of all of these ranks.

        Raises:
            BackendError: names the range of these gradients.
            CollectiveError: the same on other ranks.
        """
        bounds = torch.stack([factor, -factor])
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self.experts)
        most, negated = bounds.tolist()
        error = None
        if most != -negated:
            error = BackendError(
                f"losses are multiplied by {-negated:g} to {most:g} on ranks among which experts are divided, whose "
                "gradients the pipeline has summed over these ranks in the call; nearest: model(**batch, "
                "num_items_in_batch=1), whose loss is a sum, and accelerator.backward(loss, weight=tokens)"
            )
        self.pipeline.agree(error)

    def _divided_evenly(self, given: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
        """This rank's tokens of a batch to evaluate, and the number of its micro-batches.

        Ranks among which experts are divided have the same number, which divides the batches of all of them.
        """
        error, samples = None, 0
        try:
            given = self._own_tokens(given)
            samples, _ = batch_shape(given)
        except Exception as raised:
            if self.experts is None:
                raise
            error = raised
        if self.experts is not None:
            samples = gcd(*(one or 0 for one in agree(error, group=self.experts, note=samples)))
        plan = self.pipeline.plan
        ranks = dist.get_world_size(plan.group)
        return given, largest_divisor(samples, self._num_microbatches, plan.kind, ranks)

    def _outputs(
        self, given: Mapping[str, Any], count: int, *, routers: RouterSums | None = None
    ) -> tuple[list[dict[str, Any]], dict[int, Any]]:
        """Runs the forwards with parameters that are gathered; returns the micro-batches, and the outputs by number.

        The rank of the last stage has the outputs.
        """
        samples, tokens = batch_shape(given)
        plan = self.pipeline.plan
        parts = split_batch(given, samples, count)
        outputs: dict[int, Any] = {}

        def finish(number: int, output: Any) -> torch.Tensor:
            outputs[number] = output
            return torch.zeros((), device=plan.device)

        feed = Feed(self._inputs(parts), (samples // count, tokens), finish, routers, self._has_labels(given))
        self.pipeline.run(feed, backward=False)
        if routers is not None:
            routers.sum()
        return parts, outputs

    @torch.no_grad()
    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Decodes greedily, as transformers' ``generate(do_sample=False, use_cache=False)``.

        Args:
            input_ids: prompts, of shape (samples, tokens) and an integer dtype, padded on the left; equal on all ranks
                of a pipeline.
            attention_mask: 0 where a prompt is padding; None: nowhere.
            max_new_tokens: most tokens that are appended.
            options: ``eos_token_id`` and ``pad_token_id``, whose defaults are those of the model's
                ``generation_config``; others of transformers only with the values of greedy decoding.

        Returns:
            Prompts with their new tokens, of shape (samples, tokens + new tokens), on every rank.

        Raises:
            BackendError: an option that changes what is decoded, no number of tokens, or shards of sequences.

        Collective: every rank of the group must call this.
        """
        if self.sequences is not None:
            context = self.sequences.context
            raise BackendError(
                f"generate with a {context.kind} model in a pipeline, whose sequences would have to divide among the "
                f"ranks at every length; nearest: {context.without}"
            )
        decoding = Decoding.of(self.module, max_new_tokens, options)
        with self._gathered():  # once, because data-parallel ranks may generate different numbers of tokens
            _, count = self._divided_evenly({"input_ids": input_ids})
            next_tokens = partial(self._next_tokens, count)
            return decode_greedily(
                next_tokens, self._own_names, input_ids, attention_mask, decoding, any_rank=self._any_expert_rank
            )

    def _any_expert_rank(self, value: bool) -> bool:
        """Whether the value is true on any rank whose experts compute tokens of this one."""
        if self.experts is None:
            return value
        found = torch.tensor(int(value), device=self.pipeline.plan.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.experts)
        return bool(found)

    def _next_tokens(self, count: int, given: Mapping[str, Any]) -> torch.Tensor:
        plan = self.pipeline.plan
        parts, outputs = self._outputs(given, count)
        if plan.has_last:
            found = torch.cat([outputs[number].logits[:, -1].argmax(-1) for number in range(len(parts))])
        else:
            found = torch.zeros(batch_shape(given)[0], dtype=torch.int64, device=plan.device)
        return self.pipeline.from_last(found)

    def _routers(self, groups: Sequence[dist.ProcessGroup | None], *, training: bool) -> RouterSums:
        """Sums of the load-balancing loss of one call over the ranks of all groups.

        Raises:
            BackendError: the call cannot have that loss.
        """
        plan = self.pipeline.plan
        routers = check_routers(self.module, self._config, training=training)
        scale = 1.0 if self._loss_scale is None else self._loss_scale.current
        # Ranks of one stage average their gradients; tensor-parallel ones count their tokens several times.
        ranks = dist.get_world_size(plan.together) / dist.get_world_size(plan.group) if training else 1.0
        return RouterSums(routers, groups, scale=scale * ranks, device=plan.device)

    @property
    def _evaluating_groups(self) -> list[dist.ProcessGroup | None]:
        """Groups of ranks that evaluate equally many batches: other replicas may have other numbers of them."""
        context = None if self.sequences is None else self.sequences.context.group
        return [self.pipeline.plan.group, *(one for one in (self.experts, context) if one is not None)]

    def _gathered(self) -> AbstractContextManager[None]:
        """Context in which this rank's stages have full parameters."""
        return nullcontext() if self.shards is None else self.shards.gathered()

    def _own_tokens(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """This rank's shard of the arguments of a call."""
        return given if self.sequences is None else self.sequences.sharded(given)

    def _missing_labels(self, given: Mapping[str, Any]) -> BackendError | None:
        """Error of a call in training that cannot compute its loss."""
        if self._config.loss_fn is not None or self._has_labels(given):
            return None
        return BackendError(
            f"{type(self.module).__name__} was called in training without labels; the backward of a pipeline runs "
            "in the call, so the call has to compute the loss: pass labels, or give the loss to "
            "PipelineParallelConfig(loss_fn=lambda outputs, batch: ...). To evaluate, call it under torch.no_grad()"
        )

    def _has_labels(self, given: Mapping[str, Any]) -> bool:
        """Whether there are labels, or shifted labels of shards, which ``sequences`` make labels."""
        return "labels" in given or (self.sequences is not None and "shift_labels" in given)

    @property
    def _num_microbatches(self) -> int:
        return self._config.num_microbatches or dist.get_world_size(self.pipeline.plan.group)

    def _inputs(self, parts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """What the model is given: with ``loss_fn`` neither labels nor arguments that it does not name."""
        if self._config.loss_fn is None:
            return list(parts)
        names = self._own_names - {"labels"}
        return [{name: value for name, value in part.items() if name in names} for part in parts]

    def _total(self, losses: Mapping[int, torch.Tensor], routers: RouterSums | None) -> torch.Tensor:
        """Sum of the losses of all micro-batches, which the last stage has, and of the routers, on every rank."""
        device = self.pipeline.plan.device
        total = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        for loss in losses.values():
            total += loss.detach()
        self.pipeline.from_last(total)
        if self.sequences is not None:
            total = self.sequences.mean(total)
        if routers is not None:
            total += routers.weighted_loss
        return total

    def _sum_tied(self) -> None:
        """Sums the tied weight's gradient of this batch over the first and the last stage."""
        if self.tied is None or not self.tied.parameter.requires_grad:
            return
        parameter = self.tied.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(local_of(parameter.grad), group=self.tied.group)

    def _note_added(self) -> None:
        self.unreduced = True


def _loss_dtype(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """float64 if any parameter is; otherwise float32."""
    return torch.float64 if any(one.dtype == torch.float64 for one in parameters) else torch.float32

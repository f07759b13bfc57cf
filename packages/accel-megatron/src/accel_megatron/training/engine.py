"""The prepared model: a call runs Megatron-LM's schedule, and the backward of its loss adds the gradients."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from accel_megatron.conversion.architecture import Architecture
from accel_megatron.training.stage import bare
from accel_precision.scaler import LossScaler
from accel_state.errors import BackendError

IGNORED = -100


@final
class MegatronEngine(nn.Module):
    """A causal language model over tensor-parallel and pipeline ranks, called as the Transformers model is.

    In training, a call computes forwards and backwards of all micro-batches and returns the loss, on every rank. The
    backward of that loss adds the gradients, times its own gradient, to those of the accumulation window; without one,
    the next call discards them. Logits are returned in evaluation only.

    Args:
        chunk: this rank's stage, in Megatron-LM's wrappers.
        source: the Transformers model, whose parameters are on the meta device from now on.
        architecture: of the model.
        num_micro_batches: micro-batches of a batch.
        per_token: whether the loss is the mean over the tokens of a batch, not over its micro-batches.
        loss_scale: loss scale of fp16, which the schedule multiplies each loss by; None without one.
        kept: fp32 weights of a model that computes in 16 bits, by megatron-core's names. An optimizer takes those that
            it updates; the others stay, so that states have no rounded weights.

    Attributes:
        in_16_bits: whether the model computes in bf16 or fp16.
        load_masters: replaces master weights of the optimizer; None without one.
    """

    chunk: Any
    source: nn.Module

    def __init__(
        self,
        chunk: nn.Module,
        source: nn.Module,
        architecture: Architecture,
        *,
        num_micro_batches: int,
        per_token: bool,
        loss_scale: LossScaler | None = None,
        kept: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.chunk = chunk
        self.architecture, self.num_micro_batches, self.per_token = architecture, num_micro_batches, per_token
        # Outside of the registry of modules, so that its parameters are not the engine's.
        self.__dict__.update(source=source, config=getattr(source, "config", None))
        self.kept = dict(kept or {})
        self._loss_scale = loss_scale
        self.load_masters: Callable[[Mapping[str, torch.Tensor]], None] | None = None
        self.in_16_bits = bool(self.chunk.config.params_dtype != torch.float32)
        self.gradients = WindowGradients(chunk)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> Any:
        """Returns the loss, and in evaluation the logits, as a Transformers model does.

        Collective: every rank of the group must call this. Ranks of one replica have to pass the same batch.

        Raises:
            BackendError: training without labels, or a batch that does not divide into micro-batches.
        """
        from transformers.modeling_outputs import CausalLMOutput

        training = self.training and torch.is_grad_enabled()
        if training and labels is None:
            raise BackendError(
                "a call of a Megatron-LM model in training needs labels, because the schedule computes the backward, "
                "too; pass labels, or call model.eval()"
            )
        count = self.num_micro_batches if self._divides(input_ids) else 1
        if training and count != self.num_micro_batches:
            samples = input_ids.shape[0]
            whose = (
                "an expert-parallel rank has a batch that" if self._fits(input_ids) else f"a batch of {samples} samples"
            )
            raise BackendError(
                f"{whose} does not divide into num_micro_batches={self.num_micro_batches}; make "
                "the batch size a multiple, or use drop_last=True"
            )
        batch = TokenBatch.of(input_ids, attention_mask, labels, position_ids)
        if not training:
            loss, logits = self._evaluate(batch, count)
            return CausalLMOutput(loss=loss, logits=logits)
        self.gradients.open(1.0 if self._loss_scale is None else self._loss_scale.current)
        loss = self._train(batch, count)
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        return CausalLMOutput(loss=_Scheduled.apply(anchor, loss, self.gradients))  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        """Device of the parameters, also on a stage that has none that is trained."""
        device: torch.device = next(self.chunk.parameters()).device
        return device

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns this rank's weights by megatron-core's names, without master weights that an optimizer has."""
        return {name: p.detach() for name, p in bare(self.chunk).named_parameters()} | self.kept

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replaces this rank's weights by the given values, master weights included."""
        own = dict(bare(self.chunk).named_parameters())
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)
                if name in self.kept:
                    self.kept[name] = value.detach().float().clone()
        if self.load_masters is not None:
            self.load_masters(weights)

    def _fits(self, ids: torch.Tensor) -> bool:
        """Whether this rank's batch divides into micro-batches."""
        return ids.shape[0] % self.num_micro_batches == 0

    def _divides(self, ids: torch.Tensor) -> bool:
        """Whether the batches of all ranks of the expert-parallel group divide into micro-batches."""
        from megatron.core import parallel_state

        group = parallel_state.get_expert_model_parallel_group()
        if group.size() == 1:
            return self._fits(ids)
        fit = torch.tensor(int(self._fits(ids)), device=self.device)
        dist.all_reduce(fit, dist.ReduceOp.MIN, group=group)
        return bool(fit.item())

    def _train(self, batch: "TokenBatch", count: int) -> torch.Tensor:
        tokens = batch.num_tokens

        def step(parts: "Iterator[TokenBatch]", model: nn.Module) -> tuple[torch.Tensor, Any]:
            part = next(parts)
            output = model(part.ids, part.positions, part.mask, labels=part.targets.clamp(min=0))

            def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                summed = (losses * (part.targets != IGNORED)).sum()
                # The schedule divides by the number of micro-batches.
                mean = summed * count / tokens if self.per_token else summed / part.num_tokens
                return mean, mean.detach().clone()

            return output, loss

        return self._broadcast(self._run(step, batch, count, forward_only=False), ()) / count

    def _evaluate(self, batch: "TokenBatch", count: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        from megatron.core import parallel_state

        def step(parts: "Iterator[TokenBatch]", model: nn.Module) -> tuple[torch.Tensor, Any]:
            part = next(parts)
            output = model(part.ids, part.positions, part.mask)
            return output, lambda logits, non_loss_data: logits

        shards = self._run(step, batch, count, forward_only=True)
        width = self.architecture.model["vocab_size"]
        logits = None
        if shards:
            shard, group = torch.cat(shards), parallel_state.get_tensor_model_parallel_group()
            gathered = [torch.empty_like(shard) for _ in range(group.size())]
            dist.all_gather(gathered, shard.contiguous(), group=group)
            logits = torch.cat(gathered, -1)
        full = self._broadcast([] if logits is None else [logits], (*batch.ids.shape, width))
        loss = functional.cross_entropy(full.flatten(0, 1), batch.targets.flatten()) if batch.labelled else None
        return loss, full

    def _run(self, step: Any, batch: "TokenBatch", count: int, *, forward_only: bool) -> list[torch.Tensor]:
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        samples, length = batch.ids.shape
        with torch.enable_grad() if not forward_only else torch.no_grad():
            found: list[torch.Tensor] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=batch.split(count),
                model=self.chunk,
                num_microbatches=count,
                seq_length=length,
                micro_batch_size=samples // count,
                decoder_seq_length=length,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        return found

    def _broadcast(self, found: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """Returns the sum of what the last stage has found, on every stage."""
        from megatron.core import parallel_state

        device = self.device
        total = torch.stack(found).sum(0) if found else torch.empty(shape, device=device)
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() > 1:
            dist.broadcast(total, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return total


@final
class TokenBatch:
    """Tensors of a batch or micro-batch: ids, positions, mask of what is not attended to, next tokens as targets."""

    def __init__(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor, labelled: bool
    ) -> None:
        self.ids, self.positions, self.mask, self.targets, self.labelled = ids, positions, mask, targets, labelled

    @classmethod
    def of(
        cls,
        ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> "TokenBatch":
        """Returns the batch of a Transformers model's arguments; labels are shifted by one token."""
        samples, length = ids.shape
        if positions is None:
            positions = torch.arange(length, device=ids.device)
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1).expand(samples, 1, -1, -1)
        if attention_mask is not None:
            mask = mask | (attention_mask == 0)[:, None, None, :]
        targets = torch.full_like(ids, IGNORED)
        if labels is not None:
            targets[:, :-1] = labels[:, 1:]
        return cls(ids, positions.expand(samples, length), mask, targets, labels is not None)

    @property
    def num_tokens(self) -> torch.Tensor:
        """Number of targets."""
        return (self.targets != IGNORED).sum()

    def split(self, count: int) -> "Iterator[TokenBatch]":
        """Yields ``count`` micro-batches of equal size."""
        tensors = (self.ids, self.positions, self.mask, self.targets)
        for ids, positions, mask, targets in zip(*(one.chunk(count) for one in tensors), strict=True):
            yield TokenBatch(ids, positions, mask, targets, self.labelled)


@final
class WindowGradients:
    """Gradients of an accumulation window in Megatron-LM's buffers.

    Those of a call become part of the window in the backward of its loss. ``reduce`` averages them over ranks, once a
    window.

    Attributes:
        filled: whether the window has gradients.
        reduced: whether they are averaged over ranks.
        backwards: number of backwards so far.
    """

    def __init__(self, chunk: Any) -> None:
        self._chunk = chunk
        self._earlier: list[torch.Tensor] | None = None
        self._open, self._scale = False, 1.0
        self.filled, self.reduced, self.backwards = False, False, 0

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Megatron-LM's buffers of gradients."""
        return [buffer.grad_data for buffer in self._chunk.buffers + self._chunk.expert_parallel_buffers]

    def open(self, scale: float = 1.0) -> None:
        """Sets the window's gradients aside, and clears the buffers for those of a call, times ``scale``."""
        if self.reduced:
            raise BackendError(
                "a forward in training after clip_grad_norm_ or a step, without zero_grad: these gradients are averaged"
                " over ranks already; call optimizer.zero_grad() after each step"
            )
        if self._open:  # the last call's gradients got no backward
            self._restore()
        self._earlier = [one.clone() for one in self.buffers] if self.filled else None
        self._chunk.zero_grad_buffer()
        self._open, self._scale = True, scale

    def commit(self, factor: torch.Tensor) -> None:
        """Adds ``factor`` times the gradients of the last call to the window.

        Raises:
            BackendError: a second backward of the same loss, or of a loss of an earlier call.
        """
        if not self._open:
            raise BackendError("backward of a loss whose gradients are used or discarded already; call the model again")
        for position, buffer in enumerate(self.buffers):
            buffer.mul_((factor / self._scale).to(buffer.dtype))
            if self._earlier is not None:
                buffer.add_(self._earlier[position])
        self._earlier, self._open, self.filled = None, False, True
        self.backwards += 1

    def reduce(self) -> None:
        """Averages the window's gradients over ranks, if they are not averaged yet.

        Collective: every rank of the group must call this.
        """
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads

        if self._open:
            self._restore()
        if not self.reduced and self.filled:
            finalize_model_grads([self._chunk])
            self.reduced = True

    def clear(self) -> None:
        """Drops all gradients."""
        self._chunk.zero_grad_buffer()
        self._earlier, self._open, self.filled, self.reduced = None, False, False, False

    def _restore(self) -> None:
        for position, buffer in enumerate(self.buffers):
            buffer.zero_() if self._earlier is None else buffer.copy_(self._earlier[position])
        self._earlier, self._open = None, False


class _Scheduled(torch.autograd.Function):
    """A loss whose backward has been computed, by the schedule."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, gradients: WindowGradients) -> torch.Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *factors: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.gradients.commit(factors[0])
        return torch.zeros_like(factors[0]), None, None

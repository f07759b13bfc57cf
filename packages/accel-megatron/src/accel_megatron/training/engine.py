"""The prepared model: a call runs Megatron-LM's schedule, and the backward of its loss adds the gradients."""

from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn

from accel_megatron.conversion.architecture import Architecture
from accel_megatron.families.context import padded_length
from accel_megatron.families.family import TokenBatch
from accel_megatron.families.steps import TrainStepArguments, train_step_of
from accel_megatron.families.table import family_of
from accel_megatron.library import seed_tensor_parallel
from accel_megatron.training.own_batch import LOSS, OwnBatch, joined, reporting
from accel_megatron.training.stage import named_weights
from accel_megatron.training.window import Scheduled, WindowGradients
from accel_precision.convert import accumulation_dtype
from accel_precision.scaler import LossScaler
from accel_state.errors import BackendError

if TYPE_CHECKING:
    from accel_megatron.config import MegatronConfig
    from accel_megatron.training.optimizer import EngineOptimizer


@final
class MegatronEngine(nn.Module):
    """A language model over tensor-parallel and pipeline ranks, called as the Transformers model is.

    In training, a call computes forwards and backwards of all micro-batches and returns the loss, on every rank. The
    backward of that loss adds the gradients, times its own gradient, to those of the accumulation window; without one,
    the next call discards them. Logits are returned in evaluation only.

    Args:
        chunks: this rank's stage, in Megatron-LM's wrappers; several with an interleaved schedule.
        source: the Transformers model, whose parameters are on the meta device from now on.
        architecture: of the model.
        options: of the run.
        loss_scale: loss scale of fp16, which the schedule multiplies each loss by; None without one.
        kept: fp32 weights of a model that computes in 16 bits, by megatron-core's names. An optimizer takes those that
            it updates; the others stay, so that states have no rounded weights.

    Attributes:
        reported: what the user's loss function reported in the last call, by name, on every rank; empty without one.
        in_16_bits: whether the model computes in bf16 or fp16.
        optimizer: of the model; None without one.
    """

    source: nn.Module

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        source: nn.Module,
        architecture: Architecture,
        options: "MegatronConfig",
        *,
        loss_scale: LossScaler | None = None,
        kept: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.chunks: Any = nn.ModuleList(chunks)
        self.architecture = architecture
        self.num_micro_batches: int = options.num_micro_batches
        self._per_token = options.calculate_per_token_loss
        self.family = family_of(architecture)
        # Outside of the registry of modules, so that its parameters are not the engine's.
        self.__dict__.update(source=source, config=getattr(source, "config", None))
        self.kept = dict(kept or {})
        self._loss_scale = loss_scale
        self._own = train_step_of(TrainStepArguments(options, getattr(source, "config", None), architecture))
        self.reported: dict[str, torch.Tensor] = {}
        self.optimizer: EngineOptimizer | None = None
        self.in_16_bits = bool(self.core.params_dtype.itemsize == 2)
        self.gradients = WindowGradients(chunks)

    def forward(self, *args: Any, **arguments: Any) -> Any:
        """Returns the loss, and in evaluation the logits, as a Transformers model does.

        Collective: every rank of the group must call this. Ranks of one replica have to pass the same batch.

        Raises:
            BackendError: arguments that the family does not take, training without labels, a batch that does not divide
                into micro-batches, or with sequence parallelism sequences that do not divide among tensor-parallel
                ranks.
        """
        training = self.training and torch.is_grad_enabled()
        if self._own is not None:
            return self._call_own(OwnBatch.of(args, arguments), training)
        self._check_arguments(arguments)
        batch = self.family.batch(self.architecture, *args, **arguments)
        if training and not batch.terms:
            raise BackendError(
                "a call of a Megatron-LM model in training needs labels, because the schedule computes the backward, "
                "too; pass labels, or call model.eval()"
            )
        self._check_lengths(batch)
        count = self._count(batch, training)
        if not training:
            logits = self._evaluate(batch, count)
            return self.family.result(self.architecture, self.family.loss(logits, batch.terms), logits)
        self._open_gradients()
        return self.family.result(self.architecture, self._scheduled(self._train(batch, count)), ())

    def train_step(self, **batch: Any) -> tuple[dict[str, torch.Tensor], bool, torch.Tensor | None, None]:
        """Computes the gradients of a batch, steps the optimizer, and drops the gradients.

        A window that is open ends with it. Schedulers are stepped by the loop.

        Collective: every rank of the group must call this.

        Returns:
            The losses by name, whether the step was skipped because gradients overflowed in fp16, the norm of the
            gradients (None where they are not clipped), and None for the number of zeros, which is not counted.

        Raises:
            BackendError: a model in evaluation, or one that was prepared without an optimizer.
        """
        optimizer = self.optimizer
        if optimizer is None or not self.training:
            what = "is in evaluation; call model.train()" if optimizer is not None else "was prepared without optimizer"
            raise BackendError(f"train_step steps the model's optimizer, and this model {what}")
        with torch.enable_grad():
            loss = _loss_of(self(**batch))
            (loss if self._loss_scale is None else self._loss_scale.scale(loss)).backward()
        stepped, norm = optimizer.step(), optimizer.norm
        if self._loss_scale is not None:
            self._loss_scale.update()
        optimizer.zero_grad()
        return self._losses(loss), not stepped, norm, None

    def eval_step(self, **batch: Any) -> dict[str, torch.Tensor]:
        """Returns the losses of a batch by name, without gradients.

        Collective: every rank of the group must call this.
        """
        with torch.no_grad():
            return self._losses(_loss_of(self(**batch)))

    def _losses(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns what the user's loss function reported, or the loss by Megatron-LM's name."""
        return dict(self.reported) or {"lm loss": loss.detach()}

    def _open_gradients(self) -> None:
        self.gradients.open(1.0 if self._loss_scale is None else self._loss_scale.current)

    def _scheduled(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns a loss whose gradients have been computed, with a backward that adds them to the window."""
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        scheduled: torch.Tensor = Scheduled.apply(anchor, loss, self.gradients)  # type: ignore[no-untyped-call]
        return scheduled

    def _count(self, batch: TokenBatch | OwnBatch, training: bool) -> int:
        """Returns the number of micro-batches, which is 1 in evaluation of a batch that does not divide."""
        count = self.num_micro_batches if self._divides(batch) else 1
        interleaved_own = len(self.chunks) > 1 and isinstance(batch, OwnBatch)
        if (training or interleaved_own) and count != self.num_micro_batches:
            whose = (
                "an expert-parallel rank has a batch that"
                if self._fits(batch)
                else f"a batch of {batch.samples} samples"
            )
            raise BackendError(
                f"{whose} does not divide into num_micro_batches={self.num_micro_batches}; make "
                "the batch size a multiple, or use drop_last=True"
            )
        return count

    def _call_own(self, batch: OwnBatch, training: bool) -> Any:
        """Returns what the forward step of the user's own computes."""
        count = self._count(batch, training)
        if training:
            self._open_gradients()
        step = reporting(self._own.forward_step, self.core.context_parallel_size)
        found = self._run(step, batch, count, forward_only=not training)
        self.reported = joined(found, self.device)
        loss = self.reported.pop(LOSS)
        if training:
            loss = self._scheduled(loss)
        made = getattr(self._own, "model_output_class", None)
        return loss if made is None else made(loss=loss, logits=self.reported.get("logits"))

    @property
    def core(self) -> Any:
        """megatron-core's ``TransformerConfig`` of the model."""
        return self.chunks[0].config

    @property
    def device(self) -> torch.device:
        """Device of the parameters, also on a stage that has none that is trained."""
        device: torch.device = next(self.chunks.parameters()).device
        return device

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns this rank's weights by megatron-core's names, without master weights that an optimizer has."""
        return {name: p.detach() for name, p in named_weights(self.chunks).items()} | self.kept

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replaces this rank's weights by the given values, master weights included."""
        own = named_weights(self.chunks)
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)
                if name in self.kept:
                    self.kept[name] = value.detach().float().clone()
        if self.optimizer is not None:
            self.optimizer.load_masters(weights)

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        _, *known = signature(self.family.batch).parameters
        if unknown := [name for name in arguments if name not in known]:
            raise BackendError(
                f"a call of a Megatron-LM model takes {', '.join(known)}, and not {', '.join(unknown)}; nearest: leave "
                f"{', '.join(unknown)} out"
            )

    def _check_lengths(self, batch: TokenBatch) -> None:
        config = self.core
        size = config.tensor_model_parallel_size if config.sequence_parallel else 1
        if config.context_parallel_size > 1:  # which pads sequences
            return
        for length in batch.lengths:
            if length % size:
                raise BackendError(
                    f"sequences of {length} tokens are not divisible by tp_degree={size}, and sequence_parallelism "
                    f"splits them; nearest: pad_to_multiple_of={size}, or sequence_parallelism=False"
                )

    def _fits(self, batch: TokenBatch | OwnBatch) -> bool:
        """Whether this rank's batch divides into micro-batches."""
        return batch.samples % self.num_micro_batches == 0

    def _divides(self, batch: TokenBatch | OwnBatch) -> bool:
        """Whether the batches of all ranks of the expert-parallel group divide into micro-batches."""
        from megatron.core import parallel_state

        group = parallel_state.get_expert_model_parallel_group()
        if group.size() == 1:
            return self._fits(batch)
        fit = torch.tensor(int(self._fits(batch)), device=self.device)
        dist.all_reduce(fit, dist.ReduceOp.MIN, group=group)
        return bool(fit.item())

    def _train(self, batch: TokenBatch, count: int) -> torch.Tensor:
        counts = [term.count for term in batch.terms]

        def step(parts: Iterator[TokenBatch], model: nn.Module) -> tuple[Any, Any]:
            part = next(parts)
            output = self.family.call(model, part, labelled=True)

            def loss(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
                sums = self.family.sums(output, part)
                # The schedule divides by the number of micro-batches.
                means = (
                    [one * count / number for one, number in zip(sums, counts, strict=True)]
                    if self._per_token
                    else [one / term.count for one, term in zip(sums, part.terms, strict=True)]
                )
                mean = torch.stack(means).sum()
                return mean, mean.detach().clone()

            return output, loss

        return self._broadcast(self._run(step, batch, count, forward_only=False), ()) / count

    def _evaluate(self, batch: TokenBatch, count: int) -> list[torch.Tensor]:
        """Returns the full logits of each part of the loss."""
        from megatron.core import parallel_state

        def step(parts: Iterator[TokenBatch], model: nn.Module) -> tuple[Any, Any]:
            output = self.family.call(model, next(parts), labelled=False)
            return output, lambda output, non_loss_data: self.family.shards(output)

        run = batch
        if len(self.chunks) > 1 and count == 1:  # an interleaved schedule runs groups of micro-batches
            count = self.num_micro_batches
            run = batch.padded(count * -(-batch.samples // count))
        found = self._run(step, run, count, forward_only=True, collect=True)
        logits = []
        for number, shape in enumerate(self.family.shapes(self.architecture, batch)):
            joined = [torch.cat([part[number] for part in found])[: batch.samples]] if found else []
            if joined and number == 0:
                group = parallel_state.get_tensor_model_parallel_group()
                gathered = [torch.empty_like(joined[0]) for _ in range(group.size())]
                dist.all_gather(gathered, joined[0].contiguous(), group=group)
                joined = [torch.cat(gathered, -1)]
            logits.append(self._broadcast(joined, shape))
        return logits

    def _run(
        self, step: Any, batch: TokenBatch | OwnBatch, count: int, *, forward_only: bool, collect: bool = False
    ) -> list[Any]:
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        if self.training and (self.core.hidden_dropout or self.core.attention_dropout):
            seed_tensor_parallel(int(torch.randint(2**31, ())), self.device)
        length = padded_length(self.core, batch.lengths[-1])
        # Also in the caller's inference mode, because megatron-core keeps tensors from call to call, and adds to them.
        with torch.inference_mode(False), torch.no_grad() if forward_only else torch.enable_grad():
            found: list[Any] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[batch.split(count) for _ in self.chunks],
                model=list(self.chunks),
                num_microbatches=count,
                seq_length=length,
                micro_batch_size=batch.samples // count,
                decoder_seq_length=length,
                forward_only=forward_only,
                collect_non_loss_data=collect,
            )
        return found

    def _broadcast(self, found: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """Returns the sum of what the last stage has found, on every stage."""
        from megatron.core import parallel_state

        total = (
            torch.stack(found).sum(0)
            if found
            else torch.empty(shape, dtype=accumulation_dtype(self.core.params_dtype), device=self.device)
        )
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() > 1:
            dist.broadcast(total, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return total


def _loss_of(output: Any) -> torch.Tensor:
    """Returns the loss of what a call returned."""
    loss: torch.Tensor | None = output if isinstance(output, torch.Tensor) else output.loss
    if loss is None:
        raise BackendError("a step of a Megatron-LM model needs labels, of which it computes the losses; pass labels")
    return loss

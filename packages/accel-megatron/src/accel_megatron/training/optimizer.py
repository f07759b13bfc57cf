"""Megatron-LM's optimizers around the user's own torch optimizer, whose groups and schedulers stay."""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch.optim import Adam, AdamW, Optimizer

from accel_backends.ops.loss_scaling import check_scaled
from accel_megatron.conversion.rules import stack_name
from accel_megatron.private import publish_main_weights, shard_span
from accel_megatron.training.engine import MegatronEngine
from accel_megatron.training.gathering import local_rules, norm_over_ranks
from accel_megatron.training.stage import named_weights
from accel_precision.convert import accumulation_dtype
from accel_precision.scaler import LossScaler
from accel_state.errors import BackendError, PrepareError


@final
class EngineOptimizer:
    """One of Megatron-LM's optimizers, with a torch optimizer inside that updates this rank's parameters.

    Attributes:
        engine: the model.
        optimizer: the user's optimizer, whose parameters are those of the engine, or this rank's shards of them.
        groups: names in the Transformers model of the parameters of each group, in the user's order.
        parameters: those of this rank's stage, by megatron-core's names.
        distributed: whether states are sharded over data-parallel ranks.
        norm: of the window's gradients, once they have been clipped; otherwise None.
    """

    def __init__(
        self,
        engine: MegatronEngine,
        optimizer: Optimizer,
        names: Mapping[int, str],
        *,
        distributed: bool,
        clipping: float,
        scaler: LossScaler | None = None,
    ) -> None:
        """Takes the optimizer over; ``names``: names of the Transformers model's parameters by id.

        ``clipping``: norm that a step clips to (0: none) unless ``clip`` was called. ``scaler``: loss scale of fp16.

        Raises:
            PrepareError: see ``_rebind``; or an optimizer that Megatron-LM's distributed optimizer does not shard.
        """
        if distributed and not isinstance(optimizer, (Adam, AdamW)):
            raise PrepareError(
                f"use_distributed_optimizer shards states of Adam and AdamW, and the optimizer is "
                f"{type(optimizer).__name__}; nearest: use_distributed_optimizer=False"
            )
        if optimizer.state:
            raise PrepareError(
                f"{type(optimizer).__name__} has states already; prepare a new optimizer, and load its state after that"
            )
        self.engine, self.optimizer = engine, optimizer
        self.groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self.norm: torch.Tensor | None = None
        self._clipping, self._scaler = clipping, scaler
        self._prepared = False
        self.distributed = distributed
        self.parameters = named_weights(engine.chunks)
        self._rules = dict(local_rules(engine.architecture))
        self._rebind()
        self._megatron = self._wrapped()
        self._shards = _shards(self._megatron) if distributed else {}
        self._take_masters()
        engine.optimizer = self

    def _rebind(self) -> None:
        own = self.parameters
        group_of = {name: position for position, names in enumerate(self.groups) for name in names}
        bound: list[list[torch.Tensor]] = [[] for _ in self.groups]
        for name, rule in self._rules.items():
            found = {group_of.get(stack_name(one)) for one in rule.names}
            if len(found) > 1:
                raise PrepareError(
                    f"{', '.join(rule.names)} are one tensor in megatron-core, and the optimizer has them in several "
                    "groups; put them into one group"
                )
            position = found.pop()
            if position is not None and own[name].requires_grad:
                bound[position].append(own[name])
        for group, parameters in zip(self.optimizer.param_groups, bound, strict=True):
            group["params"][:] = parameters

    def _wrapped(self) -> Any:
        from megatron.core import parallel_state
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

        half = self.engine.in_16_bits
        config = OptimizerConfig(
            optimizer="adam",
            # Also in fp16, in which megatron-core otherwise expects a loss scale of its own.
            bf16=half,
            params_dtype=self.engine.core.params_dtype,
            use_distributed_optimizer=self.distributed,
            clip_grad=0.0,
        )
        wrapped: Any
        if self.distributed:
            wrapped = DistributedOptimizer(
                self.optimizer,
                config,
                None,
                None,
                model_chunks=list(self.engine.chunks),
                per_model_buffers={number: chunk.buffers for number, chunk in enumerate(self.engine.chunks)},
                data_parallel_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
                data_parallel_group_gloo=None,
                data_parallel_group_idx=0,
                distributed_optimizer_instance_id=0,
            )
            wrapped.grad_stats_parallel_group = parallel_state.get_intra_distributed_optimizer_instance_group()
        else:
            wrapped = (
                Float16OptimizerWithFloat16Params(self.optimizer, config, None, None)
                if half
                else FP32Optimizer(self.optimizer, config, None)
            )
            wrapped.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
        wrapped.tp_group = parallel_state.get_tensor_model_parallel_group()
        return wrapped

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the window's gradients to a joint 2-norm over all ranks, and returns the norm.

        Collective: every rank of the group must call this.
        """

        if norm_type != 2.0:
            raise BackendError(f"norm_type={norm_type}: Megatron-LM clips gradients by their 2-norm; nearest: 2")
        self.ready()
        inner = ((p, self._inner(p)) for p in self.parameters.values() if p.requires_grad)
        gradients = ((p, None if one is None else one.grad) for p, one in inner)
        norm = norm_over_ranks(gradients, self._megatron.get_grad_stats_parallel_group(), self.engine.device)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad.dtype))
        self.norm = norm.to(accumulation_dtype(self.engine.core.params_dtype))
        return self.norm

    def unscale(self) -> None:
        """Averages gradients over ranks and divides them by the loss scale, once a window; does nothing without one.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: gradients of a loss that was not scaled.
        """
        if self._scaler is not None:
            self.ready()
            check_scaled(self._scaler, self.optimizer, self.inner_names)
            self._scaler.unscale(self.optimizer)

    def step(self) -> bool:
        """Steps, after clipping unless ``clip`` was called in this window; without gradients, does nothing.

        Returns False if gradients overflowed in fp16, so that all ranks skipped the step.

        Collective: every rank of the group must call this.
        """
        if not self.engine.gradients.filled:
            return True
        self.unscale()
        self.ready()
        if self._clipping and self.norm is None:
            self.clip(self._clipping)
        if self._scaler is None:
            self._megatron.step_with_ready_grads()
            return True
        stepped = self._scaler.step(self.optimizer)
        if stepped:
            self._publish()
        return stepped

    def inner_names(self) -> dict[int, str]:
        """Returns the names in the Transformers model of what the torch optimizer updates on this rank, by id."""
        inner = {name: self._inner(p) for name, p in self.parameters.items() if p.requires_grad}
        return {id(one): self._rules[name].names[0] for name, one in inner.items() if one is not None}

    def zero_grad(self) -> None:
        """Drops the gradients of the window."""
        self.engine.gradients.end()
        self._megatron.zero_grad()
        self.norm, self._prepared = None, False
        if self._scaler is not None:
            self._scaler.forget(self.optimizer)

    def ready(self) -> None:
        """Averages gradients over ranks and passes them to the torch optimizer, once a window."""
        self.engine.gradients.reduce()
        if not self._prepared:
            self._megatron.prepare_grads()
            self._prepared = True

    # States

    def masters(self) -> dict[str, torch.Tensor]:
        """Returns the master weights by megatron-core's names, full over data-parallel ranks; empty in fp32.

        Collective: every data-parallel rank must call this.
        """
        if not self.engine.in_16_bits:
            return {}
        if not self.distributed:
            return {name: p.main_param.detach() for name, p in self.parameters.items() if hasattr(p, "main_param")}
        return {name: self._summed(p, self._inner(p)) for name, p in self.parameters.items() if p.requires_grad}

    def load_masters(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replaces this rank's master weights, those that it has, by the given values."""
        if not self.engine.in_16_bits:
            return
        with torch.no_grad():
            for name, value in weights.items():
                parameter = self.parameters[name]
                inner = self._inner(parameter)
                if inner is not None and inner is not parameter:
                    inner.copy_(self._part(parameter, value))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns the averaged gradients by megatron-core's names, full over data-parallel ranks.

        Collective: every data-parallel rank must call this.
        """
        self.engine.gradients.reduce()
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        if not self.distributed:
            return {name: p.main_grad.detach().clone() for name, p in trained.items()}
        return {
            name: self._summed(p, None if self._inner(p) is None else self._part(p, p.main_grad))
            for name, p in trained.items()
        }

    def names_of(self, name: str) -> tuple[str, ...]:
        """Returns the names in the Transformers model of a parameter of this rank's stage."""
        return self._rules[name].names

    def held(self) -> dict[str, dict[str, Any]]:
        """Returns the states of this rank's stage by megatron-core's names, those of shards gathered.

        Collective: every data-parallel rank must call this.
        """
        if not self.distributed:
            inner = {name: self._inner(p) for name, p in self.parameters.items()}
            return {
                name: dict(self.optimizer.state[p])
                for name, p in inner.items()
                if p is not None and p in self.optimizer.state
            }
        return {name: self._gathered(p) for name, p in self.parameters.items() if p.requires_grad}

    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces the states by those of this rank's stage."""
        for name, values in states.items():
            inner = self._inner(self.parameters[name])
            if inner is None:
                continue
            own = {}
            for key, value in values.items():
                moved = value
                if isinstance(value, torch.Tensor) and value.dim():
                    moved = self._part(self.parameters[name], value).to(inner.device).clone()
                own[key] = moved
            self.optimizer.state[inner] = own

    def _inner(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Returns what the torch optimizer updates for a parameter on this rank; None: it is on other ranks."""
        if not self.distributed:
            main: torch.Tensor = getattr(parameter, "main_param", parameter)
            return main
        return self._shards.get(id(parameter))

    def _part(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not self.distributed:
            return value
        begin, end = shard_span(self._megatron, parameter)
        return value.reshape(-1)[begin:end]

    def _gathered(self, parameter: torch.Tensor) -> dict[str, Any]:
        import torch.distributed as dist

        inner = self._inner(parameter)
        state = {} if inner is None else self.optimizer.state.get(inner, {})
        group = self._megatron.data_parallel_group
        found: list[dict[str, Any]] = [{} for _ in range(group.size())]
        kinds = {key: None if isinstance(one, torch.Tensor) and one.dim() else one for key, one in state.items()}
        dist.all_gather_object(found, kinds, group=group)
        full: dict[str, Any] = {key: value for one in found for key, value in one.items()}
        for key, scalar in full.items():
            if scalar is None:
                full[key] = self._summed(parameter, None if inner is None else state[key])
        return full

    def _summed(self, parameter: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor:
        """Returns a full fp32 tensor of the parts that data-parallel ranks have; None: this rank has none."""
        import torch.distributed as dist

        flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if part is not None:
            self._part(parameter, flat).copy_(part.detach())
        dist.all_reduce(flat, group=self._megatron.data_parallel_group)
        return flat.view(parameter.shape)

    def _publish(self) -> None:
        """Copies master weights into the model, those of shards on all ranks."""
        publish_main_weights(self._megatron)
        if self.distributed:
            for chunk in self.engine.chunks:
                chunk.start_param_sync()

    def _take_masters(self) -> None:
        """Replaces master weights, which megatron-core makes of rounded weights, by those that the model had."""
        trained = self.trained
        own = [name for name in self.engine.kept if name in trained]
        self.load_masters({name: self.engine.kept.pop(name) for name in own})

    @property
    def trained(self) -> set[str]:
        """Names in megatron-core's model of the parameters that the optimizer updates, on this rank or a replica."""
        listed = {name for names in self.groups for name in names}
        return {
            name
            for name, rule in self._rules.items()
            if stack_name(rule.names[0]) in listed and self.parameters[name].requires_grad
        }


def _shards(megatron: Any) -> dict[int, torch.Tensor]:
    """Returns this rank's fp32 shards in a distributed optimizer, by the id of the parameter of each."""
    return {
        id(parameter): shard
        for groups, sharded in (
            (megatron.model_fp32_groups, megatron.shard_fp32_groups),
            (megatron.model_float16_groups, megatron.shard_fp32_from_float16_groups),
        )
        for group, shards in zip(groups, sharded, strict=True)
        for parameter, shard in zip(group, shards, strict=True)
    }

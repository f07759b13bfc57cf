"""Backend whose models are split into stages on the ranks of a pipeline."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, ClassVar, cast, final
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from accel_backends.core.bundle import Bundle
from accel_backends.core.capabilities import PRECISIONS, Capabilities
from accel_backends.core.config import BackendConfig
from accel_backends.core.module_backend import ModuleBackend
from accel_backends.core.rebind import state_to_device
from accel_backends.core.replaced import replace_parameters
from accel_backends.core.run import Run
from accel_backends.ops.compile import TorchDynamoPlugin
from accel_backends.ops.fqn import innermost, named_parameters
from accel_backends.ops.master_weights import upcast_parameters
from accel_backends.ops.state_dicts import PARAMS, names_stored
from accel_backends.parallel.pipeline.causal_lm import CausalLM
from accel_backends.parallel.pipeline.pipeline import Pipeline, StagePlan
from accel_backends.parallel.pipeline.ranges import balanced_ranges, given_ranges, stages_of_rank
from accel_backends.parallel.pipeline.schedules import schedule_kind
from accel_backends.parallel.pipeline.stages import drop_other_stages, make_stages
from accel_backends.pipeline.config import PipelineParallelConfig
from accel_backends.pipeline.gradients import PipelineGradients
from accel_backends.pipeline.layout import PipelineLayout
from accel_backends.pipeline.model import PipelinedModel, TiedWeight
from accel_backends.pipeline.reduction import ReplicaReduction
from accel_backends.pipeline.states import PipelineStates
from accel_backends.roles.gradients import NOTHING
from accel_precision.autocast import autocast_module, cast_parameters
from accel_state.errors import PrepareError


@final
class PipelineBackend(ModuleBackend):
    """Splits models into stages, and averages the gradients of replicas of the pipeline."""

    name: ClassVar[str] = "pipeline"
    Config: ClassVar[type[BackendConfig]] = PipelineParallelConfig
    capabilities: ClassVar[Capabilities] = Capabilities(
        precisions=frozenset(PRECISIONS) - {"fp8"}, ranks=(2, None), several_models=False, sharded=True
    )

    def __init__(self, run: Run, config: BackendConfig | None = None) -> None:
        super().__init__(run, config)
        mesh = run.parallelism.get_device_mesh(self.device.type)
        assert mesh is not None
        self._group = mesh["pp"].get_group()
        self._replicas = mesh["dp_replicate"].get_group() if run.parallelism.size("dp_replicate") > 1 else None
        self._kind, self._per_rank = schedule_kind(self._options.schedule, self._options.stages_per_rank)
        self._models: WeakSet[PipelinedModel] = WeakSet()
        self._reductions: list[ReplicaReduction] = []
        self._names: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
        self._group_names: WeakKeyDictionary[Optimizer, list[list[str]]] = WeakKeyDictionary()
        self.layout = PipelineLayout(run)
        self.gradients = PipelineGradients(self, self._models, group=self._group, replicas=self._replicas)
        self.states = PipelineStates(self, group=self._group, names=self._names, group_names=self._group_names)

    @property
    def _options(self) -> PipelineParallelConfig:
        return cast(PipelineParallelConfig, self.config)

    @property
    def _num_stages(self) -> int:
        return dist.get_world_size(self._group) * self._per_rank

    def check(self, bundle: Bundle) -> None:
        """Refuses models that cannot be split, and optimizers that hold parameters of several models."""
        for model in bundle.models:
            self._ranges(CausalLM.of(innermost(model)))
        known = {id(parameter) for model in bundle.models for parameter in model.parameters()}
        for optimizer in bundle.optimizers if bundle.models else ():
            if any(id(one) not in known for group in optimizer.param_groups for one in group[PARAMS]):
                raise PrepareError(
                    f"{type(optimizer).__name__} updates parameters of a model that was prepared before; with a "
                    "pipeline give each model an optimizer of its own, and prepare both in one call"
                )

    def bind(self, bundle: Bundle) -> Bundle:
        """Splits the model, and leaves each optimizer the parameters of this rank's stages."""
        models: list[nn.Module] = [
            self._split(innermost(model), bundle, placed=placed)
            for model, placed in zip(bundle.models, bundle.placed, strict=True)
        ]
        for optimizer in bundle.optimizers:
            state_to_device(optimizer)
        return replace(bundle, models=models)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Returns the model itself: ``bind`` has split it, with its optimizers."""
        return model

    def compile(self, model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
        """Refuses compilation, because stages call the model's own forward with placeholders for other stages' blocks.

        Raises:
            PrepareError: always.
        """
        raise PrepareError(
            f"{type(innermost(model)).__name__} cannot be compiled over the stages of a pipeline; nearest: "
            "dynamo_backend='no' with pp_size, or compilation with strategy='fsdp'"
        )

    def release(self, models: Iterable[nn.Module]) -> None:
        """Drops prepared models, and the reductions of their gradients."""
        models = list(models)
        self._reductions[:] = [one for one in self._reductions if one.model is not None and one.model not in models]
        super().release(models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context in which gradients are not averaged over replicas of the pipeline."""
        return _reducing(model, False) if isinstance(model, PipelinedModel) else NOTHING

    def trigger_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context in which gradients are averaged although the forward ran under ``no_sync``."""
        return _reducing(model, True) if isinstance(model, PipelinedModel) else NOTHING

    def _ranges(self, whole: CausalLM) -> list[range]:
        split = self._options.split
        if split is not None:
            return given_ranges(split, len(whole.blocks), self._num_stages)
        return balanced_ranges(whole.block_bytes, self._num_stages)

    def _split(self, model: nn.Module, bundle: Bundle, *, placed: bool) -> PipelinedModel:
        whole = CausalLM.of(model)
        ranges, plan = self._ranges(whole), self._plan()
        before = named_parameters(model)
        self._names[model] = frozenset(names_stored(model))
        for optimizer in bundle.optimizers:
            self._group_names[optimizer] = _group_names(optimizer, before)
        self._equalise(model)
        if bundle.training:
            upcast_parameters(model, self.policy)
        stages = make_stages(whole, ranges, plan.held, self._in_precision)
        drop_other_stages(whole, ranges, plan.held)
        after = named_parameters(model)
        for optimizer in bundle.optimizers:
            _keep(optimizer, after)
        replace_parameters(before, after, type(model).__name__)
        cast_parameters(model, self.policy)
        if placed:
            self.place(model)
        tied = self._tied(whole, plan)
        made = PipelinedModel(model, Pipeline(stages, plan), self._options, loss_scale=self.loss_scale, tied=tied)
        made.train(model.training)
        self._models.add(made)
        if self._replicas is not None:
            self._reductions.append(ReplicaReduction(made, self._replicas))
        self.owned.add(model, made)
        return made

    def _plan(self) -> StagePlan:
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        held = stages_of_rank(rank, ranks, self._per_rank, v_shaped=self._kind.v_shaped)
        return StagePlan(held, self._num_stages, self._group, self._kind, self.device)

    def _in_precision(self, module: nn.Module) -> nn.Module:
        return autocast_module(module, self.policy, self.device.type, self.run.autocast)

    def _tied(self, whole: CausalLM, plan: StagePlan) -> TiedWeight | None:
        """The weight that this rank has in common with another rank."""
        first, last = 0 in plan.held, plan.has_last
        if whole.tied is None or first == last:
            return None
        ranks = dist.get_process_group_ranks(self._group)
        group = dist.new_group([ranks[0], ranks[plan.last_rank]], use_local_synchronization=True)
        return TiedWeight(whole.tied, cast(dist.ProcessGroup, group), is_first=first)

    def _equalise(self, model: nn.Module) -> None:
        """Overwrites the tensors of the full model with those of rank 0, as every backend does.

        One tensor at a time is on the device, because the full model need not fit there.
        """
        for tensor in (*model.parameters(), *model.buffers()):
            sent = tensor.detach().to(self.device).contiguous()
            dist.broadcast(sent, group=self.session.group, group_src=0)
            tensor.detach().copy_(sent)


@contextmanager
def _reducing(model: PipelinedModel, value: bool) -> Iterator[None]:
    before, model.reduced = model.reduced, value
    try:
        yield
    finally:
        model.reduced = before


def _group_names(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Names of the parameters of each group."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [[names[id(parameter)] for parameter in group[PARAMS]] for group in optimizer.param_groups]


def _keep(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Removes all other parameters from an optimizer, with their states; its lists stay the same objects."""
    own = {id(parameter) for parameter in parameters.values()}
    for group in optimizer.param_groups:
        kept = [id(parameter) in own for parameter in group[PARAMS]]
        for parameter, keep in zip(group[PARAMS], kept, strict=True):
            if not keep:
                optimizer.state.pop(parameter, None)
        for key in (PARAMS, "param_names"):
            if key in group:
                group[key][:] = [one for one, keep in zip(group[key], kept, strict=True) if keep]

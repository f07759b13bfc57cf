"""Backend whose models are split into stages on the ranks of a pipeline."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar, cast, final
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from accel_backends.core.bundle import Bundle
from accel_backends.core.capabilities import PRECISIONS, Capabilities
from accel_backends.core.config import BackendConfig
from accel_backends.core.module_backend import ModuleBackend
from accel_backends.core.rebind import keep_parameters, rebind, state_to_device
from accel_backends.core.replaced import replace_parameters
from accel_backends.core.run import Run
from accel_backends.ops.compile import TorchDynamoPlugin
from accel_backends.ops.dtensor import is_dtensor, loop_over_meshes, placed_like
from accel_backends.ops.fqn import innermost, named_parameters
from accel_backends.ops.master_weights import upcast_parameters, upcasts
from accel_backends.ops.optimizer_support import check_on_shards, holds_any
from accel_backends.ops.state_dicts import PARAMS, names_stored
from accel_backends.parallel.axes import ModelAxes
from accel_backends.parallel.common_calls import CommonCalls
from accel_backends.parallel.pipeline.causal_lm import CausalLM
from accel_backends.parallel.pipeline.pipeline import Pipeline, StagePlan
from accel_backends.parallel.pipeline.ranges import balanced_ranges, given_ranges, stages_of_rank
from accel_backends.parallel.pipeline.schedules import schedule_kind
from accel_backends.parallel.pipeline.shards import StageShards, check_optimizers, check_shardable
from accel_backends.parallel.pipeline.stage_plan import Places, places_of, plan_of_stage
from accel_backends.parallel.pipeline.stages import Elsewhere, drop_other_stages, make_stages
from accel_backends.parallel.plan import TensorParallelPlan
from accel_backends.parallel.router_loss import router_loss_asked
from accel_backends.pipeline.config import PipelineParallelConfig
from accel_backends.pipeline.gradients import PipelineGradients
from accel_backends.pipeline.layout import PipelineLayout
from accel_backends.pipeline.mesh import StageMesh
from accel_backends.pipeline.model import PipelinedModel, TiedWeight
from accel_backends.pipeline.reduction import DataParallelReduction
from accel_backends.pipeline.router_loss import check_routers
from accel_backends.pipeline.states import PipelineStates
from accel_backends.roles.gradients import NOTHING
from accel_precision.autocast import autocast_module, cast_parameters
from accel_state.collectives.objects import all_gather_object
from accel_state.errors import PrepareError
from accel_state.process_group.group import sibling_group


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
        self._mesh = StageMesh(run, self.device.type)
        self._axes = ModelAxes(run, self._mesh.axis, shards=self._mesh.expert_shards)
        self._group = self._mesh.pipeline
        self._ends: dist.ProcessGroup | None = None
        self._kind, self._per_rank = schedule_kind(self._options.schedule, self._options.stages_per_rank)
        self._models: WeakSet[PipelinedModel] = WeakSet()
        self._reductions: list[DataParallelReduction] = []
        self._names: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
        self._tied_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._group_names: WeakKeyDictionary[Optimizer, list[list[str]]] = WeakKeyDictionary()
        self.layout = PipelineLayout(run, self._axes)
        self.gradients = PipelineGradients(self, self._models, mesh=self._mesh)
        self.states = PipelineStates(
            self, mesh=self._mesh, names=self._names, group_names=self._group_names, tied=self._tied_names
        )

    @property
    def _options(self) -> PipelineParallelConfig:
        return cast(PipelineParallelConfig, self.config)

    @property
    def _num_stages(self) -> int:
        return dist.get_world_size(self._group) * self._per_rank

    def check(self, bundle: Bundle) -> None:
        """Refuses models that cannot be split, and optimizers that hold parameters of several models."""
        for model in bundle.models:
            inner = innermost(model)
            self._check_complete(inner)
            self._ranges(CausalLM.of(inner))
            if router_loss_asked(inner, {}):
                check_routers(inner, self._options, training=bundle.training, kind=PrepareError)
            self._axes.check(inner)
            self._places(inner)
            if self._mesh.sharding is not None:
                check_shardable(inner, axes=self._mesh.sharded_by, upcast=upcasts(self.policy))
        axes = self._mesh.sharded_by + (() if self._mesh.tensor is None else ("tp_size",))
        check_optimizers(bundle.optimizers, self._split_parameters(bundle.models), axes=axes)
        models = bundle.models or list(self._models)
        known = [{id(parameter) for parameter in model.parameters()} for model in models]
        for optimizer in bundle.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise PrepareError(
                    "LBFGS computes its steps from all parameters, and each rank of a pipeline has those of its own "
                    "stages; nearest: AdamW"
                )
            held = {id(one) for group in optimizer.param_groups for one in group[PARAMS]}
            if not any(held <= one for one in known):
                raise PrepareError(
                    f"{type(optimizer).__name__} updates parameters of several models, or of a model that was prepared "
                    "before this one; with a pipeline give each model an optimizer of its own"
                )

    def bind(self, bundle: Bundle) -> Bundle:
        """Splits the model, and leaves each optimizer the parameters of this rank's stages."""
        split = self._split_parameters(bundle.models)
        over = self._mesh.sharding or self._mesh.tensor
        if bundle.training and over is not None:
            check_on_shards([one for one in bundle.optimizers if holds_any(one, split)], over, offload=False)
        models: list[nn.Module] = [
            self._split(innermost(model), bundle, placed=placed)
            for model, placed in zip(bundle.models, bundle.placed, strict=True)
        ]
        for optimizer in bundle.optimizers:
            state_to_device(optimizer)
            if not models:
                self._group_names[optimizer] = self._names_on_all_stages(optimizer)
                loop_over_meshes(optimizer)
        return replace(bundle, models=models)

    @property
    def apart(self) -> Collection[int]:
        """Ids of the parameters of this rank's stages."""
        return self.owned.parameters

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

    def convert_state(self, parameter: nn.Parameter, key: str, value: Any) -> Any:
        """Returns this rank's shard of a full state tensor."""
        return placed_like(value, parameter)

    def close(self) -> None:
        """Releases everything, and destroys the group of the ranks that share a tied weight."""
        super().close()
        ends, self._ends = self._ends, None
        if isinstance(ends, dist.ProcessGroup) and dist.is_initialized():
            dist.destroy_process_group(ends)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context in which gradients are not averaged over replicas of the pipeline."""
        return _reducing(model, False) if isinstance(model, PipelinedModel) else NOTHING

    def trigger_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context in which gradients are averaged although the forward ran under ``no_sync``."""
        return _reducing(model, True) if isinstance(model, PipelinedModel) else NOTHING

    def _check_complete(self, model: nn.Module) -> None:
        """Refuses a model whose other stages were dropped when it was prepared before."""
        dropped = [module.name for module in model.modules() if isinstance(module, Elsewhere)]
        if dropped:
            raise PrepareError(
                f"rank {self.session.rank} has one part of this {type(model).__name__}, because prepare split it "
                f"before; {dropped[0]} and {len(dropped) - 1} more are on other ranks. Build the model again, and load "
                "the state that get_state_dict(model) returned before free_memory()"
            )

    def _ranges(self, causal_lm: CausalLM) -> list[range]:
        split = self._options.split
        if split is not None:
            return given_ranges(split, len(causal_lm.blocks), self._num_stages)
        return balanced_ranges(causal_lm.block_bytes, self._num_stages)

    def _split(self, model: nn.Module, bundle: Bundle, *, placed: bool) -> PipelinedModel:
        causal_lm = CausalLM.of(model)
        ranges, plan = self._ranges(causal_lm), self._plan()
        before, places = named_parameters(model), self._places(model)
        self._names[model] = frozenset(names_stored(model))
        if causal_lm.tied is not None and not self._kind.v_shaped:
            self._mesh.join_ends()
            self._tied_names[model] = next(name for name, one in before.items() if one is causal_lm.tied)
        for optimizer in bundle.optimizers:
            self._group_names[optimizer] = _group_names(optimizer, before)
        self._equalise(model)
        if bundle.training:
            upcast_parameters(model, self.policy)
        stages = make_stages(causal_lm, ranges, plan.held, self._in_precision)
        drop_other_stages(causal_lm, ranges, plan.held)
        after = named_parameters(model)
        for optimizer in bundle.optimizers:
            keep_parameters(optimizer, {id(parameter) for parameter in after.values()})
        replace_parameters(before, after, type(model).__name__)
        cast_parameters(model, self.policy)
        if placed or self._mesh.sharding is not None:
            self.place(model)
        shards = self._shard(causal_lm, plan_of_stage(places, model), bundle)
        tied = self._tied(causal_lm, plan)
        experts = None if self._mesh.experts is None else self._mesh.axis("ep").get_group()
        made = PipelinedModel(
            model,
            Pipeline(stages, plan),
            self._options,
            loss_scale=self.loss_scale,
            tied=tied,
            shards=shards,
            sequences=self._axes.inputs,
            experts=experts,
            calls=CommonCalls(self.run, type(model).__name__, needed=() if experts is None else _others(experts)),
        )
        made.train(model.training)
        self._models.add(made)
        if self._mesh.data is not None:
            self._reductions.append(DataParallelReduction(made, self._mesh.data))
        self.owned.add(model, made)
        return made

    def _names_on_all_stages(self, optimizer: Optimizer) -> list[list[str]]:
        """Names of the parameters of each group, with those of the other ranks of the pipeline, in order of rank."""
        names = self.owned.names()
        own = [[names[id(parameter)] for parameter in group[PARAMS]] for group in optimizer.param_groups]
        ranks = all_gather_object(own, group=self._group)
        return [list(dict.fromkeys(chain.from_iterable(groups))) for groups in zip(*ranks, strict=True)]

    def _places(self, model: nn.Module) -> Places:
        """Modules of a full model that tensor parallelism places."""
        tensor = self._mesh.tensor
        return () if tensor is None else places_of(model, tensor.size(), self._axes.plan)

    def _split_parameters(self, models: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
        """Returns, by id, the parameters that are sharded over ranks with the same stages, or will be."""
        inner = [innermost(model) for model in models]
        split = {id(one): one for model in self._models for one in model.parameters() if is_dtensor(one)}
        if self._mesh.sharding is not None:
            return split | {id(one): one for model in inner for one in model.parameters()}
        return split | {
            id(one): one for model in inner for _, module, _ in self._places(model) for one in module.parameters(False)
        }

    def _shard(self, causal_lm: CausalLM, plan: TensorParallelPlan, bundle: Bundle) -> StageShards | None:
        """Shards this rank's stages: tensor parallelism, then ranks with other tokens; rebinds the optimizers."""
        model = causal_lm.model
        before = named_parameters(model)
        self._axes.apply(model, self.device, lambda tensors: None, plan, called=False)
        shards = None
        if self._mesh.sharding is not None and self._mesh.data is not None:
            experts = [model.get_submodule(name) for name in self._axes.experts(model)]
            shards = StageShards(
                causal_lm,
                self._mesh.sharding,
                self._mesh.data,
                axes=self._mesh.sharded_by,
                experts=experts,
                expert_mesh=self._mesh.experts,
            )
        after = named_parameters(model)
        for optimizer in bundle.optimizers:
            rebind(optimizer, before, after, convert=self.convert_state)
            loop_over_meshes(optimizer)
        replace_parameters(before, after, type(model).__name__)
        return shards

    def _plan(self) -> StagePlan:
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        held = stages_of_rank(rank, ranks, self._per_rank, v_shaped=self._kind.v_shaped)
        together, exchanging = self.session.group, self._mesh.experts is not None
        return StagePlan(held, self._num_stages, self._group, self._kind, self.device, together, exchanging)

    def _in_precision(self, module: nn.Module) -> nn.Module:
        return autocast_module(module, self.policy, self.device.type, self.run.autocast)

    def _tied(self, causal_lm: CausalLM, plan: StagePlan) -> TiedWeight | None:
        """The weight that this rank has in common with another rank."""
        first, last = 0 in plan.held, plan.has_last
        if causal_lm.tied is None or plan.last_rank == 0:
            return None
        if self._ends is None:
            self._ends = sibling_group(self._group, ranks=(0, plan.last_rank))
        if first == last:
            return None
        return TiedWeight(cast(Any, causal_lm.model).get_input_embeddings(), self._ends, is_first=first)

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


def _others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks of a group, as the run numbers them."""
    return [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]


def _group_names(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Names of the parameters of each group."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [[names[id(parameter)] for parameter in group[PARAMS]] for group in optimizer.param_groups]

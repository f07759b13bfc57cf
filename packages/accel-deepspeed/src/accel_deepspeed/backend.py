"""Backend that shards optimizer states, gradients and parameters with DeepSpeed's ZeRO."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel_backends.core.backend import _NOTHING, Backend
from accel_backends.core.bundle import Bundle
from accel_backends.core.capabilities import Capabilities
from accel_backends.core.config import BackendConfig
from accel_backends.ops.backward import explain
from accel_backends.ops.compile import TorchDynamoPlugin, compile_regions
from accel_backends.ops.copying import refuse_copies
from accel_backends.ops.footprint import Held
from accel_backends.ops.fqn import innermost, named_parameters
from accel_backends.ops.gradient_observer import Keep
from accel_deepspeed.checkpoint import state_dicts as states
from accel_deepspeed.config.consistency import LAYERS, SEQUENCES
from accel_deepspeed.config.plugin import DeepSpeedConfig
from accel_deepspeed.engine.bind import bind_model, check_bundle_pieces
from accel_deepspeed.engine.engine import Prepared, run_backward
from accel_deepspeed.engine.inference import start_inference
from accel_deepspeed.engine.loss_scale import EngineCounts, EngineScale
from accel_deepspeed.engine.registry import Engines
from accel_deepspeed.layout import ZeroSpread
from accel_deepspeed.library import (
    close_communication,
    library,
    open_communication,
    open_group_of_one,
    use_device,
)
from accel_deepspeed.tensor_parallel.autotp import Layers
from accel_deepspeed.ulysses.sequence import Sequences
from accel_deepspeed.zero.clipping import ZeroClipping
from accel_deepspeed.zero.footprint import held_by
from accel_deepspeed.zero.gathered_parameters import full_parameters
from accel_precision.options import GradScalerKwargs
from accel_precision.scaler import LossScaler
from accel_state.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@final
class DeepSpeedBackend(ZeroClipping, ZeroSpread, Backend):
    """Trains with DeepSpeed engines: one for each model with its optimizer, any number in one process.

    A prepared model is the engine, which has the interface of the wrapped model. Backward adds to the engine's
    accumulated gradients, and the optimizer's step reduces, clips and updates; a training loop needs no other change.
    Works on CPUs over gloo as on accelerators, also with one process.
    """

    name: ClassVar[str] = "deepspeed"
    Config: ClassVar[type[BackendConfig]] = DeepSpeedConfig
    capabilities: ClassVar[Capabilities] = Capabilities(
        precisions=frozenset({"no", "bf16", "fp16", "bf16-true", "fp32-true"}),
        several_models=False,
        sharded=True,
        offload=True,
        optimizer_states_of_some=False,
    )
    distributed_type: ClassVar[str] = "DEEPSPEED"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.scaler_options: GradScalerKwargs | None = kwargs.get("scaler")
        super().__init__(*args, **kwargs)
        library(self.session.device.type)
        self._options = cast(DeepSpeedConfig, self.config)
        self._engines = Engines()
        self._sequences = Sequences(self.session, self._options.sequence_parallel_size)
        self._layers = Layers(self.session, self._options.tensor_parallel_size)
        if self._sequences.size > 1 and self._layers.size > 1:
            raise ConfigError(
                f"{SEQUENCES}={self._sequences.size} and {LAYERS}={self._layers.size}: neighbours share sequences or "
                "layers, not both; leave one of them out"
            )
        self._mesh = None
        self._owns_group = False

    def make_scaler(self, options: GradScalerKwargs | None) -> LossScaler | None:
        """Returns None: DeepSpeed scales the loss itself."""
        return None

    def reconfigure(self, config: BackendConfig) -> None:
        """Replaces the options for engines that are created from now on; existing engines keep theirs."""
        self.config = self._options = cast(DeepSpeedConfig, config)

    # Preparing

    def check(self, bundle: Bundle) -> None:
        """Refuses models and optimizers that contradict each other or the configuration, see ``engine.optimizers``."""
        for model in bundle.models:
            self._sequences.check(model)
            self._layers.check(innermost(model))
        if bundle.training:
            check_bundle_pieces(self._options, bundle)

    def bind(self, bundle: Bundle) -> Bundle:
        """Creates one engine for the model and its optimizer; schedulers drive the optimizer inside."""
        if not bundle.models:
            return bundle
        model = bundle.models[0]
        self._sequences.take(innermost(model), self.sequence_group, self._options.sequence_attention)
        if not bundle.training and self._options.inference is not None:
            return replace(bundle, models=[start_inference(self.session, model, self.policy, self._options.inference)])
        if not bundle.training or (not bundle.optimizers and self._options.zero_stage < 3):
            return super().bind(bundle)
        self._open_communication()
        prepared, result = bind_model(self, bundle)
        self._engines.add(prepared)
        self._owned.add(innermost(model), prepared.engine)
        refuse_copies([prepared.engine], type(innermost(model)).__name__, self.name)
        return replace(bundle, models=[prepared.engine], optimizers=result.optimizers, schedulers=result.schedulers)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Returns the model itself: without an optimizer, nothing is sharded below stage 3."""
        return model

    def compile(self, model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
        """Compiles the engine with its own method, or the repeated blocks of its model in place."""
        prepared = self._engines.find(model)
        if prepared is None:
            return super().compile(model, plugin)
        if plugin.enabled and plugin.use_regional_compilation:
            compile_regions(prepared.engine.module, plugin)
        elif plugin.enabled:
            options = plugin.to_kwargs()
            prepared.engine.compile(backend=options.pop("backend"), compile_kwargs=options)
        return model

    def release(self, models: Iterable[nn.Module]) -> None:
        """Destroys engines. A model of stage 3 stays partitioned, and cannot be prepared again."""
        models = list(models)
        super().release(models)
        self._sequences.release(map(innermost, models))
        self._engines.release(models)

    def close(self) -> None:
        """Destroys all engines, and removes the process group from DeepSpeed."""
        self._engines.clear()
        super().close()
        self._mesh = None
        self._sequences.forget()
        close_communication(self)
        if self._owns_group:
            import torch.distributed as dist

            self._owns_group = False
            if dist.is_initialized():
                dist.destroy_process_group()

    # A step

    @property
    def gradient_average(self) -> int:
        """Data-parallel size: world size divided by the size of a tensor-parallel group."""
        return self.session.world_size // self._layers.size

    @property
    def gradient_group(self) -> "ProcessGroup | None":
        """Data-parallel group: all ranks of the session, or with AutoTP those with the same shards of the layers.

        The first read is a collective.

        Collective: every rank of the group must call this.
        """
        if self._layers.size == 1:
            return super().gradient_group
        self._open_communication()
        return self._layers.data_group

    def backward(self, loss: torch.Tensor, *, scale: float = 1.0, **kwargs: Any) -> None:
        """Runs backward of the engines that the loss depends on; of ``kwargs`` they accept ``retain_graph``.

        Raises:
            BackendError: a loss that is no scalar, has no graph, or depends on no engine.
        """
        retain_graph = bool(kwargs) and bool(kwargs.pop("retain_graph", False))
        if kwargs:
            raise BackendError(f"backward of DeepSpeed takes no {min(kwargs)!r}; it takes retain_graph")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            explain(loss, kwargs, BackendError("no loss"))
        used = self._engines.used(loss)
        run_backward(used, loss if scale == 1.0 else loss * scale, retain_graph=retain_graph)
        if not retain_graph:
            for prepared in used:
                prepared.open = False

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Runs the engine's step; returns False if all ranks skipped it because gradients overflowed.

        Does nothing if there was no backward since the last step.

        Raises:
            BackendError: a closure, an optimizer of no engine, or gradients that the step would ignore.
        """
        if closure is not None:
            raise BackendError("DeepSpeed's optimizers take no closure; compute the loss before step()")
        prepared = self._engines.of_optimizer(optimizer)
        gradients = prepared.gradients
        assert gradients is not None
        prepared.edits.carry()
        if gradients.filled:
            return gradients.step()
        gradients.check()
        return True

    def watch_gradients(self, optimizer: Optimizer, keep: Keep) -> RemovableHandle:
        """Calls ``keep`` with this rank's gradient shards, reduced and unclipped, before each step of the engine."""
        gradients = self._engines.of_optimizer(optimizer).gradients
        assert gradients is not None
        handle = RemovableHandle(gradients.watchers)
        gradients.watchers[handle.id] = keep
        return handle

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Drops the gradients that have been accumulated since the last step."""
        prepared = self._engines.of_optimizer(optimizer)
        if prepared.gradients is not None and prepared.gradients.filled:
            prepared.gradients.discard()
            prepared.open = False

    # States

    def sync_buffers(self, models: Iterable[nn.Module]) -> None:
        """Broadcasts rank 0's buffers, because forwards since ``prepare`` have updated each rank's separately."""
        buffers = [buffer for model in models if self._engines.find(model) is not None for buffer in model.buffers()]
        if buffers and self.session.world_size > 1:
            from accel_state.collectives.tensors import broadcast

            broadcast(buffers, group=self.session.group)

    def gradient_marks(self, model: nn.Module) -> object:
        """Returns the number of the engine's backwards."""
        prepared = self._engines.find(model)
        if prepared is None or prepared.gradients is None:
            return super().gradient_marks(model)
        return prepared.gradients.backwards

    def unreduced_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns accumulated gradients by FQN: this rank's unreduced ones, or the mean if reduced already."""
        prepared = self._engines.find(model)
        if prepared is None or prepared.gradients is None or not prepared.gradients.filled:
            return {}
        return prepared.gradients.held(named_parameters(prepared.engine))

    def full_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """As every backend; reduces unreduced gradients, and divides by the engine's own loss scale."""
        prepared = self._engines.find(model)
        if prepared is None or prepared.gradients is None or not prepared.gradients.filled:
            return super().full_gradients(model)
        prepared.gradients.settle()
        scale = prepared.gradients.loss_scale
        return {name: held / scale for name, held in super().full_gradients(model).items()}

    def set_unreduced_gradients(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Starts an accumulation window with the mean of the given gradients.

        Collective: every rank of the group must call this.
        """
        prepared = self._engines.find(model)
        if prepared is None or prepared.gradients is None:
            return
        from accel_state.collectives.objects import all_gather_object

        brought = {name for names in all_gather_object(sorted(gradients), group=self.session.group) for name in names}
        prepared.gradients.discard()
        if brought:
            prepared.gradients.hold(named_parameters(prepared.engine), gradients, brought)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Returns DTensors by FQN, in fp32 if the optimizer has master weights.

        Collective: every rank of the group must call this.
        """
        prepared = self._engines.find_stated(model)
        if prepared is None:
            return super().model_state(model)
        return states.model_state(prepared.engine, prepared.parts, self._layout(prepared))

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Loads DTensors, or full tensors that are equal on every rank.

        Collective: every rank of the group must call this.
        """
        prepared = self._engines.find_stated(model)
        if prepared is None:
            super().load_model_state(model, state, strict=strict)
            return
        fitted = states.fitted_state(prepared.engine, state, strict=strict)
        states.load_model_state(prepared.engine, prepared.parts, fitted)
        prepared.edits.forget()

    def full_model_state(self, model: nn.Module, *, main_only: bool | None = None) -> dict[str, Any]:
        """Returns full tensors in host memory, in fp32, or in the compute dtype with ``zero3_save_16bit_model``.

        Other ranks than 0 return an empty dict unless ``main_only`` is False.

        Collective: every rank of the group must call this.
        """
        prepared = self._engines.find_stated(model)
        if prepared is None:
            return super().full_model_state(model, main_only=main_only)
        keep = main_only is False or self.session.rank == 0
        parts = None if prepared.saves_16bit else prepared.parts
        return states.full_state(prepared.engine, parts, keep=keep)

    def full_parameters(self, model: nn.Module, *, writeback: bool = True) -> AbstractContextManager[None]:
        """Context in which parameters are full on every rank.

        Changes reach the optimizer unless ``writeback`` is off.
        """
        prepared = self._engines.find(model)
        return _NOTHING if prepared is None else full_parameters(prepared, writeback=writeback)

    def optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
        """Returns optimizer states as DTensors, by FQN. Collective: every rank of the group must call this."""
        prepared = self._engines.of_optimizer(optimizer)
        if prepared.parts is None:
            return super().optimizer_state(optimizer, [prepared.engine])
        return states.optimizer_state(prepared.engine, prepared.parts, self._layout(prepared))

    def load_optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Loads DTensors, or full tensors that are equal on every rank.

        Collective: every rank of the group must call this.
        """
        prepared = self._engines.of_optimizer(optimizer)
        if prepared.parts is None:
            super().load_optimizer_state(optimizer, [prepared.engine], state)
        else:
            states.load_optimizer_state(prepared.engine, prepared.parts, self._layout(prepared), state)

    def export_native(self, model: nn.Module, folder: str, tag: str) -> None:
        """Writes the model with the engine's own ``save_checkpoint``.

        Collective: every rank of the group must call this.
        """
        prepared = self._engines.find(model)
        if prepared is None:
            super().export_native(model, folder, tag)
        else:
            prepared.edits.carry()
            prepared.engine.save_checkpoint(folder, tag=tag)

    def held(self, model: nn.Module, optimizer: Optimizer) -> Held:
        """Returns the engine's tensors, see ``zero.footprint``."""
        prepared = self._engines.find(model)
        return super().held(model, optimizer) if prepared is None else held_by(prepared)

    @property
    def loss_scales(self) -> Sequence[EngineScale]:
        """One loss scale for each engine in fp16."""
        return [EngineScale(one.engine) for one in self._engines if one.gradients and one.engine.fp16_enabled()]

    def counts(self) -> list[dict[str, int]]:
        """Returns the step counters of each engine: taken and skipped steps."""
        return [EngineCounts(one.engine).state_dict() for one in self._engines]

    def load_counts(self, counts: Sequence[Mapping[str, int]]) -> None:
        """Restores the step counters, engine by engine in the order of preparation."""
        for one, state in zip(self._engines, counts, strict=False):
            EngineCounts(one.engine).load_state_dict(state)

    def state_templates(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
        """Returns uninitialised tensors by FQN, sharded like the states of ``optimizer_state``."""
        prepared = self._engines.of_optimizer(optimizer)
        if prepared.parts is None:
            return super().state_templates(optimizer, [prepared.engine])
        parameters = named_parameters(prepared.engine)
        layout = self._layout(prepared)
        return {name: layout.empty(parameters[name]) for group in prepared.groups for name in group}

    @contextmanager
    def zero_init(self) -> Iterator[None]:
        """Context in which, at stage 3, every module is partitioned as soon as it is built.

        Collective: every rank of the group must call this.
        """
        if not self._options.zero3_init_flag:
            yield
            return
        from accel_deepspeed.engine.bind import zero3_init

        self._open_communication()
        with zero3_init(self):
            yield

    # Helpers of the above

    def _layout(self, prepared: Prepared) -> states.PartitionLayout:
        return states.PartitionLayout(self.mesh, prepared.groups)

    def _open_communication(self) -> None:
        """Passes the process group to DeepSpeed; opens a group of one process if there is none."""
        self._owns_group |= open_group_of_one(self.session)
        use_device(self.session)
        open_communication(self.session, self)
        self._layers.open()

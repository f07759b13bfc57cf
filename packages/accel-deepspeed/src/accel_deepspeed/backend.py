"""Backend that shards optimizer states, gradients and parameters with DeepSpeed's ZeRO."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.core.bundle import Bundle
from accel_backends.core.capabilities import Capabilities
from accel_backends.core.config import BackendConfig
from accel_backends.core.module_backend import ModuleBackend
from accel_backends.core.run import Run
from accel_backends.ops.backward import explain
from accel_backends.ops.compile import TorchDynamoPlugin, compile_regions, refuse_cuda_graphs
from accel_backends.ops.copying import refuse_copies
from accel_backends.ops.fqn import innermost
from accel_deepspeed.checkpoint.engine_states import ZeroStates
from accel_deepspeed.config.consistency import check_one_axis
from accel_deepspeed.config.plugin import DeepSpeedConfig
from accel_deepspeed.engine.bind import bind_model, check_bundle_pieces
from accel_deepspeed.engine.engine import run_backward
from accel_deepspeed.engine.inference import start_inference
from accel_deepspeed.engine.registry import Engines
from accel_deepspeed.layout import ZeroLayout
from accel_deepspeed.library import close_communication, library, open_communication, use_device
from accel_deepspeed.tensor_parallel.autotp import Layers
from accel_deepspeed.ulysses.sequence import Sequences
from accel_deepspeed.zero.engine_gradients import ZeroGradients
from accel_precision.options import GradScalerKwargs
from accel_state.errors import BackendError
from accel_state.process_group.single_process_group import SingleProcessGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@final
class DeepSpeedBackend(ModuleBackend):
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
        not_alone_because="DeepSpeed opens process groups by itself",
    )
    distributed_type: ClassVar[str] = "DEEPSPEED"

    layout: ZeroLayout
    states: ZeroStates

    def __init__(self, run: Run, config: BackendConfig | None = None) -> None:
        super().__init__(run, config)
        self.loss_scale = None  # DeepSpeed scales the loss itself
        self.scaler_options: GradScalerKwargs | None = run.scaler
        library(self.session.device.type)
        self.options = cast(DeepSpeedConfig, self.config)
        self._engines = Engines()
        self._sequences = Sequences(self.session, self.options.sequence_parallel_size)
        self.layers = Layers(self.session, self.options.tensor_parallel_size)
        check_one_axis(self._sequences.size, self.layers.size)
        self._group = SingleProcessGroup(self.session.device)
        self.layout = ZeroLayout(run, self.options, self._sequences, self.layers, self._open_communication)
        self.gradients = ZeroGradients(self, self._engines, self.layers, self._open_communication)
        self.states = ZeroStates(self, self._engines, self.layout)

    def reconfigure(self, config: BackendConfig) -> None:
        """Replaces the options for engines that are created from now on; existing engines keep theirs."""
        self.config = self.states.config = self.options = self.layout.options = cast(DeepSpeedConfig, config)

    # Preparing

    def check(self, bundle: Bundle) -> None:
        """Refuses models and optimizers that contradict each other or the configuration, see ``engine.optimizers``."""
        for model in bundle.models:
            self._sequences.check(model)
            self.layers.check(innermost(model))
        if bundle.training:
            check_bundle_pieces(self.options, bundle)

    def bind(self, bundle: Bundle) -> Bundle:
        """Creates one engine for the model and its optimizer; schedulers drive the optimizer inside."""
        if not bundle.models:
            return bundle
        model = bundle.models[0]
        self._sequences.take(innermost(model), self.layout.sequence_group, self.options.sequence_attention)
        if not bundle.training and self.options.inference is not None:
            return replace(bundle, models=[start_inference(self.session, model, self.policy, self.options.inference)])
        if not bundle.training or (not bundle.optimizers and self.options.zero_stage < 3):
            return super().bind(bundle)
        self._open_communication()
        prepared, result = bind_model(self, bundle)
        self._engines.add(prepared)
        self.owned.add(innermost(model), prepared.engine)
        refuse_copies([prepared.engine], type(innermost(model)).__name__, self.name)
        return replace(bundle, models=[prepared.engine], optimizers=result.optimizers, schedulers=result.schedulers)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Returns the model itself: without an optimizer, nothing is sharded below stage 3."""
        return model

    def compile(self, model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
        """Compiles the engine with its own method, or the repeated blocks of its model in place.

        Raises:
            BackendError: CUDA graphs on a CUDA device.
        """
        if self.device.type == "cuda":
            refuse_cuda_graphs(plugin, self.name)
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
        self.layout.forget_mesh()
        self._sequences.forget()
        close_communication(self)
        self._group.close()

    # A step

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
        gradients.check_empty()
        return True

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Drops the gradients that have been accumulated since the last step."""
        prepared = self._engines.of_optimizer(optimizer)
        if prepared.gradients is not None and prepared.gradients.filled:
            prepared.gradients.discard()
            prepared.open = False

    # Of this backend alone

    def export_native(self, model: nn.Module, folder: str, tag: str) -> None:
        """Writes the model with the engine's own ``save_checkpoint``.

        Collective: every rank of the group must call this.
        """
        prepared = self._engines.find(model)
        if prepared is None:
            raise BackendError(
                f"{type(innermost(model)).__name__} has no engine, because it was prepared without an optimizer, and "
                "DeepSpeed writes checkpoints of engines; nearest: save_state, or prepare it with an optimizer"
            )
        prepared.edits.carry()
        prepared.engine.save_checkpoint(folder, tag=tag)

    @contextmanager
    def zero_init(self) -> Iterator[None]:
        """Context in which, at stage 3, every module is partitioned as soon as it is built.

        Collective: every rank of the group must call this.
        """
        if not self.options.zero3_init_flag:
            yield
            return
        from accel_deepspeed.engine.bind import zero3_init

        self._open_communication()
        with zero3_init(self):
            yield

    @property
    def mesh(self) -> "DeviceMesh | None":
        """Mesh over which states are sharded, see ``ZeroLayout.mesh``."""
        return self.layout.mesh

    # Helpers of the above

    def _open_communication(self) -> None:
        """Passes the process group to DeepSpeed; opens a group of one process if there is none."""
        self._group.open()
        use_device(self.session)
        open_communication(self.session, self)
        self.layers.open()

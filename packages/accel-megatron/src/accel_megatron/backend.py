"""Backend that trains Transformers models as megatron-core's, over tensor-parallel and pipeline ranks."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, cast, final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends import BackendConfig, Bundle, Capabilities, ModuleBackend, Run
from accel_backends.ops.compile import TorchDynamoPlugin
from accel_backends.ops.fqn import few, innermost, named_parameters
from accel_backends.ops.state_dicts import model_state
from accel_megatron.config import MegatronConfig
from accel_megatron.conversion.architecture import Architecture
from accel_megatron.conversion.kinds import architecture_of
from accel_megatron.conversion.rules import stack_name
from accel_megatron.library import close_groups, divide_stages, open_groups, require_library, seed_tensor_parallel
from accel_megatron.training.engine import MegatronEngine
from accel_megatron.training.gathering import local_tensors, place
from accel_megatron.training.gradients import MegatronGradients
from accel_megatron.training.layout import MegatronLayout
from accel_megatron.training.optimizer import EngineOptimizer
from accel_megatron.training.registry import MegatronEngines
from accel_megatron.training.stage import build_chunk, transformer_config
from accel_megatron.training.states import MegatronStates
from accel_state.collectives.tensors import broadcast
from accel_state.errors import BackendError, PrepareError
from accel_state.process_group.single_process_group import SingleProcessGroup


@final
class MegatronBackend(ModuleBackend):
    """Trains language models of Transformers (Llama, Mixtral, GPT-2, BERT, T5) as megatron-core's models.

    ``prepare`` converts the model exactly, with the weights that rank 0 has, and returns an engine that is called as
    the model is. The user's torch optimizer stays, inside one of Megatron-LM's.
    """

    name: ClassVar[str] = "megatron"
    Config: ClassVar[type[BackendConfig]] = MegatronConfig
    capabilities: ClassVar[Capabilities] = Capabilities(
        device_types=frozenset({"cpu", "cuda"}),
        precisions=frozenset({"no", "fp32-true", "bf16", "fp16"}),
        several_models=False,
        sharded=True,
        not_alone_because="Megatron-LM opens process groups by itself",
        instead_of_recomputing="give MegatronLMPlugin(recompute_activations=True)",
    )
    distributed_type: ClassVar[str] = "MEGATRON_LM"

    def __init__(self, run: Run, config: BackendConfig | None = None) -> None:
        super().__init__(run, config)
        require_library()
        self._options = cast(MegatronConfig, self.config)
        self._engines = MegatronEngines()
        self._group = SingleProcessGroup(self.session.device)
        self._group.open()
        open_groups(self._options)
        self.layout = MegatronLayout(run)
        self.gradients = MegatronGradients(self, self._engines)
        self.states = MegatronStates(self, self._engines)

    def check(self, bundle: Bundle) -> None:
        """Refuses models that megatron-core does not compute, and optimizers apart from their model."""
        if bundle.optimizers and not bundle.models:
            raise PrepareError(
                "an optimizer without its model: Megatron-LM replaces the model's parameters, so prepare both in one "
                "call"
            )
        if len(bundle.optimizers) > 1:
            raise PrepareError(f"{len(bundle.optimizers)} optimizers for one model; Megatron-LM steps one of them")
        for model in bundle.models:
            names = named_parameters(innermost(model))
            architecture = architecture_of(getattr(innermost(model), "config", None), names)
            options = self._options
            architecture.check_degrees(
                options.tp_degree,
                options.pp_degree,
                options.expert_model_parallel_size,
                options.expert_tensor_parallel_size,
            )
            if architecture.num_experts:
                options.check_mixture()
            options.chunks(architecture.num_layers)
            _check_dtype(model, halves=self.policy.autocast)
            if _in_fp64(model):
                _check_fp64(architecture, sharded=options.use_distributed_optimizer)
            _check_names(model, {stack_name(one) for _, rule in architecture.rules(0, 1) for one in rule.names})
            for optimizer in bundle.optimizers if options.use_distributed_optimizer else ():
                _check_updates_all(model, optimizer)

    def bind(self, bundle: Bundle) -> Bundle:
        """Converts the model, and puts its optimizer into one of Megatron-LM's."""
        if not bundle.models:
            return bundle
        source = innermost(bundle.models[0])
        names = {id(p): name for name, p in named_parameters(source).items()}
        engine = self._engine(source)
        optimizer = None
        if bundle.optimizers:
            optimizer = EngineOptimizer(
                engine,
                bundle.optimizers[0],
                names,
                distributed=self._options.use_distributed_optimizer,
                clipping=self._options.gradient_clipping,
                scaler=self.loss_scale,
            )
        self._engines.add(engine, optimizer)
        self.owned.add(source, engine)
        return replace(bundle, models=[engine])

    def _engine(self, source: nn.Module) -> MegatronEngine:
        options, config = self._options, cast(Any, source).config
        architecture = architecture_of(config, named_parameters(source))
        dtype = torch.float64 if _in_fp64(source) else torch.float32
        if self.policy.autocast and self.policy.compute:
            source.float()  # weights in 16 bits
            dtype = self.policy.compute
        state = {name: value.detach().to(self.device) for name, value in model_state(source).items()}
        if self.session.world_size > 1:
            broadcast(list(state.values()), group=self.session.group)
        trained = {name: p.requires_grad for name, p in named_parameters(source).items()}
        devices = [self.device] if self.device.type == "cuda" else []
        seed_tensor_parallel(torch.initial_seed() % 2**31, self.device)
        # Megatron-LM's wrapper follows the graph of each parameter, also if the caller has turned gradients off.
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            divide_stages(options.chunks(architecture.num_layers))
            weights = local_tensors(architecture, state)
            transformer = transformer_config(options, architecture, dtype, self._scaled)
            chunks = [
                build_chunk(number, transformer, architecture, weights, self.device, trained, options)
                for number in range(place().chunks)
            ]
        training = source.training
        _drop_weights(source)
        engine = MegatronEngine(
            chunks,
            source,
            architecture,
            options,
            loss_scale=self.loss_scale,
            kept={} if dtype.itemsize > 2 else {name: one.detach().clone() for name, one in weights.items()},
        )
        return engine.train(training)

    @property
    def _scaled(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Function by which the schedule multiplies a loss by the loss scale of fp16; None without one."""
        scale = self.loss_scale
        return None if scale is None else lambda loss: loss * scale.current

    def wrap(self, model: nn.Module) -> nn.Module:
        """Returns the model itself, because ``bind`` prepares it."""
        return model

    def compile(self, model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
        """Refuses: schedules of Megatron-LM are not compiled.

        Raises:
            BackendError: the plugin is enabled.
        """
        if plugin.enabled:
            raise BackendError("torch.compile of a Megatron-LM model is not supported; leave dynamo_backend out")
        return model

    def release(self, models: Iterable[nn.Module]) -> None:
        """Drops engines and their optimizers. The Transformers models have no weights any more."""
        models = list(models)
        super().release(models)
        self._engines.drop(models)

    def close(self) -> None:
        """Drops all engines, and destroys Megatron-LM's process groups."""
        self._engines.drop(list(self._engines))
        super().close()
        close_groups()
        self._group.close()

    # A step

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Averages gradients over ranks, clips them as the options say, and steps; without gradients, does nothing.

        Returns False if gradients overflowed in fp16, so that all ranks skipped the step.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: a closure, or an optimizer that was not prepared.
        """
        if closure is not None:
            raise BackendError("Megatron-LM's optimizers take no closure; compute the loss before step()")
        return self._engines.of_optimizer(optimizer).step()

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Drops the gradients that have been accumulated since the last step."""
        self._engines.of_optimizer(optimizer).zero_grad()


def _drop_weights(model: nn.Module) -> None:
    """Moves a model to the meta device; tensors that are one stay one, which ``Module.to`` does not do."""
    first: dict[int, tuple[nn.Module, str]] = {}
    tied = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owner = first.setdefault(id(parameter), (module, name))
            if owner != (module, name):
                tied.append((module, name, owner))
    model.to("meta")
    for module, name, (other, known) in tied:
        setattr(module, name, getattr(other, known))


def _check_names(model: nn.Module, known: set[str]) -> None:
    """Raises PrepareError for a model with other parameters than those that the conversion knows."""
    found = set(named_parameters(innermost(model)))
    if found != known:
        other = sorted(found ^ known)
        raise PrepareError(
            f"{type(innermost(model)).__name__} has other parameters than the language model of its kind, first "
            f"{other[0]}; nearest: LlamaForCausalLM, MixtralForCausalLM, GPT2LMHeadModel, BertForMaskedLM, "
            "BertForPreTraining, MegatronBertForMaskedLM, MegatronBertForPreTraining or T5ForConditionalGeneration "
            "without adapters"
        )


def _check_updates_all(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises PrepareError for a distributed optimizer that leaves out parameters with gradients."""
    listed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = named_parameters(innermost(model)).items()
    if left_out := [name for name, p in named if p.requires_grad and id(p) not in listed]:
        raise PrepareError(
            f"use_distributed_optimizer shards all parameters that are trained, and the optimizer lacks "
            f"{few(left_out, 3)}; nearest: requires_grad_(False) for these, or use_distributed_optimizer=False"
        )


def _in_fp64(model: nn.Module) -> bool:
    """Whether all parameters are in fp64."""
    return {p.dtype for p in model.parameters()} == {torch.float64}


def _check_fp64(architecture: Architecture, *, sharded: bool) -> None:
    """Raises PrepareError for what is not computed in fp64."""
    if architecture.in_fp32:
        raise PrepareError(f"a model in fp64: {architecture.in_fp32}; nearest: model.float()")
    if sharded:
        raise PrepareError(
            "use_distributed_optimizer with a model in fp64: Megatron-LM shards states of fp32 weights, and of 16-bit "
            "ones; nearest: use_distributed_optimizer=False, or model.float()"
        )


def _check_dtype(model: nn.Module, *, halves: bool) -> None:
    """Raises PrepareError for a model in several dtypes, or in others than mixed precision, or none, can have."""
    known = {torch.float32, torch.bfloat16, torch.float16} if halves else {torch.float32}
    other = {p.dtype for p in model.parameters()} - known
    if other and (halves or not _in_fp64(model)):
        nearest = "" if torch.float64 in other else ", or mixed_precision='bf16' (or 'fp16')"
        raise PrepareError(
            f"{type(innermost(model)).__name__} has parameters in {', '.join(sorted(map(str, other)))}; Megatron-LM "
            f"keeps weights in fp32 here, or all in fp64 without mixed precision; nearest: model.float(){nearest}"
        )

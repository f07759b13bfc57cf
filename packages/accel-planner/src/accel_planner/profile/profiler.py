"""Profiler of models: traces one step on fake tensors for each variant of computing it."""

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import nn

from accel_backends.fsdp.config import FSDPConfig
from accel_backends.fsdp.shard import units_of
from accel_backends.fsdp.wrap_units import Units, parameters_of_units
from accel_backends.ops.activation_checkpointing import ActivationCheckpointing
from accel_backends.ops.fqn import innermost, named_parameters
from accel_planner import private
from accel_planner.errors import PlanError
from accel_planner.profile import layer_compression as folding
from accel_planner.profile.example_inputs import Batch, Loss, guessed_loss, tokens
from accel_planner.profile.gpu_autocast import autocast_lists_of
from accel_planner.profile.gpu_norms import norms_of
from accel_planner.profile.models import Constructor, buffer_bytes, build, fake_copy, stored_dtype
from accel_planner.profile.profile import ModelProfile, ParameterFact, Timeline, Variant
from accel_planner.profile.trace import trace
from accel_precision.autocast import autocast_module, call_within
from accel_precision.policy import PrecisionPolicy
from accel_state.logging import get_logger

_log = get_logger(__name__)
_EMPTY = Timeline((), 0)


def profile_model(
    source: "nn.Module | Constructor",
    sample: "Batch | Callable[..., Any] | Any" = None,
    *,
    batch_size: int | None = None,
    seq_length: int | None = None,
    loss: Loss | None = None,
    policy: PrecisionPolicy | str | None = None,
    config: FSDPConfig | None = None,
    device_type: str = "cuda",
) -> ModelProfile:
    """Profiles a model and one step of it on fake tensors: allocates no memory and computes nothing.

    Args:
        source: the model, with or without values, or a function that builds it.
        sample: a batch as a loader yields it, or a function of the batch size and sequence length that makes one. None:
            token ids of ``batch_size`` x ``seq_length``; without ``seq_length``, activations are not counted.
        batch_size: samples of one device's micro-batch.
        seq_length: tokens of a sample.
        loss: function of the model and a batch; None guesses one (see ``example_inputs.guessed_loss``).
        policy: the precision.
        config: options for finding the units (see ``FSDPConfig``).
        device_type: type of the devices, on which depends what autocast computes in fp32 and what norms keep.

    Raises:
        PlanError: the model cannot be built or copied, or the batch does not fit it.
    """
    policy = PrecisionPolicy.parse(policy)
    config = FSDPConfig() if config is None else config
    built = build(source)
    model = innermost(built.model)
    units = units_of(model, policy, config)
    names = ("", *sorted(units.inside_out))
    batch = _batch(model, sample, batch_size, seq_length)
    profiler = _Profiler(model, policy, units, names, device_type)
    notes = list(built.notes)
    timelines: Mapping[Variant, Timeline]
    if batch is None:
        notes.append("no batch was given, so activations are not counted")
        timelines = {variant: _EMPTY for variant in profiler.variants}
    else:
        if loss is None:
            notes.append("the loss was guessed from the model's output")
        timelines = {variant: profiler.timeline(variant, batch, loss or guessed_loss) for variant in profiler.variants}
    return ModelProfile(
        name=type(model).__name__,
        parameters=profiler.parameters,
        buffers=buffer_bytes(model, policy),
        inputs=0 if batch is None else batch.nbytes,
        units=names,
        blocks=tuple(names.index(name) for name in units.blocks),
        policy=policy,
        timelines=timelines,
        wide=tuple(names.index(name) for name in units.wide),
        notes=tuple(notes),
    )


def _batch(model: nn.Module, sample: Any, batch_size: int | None, seq_length: int | None) -> Batch | None:
    if isinstance(sample, Batch):
        return sample
    if callable(sample):
        return Batch(sample(batch_size or 1, seq_length), batch_size or 1, seq_length)
    if sample is not None:
        return Batch(sample)
    if seq_length is not None:
        return tokens(model, batch_size or 1, seq_length)
    if batch_size is not None:
        raise PlanError(
            f"batch_size={batch_size} alone does not say what {type(model).__name__} is called with; give seq_length "
            "for a language model, or a sample function"
        )
    return None


@final
class _Profiler:
    """Profiler of one model, precision and set of units, for all variants."""

    def __init__(
        self, model: nn.Module, policy: PrecisionPolicy, units: Units, names: tuple[str, ...], device_type: str
    ) -> None:
        self.model = model
        self.policy = policy
        self.units = units
        self.names = names
        self.device_type = device_type
        self.unit_of = {
            name: names.index(unit) for unit, group in parameters_of_units(model, units).items() for name in group
        }
        ignored = {id(parameter) for name in units.ignored for parameter in model.get_submodule(name).parameters()}
        self.parameters = tuple(
            ParameterFact(
                name,
                tuple(parameter.shape),
                stored_dtype(parameter, policy, sharded=True),
                parameter.requires_grad,
                self.unit_of.get(name, 0),
                sharded=parameter.dim() > 0 and id(parameter) not in ignored,
            )
            for name, parameter in named_parameters(model).items()
        )
        self.runs = [
            run for run in folding.foldable(model, units.blocks) if not any(self._has_units(block) for block in run)
        ]

    @property
    def variants(self) -> list[Variant]:
        """Variants that differ for this model and precision."""
        natives = [False, True] if self.policy.autocast else [False]
        checkpoints = [False, True] if self.units.blocks else [False]
        return [Variant(native, checkpoint) for native in natives for checkpoint in checkpoints]

    def timeline(self, variant: Variant, batch: Batch, loss: Loss) -> Timeline:
        """Traces the step in one variant: with few of the repeated blocks if possible, otherwise with all of them."""
        if self.runs:
            try:
                few = self._trace(variant, batch, loss, self.runs)
                return folding.unfold(few, self.names, self.runs)
            except Exception as error:
                # The model inspects its blocks, or the blocks differ. An error of the batch itself is raised again
                # below.
                _log.debug("repeated blocks are looked at one by one: %s: %s", type(error).__name__, error)
        return self._trace(variant, batch, loss, [])

    def _trace(self, variant: Variant, batch: Batch, loss: Loss, runs: list[list[str]]) -> Timeline:
        mode = private.FakeTensorMode(allow_non_fake_inputs=True)
        wide = {id(p) for name in self.units.wide for p in self.model.get_submodule(name).parameters()}
        compute = self.policy.compute if variant.native else None

        def dtype_of(parameter: nn.Parameter) -> torch.dtype:
            if compute is not None and parameter.is_floating_point() and id(parameter) not in wide:
                return compute
            return stored_dtype(parameter, self.policy, sharded=variant.native)

        copied = fake_copy(self.model, mode, dtype_of, self.policy)
        kept = {name: parameter for name, parameter in named_parameters(copied).items()}
        units = {index: copied.get_submodule(name) for index, name in enumerate(self.names) if index}
        unit_of = {id(parameter): self.unit_of.get(name, 0) for name, parameter in kept.items()}
        if variant.checkpointed:
            ActivationCheckpointing().apply(copied, self.units.blocks)
        folding.fold(copied, runs)
        gone = {name for run in runs for name in run[2:-1]}
        units = {index: module for index, module in units.items() if self.names[index] not in gone}
        callable_ = self._precise(copied, units, variant)
        units[0] = copied
        with mode:
            value = batch.fake(self.policy.compute if variant.native or self.policy.true else None)
            known = [*kept.values(), *copied.buffers(), *_leaves(value)]
        with autocast_lists_of(self.device_type), norms_of(self.device_type):
            return trace(
                copied, lambda: _explained(loss, callable_, value), units=units, unit_of=unit_of, known=known, fake=mode
            )

    def _precise(self, model: nn.Module, units: Mapping[int, nn.Module], variant: Variant) -> nn.Module:
        """Sets the copy's precision: autocast, or casts of each unit's inputs to its compute dtype."""
        if not variant.native:
            return autocast_module(model, self.policy, "cpu")
        compute, output = self.policy.compute, self.policy.output
        for index, module in units.items():
            if self.names[index] not in self.units.wide:
                call_within(module, None, inputs=compute)
        from accel_precision.convert import converter

        return call_within(model, None, inputs=compute, outputs=None if output is None else converter(output))

    def _has_units(self, block: str) -> bool:
        return any(name.startswith(f"{block}.") for name in self.names)


def _explained(loss: Loss, model: nn.Module, value: Any) -> torch.Tensor:
    """Computes the loss.

    Raises:
        PlanError: the batch does not fit the model, or the loss is not a scalar that requires a gradient.
    """
    try:
        result = loss(model, value)
    except (PlanError, folding.CannotFoldError):
        raise
    except Exception as error:
        shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in _leaves(value))
        text = (str(error).strip().splitlines() or [""])[0]
        raise PlanError(
            f"{type(model).__name__} cannot be run with a batch of {shapes or 'no tensors'} ({type(error).__name__}: "
            f"{text}); give a sample (and a loss) that fits it"
        ) from error
    if not isinstance(result, torch.Tensor) or result.numel() != 1 or not result.requires_grad:
        got = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise PlanError(f"the loss of {type(model).__name__} is {got}; expected one number that depends on parameters")
    return result


def _leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in private.leaves(value) if isinstance(leaf, torch.Tensor)]

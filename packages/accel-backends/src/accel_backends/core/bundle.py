"""Arguments of one ``prepare`` (models, optimizers, schedulers), and their checks."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from accel_backends.ops.fqn import innermost, named_parameters
from accel_backends.ops.state_dicts import foreign_parameters
from accel_state.errors import PrepareError


@final
@dataclass(frozen=True, slots=True)
class Bundle:
    """Models, optimizers and schedulers of one ``prepare``, for backends that need them together.

    Attributes:
        models: as the user built them; in the result of ``prepare``, the modules to call.
        optimizers: the user's own, whose parameters are those of the models.
        schedulers: of those optimizers; a backend with its own engine may replace them.
        place: for each model, whether it is moved to the session's device; empty: all are.
        training: False for models that are only evaluated, which need no synchronisation.
        batch_sizes: micro-batch size of each loader that is prepared in the same call and has one.
    """

    models: list[nn.Module]
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    place: tuple[bool, ...] = ()
    training: bool = True
    batch_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.place and len(self.place) != len(self.models):
            raise PrepareError(f"place has {len(self.place)} entries for {len(self.models)} models")

    @property
    def placed(self) -> tuple[bool, ...]:
        """``place`` with its default filled in."""
        return self.place or (True,) * len(self.models)


def check_bundle(
    bundle: Bundle, *, prepared: Collection[nn.Module], owned: Collection[int], meta_allowed: bool = False
) -> None:
    """Validates a bundle before it is prepared.

    Args:
        prepared: innermost modules of the models that this backend prepared before.
        owned: ids of the parameters of those models, which optimizers may hold too.
        meta_allowed: whether the backend initialises parameters on the meta device.

    Raises:
        PrepareError: a model given twice or prepared before, a model whose parameters are on several devices, or an
            optimizer with parameters of no prepared model.
    """
    seen: list[nn.Module] = []
    for position, model in enumerate(bundle.models):
        inner = innermost(model)
        kind = type(inner).__name__
        if any(inner is other for other in seen):
            raise PrepareError(
                f"model {position} ({kind}) was given to prepare twice; give it once and use what it returns"
            )
        if inner in prepared:
            raise PrepareError(
                f"this {kind} is prepared already; use the model that prepare returned, or release it first "
                "(free_memory)"
            )
        seen.append(inner)
        _check_devices(inner, meta_allowed)
    known = {id(parameter) for model in bundle.models for parameter in model.parameters()} | set(owned)
    for optimizer in bundle.optimizers:
        _check_optimizer(optimizer, known, bundle.models)


def _check_devices(model: nn.Module, meta_allowed: bool) -> None:
    if any(getattr(getattr(part, "_hf_hook", None), "offload", False) for part in model.modules()):
        raise PrepareError(
            f"weights of {type(model).__name__} are offloaded; call the model as it is, without prepare, or prepare it "
            "after remove_hook_from_submodules(model), which brings back the weights that it had in memory"
        )
    first: tuple[str, nn.Parameter] | None = None
    for name, parameter in named_parameters(model).items():
        if first is None:
            first = name, parameter
        elif parameter.device != first[1].device:
            raise PrepareError(
                f"parameters of {type(model).__name__} lie on several devices: {first[0]} on {first[1].device}, {name} "
                f"on {parameter.device}; move the full model to one device before preparing it"
            )
    if first is not None and first[1].is_meta and not meta_allowed:
        raise PrepareError(
            f"parameters of {type(model).__name__} are on the meta device, without values; give them values with "
            "load_checkpoint_in_model, or model.to_empty(device=...) and an initialisation or a loaded state, or use a "
            "backend that shards (fsdp)"
        )


def _check_optimizer(optimizer: Optimizer, known: Collection[int], models: Sequence[nn.Module]) -> None:
    foreign = foreign_parameters(optimizer, known)
    if not foreign:
        return
    kinds = ", ".join(type(model).__name__ for model in models) or "none"
    more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
    raise PrepareError(
        f"{type(optimizer).__name__} updates parameters of no prepared model: {', '.join(foreign[:3])}{more}; models "
        f"of this call: {kinds}. Prepare the model before or with its optimizer, and build the optimizer from that "
        "model's parameters(); put loose tensors into an nn.ParameterList and prepare it, too"
    )

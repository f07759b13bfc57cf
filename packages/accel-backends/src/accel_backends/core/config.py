"""Options of a backend, whose class selects the backend, and their resolution for one run."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

from accel_precision.options import KwargsHandler
from accel_state.errors import ConfigError, did_you_mean
from accel_state.parallelism.config import MESH_AXES, ParallelismConfig

if TYPE_CHECKING:
    from accel_backends.ops.activation_checkpointing import ActivationCheckpointing
    from accel_state.device.device import Device
    from accel_state.topology import Topology


@final
@dataclass(frozen=True, slots=True)
class Stated:
    """Value of a setting of the Accelerator, and where the value is written."""

    value: object
    origin: str


@final
@dataclass(frozen=True, slots=True)
class StrategyFacts:
    """Facts about a run that the options of its backend depend on; known before anything is opened.

    Attributes:
        topology: ranks of the run.
        device: device of this process.
        parallelism: requested degrees.
        open_axes: axes whose degree was not given, so that a backend's own options may set it.
        given: settings of the Accelerator that were given.
        plan: values that the planner chose for the options; None: it has not chosen (yet).
    """

    topology: "Topology"
    device: "Device"
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    open_axes: frozenset[str] = frozenset(MESH_AXES)
    given: Mapping[str, Stated] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None

    def agree(self, implied: Mapping[str, Stated]) -> None:
        """Compares settings that options imply with the given ones.

        Raises:
            ConfigError: two differ; names both origins.
        """
        for name, said in implied.items():
            own = self.given.get(name, said)
            if own.value != said.value:
                raise ConfigError(
                    f"{name} is {own.value!r} ({own.origin}), and {said.origin} says {said.value!r}; make them agree"
                )


@final
@dataclass(frozen=True, slots=True)
class Resolution:
    """Options as a run needs them, and what follows from them.

    Attributes:
        config: options to open the backend with; their class may be that of another backend.
        parallelism: degrees of all axes, whose product is the number of processes.
        implied: values that the options imply for the Accelerator's own settings, by name.
        reasons: why the options are not those that were given.
    """

    config: "BackendConfig"
    parallelism: ParallelismConfig
    implied: Mapping[str, Stated] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class FullStateForm:
    """Form of a full state dict: on the host or on the device, on rank 0 or on every rank."""

    offload_to_cpu: bool = True
    rank0_only: bool = True


@dataclass(slots=True)
class BackendConfig(KwargsHandler):
    """Base of the options of a backend.

    Attributes:
        backend: the backend's entry-point name.
        axes: axes of ``ParallelismConfig`` whose degrees the backend may raise above 1. Default: it replicates models.
        precedence: place among the installed backends that serve the requested axes, when no strategy is named: the
            lowest is chosen. None: the backend has to be named, or its options given.
        needs_ranks: the backend is of no use with one process, so that a script that passes these options runs in a
            single process without the backend.
    """

    backend: ClassVar[str] = ""
    axes: ClassVar[frozenset[str]] = frozenset({"dp_replicate"})
    precedence: ClassVar[int | None] = 100
    needs_ranks: ClassVar[bool] = False

    @property
    def bounds_experts(self) -> bool:
        """Whether the backend gives undivided experts the capacity of ``ParallelismConfig.ep_handler``. Default: no."""
        return False

    @property
    def recomputed(self) -> "ActivationCheckpointing | None":
        """Activations that backward recomputes where the run says nothing; None: none. Default: none."""
        return None

    @classmethod
    def build(
        cls, values: "Self | Mapping[str, Any] | None" = None, *, sources: Mapping[str, str] | None = None
    ) -> Self:
        """Returns ``values`` if they are such options already; otherwise builds the options from a mapping.

        ``sources``: origins of the values by name, for options that tell them in messages.

        Raises:
            ConfigError: options of another backend, or an unknown field, with the nearest known one.
        """
        if values is None:
            return cls()
        if isinstance(values, cls):
            return values
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"options of type {type(values).__name__}; expected {cls.__name__} or a mapping of its fields"
            )
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                hint = did_you_mean(str(name), known)
                raise ConfigError(f"{cls.__name__} has no field {name!r}; fields: {', '.join(known) or 'none'}{hint}")
        return cls(**values)

    @classmethod
    def several(cls, plugins: Mapping[str, Any]) -> Self:
        """Returns the first of several options by name, each of which applies while it is selected.

        Default: a run has one.

        Raises:
            ConfigError: the backend keeps the options that it was opened with, or ``plugins`` is empty.
        """
        raise ConfigError(f"{cls.__name__} by name: {', '.join(plugins)}; a run of {cls.backend!r} has one of them")

    @classmethod
    def serves(cls, axes: Collection[str]) -> bool:
        """Whether the backend serves all of ``axes`` together. Default: ``axes`` of the class has each of them."""
        return cls.axes.issuperset(axes)

    @property
    def planned(self) -> bool:
        """Whether the planner completes these options when the first model is prepared. Default: no value is open."""
        return False

    def resolve(self, facts: StrategyFacts) -> Resolution:
        """Returns these options as the run needs them; pure, so neither the options nor the facts change.

        Default: these options, and the requested degrees; ranks without a degree are replicas.

        Raises:
            ConfigError: an option contradicts a fact, with both origins, or has no equivalent on the run's devices.
            TopologyError: the product of the degrees is not the number of processes.
        """
        if facts.plan is not None:
            raise ConfigError(f"{type(self).__name__} leaves the planner nothing to choose; name it as the strategy")
        return Resolution(self, facts.parallelism.fitted(facts.topology.world_size))

    @property
    def state_form(self) -> FullStateForm | None:
        """Form of full model state dicts. Default: None, every rank has full tensors, or has DTensors."""
        return None

    @property
    def optimizer_state_form(self) -> FullStateForm | None:
        """Form of full optimizer state dicts. Default: as ``state_form``."""
        return None


@dataclass(slots=True)
class SingleConfig(BackendConfig):
    """Options of training on one device: none."""

    backend: ClassVar[str] = "single"
    axes: ClassVar[frozenset[str]] = frozenset()

    @property
    def bounds_experts(self) -> bool:
        """Whether undivided experts get their capacity: always."""
        return True

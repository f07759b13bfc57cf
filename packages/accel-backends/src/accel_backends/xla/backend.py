"""Backend for TPUs and other devices of torch_xla: one process drives all devices of its host (SPMD).

The compiler splits the work over the devices. On several hosts of a pod every process runs the same program for all
devices of the pod; only batches differ from host to host.

Computations are recorded and run when a step ends. Steps therefore have to look alike: a new shape means a new
compilation, which takes seconds. Sources: torch_xla's documentation of PyTorch/XLA SPMD, and GSPMD (arXiv:2105.04663)
for the partitioning of a program with marked tensors.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.core.bundle import Bundle
from accel_backends.core.capabilities import Capabilities
from accel_backends.core.config import BackendConfig
from accel_backends.core.module_backend import ModuleBackend
from accel_backends.core.run import Run
from accel_backends.xla.compilations import CompilationWatch
from accel_backends.xla.config import XLAConfig
from accel_backends.xla.gradients import XLAGradients
from accel_backends.xla.mesh import open_mesh, shard_rows
from accel_backends.xla.recording import run_recorded
from accel_backends.xla.states import XLAStates, shard_parameters
from accel_state.errors import BackendError

if TYPE_CHECKING:
    from accel_state.topology import Topology


@final
class XLABackend(ModuleBackend):
    """One process drives all XLA devices of a host; each batch is split into one part per device.

    The batches of a step on all hosts form one tensor: losses, norms and gathered tensors are those of the global
    batch, and no collective is called explicitly. Objects outside XLA are exchanged over the session's process group.

    Raises:
        BackendError: there are no XLA devices; the processes are not exactly one for each host that the runtime
            connects; or gradients were computed before torch_xla was imported.

    Attributes:
        watch: counts compilations, and reports late ones.
    """

    name: ClassVar[str] = "xla"
    Config: ClassVar[type[BackendConfig]] = XLAConfig
    capabilities: ClassVar[Capabilities] = Capabilities(
        device_types=frozenset({"xla"}),
        precisions=frozenset({"no", "bf16", "bf16-true", "fp32-true", "fp64-true"}),
        uneven_inputs=True,
        not_alone_because="XLA connects the machines by itself",
        instead_of_recomputing="call torch_xla.utils.checkpoint.checkpoint in the forward of the model's blocks",
    )
    distributed_type: ClassVar[str] = "XLA"

    def __init__(self, run: Run, config: BackendConfig | None = None) -> None:
        session = run.session
        if session.device.type != "xla":
            raise BackendError(
                f"backend {self.name!r} needs XLA devices, and this is {session.device}: {_how_to_get()}"
            )
        session.device.load_collectives()
        check_hosts(count_hosts(), session.topology)
        open_mesh(session.group)
        check_gradients(session.device.torch)
        super().__init__(run, config)
        self.watch = CompilationWatch(cast(XLAConfig, self.config).quiet_steps)
        self._micro_batch = _MicroBatch(self.watch, run_recorded)
        self.gradients = XLAGradients(self)
        self.states = XLAStates(self)

    @property
    def num_devices(self) -> int:
        """Number of devices over which a batch is split."""
        return int(open_mesh().size())

    # Preparing

    def bind(self, bundle: Bundle) -> Bundle:
        """As every backend; afterwards runs the recorded copies, so that no step's computation contains them."""
        bundle = super().bind(bundle)
        run_recorded()
        return bundle

    def place(self, model: nn.Module) -> nn.Module:
        """Moves a model to the devices with the first host's values, replicated or sharded as the options say."""
        if self.session.world_size > 1:
            self._take_first(model)
        tied = _places(model)
        model = model.to(self.device)
        for (module, name), *others in tied:
            for other, alias in others:
                setattr(other, alias, getattr(module, name))
        shard_parameters(model, cast(XLAConfig, self.config))
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        """Returns the model itself."""
        return model

    def _take_first(self, model: nn.Module) -> None:
        """Broadcasts the first host's parameters and buffers, because every host sends its own to its devices."""
        own = {id(one): one.detach() for one in (*model.parameters(), *model.buffers())}
        self.session.broadcast([one for one in own.values() if one.device.type == "cpu"])

    # A step

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context of a micro-batch without optimizer step: runs the recorded computations on exit."""
        return self._micro_batch

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Updates parameters, ends the recording of the step and runs it."""
        taken = super().step(optimizer, closure)
        self.watch.end_step(run_recorded)
        return taken


@final
class _MicroBatch:
    """Context of a micro-batch that no optimizer step follows yet."""

    def __init__(self, watch: CompilationWatch, end: Callable[[], None]) -> None:
        self._watch, self._end = watch, end

    def __enter__(self) -> None:
        """Does nothing: computations are always recorded."""

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self._watch.end_micro_batch(self._end)


def _how_to_get() -> str:
    """Returns advice for a process without XLA devices."""
    if find_spec("torch_xla") is None:
        return "install torch_xla, the one made for your torch (pip install torch==2.9.0 torch_xla==2.9.0)"
    return "set PJRT_DEVICE to TPU (or to CPU, to try it), and do not ask for the CPU"


def count_hosts() -> int:
    """Returns the number of hosts that the runtime connects: 1, or those of a pod."""
    import torch_xla.runtime as runtime

    return int(runtime.process_count())


def check_hosts(hosts: int, topology: "Topology") -> None:
    """Raises BackendError unless there is exactly one process for each host that the runtime connects."""
    started = topology.world_size
    if hosts == started == topology.num_nodes:
        return
    if started == 1:
        raise BackendError(
            f"this is one of {hosts} machines of a pod, and was started alone: it would train on all batches as if it "
            "had all devices; start it on each of them (accel launch --tpu there, or --tpu_cluster from elsewhere)"
        )
    raise BackendError(
        f"{started} processes were started on {topology.num_nodes} machine(s), and XLA's runtime connects {hosts} "
        "machine(s): one process on each drives all its devices, so start as many"
    )


def check_gradients(device: torch.device) -> None:
    """Raises BackendError if torch initialised autograd's device threads before torch_xla was imported."""
    probe = torch.zeros((), device=device, requires_grad=True)
    try:
        probe.neg().backward()
    except RuntimeError as error:
        raise BackendError(
            "gradients were computed in this process before torch_xla was imported, and torch looks for devices only "
            "once, at the first backward: make the Accelerator, or import torch_xla, before that"
        ) from error


def shard_batch(batch: Any) -> Any:
    """Shards the rows of every tensor of a batch over the devices; for batches that no prepared loader made."""
    from accel_state.pytree.operations import map_leaves

    return map_leaves(lambda leaf: shard_rows(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)


def _places(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Lists the places of each tied parameter, because moving to XLA makes a new parameter in each place."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [group for group in places.values() if len(group) > 1]

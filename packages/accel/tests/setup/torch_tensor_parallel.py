"""A backend as another package adds it: this file, and an entry point ``accel.backends`` that names its class.

Pairs of linear layers are split over neighbouring ranks by ``torch.distributed.tensor.parallel``: the first by columns,
the second by rows, so that activations are summed once for each pair. A last layer without a partner is replicated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from accel_backends import BackendConfig, Bundle, Capabilities, ModuleBackend, ReplicatedLayout, Run
from accel_state import PrepareError


@final
@dataclass(slots=True)
class TensorParallelConfig(BackendConfig):
    """Options of tensor parallelism: none beside the degree, which is ``ParallelismConfig.tp_size``."""

    backend: ClassVar[str] = "torch_tp"
    axes: ClassVar[frozenset[str]] = frozenset({"tp"})


@final
class TensorParallelLayout(ReplicatedLayout):
    """One replica, of which all ranks of the tensor-parallel group compute a part on the same samples."""

    @property
    def degrees(self) -> tuple[int, int]:
        """Number of replicas and shard degree: parameters are split by layers, not over data-parallel ranks."""
        return 1, 1

    @property
    def shared_degrees(self) -> Mapping[str, int]:
        """Size of the tensor-parallel group."""
        return {"tp": self.run.parallelism.size("tp")}

    @property
    def rng_seed_rank(self) -> int:
        """First rank of this rank's tensor-parallel group."""
        return self.run.session.rank - self.run.parallelism.coordinates(self.run.session.rank)["tp"]


@final
class TensorParallelBackend(ModuleBackend):
    """Splits the linear layers of a sequential model over the ranks of the ``tp`` axis."""

    name: ClassVar[str] = "torch_tp"
    Config: ClassVar[type[BackendConfig]] = TensorParallelConfig
    capabilities: ClassVar[Capabilities] = Capabilities(
        precisions=frozenset({"no", "fp32-true", "fp64-true"}), ranks=(2, None), sharded=True
    )

    def __init__(self, run: Run, config: BackendConfig | None = None) -> None:
        super().__init__(run, config)
        self.layout = TensorParallelLayout(run)

    def check(self, bundle: Bundle) -> None:
        """Refuses models whose layers do not divide into columns and rows."""
        size = self.run.parallelism.size("tp")
        for model in bundle.models:
            for name in _pairs(model)[::2]:
                columns = model.get_submodule(name).out_features
                if columns % size:
                    raise PrepareError(f"layer {name} has {columns} columns, which {size} ranks do not divide")

    def wrap(self, model: nn.Module) -> nn.Module:
        """Splits the layers in place; rank 0's values count."""
        mesh = self.run.parallelism.get_device_mesh(self.session.device.type)
        plan = {name: RowwiseParallel() if place % 2 else ColwiseParallel() for place, name in enumerate(_pairs(model))}
        return parallelize_module(model, mesh["tp"], plan)


def _pairs(model: nn.Module) -> list[str]:
    """Names of the linear layers that have a partner: columns, rows, columns, rows, ..."""
    layers = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    return layers[: len(layers) // 2 * 2]

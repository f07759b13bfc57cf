"""Backend for one process and one device."""

from typing import ClassVar, final

from torch import nn

from accel_backends.core.capabilities import Capabilities
from accel_backends.core.config import BackendConfig, SingleConfig
from accel_backends.core.module_backend import ModuleBackend


@final
class SingleBackend(ModuleBackend):
    """Trains on one device: the defaults of ``Backend``, without a wrapper."""

    name: ClassVar[str] = "single"
    Config: ClassVar[type[BackendConfig]] = SingleConfig
    capabilities: ClassVar[Capabilities] = Capabilities(ranks=(1, 1), uneven_inputs=True, loads_in_place=True)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Returns the model itself."""
        return model

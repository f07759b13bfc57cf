"""One object around your PyTorch training loop: from one CPU to a cluster.

    from accel import Accelerator

Names are imported on first use, so that ``import accel`` costs next to nothing and touches no device.
"""

from typing import TYPE_CHECKING

from accel._version import __version__ as __version__
from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel.accelerator import Accelerator as Accelerator
    from accel.clock import GradientAccumulationPlugin as GradientAccumulationPlugin
    from accel.clock import StepClock as StepClock
    from accel.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accel.handlers import ProjectConfiguration as ProjectConfiguration
    from accel.launchers import debug_launcher as debug_launcher
    from accel.launchers import notebook_launcher as notebook_launcher
    from accel.local_sgd import LocalSGD as LocalSGD
    from accel.optimizer import PreparedOptimizer as PreparedOptimizer
    from accel.profiling import ProfileKwargs as ProfileKwargs
    from accel.scheduler import PreparedScheduler as PreparedScheduler
    from accel.state import PartialState as PartialState
    from accel_backends import DDPCommunicationHookType as DDPCommunicationHookType
    from accel_backends import DeepSpeedPlugin as DeepSpeedPlugin
    from accel_backends import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from accel_backends import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from accel_backends import TorchDynamoPlugin as TorchDynamoPlugin
    from accel_data import LoaderOptions as DataLoaderConfiguration  # noqa: F401
    from accel_data import skip_first_batches as skip_first_batches
    from accel_precision import AutocastKwargs as AutocastKwargs
    from accel_precision import GradScalerKwargs as GradScalerKwargs
    from accel_precision import PrecisionPolicy as PrecisionPolicy
    from accel_state import AccelError as AccelError
    from accel_state import DistributedType as DistributedType
    from accel_state import ParallelismConfig as ParallelismConfig
    from accel_state import find_executable_batch_size as find_executable_batch_size
    from accel_state import synchronize_rng_states as synchronize_rng_states
    from accel_state.imports import is_rich_available as is_rich_available

_EXPORTS = {
    "accel.accelerator": ("Accelerator",),
    "accel.clock": ("GradientAccumulationPlugin", "StepClock"),
    "accel.handlers": ("InitProcessGroupKwargs", "ProjectConfiguration"),
    "accel.launchers": ("debug_launcher", "notebook_launcher"),
    "accel.local_sgd": ("LocalSGD",),
    "accel.optimizer": ("PreparedOptimizer",),
    "accel.profiling": ("ProfileKwargs",),
    "accel.scheduler": ("PreparedScheduler",),
    "accel.state": ("PartialState",),
    "accel_backends": (
        "DDPCommunicationHookType",
        "DeepSpeedPlugin",
        "DistributedDataParallelKwargs",
        "FullyShardedDataParallelPlugin",
        "TorchDynamoPlugin",
    ),
    "accel_data": ("skip_first_batches",),
    "accel_precision": ("AutocastKwargs", "GradScalerKwargs", "PrecisionPolicy"),
    "accel_state": (
        "AccelError",
        "DistributedType",
        "ParallelismConfig",
        "find_executable_batch_size",
        "synchronize_rng_states",
    ),
    "accel_state.imports": ("is_rich_available",),
}
_PLACE_OF = {name: module for module, names in _EXPORTS.items() for name in names}
_PLACE_OF["DataLoaderConfiguration"] = "accel_data:LoaderOptions"
# Reachable as attributes without an import of their own, as users of these names are used to.
_SUBMODULES = (
    *("data_loader", "launchers", "logging", "optimizer", "parallelism_config"),
    *("scheduler", "state", "tracking", "utils"),
)
__all__ = sorted([*_PLACE_OF, "__version__"])

__getattr__, __dir__ = lazy_names(
    __name__, {**_PLACE_OF, **{name: f".{name}:" for name in _SUBMODULES}}, advice="accel.absent"
)

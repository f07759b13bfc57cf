"""Where a process sits, on which device, and how it talks to the others.

Names are imported on first use, so that ``import accel_state`` costs next to nothing and touches no device.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from accel_state._version import __version__ as __version__

if TYPE_CHECKING:
    from accel_state.device import DEVICE_KINDS as DEVICE_KINDS
    from accel_state.device import Device as Device
    from accel_state.device import DeviceKind as DeviceKind
    from accel_state.device import DeviceMemory as DeviceMemory
    from accel_state.device import count_devices as count_devices
    from accel_state.errors import AccelError as AccelError
    from accel_state.errors import BackendError as BackendError
    from accel_state.errors import CheckpointCorruptError as CheckpointCorruptError
    from accel_state.errors import CheckpointError as CheckpointError
    from accel_state.errors import CheckpointMismatchError as CheckpointMismatchError
    from accel_state.errors import CollectiveError as CollectiveError
    from accel_state.errors import CollectiveMismatchError as CollectiveMismatchError
    from accel_state.errors import ConfigError as ConfigError
    from accel_state.errors import DataError as DataError
    from accel_state.errors import DataStateError as DataStateError
    from accel_state.errors import LaunchError as LaunchError
    from accel_state.errors import PrepareError as PrepareError
    from accel_state.errors import SessionError as SessionError
    from accel_state.errors import TopologyError as TopologyError
    from accel_state.session import Session as Session
    from accel_state.topology import ClusterReader as ClusterReader
    from accel_state.topology import Topology as Topology


_EXPORTS = {
    "accel_state.errors": (
        "AccelError",
        "BackendError",
        "CheckpointCorruptError",
        "CheckpointError",
        "CheckpointMismatchError",
        "CollectiveError",
        "CollectiveMismatchError",
        "ConfigError",
        "DataError",
        "DataStateError",
        "LaunchError",
        "PrepareError",
        "SessionError",
        "TopologyError",
    ),
    "accel_state.device": (
        "DEVICE_KINDS",
        "Device",
        "DeviceKind",
        "DeviceMemory",
        "count_devices",
    ),
    "accel_state.session": ("Session",),
    "accel_state.topology": (
        "ClusterReader",
        "Topology",
    ),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted([*_MODULE_OF, "__version__"])


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__

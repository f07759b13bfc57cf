"""Where a process sits, on which device, and how it talks to the others.

Names are imported on first use, so that ``import accel_state`` costs next to nothing and touches no device.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from accel_state._version import __version__ as __version__

if TYPE_CHECKING:
    from accel_state.casting import ConvertOutputsToFp32 as ConvertOutputsToFp32
    from accel_state.casting import convert_outputs_to_fp32 as convert_outputs_to_fp32
    from accel_state.collectives import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
    from accel_state.collectives import agree as agree
    from accel_state.collectives import all_gather_object as all_gather_object
    from accel_state.collectives import broadcast as broadcast
    from accel_state.collectives import broadcast_object_list as broadcast_object_list
    from accel_state.collectives import gather as gather
    from accel_state.collectives import gather_object as gather_object
    from accel_state.collectives import pad_across_processes as pad_across_processes
    from accel_state.collectives import pad_input_tensors as pad_input_tensors
    from accel_state.collectives import reduce as reduce
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
    from accel_state.nested import Structure as Structure
    from accel_state.nested import TensorInformation as TensorInformation
    from accel_state.nested import concatenate as concatenate
    from accel_state.nested import convert_to_fp32 as convert_to_fp32
    from accel_state.nested import find_batch_size as find_batch_size
    from accel_state.nested import find_device as find_device
    from accel_state.nested import first_tensor as first_tensor
    from accel_state.nested import flatten as flatten
    from accel_state.nested import get_data_structure as get_data_structure
    from accel_state.nested import get_shape as get_shape
    from accel_state.nested import honor_type as honor_type
    from accel_state.nested import ignorant_find_batch_size as ignorant_find_batch_size
    from accel_state.nested import initialize_tensors as initialize_tensors
    from accel_state.nested import is_container as is_container
    from accel_state.nested import is_namedtuple as is_namedtuple
    from accel_state.nested import is_tensor_information as is_tensor_information
    from accel_state.nested import is_torch_tensor as is_torch_tensor
    from accel_state.nested import listify as listify
    from accel_state.nested import map_leaves as map_leaves
    from accel_state.nested import recursively_apply as recursively_apply
    from accel_state.nested import send_to_device as send_to_device
    from accel_state.nested import slice_tensors as slice_tensors
    from accel_state.nested import unflatten as unflatten
    from accel_state.nested import walk as walk
    from accel_state.session import Session as Session
    from accel_state.topology import ClusterReader as ClusterReader
    from accel_state.topology import Topology as Topology


_EXPORTS = {
    "accel_state.casting": (
        "ConvertOutputsToFp32",
        "convert_outputs_to_fp32",
    ),
    "accel_state.collectives": (
        "CannotPadNestedTensorWarning",
        "agree",
        "all_gather_object",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "pad_across_processes",
        "pad_input_tensors",
        "reduce",
    ),
    "accel_state.nested": (
        "Structure",
        "TensorInformation",
        "concatenate",
        "convert_to_fp32",
        "find_batch_size",
        "find_device",
        "first_tensor",
        "flatten",
        "get_data_structure",
        "get_shape",
        "honor_type",
        "ignorant_find_batch_size",
        "initialize_tensors",
        "is_container",
        "is_namedtuple",
        "is_tensor_information",
        "is_torch_tensor",
        "listify",
        "map_leaves",
        "recursively_apply",
        "send_to_device",
        "slice_tensors",
        "unflatten",
        "walk",
    ),
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

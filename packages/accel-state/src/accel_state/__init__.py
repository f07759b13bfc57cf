"""The place of a process among the processes of a run, its device, and its collectives.

Names are imported on first use, so that ``import accel_state`` costs next to nothing and touches no device.
"""

from typing import TYPE_CHECKING

from accel_state._version import __version__ as __version__
from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel_state.casting import ConvertOutputsToFp32 as ConvertOutputsToFp32
    from accel_state.casting import convert_outputs_to_fp32 as convert_outputs_to_fp32
    from accel_state.collectives import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
    from accel_state.collectives import agree as agree
    from accel_state.collectives import all_gather_object as all_gather_object
    from accel_state.collectives import broadcast as broadcast
    from accel_state.collectives import broadcast_object_list as broadcast_object_list
    from accel_state.collectives import copy_tensor_to_devices as copy_tensor_to_devices
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
    from accel_state.enums import BaseEnum as BaseEnum
    from accel_state.enums import ComputeEnvironment as ComputeEnvironment
    from accel_state.enums import CustomDtype as CustomDtype
    from accel_state.enums import DDPCommunicationHookType as DDPCommunicationHookType
    from accel_state.enums import DistributedType as DistributedType
    from accel_state.enums import DynamoBackend as DynamoBackend
    from accel_state.enums import FP8BackendType as FP8BackendType
    from accel_state.enums import LoggerType as LoggerType
    from accel_state.enums import PrecisionType as PrecisionType
    from accel_state.enums import RNGType as RNGType
    from accel_state.enums import SageMakerDistributedType as SageMakerDistributedType
    from accel_state.environment import CPUInformation as CPUInformation
    from accel_state.environment import are_libraries_initialized as are_libraries_initialized
    from accel_state.environment import clear_environment as clear_environment
    from accel_state.environment import convert_dict_to_env_variables as convert_dict_to_env_variables
    from accel_state.environment import get_cpu_distributed_information as get_cpu_distributed_information
    from accel_state.environment import get_current_device_type as get_current_device_type
    from accel_state.environment import get_int_from_env as get_int_from_env
    from accel_state.environment import parse_choice_from_env as parse_choice_from_env
    from accel_state.environment import parse_flag_from_env as parse_flag_from_env
    from accel_state.environment import patch_environment as patch_environment
    from accel_state.environment import purge_accelerate_environment as purge_accelerate_environment
    from accel_state.environment import str_to_bool as str_to_bool
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
    from accel_state.hardware import check_cuda_fp8_capability as check_cuda_fp8_capability
    from accel_state.hardware import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
    from accel_state.hardware import get_driver_version as get_driver_version
    from accel_state.hardware import get_gpu_info as get_gpu_info
    from accel_state.hardware import override_numa_affinity as override_numa_affinity
    from accel_state.hardware import set_numa_affinity as set_numa_affinity
    from accel_state.logging import MultiProcessAdapter as MultiProcessAdapter
    from accel_state.logging import get_logger as get_logger
    from accel_state.memory import clear_device_cache as clear_device_cache
    from accel_state.memory import find_executable_batch_size as find_executable_batch_size
    from accel_state.memory import release_memory as release_memory
    from accel_state.memory import should_reduce_batch_size as should_reduce_batch_size
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
    from accel_state.parallel_options import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
    from accel_state.parallel_options import TorchContextParallelConfig as TorchContextParallelConfig
    from accel_state.parallel_options import TorchTensorParallelConfig as TorchTensorParallelConfig
    from accel_state.parallelism import MESH_AXES as MESH_AXES
    from accel_state.parallelism import DataShard as DataShard
    from accel_state.parallelism import ParallelismConfig as ParallelismConfig
    from accel_state.progress import tqdm as tqdm
    from accel_state.rng import Determinism as Determinism
    from accel_state.rng import derive_seed as derive_seed
    from accel_state.rng import rng_state as rng_state
    from accel_state.rng import set_deterministic as set_deterministic
    from accel_state.rng import set_rng_state as set_rng_state
    from accel_state.rng import set_seed as set_seed
    from accel_state.rng import synchronize_rng_state as synchronize_rng_state
    from accel_state.rng import synchronize_rng_states as synchronize_rng_states
    from accel_state.session import Session as Session
    from accel_state.session import current_topology as current_topology
    from accel_state.topology import ClusterReader as ClusterReader
    from accel_state.topology import Topology as Topology
    from accel_state.verify import verify_collective as verify_collective
    from accel_state.versions import Version as Version
    from accel_state.versions import compare_versions as compare_versions
    from accel_state.versions import installed_version as installed_version
    from accel_state.versions import is_torch_version as is_torch_version


_EXPORTS = {
    "accel_state.rng": (
        "Determinism",
        "derive_seed",
        "rng_state",
        "set_deterministic",
        "set_rng_state",
        "set_seed",
        "synchronize_rng_state",
        "synchronize_rng_states",
    ),
    "accel_state.verify": ("verify_collective",),
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
        "copy_tensor_to_devices",
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
    "accel_state.session": ("Session", "current_topology"),
    "accel_state.topology": (
        "ClusterReader",
        "Topology",
    ),
    "accel_state.enums": (
        "BaseEnum",
        "ComputeEnvironment",
        "CustomDtype",
        "DDPCommunicationHookType",
        "DistributedType",
        "DynamoBackend",
        "FP8BackendType",
        "LoggerType",
        "PrecisionType",
        "RNGType",
        "SageMakerDistributedType",
    ),
    "accel_state.environment": (
        "CPUInformation",
        "are_libraries_initialized",
        "clear_environment",
        "convert_dict_to_env_variables",
        "get_cpu_distributed_information",
        "get_current_device_type",
        "get_int_from_env",
        "parse_choice_from_env",
        "parse_flag_from_env",
        "patch_environment",
        "purge_accelerate_environment",
        "str_to_bool",
    ),
    "accel_state.hardware": (
        "check_cuda_fp8_capability",
        "check_cuda_p2p_ib_support",
        "get_driver_version",
        "get_gpu_info",
        "override_numa_affinity",
        "set_numa_affinity",
    ),
    "accel_state.logging": (
        "MultiProcessAdapter",
        "get_logger",
    ),
    "accel_state.memory": (
        "clear_device_cache",
        "find_executable_batch_size",
        "release_memory",
        "should_reduce_batch_size",
    ),
    "accel_state.parallel_options": (
        "DeepSpeedSequenceParallelConfig",
        "TorchContextParallelConfig",
        "TorchTensorParallelConfig",
    ),
    "accel_state.parallelism": (
        "MESH_AXES",
        "DataShard",
        "ParallelismConfig",
    ),
    "accel_state.progress": ("tqdm",),
    "accel_state.versions": (
        "Version",
        "compare_versions",
        "installed_version",
        "is_torch_version",
    ),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted([*_MODULE_OF, "__version__"])
__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)

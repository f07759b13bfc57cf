"""Collectives and nested structures."""

from accel_state.collectives.tensors import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from accel_state.collectives.tensors import broadcast as broadcast
from accel_state.collectives.tensors import broadcast_object_list as broadcast_object_list
from accel_state.collectives.tensors import copy_tensor_to_devices as copy_tensor_to_devices
from accel_state.collectives.tensors import gather as gather
from accel_state.collectives.tensors import gather_object as gather_object
from accel_state.collectives.tensors import pad_across_processes as pad_across_processes
from accel_state.collectives.tensors import pad_input_tensors as pad_input_tensors
from accel_state.collectives.tensors import reduce as reduce
from accel_state.errors import CollectiveMismatchError as CollectiveMismatchError
from accel_state.pytree.casting import ConvertOutputsToFp32 as ConvertOutputsToFp32
from accel_state.pytree.casting import convert_outputs_to_fp32 as convert_outputs_to_fp32
from accel_state.pytree.operations import TensorInformation as TensorInformation
from accel_state.pytree.operations import concatenate as concatenate
from accel_state.pytree.operations import convert_to_fp32 as convert_to_fp32
from accel_state.pytree.operations import find_batch_size as find_batch_size
from accel_state.pytree.operations import find_device as find_device
from accel_state.pytree.operations import get_data_structure as get_data_structure
from accel_state.pytree.operations import get_shape as get_shape
from accel_state.pytree.operations import honor_type as honor_type
from accel_state.pytree.operations import ignorant_find_batch_size as ignorant_find_batch_size
from accel_state.pytree.operations import initialize_tensors as initialize_tensors
from accel_state.pytree.operations import is_namedtuple as is_namedtuple
from accel_state.pytree.operations import is_tensor_information as is_tensor_information
from accel_state.pytree.operations import is_torch_tensor as is_torch_tensor
from accel_state.pytree.operations import listify as listify
from accel_state.pytree.operations import recursively_apply as recursively_apply
from accel_state.pytree.operations import send_to_device as send_to_device
from accel_state.pytree.operations import slice_tensors as slice_tensors

DistributedOperationException = CollectiveMismatchError

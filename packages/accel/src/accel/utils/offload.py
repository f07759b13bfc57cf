"""Offload folders, under Accelerate's import path."""

from accel_inference import OffloadedWeightsLoader as OffloadedWeightsLoader
from accel_inference import PrefixedDataset as PrefixedDataset
from accel_inference import extract_submodules_state_dict as extract_submodules_state_dict
from accel_inference import load_offloaded_weight as load_offloaded_weight
from accel_inference import offload_state_dict as offload_state_dict
from accel_inference import offload_weight as offload_weight
from accel_inference import save_offload_index as save_offload_index

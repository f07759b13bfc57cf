from accel_megatron._version import __version__ as __version__
from accel_megatron.backend import MegatronBackend as MegatronBackend
from accel_megatron.config import MegatronConfig as MegatronConfig
from accel_megatron.config import MegatronLMPlugin as MegatronLMPlugin
from accel_megatron.conversion.state import from_megatron as from_megatron
from accel_megatron.conversion.state import to_megatron as to_megatron
from accel_megatron.families.replicas import (
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
from accel_megatron.families.replicas import gather_across_data_parallel_groups as gather_across_data_parallel_groups
from accel_megatron.families.steps import AbstractTrainStep as AbstractTrainStep
from accel_megatron.families.steps import BertTrainStep as BertTrainStep
from accel_megatron.families.steps import GPTTrainStep as GPTTrainStep
from accel_megatron.families.steps import T5TrainStep as T5TrainStep
from accel_megatron.families.steps import TrainStepArguments as TrainStepArguments
from accel_megatron.training.datasets import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from accel_megatron.training.folders import load_folder as load_folder
from accel_megatron.training.folders import save_folder as save_folder

"""Helpers under the names of ``accelerate.utils``; each is imported on first use."""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel.utils.constants import BETA_CP_AVAILABLE_PYTORCH_VERSION as BETA_CP_AVAILABLE_PYTORCH_VERSION
    from accel.utils.constants import BETA_SP_AVAILABLE_DEEPSPEED_VERSION as BETA_SP_AVAILABLE_DEEPSPEED_VERSION
    from accel.utils.constants import BETA_TP_AVAILABLE_PYTORCH_VERSION as BETA_TP_AVAILABLE_PYTORCH_VERSION
    from accel.utils.constants import BETA_TP_AVAILABLE_TRANSFORMERS_VERSION as BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
    from accel.utils.constants import CUDA_DISTRIBUTED_TYPES as CUDA_DISTRIBUTED_TYPES
    from accel.utils.constants import DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS
    from accel.utils.constants import DTENSOR_PYTORCH_VERSION as DTENSOR_PYTORCH_VERSION
    from accel.utils.constants import (
        ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION as ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION,
    )
    from accel.utils.constants import FSDP2_PYTORCH_VERSION as FSDP2_PYTORCH_VERSION
    from accel.utils.constants import FSDP2_STATE_DICT_TYPE as FSDP2_STATE_DICT_TYPE
    from accel.utils.constants import FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY
    from accel.utils.constants import FSDP_BACKWARD_PREFETCH as FSDP_BACKWARD_PREFETCH
    from accel.utils.constants import FSDP_MODEL_NAME as FSDP_MODEL_NAME
    from accel.utils.constants import FSDP_PYTORCH_VERSION as FSDP_PYTORCH_VERSION
    from accel.utils.constants import FSDP_SHARDING_STRATEGY as FSDP_SHARDING_STRATEGY
    from accel.utils.constants import FSDP_STATE_DICT_TYPE as FSDP_STATE_DICT_TYPE
    from accel.utils.constants import (
        MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
    )
    from accel.utils.constants import MODEL_NAME as MODEL_NAME
    from accel.utils.constants import OPTIMIZER_NAME as OPTIMIZER_NAME
    from accel.utils.constants import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME
    from accel.utils.constants import RNG_STATE_NAME as RNG_STATE_NAME
    from accel.utils.constants import SAFE_MODEL_NAME as SAFE_MODEL_NAME
    from accel.utils.constants import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
    from accel.utils.constants import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
    from accel.utils.constants import SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
    from accel.utils.constants import SAGEMAKER_PARALLEL_EC2_INSTANCES as SAGEMAKER_PARALLEL_EC2_INSTANCES
    from accel.utils.constants import SAGEMAKER_PYTHON_VERSION as SAGEMAKER_PYTHON_VERSION
    from accel.utils.constants import SAGEMAKER_PYTORCH_VERSION as SAGEMAKER_PYTORCH_VERSION
    from accel.utils.constants import SAGEMAKER_TRANSFORMERS_VERSION as SAGEMAKER_TRANSFORMERS_VERSION
    from accel.utils.constants import SAMPLER_NAME as SAMPLER_NAME
    from accel.utils.constants import SCALER_NAME as SCALER_NAME
    from accel.utils.constants import SCHEDULER_NAME as SCHEDULER_NAME
    from accel.utils.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
    from accel.utils.constants import TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES
    from accel.utils.constants import TORCH_DYNAMO_MODES as TORCH_DYNAMO_MODES
    from accel.utils.constants import TORCH_LAUNCH_PARAMS as TORCH_LAUNCH_PARAMS
    from accel.utils.constants import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
    from accel.utils.constants import WEIGHTS_NAME as WEIGHTS_NAME
    from accel.utils.constants import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME
    from accel.utils.constants import XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
    from accel.utils.dataclasses import AORecipeKwargs as AORecipeKwargs
    from accel.utils.dataclasses import AutocastKwargs as AutocastKwargs
    from accel.utils.dataclasses import BaseEnum as BaseEnum
    from accel.utils.dataclasses import ComputeEnvironment as ComputeEnvironment
    from accel.utils.dataclasses import CustomDtype as CustomDtype
    from accel.utils.dataclasses import DataLoaderConfiguration as DataLoaderConfiguration
    from accel.utils.dataclasses import DDPCommunicationHookType as DDPCommunicationHookType
    from accel.utils.dataclasses import DeepSpeedPlugin as DeepSpeedPlugin
    from accel.utils.dataclasses import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
    from accel.utils.dataclasses import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from accel.utils.dataclasses import DistributedType as DistributedType
    from accel.utils.dataclasses import DynamoBackend as DynamoBackend
    from accel.utils.dataclasses import FP8BackendType as FP8BackendType
    from accel.utils.dataclasses import FP8RecipeKwargs as FP8RecipeKwargs
    from accel.utils.dataclasses import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from accel.utils.dataclasses import GradientAccumulationPlugin as GradientAccumulationPlugin
    from accel.utils.dataclasses import GradScalerKwargs as GradScalerKwargs
    from accel.utils.dataclasses import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accel.utils.dataclasses import KwargsHandler as KwargsHandler
    from accel.utils.dataclasses import LoggerType as LoggerType
    from accel.utils.dataclasses import ParallelismConfig as ParallelismConfig
    from accel.utils.dataclasses import PrecisionType as PrecisionType
    from accel.utils.dataclasses import ProfileKwargs as ProfileKwargs
    from accel.utils.dataclasses import ProjectConfiguration as ProjectConfiguration
    from accel.utils.dataclasses import RNGType as RNGType
    from accel.utils.dataclasses import SageMakerDistributedType as SageMakerDistributedType
    from accel.utils.dataclasses import TensorInformation as TensorInformation
    from accel.utils.dataclasses import TERecipeKwargs as TERecipeKwargs
    from accel.utils.dataclasses import TorchContextParallelConfig as TorchContextParallelConfig
    from accel.utils.dataclasses import TorchDynamoPlugin as TorchDynamoPlugin
    from accel.utils.dataclasses import TorchTensorParallelConfig as TorchTensorParallelConfig
    from accel.utils.deepspeed import DummyOptim as DummyOptim
    from accel.utils.deepspeed import DummyScheduler as DummyScheduler
    from accel.utils.deepspeed import HfDeepSpeedConfig as HfDeepSpeedConfig
    from accel.utils.deepspeed import map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed
    from accel.utils.environment import CPUInformation as CPUInformation
    from accel.utils.environment import are_libraries_initialized as are_libraries_initialized
    from accel.utils.environment import check_cuda_fp8_capability as check_cuda_fp8_capability
    from accel.utils.environment import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
    from accel.utils.environment import clear_environment as clear_environment
    from accel.utils.environment import convert_dict_to_env_variables as convert_dict_to_env_variables
    from accel.utils.environment import get_cpu_distributed_information as get_cpu_distributed_information
    from accel.utils.environment import get_current_device_type as get_current_device_type
    from accel.utils.environment import get_driver_version as get_driver_version
    from accel.utils.environment import get_gpu_info as get_gpu_info
    from accel.utils.environment import get_int_from_env as get_int_from_env
    from accel.utils.environment import override_numa_affinity as override_numa_affinity
    from accel.utils.environment import parse_choice_from_env as parse_choice_from_env
    from accel.utils.environment import parse_flag_from_env as parse_flag_from_env
    from accel.utils.environment import patch_environment as patch_environment
    from accel.utils.environment import purge_accelerate_environment as purge_accelerate_environment
    from accel.utils.environment import set_numa_affinity as set_numa_affinity
    from accel.utils.environment import str_to_bool as str_to_bool
    from accel.utils.imports import is_4bit_bnb_available as is_4bit_bnb_available
    from accel.utils.imports import is_8bit_bnb_available as is_8bit_bnb_available
    from accel.utils.imports import is_aim_available as is_aim_available
    from accel.utils.imports import is_amdsmi_available as is_amdsmi_available
    from accel.utils.imports import is_bf16_available as is_bf16_available
    from accel.utils.imports import is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available
    from accel.utils.imports import is_bnb_available as is_bnb_available
    from accel.utils.imports import is_boto3_available as is_boto3_available
    from accel.utils.imports import is_clearml_available as is_clearml_available
    from accel.utils.imports import is_comet_ml_available as is_comet_ml_available
    from accel.utils.imports import is_cuda_available as is_cuda_available
    from accel.utils.imports import is_datasets_available as is_datasets_available
    from accel.utils.imports import is_deepspeed_available as is_deepspeed_available
    from accel.utils.imports import is_dvclive_available as is_dvclive_available
    from accel.utils.imports import is_fp8_available as is_fp8_available
    from accel.utils.imports import is_fp16_available as is_fp16_available
    from accel.utils.imports import is_habana_gaudi1 as is_habana_gaudi1
    from accel.utils.imports import is_hpu_available as is_hpu_available
    from accel.utils.imports import is_import_timer_available as is_import_timer_available
    from accel.utils.imports import is_lomo_available as is_lomo_available
    from accel.utils.imports import is_matplotlib_available as is_matplotlib_available
    from accel.utils.imports import is_megatron_lm_available as is_megatron_lm_available
    from accel.utils.imports import is_mlflow_available as is_mlflow_available
    from accel.utils.imports import is_mlu_available as is_mlu_available
    from accel.utils.imports import is_mps_available as is_mps_available
    from accel.utils.imports import is_msamp_available as is_msamp_available
    from accel.utils.imports import is_musa_available as is_musa_available
    from accel.utils.imports import is_neuron_available as is_neuron_available
    from accel.utils.imports import is_npu_available as is_npu_available
    from accel.utils.imports import is_numpy_available as is_numpy_available
    from accel.utils.imports import is_pandas_available as is_pandas_available
    from accel.utils.imports import is_peft_available as is_peft_available
    from accel.utils.imports import is_pippy_available as is_pippy_available
    from accel.utils.imports import is_pynvml_available as is_pynvml_available
    from accel.utils.imports import is_pytest_available as is_pytest_available
    from accel.utils.imports import is_rich_available as is_rich_available
    from accel.utils.imports import is_rocm_available as is_rocm_available
    from accel.utils.imports import is_sagemaker_available as is_sagemaker_available
    from accel.utils.imports import is_schedulefree_available as is_schedulefree_available
    from accel.utils.imports import is_sdaa_available as is_sdaa_available
    from accel.utils.imports import is_swanlab_available as is_swanlab_available
    from accel.utils.imports import is_tensorboard_available as is_tensorboard_available
    from accel.utils.imports import is_tensorboardx_available as is_tensorboardx_available
    from accel.utils.imports import is_timm_available as is_timm_available
    from accel.utils.imports import is_torch_distributed_available as is_torch_distributed_available
    from accel.utils.imports import is_torch_xla_available as is_torch_xla_available
    from accel.utils.imports import is_torchao_available as is_torchao_available
    from accel.utils.imports import is_torchdata_available as is_torchdata_available
    from accel.utils.imports import (
        is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
    )
    from accel.utils.imports import is_torchvision_available as is_torchvision_available
    from accel.utils.imports import is_tqdm_available as is_tqdm_available
    from accel.utils.imports import is_trackio_available as is_trackio_available
    from accel.utils.imports import is_transformer_engine_available as is_transformer_engine_available
    from accel.utils.imports import is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available
    from accel.utils.imports import is_transformers_available as is_transformers_available
    from accel.utils.imports import is_triton_available as is_triton_available
    from accel.utils.imports import is_wandb_available as is_wandb_available
    from accel.utils.imports import is_weights_only_available as is_weights_only_available
    from accel.utils.imports import is_xccl_available as is_xccl_available
    from accel.utils.imports import is_xpu_available as is_xpu_available
    from accel.utils.memory import clear_device_cache as clear_device_cache
    from accel.utils.memory import find_executable_batch_size as find_executable_batch_size
    from accel.utils.memory import release_memory as release_memory
    from accel.utils.memory import should_reduce_batch_size as should_reduce_batch_size
    from accel.utils.operations import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
    from accel.utils.operations import ConvertOutputsToFp32 as ConvertOutputsToFp32
    from accel.utils.operations import DistributedOperationException as DistributedOperationException
    from accel.utils.operations import broadcast as broadcast
    from accel.utils.operations import broadcast_object_list as broadcast_object_list
    from accel.utils.operations import concatenate as concatenate
    from accel.utils.operations import convert_outputs_to_fp32 as convert_outputs_to_fp32
    from accel.utils.operations import convert_to_fp32 as convert_to_fp32
    from accel.utils.operations import copy_tensor_to_devices as copy_tensor_to_devices
    from accel.utils.operations import find_batch_size as find_batch_size
    from accel.utils.operations import find_device as find_device
    from accel.utils.operations import gather as gather
    from accel.utils.operations import gather_object as gather_object
    from accel.utils.operations import get_data_structure as get_data_structure
    from accel.utils.operations import get_shape as get_shape
    from accel.utils.operations import honor_type as honor_type
    from accel.utils.operations import ignorant_find_batch_size as ignorant_find_batch_size
    from accel.utils.operations import initialize_tensors as initialize_tensors
    from accel.utils.operations import is_namedtuple as is_namedtuple
    from accel.utils.operations import is_tensor_information as is_tensor_information
    from accel.utils.operations import is_torch_tensor as is_torch_tensor
    from accel.utils.operations import listify as listify
    from accel.utils.operations import pad_across_processes as pad_across_processes
    from accel.utils.operations import pad_input_tensors as pad_input_tensors
    from accel.utils.operations import recursively_apply as recursively_apply
    from accel.utils.operations import reduce as reduce
    from accel.utils.operations import send_to_device as send_to_device
    from accel.utils.operations import slice_tensors as slice_tensors
    from accel.utils.other import compile_regions as compile_regions
    from accel.utils.other import extract_model_from_parallel as extract_model_from_parallel
    from accel.utils.other import wait_for_everyone as wait_for_everyone
    from accel.utils.random import set_seed as set_seed
    from accel.utils.random import synchronize_rng_state as synchronize_rng_state
    from accel.utils.random import synchronize_rng_states as synchronize_rng_states
    from accel.utils.versions import compare_versions as compare_versions
    from accel.utils.versions import is_torch_version as is_torch_version
    from accel_state.progress import tqdm as tqdm

_EXPORTS = {
    "accel.utils.constants": (
        "BETA_CP_AVAILABLE_PYTORCH_VERSION",
        "BETA_SP_AVAILABLE_DEEPSPEED_VERSION",
        "BETA_TP_AVAILABLE_PYTORCH_VERSION",
        "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION",
        "CUDA_DISTRIBUTED_TYPES",
        "DEEPSPEED_MULTINODE_LAUNCHERS",
        "DTENSOR_PYTORCH_VERSION",
        "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION",
        "FSDP2_PYTORCH_VERSION",
        "FSDP2_STATE_DICT_TYPE",
        "FSDP_AUTO_WRAP_POLICY",
        "FSDP_BACKWARD_PREFETCH",
        "FSDP_MODEL_NAME",
        "FSDP_PYTORCH_VERSION",
        "FSDP_SHARDING_STRATEGY",
        "FSDP_STATE_DICT_TYPE",
        "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION",
        "MODEL_NAME",
        "OPTIMIZER_NAME",
        "PROFILE_PATTERN_NAME",
        "RNG_STATE_NAME",
        "SAFE_MODEL_NAME",
        "SAFE_WEIGHTS_INDEX_NAME",
        "SAFE_WEIGHTS_NAME",
        "SAFE_WEIGHTS_PATTERN_NAME",
        "SAGEMAKER_PARALLEL_EC2_INSTANCES",
        "SAGEMAKER_PYTHON_VERSION",
        "SAGEMAKER_PYTORCH_VERSION",
        "SAGEMAKER_TRANSFORMERS_VERSION",
        "SAMPLER_NAME",
        "SCALER_NAME",
        "SCHEDULER_NAME",
        "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
        "TORCH_DISTRIBUTED_OPERATION_TYPES",
        "TORCH_DYNAMO_MODES",
        "TORCH_LAUNCH_PARAMS",
        "WEIGHTS_INDEX_NAME",
        "WEIGHTS_NAME",
        "WEIGHTS_PATTERN_NAME",
        "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
    ),
    "accel.utils.dataclasses": (
        "AORecipeKwargs",
        "AutocastKwargs",
        "BaseEnum",
        "ComputeEnvironment",
        "CustomDtype",
        "DDPCommunicationHookType",
        "DataLoaderConfiguration",
        "DeepSpeedPlugin",
        "DeepSpeedSequenceParallelConfig",
        "DistributedDataParallelKwargs",
        "DistributedType",
        "DynamoBackend",
        "FP8BackendType",
        "FP8RecipeKwargs",
        "FullyShardedDataParallelPlugin",
        "GradScalerKwargs",
        "GradientAccumulationPlugin",
        "InitProcessGroupKwargs",
        "KwargsHandler",
        "LoggerType",
        "ParallelismConfig",
        "PrecisionType",
        "ProfileKwargs",
        "ProjectConfiguration",
        "RNGType",
        "SageMakerDistributedType",
        "TERecipeKwargs",
        "TensorInformation",
        "TorchContextParallelConfig",
        "TorchDynamoPlugin",
        "TorchTensorParallelConfig",
    ),
    "accel.utils.deepspeed": (
        "DummyOptim",
        "DummyScheduler",
        "HfDeepSpeedConfig",
        "map_pytorch_optim_to_deepspeed",
    ),
    "accel.utils.environment": (
        "CPUInformation",
        "are_libraries_initialized",
        "check_cuda_fp8_capability",
        "check_cuda_p2p_ib_support",
        "clear_environment",
        "convert_dict_to_env_variables",
        "get_cpu_distributed_information",
        "get_current_device_type",
        "get_driver_version",
        "get_gpu_info",
        "get_int_from_env",
        "override_numa_affinity",
        "parse_choice_from_env",
        "parse_flag_from_env",
        "patch_environment",
        "purge_accelerate_environment",
        "set_numa_affinity",
        "str_to_bool",
    ),
    "accel.utils.imports": (
        "is_4bit_bnb_available",
        "is_8bit_bnb_available",
        "is_aim_available",
        "is_amdsmi_available",
        "is_bf16_available",
        "is_bitsandbytes_multi_backend_available",
        "is_bnb_available",
        "is_boto3_available",
        "is_clearml_available",
        "is_comet_ml_available",
        "is_cuda_available",
        "is_datasets_available",
        "is_deepspeed_available",
        "is_dvclive_available",
        "is_fp16_available",
        "is_fp8_available",
        "is_habana_gaudi1",
        "is_hpu_available",
        "is_import_timer_available",
        "is_lomo_available",
        "is_matplotlib_available",
        "is_megatron_lm_available",
        "is_mlflow_available",
        "is_mlu_available",
        "is_mps_available",
        "is_msamp_available",
        "is_musa_available",
        "is_neuron_available",
        "is_npu_available",
        "is_numpy_available",
        "is_pandas_available",
        "is_peft_available",
        "is_pippy_available",
        "is_pynvml_available",
        "is_pytest_available",
        "is_rich_available",
        "is_rocm_available",
        "is_sagemaker_available",
        "is_schedulefree_available",
        "is_sdaa_available",
        "is_swanlab_available",
        "is_tensorboard_available",
        "is_tensorboardx_available",
        "is_timm_available",
        "is_torch_distributed_available",
        "is_torch_xla_available",
        "is_torchao_available",
        "is_torchdata_available",
        "is_torchdata_stateful_dataloader_available",
        "is_torchvision_available",
        "is_tqdm_available",
        "is_trackio_available",
        "is_transformer_engine_available",
        "is_transformer_engine_mxfp8_available",
        "is_transformers_available",
        "is_triton_available",
        "is_wandb_available",
        "is_weights_only_available",
        "is_xccl_available",
        "is_xpu_available",
    ),
    "accel.utils.memory": (
        "clear_device_cache",
        "find_executable_batch_size",
        "release_memory",
        "should_reduce_batch_size",
    ),
    "accel.utils.operations": (
        "CannotPadNestedTensorWarning",
        "ConvertOutputsToFp32",
        "DistributedOperationException",
        "broadcast",
        "broadcast_object_list",
        "concatenate",
        "convert_outputs_to_fp32",
        "convert_to_fp32",
        "copy_tensor_to_devices",
        "find_batch_size",
        "find_device",
        "gather",
        "gather_object",
        "get_data_structure",
        "get_shape",
        "honor_type",
        "ignorant_find_batch_size",
        "initialize_tensors",
        "is_namedtuple",
        "is_tensor_information",
        "is_torch_tensor",
        "listify",
        "pad_across_processes",
        "pad_input_tensors",
        "recursively_apply",
        "reduce",
        "send_to_device",
        "slice_tensors",
    ),
    "accel.utils.other": (
        "compile_regions",
        "extract_model_from_parallel",
        "wait_for_everyone",
    ),
    "accel.utils.random": (
        "set_seed",
        "synchronize_rng_state",
        "synchronize_rng_states",
    ),
    "accel.utils.versions": (
        "compare_versions",
        "is_torch_version",
    ),
    "accel_state.progress": ("tqdm",),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted(_MODULE_OF)
__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF, advice="accel.absent")

"""Enumerations, options and plugins."""

from accel.loop.accumulator import GradientAccumulationPlugin as GradientAccumulationPlugin
from accel.setup.kwargs_handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from accel.utils.enums import ComputeEnvironment as ComputeEnvironment
from accel.utils.enums import DynamoBackend as DynamoBackend
from accel.utils.enums import FP8BackendType as FP8BackendType
from accel.utils.enums import PrecisionType as PrecisionType
from accel.utils.enums import RNGType as RNGType
from accel.utils.enums import SageMakerDistributedType as SageMakerDistributedType
from accel_backends.ddp.comm_hooks import DDPCommunicationHookType as DDPCommunicationHookType
from accel_backends.ddp.config import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accel_backends.fsdp.config import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accel_backends.ops.compile import TorchDynamoPlugin as TorchDynamoPlugin
from accel_ckpt.series.project import ProjectConfiguration as ProjectConfiguration
from accel_data.options import LoaderOptions as LoaderOptions
from accel_deepspeed.config.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from accel_inference.quantization.config import BnbQuantizationConfig as BnbQuantizationConfig
from accel_inference.quantization.config import TorchAOQuantizationConfig as TorchAOQuantizationConfig
from accel_observe.profiling.profiler import ProfileKwargs as ProfileKwargs
from accel_precision.options import AutocastKwargs as AutocastKwargs
from accel_precision.options import GradScalerKwargs as GradScalerKwargs
from accel_precision.options import KwargsHandler as KwargsHandler
from accel_precision.recipes import AORecipeKwargs as AORecipeKwargs
from accel_precision.recipes import FP8RecipeKwargs as FP8RecipeKwargs
from accel_precision.recipes import TERecipeKwargs as TERecipeKwargs
from accel_state.enums import BaseEnum as BaseEnum
from accel_state.enums import CustomDtype as CustomDtype
from accel_state.enums import DistributedType as DistributedType
from accel_state.enums import LoggerType as LoggerType
from accel_state.parallelism.axis_options import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
from accel_state.parallelism.axis_options import ExpertParallelConfig as ExpertParallelConfig
from accel_state.parallelism.axis_options import TorchContextParallelConfig as TorchContextParallelConfig
from accel_state.parallelism.axis_options import TorchTensorParallelConfig as TorchTensorParallelConfig
from accel_state.parallelism.axis_options import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from accel_state.parallelism.config import ParallelismConfig as ParallelismConfig
from accel_state.pytree.operations import TensorInformation as TensorInformation

DataLoaderConfiguration = LoaderOptions

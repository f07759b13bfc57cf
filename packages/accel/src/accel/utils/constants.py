"""File names and lists of choices that users of Accelerate know by name."""

from typing import Final

from accel_inference.hooks.layerwise_casting import CAST_LAYERS

SCALER_NAME: Final = "scaler.pt"
MODEL_NAME: Final = "pytorch_model"
SAFE_MODEL_NAME: Final = "model"
RNG_STATE_NAME: Final = "random_states"
OPTIMIZER_NAME: Final = "optimizer"
SCHEDULER_NAME: Final = "scheduler"
SAMPLER_NAME: Final = "sampler"
PROFILE_PATTERN_NAME: Final = "profile_{suffix}.json"
WEIGHTS_NAME: Final = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME: Final = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME: Final = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME: Final = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME: Final = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME: Final = f"{SAFE_WEIGHTS_NAME}.index.json"
FSDP_MODEL_NAME: Final = "pytorch_model_fsdp"

# The 1-based position is the value of torch's ShardingStrategy.
FSDP_SHARDING_STRATEGY: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
FSDP_AUTO_WRAP_POLICY: Final = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
FSDP_BACKWARD_PREFETCH: Final = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
FSDP_STATE_DICT_TYPE: Final = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
FSDP2_STATE_DICT_TYPE: Final = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
FSDP_PYTORCH_VERSION: Final = "2.1.0.a0+32f93b1"
FSDP2_PYTORCH_VERSION: Final = "2.6.0"
DTENSOR_PYTORCH_VERSION: Final = "2.5.0"
BETA_TP_AVAILABLE_PYTORCH_VERSION: Final = "2.3.0"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION: Final = "4.52.0"
BETA_CP_AVAILABLE_PYTORCH_VERSION: Final = "2.6.0"
BETA_SP_AVAILABLE_DEEPSPEED_VERSION: Final = "0.18.2"
ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION: Final = "2.2.0"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION: Final = "2.4.0"
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION: Final = "2.1.0"

DEEPSPEED_MULTINODE_LAUNCHERS: Final = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")
TORCH_DYNAMO_MODES: Final = ("default", "reduce-overhead", "max-autotune")
SAGEMAKER_PYTORCH_VERSION: Final = "1.10.2"
SAGEMAKER_PYTHON_VERSION: Final = "py38"
SAGEMAKER_TRANSFORMERS_VERSION: Final = "4.17.0"
SAGEMAKER_PARALLEL_EC2_INSTANCES: Final = ("ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4dn.24xlarge")

# Options of torchrun, spelled as attributes.
TORCH_LAUNCH_PARAMS: Final = (
    "nnodes",
    "nproc_per_node",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "standalone",
    "max_restarts",
    "monitor_interval",
    "start_method",
    "role",
    "module",
    "m",
    "no_python",
    "run_path",
    "log_dir",
    "r",
    "redirects",
    "t",
    "tee",
    "node_rank",
    "master_addr",
    "master_port",
)
CUDA_DISTRIBUTED_TYPES: Final = ("DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP")
TORCH_DISTRIBUTED_OPERATION_TYPES: Final = (
    *CUDA_DISTRIBUTED_TYPES,
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_CPU",
    "MULTI_HPU",
    "MULTI_NEURON",
)
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING: Final = CAST_LAYERS

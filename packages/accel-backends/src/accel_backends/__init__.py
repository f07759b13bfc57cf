"""Placing, synchronising and stepping of models."""

from typing import TYPE_CHECKING

from accel_backends._version import __version__ as __version__
from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel_backends.averaging import average_tensors as average_tensors
    from accel_backends.base import Backend as Backend
    from accel_backends.batch_norm import SyncBatchNorm as SyncBatchNorm
    from accel_backends.batch_norm import convert_sync_batch_norm as convert_sync_batch_norm
    from accel_backends.bundle import Bundle as Bundle
    from accel_backends.bundle import check_bundle as check_bundle
    from accel_backends.capabilities import Capabilities as Capabilities
    from accel_backends.clip import clip_grad_norm as clip_grad_norm
    from accel_backends.clip import clip_grad_value as clip_grad_value
    from accel_backends.clip import total_norm as total_norm
    from accel_backends.compile import TorchDynamoPlugin as TorchDynamoPlugin
    from accel_backends.compile import compile_model as compile_model
    from accel_backends.compile import compile_regions as compile_regions
    from accel_backends.compile import repeated_blocks as repeated_blocks
    from accel_backends.compile import unwrap as unwrap
    from accel_backends.config import BackendConfig as BackendConfig
    from accel_backends.config import SingleConfig as SingleConfig
    from accel_backends.ddp import DDPBackend as DDPBackend
    from accel_backends.ddp import DDPConfig as DDPConfig
    from accel_backends.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from accel_backends.deepspeed import DeepSpeedBackend as DeepSpeedBackend
    from accel_backends.deepspeed_config import DeepSpeedConfig as DeepSpeedConfig
    from accel_backends.deepspeed_config import DeepSpeedPlugin as DeepSpeedPlugin
    from accel_backends.deepspeed_dummies import DummyOptim as DummyOptim
    from accel_backends.deepspeed_dummies import DummyScheduler as DummyScheduler
    from accel_backends.deepspeed_json import HfDeepSpeedConfig as HfDeepSpeedConfig
    from accel_backends.deepspeed_optimizers import map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed
    from accel_backends.fsdp import FSDPBackend as FSDPBackend
    from accel_backends.fsdp1 import FSDP1Backend as FSDP1Backend
    from accel_backends.fsdp_config import FSDPConfig as FSDPConfig
    from accel_backends.fsdp_config import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from accel_backends.hooks import DDPCommunicationHookType as DDPCommunicationHookType
    from accel_backends.names import innermost as innermost
    from accel_backends.names import named_parameters as named_parameters
    from accel_backends.rebinding import rebind as rebind
    from accel_backends.registry import installed_backends as installed_backends
    from accel_backends.registry import load_backend as load_backend
    from accel_backends.select import Choice as Choice
    from accel_backends.select import ModelFacts as ModelFacts
    from accel_backends.select import select_backend as select_backend
    from accel_backends.single import SingleBackend as SingleBackend
    from accel_backends.states import load_model_state as load_model_state
    from accel_backends.states import load_optimizer_state as load_optimizer_state
    from accel_backends.states import model_state as model_state
    from accel_backends.states import optimizer_state as optimizer_state

_HOMES = {
    "Backend": "base",
    "BackendConfig": "config",
    "Bundle": "bundle",
    "Capabilities": "capabilities",
    "Choice": "select",
    "DDPBackend": "ddp",
    "DDPCommunicationHookType": "hooks",
    "DDPConfig": "ddp",
    "DeepSpeedBackend": "deepspeed",
    "DeepSpeedConfig": "deepspeed_config",
    "DeepSpeedPlugin": "deepspeed_config",
    "DistributedDataParallelKwargs": "ddp",
    "DummyOptim": "deepspeed_dummies",
    "DummyScheduler": "deepspeed_dummies",
    "FSDP1Backend": "fsdp1",
    "FSDPBackend": "fsdp",
    "FSDPConfig": "fsdp_config",
    "FullyShardedDataParallelPlugin": "fsdp_config",
    "HfDeepSpeedConfig": "deepspeed_json",
    "ModelFacts": "select",
    "SingleBackend": "single",
    "SingleConfig": "config",
    "SyncBatchNorm": "batch_norm",
    "TorchDynamoPlugin": "compile",
    "average_tensors": "averaging",
    "check_bundle": "bundle",
    "clip_grad_norm": "clip",
    "clip_grad_value": "clip",
    "compile_model": "compile",
    "compile_regions": "compile",
    "convert_sync_batch_norm": "batch_norm",
    "innermost": "names",
    "installed_backends": "registry",
    "load_backend": "registry",
    "load_model_state": "states",
    "load_optimizer_state": "states",
    "map_pytorch_optim_to_deepspeed": "deepspeed_optimizers",
    "model_state": "states",
    "named_parameters": "names",
    "optimizer_state": "states",
    "rebind": "rebinding",
    "repeated_blocks": "compile",
    "select_backend": "select",
    "total_norm": "clip",
    "unwrap": "compile",
}

__all__ = ["__version__", *_HOMES]
__getattr__, __dir__ = lazy_names(__name__, {name: f".{module}" for name, module in _HOMES.items()})

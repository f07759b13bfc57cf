"""Import paths and names that users of Accelerate know resolve here, lazily and without touching a device."""

import importlib
import subprocess
import sys
from pkgutil import iter_modules

import pytest

import accel
import accel.utils
from accel.absent import PAGE, names, names_on_accelerator

PATHS = {
    "accel": (
        "Accelerator AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin "
        "DistributedDataParallelKwargs DistributedType FullyShardedDataParallelPlugin GradScalerKwargs "
        "InitProcessGroupKwargs ParallelismConfig PartialState ProfileKwargs debug_launcher find_executable_batch_size "
        "is_rich_available load_checkpoint_in_model notebook_launcher skip_first_batches synchronize_rng_states "
        "__version__"
    ),
    "accel.state": "PartialState AcceleratorState GradientState is_initialized",
    "accel.logging": "get_logger MultiProcessAdapter",
    "accel.data_loader": "prepare_data_loader skip_first_batches SeedableRandomSampler BatchSamplerShard "
    "IterableDatasetShard SkipBatchSampler get_sampler",
    "accel.optimizer": "PreparedOptimizer AcceleratedOptimizer",
    "accel.scheduler": "PreparedScheduler AcceleratedScheduler",
    "accel.inference": "prepare_pippy",
    "accel.local_sgd": "LocalSGD",
    "accel.parallelism_config": "ParallelismConfig",
    "accel.launchers": "debug_launcher notebook_launcher",
    "accel_observe.tracking": "GeneralTracker filter_trackers LOGGER_TYPE_TO_CLASS",
    "accel.utils": (
        "AORecipeKwargs AutocastKwargs ComputeEnvironment CustomDtype DeepSpeedPlugin DistributedType DummyOptim "
        "DummyScheduler DynamoBackend FullyShardedDataParallelPlugin GradientAccumulationPlugin KwargsHandler "
        "LoggerType PrecisionType ProjectConfiguration RNGType "
        "TorchDynamoPlugin broadcast broadcast_object_list concatenate convert_outputs_to_fp32 convert_to_fp32 "
        "copy_tensor_to_devices extract_model_from_parallel find_batch_size find_device gather gather_object "
        "get_data_structure honor_type initialize_tensors is_bf16_available is_namedtuple is_torch_tensor "
        "is_torch_version listify "
        "pad_across_processes pad_input_tensors patch_environment recursively_apply reduce release_memory "
        "send_to_device set_seed slice_tensors str_to_bool synchronize_rng_states tqdm wait_for_everyone"
    ),
    "accel.big_modeling": "init_empty_weights cpu_offload disk_offload dispatch_model load_checkpoint_and_dispatch "
    "cpu_offload_with_hook attach_layerwise_casting_hooks",
    "accel.hooks": "AlignDevicesHook CpuOffload SequentialHook add_hook_to_module remove_hook_from_module",
    "accel.utils.modeling": "get_balanced_memory infer_auto_device_map clean_device_map set_module_tensor_to_device",
    "accel.utils.offload": "OffloadedWeightsLoader offload_weight save_offload_index",
    "accel.utils.operations": "gather reduce DistributedOperationException send_to_device",
    "accel.utils.constants": "SAFE_WEIGHTS_NAME TORCH_LAUNCH_PARAMS",
    "accel.utils.deepspeed": "DummyOptim DummyScheduler HfDeepSpeedConfig map_pytorch_optim_to_deepspeed",
    "accel.utils.environment": "patch_environment str_to_bool",
    "accel.utils.other": "extract_model_from_parallel wait_for_everyone",
    "accel.utils.versions": "compare_versions is_torch_version",
    "accel.utils.random": "set_seed synchronize_rng_state synchronize_rng_states",
    "accel.utils.memory": "find_executable_batch_size release_memory",
    "accel.utils.dataclasses": "DataLoaderConfiguration DeepSpeedPlugin DistributedType "
    "FullyShardedDataParallelPlugin ProjectConfiguration",
    "accel.utils.imports": "is_cuda_available is_tensorboard_available is_fp8_available",
}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in PATHS.items() for name in names.split()])
def test_the_name_is_where_users_look_for_it(path: str, name: str) -> None:
    assert hasattr(importlib.import_module(path), name)


@pytest.mark.parametrize(
    "module", ["accel", "accel.utils", "accel_state", "accel_data", "accel_backends", "accel_ckpt", "accel_precision"]
)
def test_every_listed_name_can_be_imported(module: str) -> None:
    imported = importlib.import_module(module)
    assert [name for name in imported.__all__ if not hasattr(imported, name)] == []


def test_importing_everything_initialises_no_device_and_opens_no_group() -> None:
    code = (
        "import accel, accel.utils as u\n"
        "[getattr(accel, n) for n in accel.__all__]; [getattr(u, n) for n in u.__all__]\n"
        "import torch, torch.distributed as d\n"
        "assert not torch.cuda.is_initialized() and not d.is_initialized()\n"
        "import os; assert 'ACCEL_CONFIG' not in os.environ"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_accel_alone_imports_no_torch() -> None:
    code = "import sys, accel, accel.utils, accel_launch.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plugins_of_libraries_are_named_without_the_libraries() -> None:
    code = (
        "import sys, accel, accel.utils\n"
        "from accel import DeepSpeedPlugin, FullyShardedDataParallelPlugin\n"
        "from accel.utils.deepspeed import DummyOptim, HfDeepSpeedConfig\n"
        "from accel.utils import DeepSpeedPlugin as same\n"
        "assert same is DeepSpeedPlugin and 'deepspeed' not in sys.modules and 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_naming_accelerator_makes_few_objects() -> None:
    """``import torch`` ends just short of a collection of all its objects, which 7,700 new ones would set off."""
    code = "import gc, torch; gc.collect(); gc.disable(); from accel import Accelerator; print(gc.get_count()[0])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 6500


@pytest.mark.parametrize(
    ("statement", "instead"),
    [
        ("from accel import build_pipeline", "prepare_pippy splits"),
        ("from accel.utils import is_port_in_use", "nothing to do with training"),
        ("from accel.utils import MegatronLMPlugin", "accel-megatron"),
        ("from accel.utils import GPTTrainStep", "from accel_megatron import it"),
        ("from accel.utils import compile_regions_fsdp2", "use_regional_compilation"),
        ("from accel.utils import fsdp2_apply_ac", "inner part"),
    ],
)
def test_importing_a_name_that_only_accelerate_has_says_what_works_instead(statement: str, instead: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(statement, {})
    for part in (statement.split()[-1], instead, PAGE):
        assert part in str(caught.value)


def test_a_name_that_only_accelerate_has_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=f"commands.*{PAGE}"):
        accel.commands  # noqa: B018
    assert not hasattr(accel.utils, "is_port_in_use")
    with pytest.raises(ImportError, match=r"^cannot import name 'Acelerator' from 'accel' \("):
        exec("from accel import Acelerator", {})


def test_an_attribute_that_only_accelerates_accelerator_has_says_what_works_instead() -> None:
    accelerator = accel.Accelerator(cpu=True)
    with pytest.raises(AttributeError, match=f"fp8_recipe_handler.*accelerator.policy.*{PAGE}"):
        accelerator.fp8_recipe_handler  # noqa: B018
    assert getattr(accelerator, "native_amp", None) is None
    with pytest.raises(AttributeError, match=r"^'Accelerator' object has no attribute 'nonsense'$"):
        accelerator.nonsense  # noqa: B018


def test_names_that_are_there_are_not_called_absent() -> None:
    there = set(accel.__all__) | set(accel.utils.__all__) | {module.name for module in iter_modules(accel.__path__)}
    assert there.isdisjoint(names())
    accelerator = accel.Accelerator(cpu=True)
    assert [name for name in names_on_accelerator() if hasattr(accelerator, name)] == []

"""DeepSpeed's own configuration: its sources, its known keys, and access by dotted keys."""

import base64
import binascii
import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigError

AUTO = "auto"
ZERO = "zero_optimization"

# Keys that DeepSpeed 0.19 reads, by section; "top" is the document. It ignores all others at the top level, so that a
# misspelt key would silently leave a default in place. Source: DeepSpeed's configuration reference.
_KNOWN = """
top:
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
    compile compression_training csv_monitor curriculum_learning data_efficiency data_parallel_size data_types
    dataloader_drop_last disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel
    flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor
    graph_harvesting hybrid_engine load_universal_checkpoint log_level managed_gradient_accumulation memory_breakdown
    msamp nebula optimizer pipeline prescale_gradients progressive_layer_drop quantize_training scheduler
    seq_parallel_communication_data_type sequence_parallel_size sparse_attention sparse_gradients steps_per_print
    swap_tensor tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
    zero_allow_untested_optimizer zero_elastic_checkpoint zero_force_ds_cpu_optimizer zero_optimization
zero_optimization:
    allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients cpu_offload
    cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks
    gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights
    log_trace_cache_warnings max_live_parameters max_reuse_distance memory_efficient_linear model_persistence_threshold
    module_granularity_threshold offload_optimizer offload_param overlap_comm override_module_apply
    param_persistence_threshold parameter_alignment pipeline_loading_checkpoint prefetch_bucket_size reduce_bucket_size
    reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters
    stage3_max_reuse_distance stage3_model_persistence_threshold stage3_module_granularity_threshold
    stage3_param_persistence_threshold stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size
    use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size
    zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
zero_optimization.offload_optimizer:
    buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read pipeline_write ratio
    super_offload
zero_optimization.offload_param:
    buffer_count buffer_size device max_in_cpu nvme_path pin_memory
tensor_parallel:
    autotp_size dtype injection_policy_tuple keep_module_on_host kernel_inject partition_config preset_model
    replace_with_kernel_inject tensor_parallel tp tp_overlap_comm vocab_parallel_ce_backend vocab_parallel_lm_head
"""


def _sections(table: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for word in table.split():
        if word.endswith(":"):
            section = found.setdefault(word[:-1], set())
        else:
            section.add(word)
    return found


_SECTIONS = _sections(_KNOWN)
TOP_KEYS = frozenset(_SECTIONS["top"])
_GONE = {
    "mics_shard_size": "MiCS was removed from DeepSpeed; nearest: zero_hpz_partition_size (ZeRO++), or strategy 'fsdp' "
    "with sharding_strategy HYBRID_SHARD",
    "mics_hierarchical_params_gather": "MiCS was removed from DeepSpeed; nearest: zero_hpz_partition_size (ZeRO++)",
}


# Sections that replace modules by ones whose parameters are not covered by state dicts, norms and gradients here.
_UNKNOWN_PARTS = {
    "expert_parallel": "AutoEP gives each rank other experts, packed into weights of other names; nearest: experts as "
    "ordinary modules at stage 3, their class in transformer_moe_cls_names, or deepspeed.moe at stages 0 to 2",
}


def read_document(source: object) -> tuple[dict[str, Any], str]:
    """Reads a configuration; returns a new dictionary and a description of its source.

    ``source`` is a mapping, the path of a JSON file, JSON itself, or JSON in URL-safe base64.

    Raises:
        ConfigError: ``source`` is none of these, or JSON that is no object or has a duplicate key.
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source)), "the DeepSpeed config given as a dictionary"
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"a DeepSpeed config of type {type(source).__name__}. Expected a string path to an existing deepspeed "
            "config, or a dictionary, or a base64 encoded string"
        )
    path = Path(source).expanduser()
    if _is_file(path):
        return _parse(path.read_text(), str(path)), str(path)
    text = str(source).strip()
    if not text.startswith("{"):
        try:
            text = base64.urlsafe_b64decode(text).decode()
        except (binascii.Error, ValueError):
            raise ConfigError(
                f"no DeepSpeed config at {str(source)!r}. Expected a string path to an existing deepspeed config, or a "
                "dictionary, or a base64 encoded string"
            ) from None
    return _parse(text, "the DeepSpeed config given as text"), "the DeepSpeed config given as text"


def check_keys(document: Mapping[str, Any], origin: str) -> None:
    """Refuses keys that DeepSpeed ignores or no longer has, and features that this backend does not support.

    Raises:
        ConfigError: the first such key, its source, and the nearest known key.
    """
    for section, reason in _UNKNOWN_PARTS.items():
        if find(document, f"{section}.enabled", False):
            raise ConfigError(f"{section}.enabled ({origin}): {reason}")
    for section, known in _SECTIONS.items():
        found = document if section == "top" else find(document, section)
        if not isinstance(found, Mapping):
            continue
        for key in found:
            if key in known:
                continue
            name = str(key) if section == "top" else f"{section}.{key}"
            if key in _GONE:
                raise ConfigError(f"{name} ({origin}): {_GONE[key]}")
            raise ConfigError(f"{origin} has a key {name!r} that DeepSpeed does not know{near(str(key), known)}")


def near(name: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean ...?"``, or an empty text if no known name is similar."""
    found = get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def find(document: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Returns the value at a dotted key."""
    node: Any = document
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def put(document: dict[str, Any], key: str, value: Any) -> None:
    """Sets the value at a dotted key; creates missing sections."""
    *above, last = key.split(".")
    node = document
    for part in above:
        inner = node.get(part)
        if not isinstance(inner, dict):
            inner = node[part] = {}
        node = inner
    node[last] = value


def leaves(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value with its dotted key; lists are values."""
    for key, value in document.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from leaves(value, f"{name}.")
        else:
            yield name, value


class HfDeepSpeedConfig:
    """Read access to a DeepSpeed configuration by dotted keys, as Transformers' integration expects it.

    Transformers subclasses this class, so it is neither final nor abstract.

    Attributes:
        config: the configuration, a copy of the given one.
        origin: description of its source.
    """

    def __init__(self, config_file_or_dict: object) -> None:
        self.config: dict[str, Any]
        self.config, self.origin = read_document(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Sets the ZeRO stage (-1 if none is given) and whether anything is offloaded."""
        self._stage = self.get_value(f"{ZERO}.stage", -1)
        devices = {self.get_value(f"{ZERO}.offload_{kind}.device") for kind in ("optimizer", "param")}
        self._offload = bool(devices & {"cpu", "nvme"})

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Returns the section of a dotted key (None if it does not exist), and the key's last part."""
        above, _, last = ds_key_long.rpartition(".")
        node = find(self.config, above) if above else self.config
        return (node if isinstance(node, dict) else None), last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Returns the value at a dotted key."""
        return find(self.config, ds_key_long, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Removes a key or a section.

        Raises:
            ConfigError: the key does not exist, and ``must_exist``.
        """
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise ConfigError(f"Can't find {ds_key_long} entry in the config: {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether the key is set and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether the key is set and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether the ZeRO stage is 2 (gradients are partitioned)."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Whether the ZeRO stage is 3 (parameters are partitioned)."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether optimizer states or parameters are offloaded to host memory or disk."""
        return self._offload


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # text too long for a file name
        return False


def _parse(text: str, origin: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise ConfigError(f"{origin} has the key {twice!r} twice; leave one of them out")
        return dict(pairs)

    try:
        found = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{origin} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{origin} holds a {type(found).__name__}; expected an object of DeepSpeed's settings")
    return found

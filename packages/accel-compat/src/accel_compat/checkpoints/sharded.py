"""Files of FSDP models and optimizers in Accelerate's layout: one file of full tensors, or a folder of shards.

With ``adapter_only`` a model of peft is stored without its frozen weights. Shards are torch's distributed checkpoints;
``use_dcp=False``, files of single ranks, is refused.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from accel_compat.checkpoints.closed_shards import failures_as_errors
from accel_compat.checkpoints.files import numbered
from accel_compat.checkpoints.pickles import load
from accel_compat.helpers.system import is_peft_model

MODEL, OPTIMIZER = "pytorch_model_fsdp", "optimizer"
METADATA = ".metadata"
"""File of every folder of shards, written last."""


def _is_full(plugin: Any) -> bool:
    return plugin is None or plugin.state_dict_type.name == "FULL_STATE_DICT"


def _folder(folder: Any, stem: str, index: int) -> Path:
    return Path(folder) / f"{stem}_{index}"


def _saved_folder(folder: Any, stem: str, index: int) -> Path:
    """The folder of shards in a checkpoint; the given folder itself, if it has shards and no such folder in it.

    Callers may name the folder of shards instead of the checkpoint, also after renaming it.
    """
    shards, given = _folder(folder, stem, index), Path(folder)
    return given if not shards.is_dir() and (given / METADATA).is_file() else shards


def _options(plugin: Any, *, loading: bool = False, adapter: bool = False) -> states.StateDictOptions:
    full = _is_full(plugin)
    return states.StateDictOptions(
        full_state_dict=full,
        cpu_offload=full and not loading,
        broadcast_from_rank0=full and loading and torch.distributed.is_initialized(),
        ignore_frozen_params=adapter and not loading,
        strict=not adapter,
    )


def _check_dcp(plugin: Any, use_dcp: bool) -> None:
    if not use_dcp and not _is_full(plugin):
        raise ValueError(
            "use_dcp=False with shards, which are written and read as torch's distributed checkpoints here; nearest: "
            "use_dcp=True, or the state dict type FULL_STATE_DICT"
        )


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    output_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Writes the weights of a model: full ones on rank 0, or the shards of all ranks.

    Args:
        adapter_only: whether a model of peft is written without its frozen weights.

    Raises:
        ValueError: ``use_dcp=False`` with shards.
    """
    _check_dcp(fsdp_plugin, use_dcp)
    options = _options(fsdp_plugin, adapter=adapter_only and is_peft_model(model))
    state = states.get_model_state_dict(model, options=options)
    _write(fsdp_plugin, accelerator, state, output_dir, MODEL, "model", model_index)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: Any,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Writes the state of an optimizer: full tensors on rank 0, or the shards of all ranks.

    Raises:
        ValueError: ``use_dcp=False`` with shards.
    """
    _check_dcp(fsdp_plugin, use_dcp)
    inner = getattr(optimizer, "optimizer", optimizer)
    state = states.get_optimizer_state_dict(model, inner, options=_options(fsdp_plugin))
    _write(fsdp_plugin, accelerator, state, output_dir, OPTIMIZER, "optimizer", optimizer_index)


def _write(plugin: Any, accelerator: Any, state: Any, folder: Any, stem: str, key: str, index: int) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    if not _is_full(plugin):
        save_shards({key: state}, checkpoint_id=_folder(folder, stem, index))
    elif accelerator.is_main_process:
        torch.save(state, Path(folder) / numbered(stem, index, "bin"))
    accelerator.wait_for_everyone()


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    input_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Loads the weights of a model.

    Collective: every rank of the group must call this.

    Raises:
        CheckpointError: a shard is missing or damaged, on any rank; or the file of full weights is.
        ValueError: ``use_dcp=False`` with shards.
    """
    _check_dcp(fsdp_plugin, use_dcp)
    adapter = adapter_only and is_peft_model(model)
    options = _options(fsdp_plugin, loading=True, adapter=adapter)
    state = states.get_model_state_dict(model, options=states.StateDictOptions(ignore_frozen_params=adapter))
    state = _read(fsdp_plugin, accelerator, state, input_dir, MODEL, "model", model_index)
    return states.set_model_state_dict(model, state, options=options)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: Any,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Loads the state of an optimizer.

    Collective: every rank of the group must call this.

    Raises:
        CheckpointError: a shard is missing or damaged, on any rank; or the file of the full state is.
        ValueError: ``use_dcp=False`` with shards.
    """
    _check_dcp(fsdp_plugin, use_dcp)
    inner = getattr(optimizer, "optimizer", optimizer)
    state = states.get_optimizer_state_dict(model, inner, options=states.StateDictOptions())
    state = _read(fsdp_plugin, accelerator, state, input_dir, OPTIMIZER, "optimizer", optimizer_index)
    states.set_optimizer_state_dict(model, inner, state, options=_options(fsdp_plugin, loading=True))


def _read(plugin: Any, accelerator: Any, state: Any, folder: Any, stem: str, key: str, index: int) -> Any:
    accelerator.wait_for_everyone()
    path = Path(folder) / numbered(stem, index, "bin")
    if _is_full(plugin):
        return load(path, map_location="cpu") if accelerator.is_main_process else {}
    held = {key: state}
    shards = _saved_folder(folder, stem, index)
    with failures_as_errors(shards):
        load_shards(held, checkpoint_id=shards)
    return held[key]


def merge_fsdp_weights(
    checkpoint_dir: Any, output_path: Any, safe_serialization: bool = True, remove_checkpoint_dir: bool = False
) -> None:
    """Writes the shards of a model as one file of full tensors, on rank 0, which holds all of them in memory.

    torch reads a pickle of the folder, so that it has to be of a source that is trusted.

    Collective: every rank of the group must call this.

    Raises:
        ValueError: ``checkpoint_dir`` has no shards of torch's distributed checkpoints, or is to be removed with the
            merged file in it. The other ranks raise a CollectiveError.
        CheckpointError: a file of the shards is damaged.
    """
    from accel_compat.state.process_state import SharedPartialState
    from accel_state.collectives.objects import agree

    error: Exception | None = None
    state = SharedPartialState()
    if state.is_main_process:
        try:
            _merge(Path(checkpoint_dir), Path(output_path), safe=safe_serialization, remove=remove_checkpoint_dir)
        except Exception as caught:
            error = caught
    if state.use_distributed:
        agree(error, group=state.session.group)
    if error is not None:
        raise error


def _merge(source: Path, target: Path, *, safe: bool, remove: bool) -> None:
    from accel_compat.checkpoints.pickles import save

    if not (source / METADATA).is_file():
        found = [path.name for path in sorted(source.glob("pytorch_model_fsdp_*"))] if source.is_dir() else []
        hint = f"; nearest: {source / found[0]}" if found else ""
        raise ValueError(f"{source} has no shards of a distributed checkpoint (no file .metadata){hint}")
    if remove and target.resolve().is_relative_to(source.resolve()):
        raise ValueError(
            f"remove_checkpoint_dir=True would remove {target} with {source}; expected an output_path outside of it"
        )
    target.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target) as folder:
        with failures_as_errors(source):
            dcp_to_torch_save(source, Path(folder) / "full.bin")
        tensors = load(Path(folder) / "full.bin", map_location="cpu")
    tensors = tensors["model"] if list(tensors) == ["model"] else tensors
    save(tensors, target / ("model.safetensors" if safe else "pytorch_model.bin"), safe_serialization=safe)
    if remove:
        shutil.rmtree(source)

"""Files of a state in Accelerate's layout: weights, optimizers, schedulers, random states, custom objects."""

import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accel_compat.checkpoints.pickles import load, save

LOG = logging.getLogger("accelerate.checkpointing")
MODEL, SAFE_MODEL, OPTIMIZER, SCHEDULER = "pytorch_model", "model", "optimizer", "scheduler"
LOADER, SCALER, RANDOM, CUSTOM = "dl_state_dict", "scaler.pt", "random_states", "custom_checkpoint"


def numbered(stem: str, index: int, ending: str) -> str:
    """Name of the file of the object with this number; the first has none."""
    return f"{stem}{'' if index == 0 else f'_{index}'}.{ending}"


def loader_file(index: int, rank: int) -> str:
    """Name of the file with a rank's state of the loader with this number; Accelerate knows that of rank 0."""
    return numbered(LOADER if rank == 0 else f"{LOADER}_rank{rank}", index, "bin")


def save_accelerator_state(  # noqa: PLR0913  (the signature that users know)
    output_dir: str | Path,
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Writes the state of a run into ``output_dir``, and returns the folder."""
    folder = Path(output_dir)
    for index, state in enumerate(model_states):
        name = numbered(SAFE_MODEL, index, "safetensors") if safe_serialization else numbered(MODEL, index, "bin")
        save(state, folder / name, save_on_each_node=save_on_each_node, safe_serialization=safe_serialization)
        LOG.info("Model weights saved in %s", folder / name)
    for stem, objects in ((OPTIMIZER, optimizers), (SCHEDULER, schedulers)):
        for index, item in enumerate(objects):
            save(item.state_dict(), folder / numbered(stem, index, "bin"), save_on_each_node=save_on_each_node)
    for index, loader in enumerate(dataloaders):
        if getattr(loader, "use_stateful_dataloader", False):
            torch.save(loader.state_dict(), folder / loader_file(index, process_index))
    if scaler is not None:
        torch.save(scaler.state_dict(), folder / SCALER)
    states: dict[str, Any] = {
        "step": step,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    torch.save(states, folder / f"{RANDOM}_{process_index}.pkl")
    return folder


def load_accelerator_state(  # noqa: PLR0913  (the signature that users know)
    input_dir: str | Path,
    models: Sequence[Any],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: Any = None,
    map_location: str | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Loads a state from ``input_dir``, and returns the values that the Accelerator keeps.

    Raises:
        TypeError: ``map_location`` is neither "cpu" nor "on_device".
    """
    if map_location not in (None, "cpu", "on_device"):
        raise TypeError(
            "Unsupported optimizer map location passed, please choose one of `None`, `'cpu'`, or `'on_device'`"
        )
    from accel_compat.state.process_state import SharedPartialState

    folder, options = Path(input_dir), load_kwargs or {}
    device = SharedPartialState().device if map_location == "on_device" else torch.device("cpu")
    for index, model in enumerate(models):
        load_weights(model, folder, index, device, load_model_func_kwargs)
    for index, optimizer in enumerate(optimizers):
        name = numbered(OPTIMIZER, index, "bin")
        optimizer.load_state_dict(load(folder / name, map_location=device, **options))
    for index, scheduler in enumerate(schedulers):
        scheduler.load_state_dict(load(folder / numbered(SCHEDULER, index, "bin"), **options))
    for index, loader in enumerate(dataloaders):
        if getattr(loader, "use_stateful_dataloader", False):
            own = folder / loader_file(index, process_index)
            path = own if own.exists() else folder / loader_file(index, 0)  # Accelerate writes that one only
            if path.exists():
                loader.load_state_dict(load(path, **options))
    if scaler is not None and (folder / SCALER).exists():
        scaler.load_state_dict(load(folder / SCALER, **options))
    kept: dict[str, Any] = {}
    try:
        states = load(folder / f"{RANDOM}_{process_index}.pkl")
        if "step" in states:
            kept["step"] = states["step"]
        random.setstate(states["random_state"])
        np.random.set_state(states["numpy_random_seed"])
        torch.set_rng_state(states["torch_manual_seed"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(states["torch_cuda_manual_seed"])
    except Exception:
        LOG.info("Could not load random states")
    return kept


def load_weights(model: Any, folder: Path, index: int, device: torch.device, options: dict[str, Any]) -> None:
    """Loads the weights of model ``index`` from safetensors, or from torch's file."""
    safe = folder / numbered(SAFE_MODEL, index, "safetensors")
    if safe.exists():
        from safetensors.torch import load_model

        load_model(model, safe, device=str(device), **options)
        return
    model.load_state_dict(load(folder / numbered(MODEL, index, "bin"), map_location=device), **options)


def save_custom_state(obj: Any, path: str | Path, index: int = 0, save_on_each_node: bool = False) -> None:
    """Writes the state of a registered object."""
    save(obj.state_dict(), Path(path) / f"{CUSTOM}_{index}.pkl", save_on_each_node=save_on_each_node)


def load_custom_state(obj: Any, path: str | Path, index: int = 0) -> None:
    """Loads the state of a registered object."""
    obj.load_state_dict(load(Path(path) / f"{CUSTOM}_{index}.pkl", map_location="cpu"))

"""Folders of Megatron-LM's own distributed checkpoints (torch_dist): prepared models, saved and loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from accel_backends.ops.fqn import innermost
from accel_megatron.private import without_writer_process
from accel_megatron.training.engine import MegatronEngine
from accel_megatron.training.folder_states import (
    MASTERS,
    FolderStates,
    check_states,
    described_states,
    described_weights,
    load_states,
)
from accel_megatron.training.stage import named_weights
from accel_precision.convert import accumulation_dtype
from accel_state.collectives.tensors import agree
from accel_state.errors import BackendError, CheckpointError

T = TypeVar("T")
_LATEST, _FORMAT = "latest_checkpointed_iteration.txt", "metadata.json"


def save_folder(model: nn.Module, folder: str | Path, *, optimizer: bool = True) -> None:
    """Saves a prepared model, and the states of its optimizer, as a folder of Megatron-LM's, for any degrees.

    Weights have the dtype in which the model computes; fp32 master weights are among the states.

    Collective: every rank of the group must call this.

    Args:
        model: what ``prepare`` returned.
        folder: is created; must be empty or absent.
        optimizer: save the states of the optimizer, too, if the model has one.

    Raises:
        BackendError: the model was not prepared with Megatron-LM.
        CheckpointError: the folder has files, or cannot be written; or states that such folders do not hold.
    """
    from megatron.core import dist_checkpointing

    engine, path = _engine(model), Path(folder)

    def create() -> None:
        if dist.get_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise CheckpointError(f"{path} has files already; name a folder that is empty or absent")

    _on_all_ranks(create, f"{path} cannot be created")
    saved: dict[str, Any] = {"model": described_weights(engine.chunks)}
    if optimizer and engine.optimizer is not None:
        saved["optimizer"] = described_states(engine.optimizer, saved["model"])
    with without_writer_process():
        _on_all_ranks(lambda: dist_checkpointing.save(saved, str(path)), f"{path} cannot be written")


def load_folder(model: nn.Module, folder: str | Path, *, optimizer: bool = True, trust_pickle: bool = False) -> None:
    """Loads a folder that Megatron-LM, or ``save_folder``, wrote with any degrees.

    Weights are the folder's fp32 master weights if it has them. Options of an optimizer's groups are loaded from
    folders of ``save_folder``; those of Megatron-LM do not say which parameters a group has.

    Collective: every rank of the group must call this.

    Args:
        model: what ``prepare`` returned.
        folder: one with ``metadata.json``, or one of a series, of which the latest iteration is loaded.
        optimizer: load the states of the optimizer, too, if the model has one; False: they stay.
        trust_pickle: has to be True, because torch reads the folder's index by unpickling, which runs its code.

    Raises:
        BackendError: the model was not prepared with Megatron-LM.
        CheckpointError: ``trust_pickle`` is False, the folder is no such folder, its tensors are those of another
            model, or it has no states that fit any degrees.
    """
    from megatron.core import dist_checkpointing

    engine = _engine(model)
    if not trust_pickle:
        raise CheckpointError(
            f"{folder}: the index of Megatron-LM's folders is a pickle, which runs code when it is read; if you trust "
            "where it comes from: load_folder(..., trust_pickle=True)"
        )
    path = _on_all_ranks(lambda: _readable(Path(folder)), f"{folder} cannot be read", same=True)
    own = engine.optimizer if optimizer else None
    states = _on_all_ranks(lambda: _states(path, own is not None), f"{path} cannot be read")
    weights = _wanted(engine)
    further = states.wanted(weights, () if own is None else own.trained)
    loaded: dict[str, Any] = _on_all_ranks(
        lambda: dist_checkpointing.load({"model": weights, "further": further}, str(path)),
        f"{path} does not fit the model",
    )
    found: dict[str, dict[str, torch.Tensor]] = loaded.get("further", {})
    masters = {name: values[key] for name, values in found.items() for key in MASTERS if key in values}
    engine.load_weights({name: masters.get(name, loaded["model"][name]) for name in named_weights(engine.chunks)})
    if own is not None:
        _on_all_ranks(lambda: load_states(own, states, found), f"{path} does not fit the optimizer")


def _states(folder: Path, wanted: bool) -> FolderStates:
    """Returns the states that a folder has; with ``wanted``, it must have some that fit any degrees."""
    from megatron.core import dist_checkpointing

    keys = list(dist_checkpointing.load_tensors_metadata(str(folder)))
    common = dist_checkpointing.load_common_state_dict(str(folder))
    if wanted:
        check_states(keys, common, folder)
    return FolderStates.of(keys, common)


def latest(folder: Path) -> Path:
    """Returns the folder of the latest iteration, if ``folder`` is one of Megatron-LM's series; otherwise itself."""
    note = folder / _LATEST
    if not note.is_file():
        return folder
    iteration = note.read_text().strip()
    return folder / (f"iter_{int(iteration):07d}" if iteration.isdigit() else iteration)


def _readable(folder: Path) -> Path:
    """Returns the folder to load, as this rank sees it."""
    path = latest(folder)
    if not (path / _FORMAT).is_file():
        raise CheckpointError(
            f"{path} has no {_FORMAT}; expected a folder that Megatron-LM wrote with --ckpt-format torch_dist, or one "
            f"with {_LATEST}"
        )
    return path


def _on_all_ranks(work: Callable[[], T], failed: str, *, same: bool = False) -> T:
    """Returns the result of ``work``, with ``same`` that of rank 0; raises on all ranks if it fails on one.

    Collective: every rank of the group must call this.

    Raises:
        CheckpointError: ``work`` raised it, or another error, whose message then follows ``failed``.
        CollectiveError: ``work`` failed on other ranks only, whose messages it has.
    """
    found, problem, elsewhere = None, None, False
    try:
        found = work()
    except CheckpointError as error:
        problem = error
    except CheckpointException as error:  # torch's, which is no Exception; may have no failure but on rank 0
        first = next((one for one, _ in error.failures.values()), None)
        elsewhere = first is None
        problem = None if elsewhere else CheckpointError(f"{failed}: {first}")
    except Exception as error:
        problem = CheckpointError(f"{failed}: {error}")
    notes = agree(problem, note=found if same else None)
    if elsewhere:
        raise CheckpointError(failed)
    return cast(T, notes[0] if same else found)


def _wanted(engine: MegatronEngine) -> dict[str, Any]:
    """Returns the tensors to load, which a folder must have in the same shapes.

    megatron-core itself cuts or pads an embedding that has another number of rows. Floating-point tensors are fp32
    or fp64, so that master weights are not rounded.
    """
    wanted = described_weights(engine.chunks)
    for one in wanted.values():
        if hasattr(one, "allow_shape_mismatch"):
            one.allow_shape_mismatch = False
        if isinstance(getattr(one, "data", None), torch.Tensor) and one.data.is_floating_point():
            one.data = one.data.to(accumulation_dtype(one.data.dtype))
            if hasattr(one, "dtype"):
                one.dtype = one.data.dtype
    return wanted


def _engine(model: nn.Module) -> MegatronEngine:
    found = innermost(model)
    if not isinstance(found, MegatronEngine):
        raise BackendError(f"{type(found).__name__} was not prepared with Megatron-LM; pass what prepare returned")
    return found

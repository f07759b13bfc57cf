"""Checkpoints of a training run, as ``save_state`` writes them, as sources of weights."""

from pathlib import Path

from accel_inference.weights.sources import FormatWeight
from accel_state.errors import CheckpointError

_MANIFEST = "manifest.json"


def is_run_checkpoint(place: Path) -> bool:
    """Whether a folder is a checkpoint of a run."""
    return (place / _MANIFEST).is_file()


def weights_of_run(folder: Path) -> dict[str, FormatWeight]:
    """Weights of the first model of a run's checkpoint by name; each is read, and verified, when it is needed.

    Raises:
        CheckpointError: the folder holds no model, or the package that reads it is not installed.
        CheckpointCorruptError: the manifest is damaged.
    """
    try:
        from accel_ckpt.tools.stored_weights import stored_weights
    except ImportError as error:
        raise CheckpointError(f"{folder} is the checkpoint of a run; accel-ckpt reads it: {error}") from error
    return {
        name: FormatWeight(weight.read, weight.shape, weight.dtype, weight.dtype)
        for name, weight in stored_weights(folder).items()
    }

"""Importer behind ``accel ckpt import``."""

from dataclasses import asdict
from typing import Any


def import_accelerate(folder: str, out: str, model: str | None, trust_pickle: bool) -> dict[str, Any]:
    """Writes a checkpoint from a folder of Accelerate; returns what was written, as JSON.

    Raises:
        CheckpointError: the folder cannot be imported.
        ConfigError: ``model`` names nothing that can be imported.
    """
    from accel_compat.checkpoints.importing import import_folder
    from accel_planner.profile.named_objects import load_object

    built = None if model is None else load_object(model, "--model")
    return asdict(import_folder(folder, out, model=built, trust_pickle=trust_pickle))

"""Checkpoints that are committed or not there, readable at any world size.

Names are imported on first use, so that ``import accel_ckpt`` costs next to nothing.
"""

from typing import TYPE_CHECKING

from accel_ckpt._version import __version__ as __version__
from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel_ckpt.background import AsyncSaver as AsyncSaver
    from accel_ckpt.background import SaveHandle as SaveHandle
    from accel_ckpt.checkpoint import Checkpoint as Checkpoint
    from accel_ckpt.checkpoint import open_checkpoint as open_checkpoint
    from accel_ckpt.difference import Difference as Difference
    from accel_ckpt.directory import CheckpointDirectory as CheckpointDirectory
    from accel_ckpt.export import export_checkpoint as export_checkpoint
    from accel_ckpt.export import export_model as export_model
    from accel_ckpt.export import export_tensors as export_tensors
    from accel_ckpt.manifest import Manifest as Manifest
    from accel_ckpt.manifest import Part as Part
    from accel_ckpt.manifest import TensorEntry as TensorEntry
    from accel_ckpt.model_parts import load_model_parts as load_model_parts
    from accel_ckpt.peers import PerNode as PerNode
    from accel_ckpt.plain_files import load_model_files as load_model_files
    from accel_ckpt.replicas import Terms as Terms
    from accel_ckpt.resharding import reshard as reshard
    from accel_ckpt.retention import Best as Best
    from accel_ckpt.retention import Retention as Retention
    from accel_ckpt.retention import SavedCheckpoint as SavedCheckpoint
    from accel_ckpt.retention import keep_all as keep_all
    from accel_ckpt.retention import keep_best as keep_best
    from accel_ckpt.retention import keep_every as keep_every
    from accel_ckpt.retention import keep_for_run as keep_for_run
    from accel_ckpt.retention import keep_last as keep_last
    from accel_ckpt.retention import keep_union as keep_union
    from accel_ckpt.saving import save as save
    from accel_ckpt.storage import Url as Url

_EXPORTS = {
    "accel_ckpt.background": ("AsyncSaver", "SaveHandle"),
    "accel_ckpt.checkpoint": ("Checkpoint", "open_checkpoint"),
    "accel_ckpt.difference": ("Difference",),
    "accel_ckpt.directory": ("CheckpointDirectory",),
    "accel_ckpt.export": ("export_checkpoint", "export_model", "export_tensors"),
    "accel_ckpt.manifest": ("Manifest", "Part", "TensorEntry"),
    "accel_ckpt.model_parts": ("load_model_parts",),
    "accel_ckpt.peers": ("PerNode",),
    "accel_ckpt.plain_files": ("load_model_files",),
    "accel_ckpt.replicas": ("Terms",),
    "accel_ckpt.resharding": ("reshard",),
    "accel_ckpt.retention": (
        "Best",
        "Retention",
        "SavedCheckpoint",
        "keep_all",
        "keep_best",
        "keep_every",
        "keep_for_run",
        "keep_last",
        "keep_union",
    ),
    "accel_ckpt.saving": ("save",),
    "accel_ckpt.storage": ("Url",),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted([*_MODULE_OF, "__version__"])
__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)

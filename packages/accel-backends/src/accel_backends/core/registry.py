"""Installed backends by name."""

from importlib import import_module
from typing import cast

from accel_backends.core.backend import Backend
from accel_state.entry_points import find_entry_point
from accel_state.errors import BackendError, did_you_mean

GROUP = "accel.backends"
# Resolved without reading the metadata of all installed packages, which takes longer than importing the backend.
OWN = {
    "single": ("accel_backends.single.backend", "SingleBackend"),
    "ddp": ("accel_backends.ddp.backend", "DDPBackend"),
    "fsdp": ("accel_backends.fsdp.backend", "FSDPBackend"),
    "fsdp1": ("accel_backends.fsdp1.backend", "FSDP1Backend"),
    "pipeline": ("accel_backends.pipeline.backend", "PipelineBackend"),
    "xla": ("accel_backends.xla.backend", "XLABackend"),
}


def installed_backends() -> tuple[str, ...]:
    """Returns the names of the installed backends, those of other packages included."""
    from importlib.metadata import entry_points

    return tuple(sorted({*OWN, *(point.name for point in entry_points(group=GROUP))}))


def load_backend(name: str) -> type[Backend]:
    """Returns the class of the backend ``name``, whose module is imported by this call.

    Raises:
        BackendError: no such backend is installed (the message lists the installed ones), two packages claim the name,
            or the import fails.
    """
    if name in OWN:
        module, attribute = OWN[name]
        return cast(type[Backend], getattr(import_module(module), attribute))
    if (point := find_entry_point(GROUP, name, BackendError)) is not None:
        try:
            return cast(type[Backend], point.load())
        except ImportError as error:
            raise BackendError(f"backend {name!r} ({point.value}) cannot be imported: {error}") from error
    known = installed_backends()
    hint = did_you_mean(name, known)
    raise BackendError(f"no backend {name!r}; installed: {', '.join(known)}{hint}")

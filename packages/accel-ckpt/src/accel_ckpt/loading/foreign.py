"""Detection of checkpoint folders that Accelerate wrote, by the names of their files; none of the files is read."""

import re
from collections.abc import Iterable
from contextlib import suppress

from accel_ckpt.io.storage import Location, is_folder, storage_of
from accel_state.errors import CheckpointError

_ACCELERATES = re.compile(r"random_states_\d+\.pkl|optimizer(_\d+)?\.bin|scheduler(_\d+)?\.bin|pytorch_model_fsdp_\d+")


def advice(names: Iterable[str]) -> str:
    """Returns advice on loading a folder of these files if Accelerate wrote it; otherwise an empty text."""
    names = list(names)
    if not any(_ACCELERATES.fullmatch(name) for name in names):
        return ""
    if any(name.startswith("model") and name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        weights = "its weights can be loaded by load_model(model, folder) of an Accelerator"
    else:
        weights = "its weights can be loaded into the model with torch.load and load_state_dict before prepare"
    return (
        "; Accelerate wrote it, and its states are pickles, which load_state does not read: accel ckpt import, of "
        f"accel-compat, makes a checkpoint of the folder; {weights} (see docs/guides/checkpoints.md)"
    )


def advice_on_series(folder: Location) -> str:
    """Returns the same advice about the newest folder ``checkpoint_N`` in ``folder`` that Accelerate wrote."""
    storage = storage_of(folder)
    if not is_folder(storage, folder):
        return ""
    names = (name for name, size in storage.listing(folder).items() if size is None)
    numbered = sorted(
        (name for name in names if re.fullmatch(r"checkpoint_\d+", name)), key=lambda name: int(name[11:])
    )
    for name in reversed(numbered):
        with suppress(FileNotFoundError, CheckpointError):  # removed meanwhile, or not readable
            if said := advice(storage.names(folder / name)):
                return f"; there is {name}{said}"
    return ""

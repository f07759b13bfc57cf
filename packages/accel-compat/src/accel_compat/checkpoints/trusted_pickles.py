"""Pickles that the user trusts, read with torch's own unpickler, which runs the code in them."""

from pathlib import Path
from typing import Any

import torch

from accel_state.errors import CheckpointError


def load_trusted(path: Path) -> Any:
    """Reads the state of a registered object.

    Raises:
        CheckpointError: the file is damaged, or names a class that cannot be imported here, as are those of a script
            that was run (``__main__``).
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except (AttributeError, ImportError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; put the module of its classes on PYTHONPATH. Classes of the script that was "
            "run are pickled as those of __main__, which is another module here: save plain values in state_dict instead"
        ) from error
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error

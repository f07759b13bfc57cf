"""Local storage raises CheckpointErrors for what the system refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest

from accel_ckpt.io.local import LocalStorage
from accel_state.errors import CheckpointError

LONG = "x" * 300


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda storage, folder: storage.sweep(folder / LONG), "leftovers cannot be removed: File name too long"),
        (lambda storage, folder: storage.listing(folder / LONG), "File name too long"),
        (lambda storage, folder: storage.remove(folder), "cannot be removed: Is a directory"),
    ],
    ids=["sweep", "listing", "remove"],
)
def test_what_the_system_refuses_is_a_checkpoint_error(
    tmp_path: Path, use: Callable[[LocalStorage, Path], object], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        use(LocalStorage(), tmp_path)

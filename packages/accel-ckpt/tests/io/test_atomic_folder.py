"""Atomic folder: no other rank can keep a dropped staging folder alive."""

from pathlib import Path
from threading import Event, Thread

from accel_ckpt.io.atomic_folder import Staging


def test_a_dropped_folder_is_gone_although_another_rank_still_writes_into_it(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "one", overwrite=False)
    folder = Path(staging.folder)
    many = Event()

    def write() -> None:
        for number in range(1_000_000):
            try:
                (folder / f"{number}.bin").touch()
            except FileNotFoundError:
                return
            if number == 2000:
                many.set()

    writer = Thread(target=write)
    writer.start()
    assert many.wait(60)
    staging.drop()
    writer.join(60)
    assert not writer.is_alive()
    assert list(tmp_path.iterdir()) == []

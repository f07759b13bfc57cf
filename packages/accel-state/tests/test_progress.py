"""A progress bar shows on the first process of a node."""

import io

import pytest

from accel_state import tqdm

pytest.importorskip("tqdm")


@pytest.mark.parametrize(("local_rank", "only", "shown"), [(0, True, True), (1, True, False), (1, False, True)])
def test_the_first_process_shows_the_bar(local_rank, only, shown, monkeypatch):
    for name, value in {"RANK": local_rank, "WORLD_SIZE": 2, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    screen = io.StringIO()
    assert list(tqdm([1, 2], main_process_only=only, file=screen)) == [1, 2]
    assert bool(screen.getvalue()) is shown


@pytest.mark.parametrize("disable", [True, None])
def test_disable_is_kept(disable):
    screen = io.StringIO()  # no terminal
    assert list(tqdm([1], disable=disable, file=screen)) == [1]
    assert not screen.getvalue()


def test_the_old_signature_is_refused():
    with pytest.raises(ValueError, match="main_process_only=True"):
        tqdm(True, [1, 2])

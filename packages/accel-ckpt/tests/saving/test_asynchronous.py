import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accel_ckpt import AsyncSaver, CheckpointDirectory, keep_last, open_checkpoint
from accel_ckpt.saving import asynchronous as backgrounds
from accel_ckpt.saving import host_snapshot
from accel_state.errors import CheckpointError


def test_a_snapshot_has_the_values_at_the_call(tmp_path: Path) -> None:
    weight, column = torch.zeros(300_000), torch.zeros(400, 400).t()
    steps = [0]
    with AsyncSaver() as saver:
        for number in range(4):
            handle = saver.save(tmp_path / f"checkpoint_{number}", {"w": weight, "c": column, "steps": steps})
            weight += 1
            column += 1
            steps[0] += 1
            assert handle.stall > 0
    for number in range(4):
        saved = open_checkpoint(tmp_path / f"checkpoint_{number}")
        assert torch.equal(saved.read("w"), torch.full((300_000,), float(number)))
        assert torch.equal(saved.read("c"), torch.full((400, 400), float(number)))
        assert saved.read("steps") == [number]


def test_the_buffer_is_reused(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        saver.save(tmp_path / "one", {"w": torch.zeros(1000)})
        buffer = saver._snapshot._buffer
        saver.save(tmp_path / "two", {"w": torch.zeros(500)}).wait()
        assert saver._snapshot._buffer is buffer


def test_the_buffer_is_pinned_after_the_first_save_from_an_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strided tensors stand for those of an accelerator."""
    events: list[str] = []
    monkeypatch.setattr(host_snapshot, "uses_pinned_memory", lambda device: True)

    def pin(buffer: torch.Tensor) -> Callable[[], object]:
        events.append(f"pin {buffer.numel()}")
        return lambda: events.append("unpin")

    monkeypatch.setattr(host_snapshot, "pin_in_place", pin)
    with AsyncSaver() as saver:
        for number, width in enumerate((5, 5, 7)):
            weight = torch.full((width, 2), float(number)).t()
            saver.save(tmp_path / str(number), {"w": weight, "n": torch.tensor([number])})
            weight += 10
            saver.wait()
    assert events == ["pin 48", "unpin", "pin 64", "unpin"]
    for number, width in enumerate((5, 5, 7)):
        saved = open_checkpoint(tmp_path / str(number))
        assert torch.equal(saved.read("w"), torch.full((2, width), float(number)))
        assert torch.equal(saved.read("n"), torch.tensor([number]))


def test_only_one_save_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, original = threading.Event(), backgrounds.SaveTransaction.finish

    def slow(self: object, *args: object, **kwargs: object) -> None:
        gate.wait(60)
        original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(backgrounds.SaveTransaction, "finish", slow)
    with AsyncSaver() as saver:
        first = saver.save(tmp_path / "one", {"n": 1})
        assert not first.done()
        assert "under way" in repr(first)
        with pytest.raises(CheckpointError, match=r"one is not committed after 0\.01 s"):
            first.wait(0.01)
        threading.Timer(0.05, gate.set).start()
        saver.save(tmp_path / "two", {"n": 2})
        assert first.done()
    assert open_checkpoint(tmp_path / "two").read("n") == 2


def test_a_failure_is_raised_at_the_next_call_once(tmp_path: Path) -> None:
    saver = AsyncSaver()
    handle = saver.save(tmp_path / "one", {"n": 1})
    handle.wait()
    failing = saver.save(tmp_path / "two", {"n": 2})
    failing.wait()
    (tmp_path / "three").mkdir()
    bad = _failing_save(saver, tmp_path / "three")
    with pytest.raises(CheckpointError, match=r"three in the background failed: .*other files"):
        saver.save(tmp_path / "four", {"n": 4})
    assert bad.done()
    assert saver.save(tmp_path / "four", {"n": 4}).wait().read("n") == 4
    saver.close()
    assert sorted(os.listdir(tmp_path)) == ["four", "one", "three", "two"]


def _failing_save(saver: AsyncSaver, path: Path) -> backgrounds.SaveHandle:
    """A save whose commit finds the place taken."""
    original = backgrounds.SaveTransaction.finish

    def spoil(self: backgrounds.SaveTransaction, *args: object, **kwargs: object) -> None:
        (path / "mine").write_text("")
        original(self, *args, **kwargs)  # type: ignore[arg-type]

    backgrounds.SaveTransaction.finish = spoil  # type: ignore[method-assign]
    try:
        handle = saver.save(path, {"n": 3})
        handle._over.wait(60)
    finally:
        backgrounds.SaveTransaction.finish = original  # type: ignore[method-assign]
    return handle


def test_a_failure_that_was_seen_is_not_raised_again(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with AsyncSaver() as saver:
        handle = _failing_save(saver, tmp_path / "one")
        with pytest.raises(CheckpointError, match="other files"):
            handle.wait()


def test_what_cannot_be_saved_is_refused_at_the_call(tmp_path: Path) -> None:
    with AsyncSaver() as saver, pytest.raises(CheckpointError, match="x/a is a"):
        saver.save(tmp_path / "one", {"x": {"a": object()}})
    assert os.listdir(tmp_path) == []


def test_leaving_by_an_exception_waits_and_keeps_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "bad").mkdir()

    def train() -> None:
        with AsyncSaver() as saver:
            saver.save(tmp_path / "one", {"w": torch.ones(10)})
            saver.wait()
            _failing_save(saver, tmp_path / "bad")
            raise KeyError("mine")

    with caplog.at_level(logging.ERROR), pytest.raises(KeyError, match="mine"):
        train()
    assert open_checkpoint(tmp_path / "one").names == ["w"]
    assert "failed too" in caplog.text


def test_leaving_by_sys_exit_does_not_hide_a_failure(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()

    def train() -> None:
        with AsyncSaver() as saver:
            _failing_save(saver, tmp_path / "bad")
            sys.exit(0)

    with pytest.raises(CheckpointError, match="other files"):
        train()


def test_a_closed_saver_says_so_and_begins_nothing(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        saver.save(tmp_path / "one", {"n": 1})
    with pytest.raises(CheckpointError, match="this AsyncSaver is closed"):
        saver.save(tmp_path / "two", {"n": 2})
    assert os.listdir(tmp_path) == ["one"]


def test_a_series_is_pruned_after_the_commit(tmp_path: Path) -> None:
    series = CheckpointDirectory(tmp_path, retention=keep_last(2))
    with AsyncSaver() as saver:
        for number in range(4):
            saver.save(tmp_path / f"checkpoint_{number}", {"n": number}, series=series)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_2", "checkpoint_3"]


@pytest.mark.ranks(2)
def test_ranks_save_in_the_background_while_they_talk_in_the_foreground(tmp_path: Path, rank: int) -> None:
    import torch.distributed as dist

    weight = torch.zeros(100_000)
    with AsyncSaver() as saver:
        for number in range(5):
            saver.save(tmp_path / f"checkpoint_{number}", {"w": weight}, local={"rank": rank + number})
            weight += 1
            for _ in range(20):
                dist.all_reduce(torch.ones(10))
    for number in range(5):
        saved = open_checkpoint(tmp_path / f"checkpoint_{number}")
        assert torch.equal(saved.read("w"), torch.full((100_000,), float(number)))
        assert [saved.read_local("rank", r) for r in range(2)] == [number, number + 1]


@pytest.mark.ranks(2)
def test_a_failure_of_one_rank_reaches_all_at_the_next_call(tmp_path: Path, rank: int) -> None:
    saver = AsyncSaver()
    original = backgrounds.SaveTransaction._write
    if rank == 1:

        def fail(*_: object) -> None:
            raise CheckpointError("the disk is on fire")

        backgrounds.SaveTransaction._write = fail  # type: ignore[assignment]
    try:
        saver.save(tmp_path / "one", {"w": torch.ones(3)})
        with pytest.raises(CheckpointError, match="the disk is on fire"):
            saver.wait()
    finally:
        backgrounds.SaveTransaction._write = original  # type: ignore[method-assign]
    saver.close()
    torch.distributed.barrier()
    assert os.listdir(tmp_path) == []


@pytest.mark.ranks(2)
def test_ranks_that_no_longer_bring_the_same_hear_of_it_and_go_on(tmp_path: Path, rank: int) -> None:
    same, more = {"w": torch.ones(100)}, {"w": torch.ones(100), **({"own": torch.ones(3)} if rank else {})}
    with AsyncSaver() as saver:
        for number in range(2):
            saver.save(tmp_path / f"same_{number}", same).wait()
        handle = saver.save(tmp_path / "more", more)
        with pytest.raises(CheckpointError, match="no longer bring the same tensors"):
            handle.wait()
        assert saver.save(tmp_path / "again", more).wait().names == ["w", "own"]
        assert saver.save(tmp_path / "values", {"step": rank}).wait().read("step") == 0
    assert not (tmp_path / "more").exists()


@pytest.mark.ranks(2)
def test_what_one_rank_cannot_save_later_fails_on_all_and_nobody_waits(tmp_path: Path, rank: int) -> None:
    with AsyncSaver() as saver:
        for number in range(2):
            saver.save(tmp_path / f"good_{number}", {"w": torch.ones(100)}).wait()
        bad = saver.save(tmp_path / "bad", {"w": torch.ones(100), "x": object() if rank else 1})
        with pytest.raises(CheckpointError, match=r"x is a builtins\.object"):
            bad.wait()
        assert saver.save(tmp_path / "after", {"w": torch.ones(100)}).wait().names == ["w"]


@pytest.mark.ranks(2)
def test_values_that_differ_between_ranks_are_rank_zeros_in_the_background_too(tmp_path: Path, rank: int) -> None:
    with AsyncSaver() as saver:
        for number in range(3):
            saved = saver.save(tmp_path / str(number), {"w": torch.full((9,), number), "loss": rank + number}).wait()
            assert saved.read("loss") == number


@pytest.mark.parametrize("end", ["raise KeyError('mine')", pytest.param("del saver", marks=pytest.mark.slow)])
def test_a_process_that_ends_waits_for_what_is_under_way(tmp_path: Path, end: str) -> None:
    script = (
        "import sys, torch\n"
        "from accel_ckpt import AsyncSaver\n"
        "saver = AsyncSaver()\n"
        f"saver.save({str(tmp_path / 'one')!r}, {{'w': torch.arange(6_000_000)}})\n"
        f"{end}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == (0 if end == "del saver" else 1), done.stderr
    assert torch.equal(open_checkpoint(tmp_path / "one").read("w"), torch.arange(6_000_000))
    assert os.listdir(tmp_path) == ["one"]

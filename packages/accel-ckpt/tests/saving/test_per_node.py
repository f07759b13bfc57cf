"""Machines that share no disk: each keeps a whole copy of its own, and what counts is what all of them have."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import accel_ckpt
from accel_ckpt import AsyncSaver, CheckpointDirectory, PerNode, keep_last, open_checkpoint
from accel_ckpt.io.local import LocalStorage
from accel_state.errors import CheckpointError
from accel_testing.faults.faults import injected
from accel_testing.pytest.logs import heard

NODES = (0, 0, 1, 1)


def of(rank: int) -> PerNode:
    """Four ranks on two machines."""
    return PerNode(node=NODES[rank])


def disk(folder: Path, rank: int) -> Path:
    """The disk that this rank sees."""
    return folder / f"node{NODES[rank]}"


def state(number: int) -> dict[str, Any]:
    """Tensors that one rank writes, and one of which each rank has a part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(35.0).reshape(7, 5) + number
    mesh = init_device_mesh("cpu", (4,))
    plain = {f"plain{i}": torch.full((200, 200), float(number + i)) for i in range(5)}
    return {"model": {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), **plain}, "n": number}


def check(saved: accel_ckpt.Checkpoint) -> int:
    """All of it, as any process reads it."""
    number: int = saved.read("n")
    model = saved.read("model")
    assert torch.equal(model["sharded"], torch.arange(35.0).reshape(7, 5) + number)
    assert all(model[f"plain{i}"].unique().tolist() == [number + i] for i in range(5))
    return number


@pytest.mark.ranks(4)
def test_each_machine_keeps_all_of_it_and_reads_its_own(tmp_path: Path, rank: int) -> None:
    nodes, mine = of(rank), disk(tmp_path, rank)
    saved = accel_ckpt.save(mine / "one", state(3), local={"rank": rank}, metadata={"said by": rank}, group=nodes)
    assert saved.path == mine / "one"
    assert check(saved) == 3
    assert [saved.read_local("rank", other) for other in range(4)] == [0, 1, 2, 3]
    assert (saved.world_size, saved.metadata) == (4, {"said by": 0})
    dist.barrier()
    copies = [(tmp_path / node / "one" / "manifest.json").read_bytes() for node in ("node0", "node1")]
    assert copies[0] == copies[1]
    dist.barrier()
    if rank == 3:
        for file in (tmp_path / "node0" / "one").iterdir():
            file.unlink()
    dist.barrier()
    if rank >= 2:
        assert check(open_checkpoint(mine / "one")) == 3
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint"):
        open_checkpoint(mine / "one", group=nodes)


@pytest.mark.ranks(4)
def test_a_series_counts_what_all_machines_have(tmp_path: Path, rank: int) -> None:
    series = CheckpointDirectory(disk(tmp_path, rank), retention=keep_last(2), group=of(rank))
    for number in range(4):
        assert series.save(state(number)).path == series.path / f"checkpoint_{number}"
    dist.barrier()
    assert sorted(os.listdir(tmp_path / "node1")) == ["checkpoint_2", "checkpoint_3"]
    dist.barrier()
    if rank == 0:
        (tmp_path / "node1" / "checkpoint_3").rename(tmp_path / "lost")
    dist.barrier()
    with heard("accel_ckpt") as said:
        latest = series.latest()
    assert latest is not None
    assert check(latest) == 2
    expected = "passing over checkpoint_3, trying an older one: the machine of rank 2 has no copy of it"
    assert said == ([expected] if rank == 0 else [])
    assert series.next_path().name == "checkpoint_4"
    assert series.prune() == []
    series.save(state(4))
    dist.barrier()
    assert sorted(os.listdir(tmp_path / "node0")) == ["checkpoint_2", "checkpoint_3", "checkpoint_4"]
    assert sorted(os.listdir(tmp_path / "node1")) == ["checkpoint_2", "checkpoint_4"]


@pytest.mark.ranks(4)
def test_a_disk_that_fails_while_files_arrive_fails_the_save_on_all(tmp_path: Path, rank: int) -> None:
    series = CheckpointDirectory(disk(tmp_path, rank), group=of(rank))
    series.save(state(0))
    with (
        injected("raise(EIO) at call 2 of os:pwritev on rank 2", rank=rank),
        pytest.raises(CheckpointError, match=r"Input/output error"),
    ):
        series.save(state(1))
    dist.barrier()
    assert os.listdir(series.path) == ["checkpoint_0"]
    assert check(series.save(state(2))) == 2


@pytest.mark.ranks(4)
def test_a_file_that_cannot_be_opened_to_be_sent_fails_the_save_on_all(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = of(rank)

    def lost(storage: LocalStorage, file: Path) -> None:
        raise CheckpointError(f"{file.name}: gone")

    with monkeypatch.context() as patch:
        if rank == 0:
            patch.setattr(LocalStorage, "open", lost)
        with pytest.raises(CheckpointError, match=r"gone|is not what rank 0 has written"):
            accel_ckpt.save(disk(tmp_path, rank) / "one", state(1), group=nodes)
    assert check(accel_ckpt.save(disk(tmp_path, rank) / "one", state(2), group=nodes)) == 2


@pytest.mark.ranks(4)
def test_copies_of_different_saves_are_told_apart(tmp_path: Path, rank: int) -> None:
    nodes, mine = of(rank), disk(tmp_path, rank)
    accel_ckpt.save(mine / "one", state(1), group=nodes)
    accel_ckpt.save(mine / "two", state(2), group=nodes)
    dist.barrier()
    if rank == 3:
        (mine / "one").rename(mine / "old")
        (mine / "two").rename(mine / "one")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"rank 0 sees the save \w+ there and rank 2 the save \w+"):
        open_checkpoint(mine / "one", group=nodes)


@pytest.mark.ranks(4)
def test_copies_are_made_in_the_background_too(tmp_path: Path, rank: int) -> None:
    nodes = of(rank)
    series = CheckpointDirectory(disk(tmp_path, rank), retention=keep_last(1), group=nodes)
    with AsyncSaver(group=nodes) as saver:
        for number in range(3):
            saver.save(series.next_path(), state(number), local={"rank": rank}, series=series)
            saver.wait()
    dist.barrier()
    assert os.listdir(series.path) == ["checkpoint_2"]
    found = open_checkpoint(series.path / "checkpoint_2", group=nodes)
    assert check(found) == 2
    assert [found.read_local("rank", other) for other in range(4)] == [0, 1, 2, 3]


@pytest.mark.ranks(4)
def test_a_url_is_one_place_for_all(rank: int) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("tenacity")
    with pytest.raises(CheckpointError, match="one place for all machines"):
        accel_ckpt.save("memory://nodes/one", {"n": 1}, group=of(rank))


def test_one_process_is_one_machine(tmp_path: Path) -> None:
    assert accel_ckpt.save(tmp_path / "one", {"n": 1}, group=PerNode(node=5)).read("n") == 1
    assert open_checkpoint(tmp_path / "one", group=PerNode(node=5)).read("n") == 1

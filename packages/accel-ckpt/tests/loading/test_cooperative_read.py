"""What several ranks want is compared by one of them, and read by one for all where that is faster."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import accel_ckpt
from accel_ckpt.format.blocks import BLOCK, CheckedFile
from accel_ckpt.io.thread_pool import Seat
from accel_ckpt.loading import checkpoint
from accel_ckpt.loading import cooperative_read as sharing
from accel_ckpt.loading.cooperative_read import RankReads, assign_verifiers, broadcast_is_cheaper, wanted_by_all
from accel_state.collectives.tensors import all_gather_object
from accel_state.errors import CheckpointError

A, B = Seat("a", 0b11), Seat("b", 0b11)


def test_of_the_ranks_that_read_a_block_on_one_machine_one_compares_it() -> None:
    wants = [RankReads(A, {"f": (0, 1, 2)}), RankReads(A, {"f": (1, 2)}), RankReads(B, {"f": (1,)})]
    compares = assign_verifiers(wants, neighbours=(0, 1, 2))
    assert [compares(0, ("f", number)) for number in range(3)] == [True, False, True]
    assert [compares(1, ("f", number)) for number in (1, 2)] == [True, False]
    assert compares(2, ("f", 1)), "another machine may have read something else"
    apart = assign_verifiers(wants, neighbours=(0,))
    assert all(apart(0, ("f", number)) for number in range(3)), "the others read other copies"
    assert wanted_by_all(wants) == [("f", 1)]


@pytest.mark.parametrize(
    ("read", "exchange", "readers", "faster"),
    [
        (0.1, 0.01, 8, True),  # a slow store, a fast network
        (0.1, 0.01, 1, False),  # nobody to share with
        (0.002, 0.02, 2, False),  # the system's memory against a network
        (0.02, 0.2, 64, True),  # a file system that 64 machines pull at
    ],
)
def test_passing_on_pays_where_reading_is_slow_and_many_read(
    read: float, exchange: float, readers: int, faster: bool
) -> None:
    assert broadcast_is_cheaper(read, exchange, readers=readers) is faster


def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The blocks that this rank compares with their digests from now on: their files and numbers."""
    found: list[tuple[str, int]] = []
    original = CheckedFile._read_compared

    def noted(self: CheckedFile, number: int, *views: memoryview) -> None:
        found.append((self.name, number))
        original(self, number, *views)

    monkeypatch.setattr(CheckedFile, "_read_compared", noted)
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("verify", [False, True])
def test_every_block_is_compared_once_by_one_of_two_ranks(
    tmp_path: Path, rank: int, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are read, and with ``verify`` those that nobody reads."""
    world = dist.group.WORLD
    values = {"w": torch.arange(BLOCK, dtype=torch.int32), "unread": torch.ones(BLOCK)}
    accel_ckpt.save(tmp_path / "one", values)
    opened = accel_ckpt.open_checkpoint(tmp_path / "one", verify=False, group=world)
    compared = comparisons(monkeypatch)
    put = opened.fetch({"w": None}, group=world, verify=verify)["w"]
    every = [place for places in all_gather_object(compared) for place in places if place[0] != "tree.json"]
    assert len({*every}) == len(every), "a block was compared twice"  # but the names, which each rank reads
    files = [opened._files[name] for name in opened.manifest.files if name != "tree.json"]
    assert sum(len(file.record.blocks) for file in files) == 10
    assert len(every) == 10 if verify else 5
    assert sum(len(file.unchecked()) for file in files) == (0 if verify else 5)
    assert torch.equal(put(), values["w"])
    compared.clear()
    opened.verify(group=world)
    assert not any(file.unchecked() for file in files)
    assert verify is not any(all_gather_object(compared)), "and no block again"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("block", range(4))
@pytest.mark.sampled(1)
def test_damage_that_one_rank_compares_fails_both(tmp_path: Path, rank: int, block: int) -> None:
    world = dist.group.WORLD
    saved = accel_ckpt.save(tmp_path / "one", {"w": torch.zeros(BLOCK, dtype=torch.int32)})
    if rank == 0:
        with (saved.path / "tensors-00000.safetensors").open("r+b") as file:
            file.seek(block * BLOCK + BLOCK // 2)
            file.write(b"x")
    dist.barrier()
    opened = accel_ckpt.open_checkpoint(saved.path, verify=False, group=world)
    with pytest.raises(CheckpointError, match=rf"tensors-00000\.safetensors: bytes {block * BLOCK} to"):
        opened.fetch({"w": None}, group=world)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("on", [True, False], ids=["passed on", "tried and left"])
def test_what_is_passed_on_is_what_was_saved(
    tmp_path: Path, rank: int, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between machines, each of which would read for itself."""
    world = dist.group.WORLD
    values = torch.arange(9 * BLOCK // 4, dtype=torch.int32)
    accel_ckpt.save(tmp_path / "one", {"w": values, "b": torch.ones(3)})
    monkeypatch.setattr(sharing, "broadcast_is_cheaper", lambda *_, **__: on)
    monkeypatch.setattr(sharing, "_AT_ONCE", 5 * 2**20)  # so that blocks are passed on in parts
    monkeypatch.setattr("accel_ckpt.io.thread_pool.gethostname", lambda: f"machine{rank}")
    opened = accel_ckpt.open_checkpoint(tmp_path / "one", verify=False, group=world)
    file = opened._files["tensors-00000.safetensors"]
    reads: list[int] = []
    original = type(file.source).reading

    def counted(self: object, begin: int, *views: memoryview) -> Iterator[memoryview]:
        reads.append(sum(map(len, views)))
        return original(self, begin, *views)  # type: ignore[arg-type]

    monkeypatch.setattr(type(file.source), "reading", counted)
    assert torch.equal(opened.fetch({"w": None}, group=world)["w"](), values)
    read = torch.tensor(float(sum(reads)))
    dist.all_reduce(read)
    beyond = (read.item() - file.source.size) / BLOCK  # besides, each rank reads the header
    assert beyond < 0.1 if on else beyond >= 5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("before", ["nothing", "another save"])
def test_a_rank_that_opens_early_finds_what_another_saves_before_it_opens(
    tmp_path: Path, rank: int, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 saves by itself once rank 1 has looked."""
    place, looked = tmp_path / "one", tmp_path / "looked"
    if before == "another save":
        accel_ckpt.save(place, {"w": torch.zeros(3)})
    dist.barrier()
    original = checkpoint.read_manifest

    def noted(folder: Path) -> object:
        try:
            return original(folder)
        finally:
            looked.touch()

    if rank == 1:
        monkeypatch.setattr(checkpoint, "read_manifest", noted)
    else:
        while not looked.exists():
            time.sleep(0.01)
        accel_ckpt.save(place, {"w": torch.ones(3)}, alone=True)
    opened = accel_ckpt.open_checkpoint(place, group=dist.group.WORLD)
    assert torch.equal(opened.read("w"), torch.ones(3))
    assert len({*all_gather_object(opened.manifest.id)}) == 1

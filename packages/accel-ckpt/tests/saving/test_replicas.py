"""Ranks that should hold the same and do not: never put together into one state, and never without a word."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from accel_ckpt import AsyncSaver, Terms, open_checkpoint, save
from accel_ckpt.saving.replicas import row_sums, value_digests
from accel_state.errors import CheckpointError

LARGE = 2**15  # floats, so that tensors are spread over the ranks that hold them


@contextmanager
def warnings_of_saves() -> Iterator[list[str]]:
    """What is logged while the block runs."""
    texts: list[str] = []
    logger, handler = logging.getLogger("accel_ckpt.saving.transaction"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def replica(rank: int) -> dict[str, torch.Tensor]:
    """Large tensors of which ranks write some each."""
    return {str(number): torch.full((LARGE,), float(rank)) for number in range(4)}


@pytest.mark.ranks(2)
def test_tensors_that_differ_all_come_from_the_first_rank(rank, tmp_path):
    with warnings_of_saves() as warned:
        save(tmp_path / "c", {"model": replica(rank)})
    read = open_checkpoint(tmp_path / "c").read("model")
    assert {float(tensor[0]) for tensor in read.values()} == {0.0}
    assert ("model/0, model/1, model/2, model/3 (rank 1)" in "".join(warned)) == (rank == 0)


@pytest.mark.ranks(2)
def test_a_value_deep_in_a_large_tensor_is_seen(rank, tmp_path):
    tensor = torch.zeros(2**22)
    tensor[-5] += rank
    with warnings_of_saves() as warned:
        save(tmp_path / "c", {"model": {"w": tensor, "same": torch.ones(4)}})
    assert ("different values at model/w (rank 1)" in "".join(warned)) == (rank == 0)


@pytest.mark.ranks(2)
def test_what_is_refused_names_place_ranks_and_advice_on_every_rank(rank, tmp_path):
    terms = Terms(refused=lambda place: "average first" if place.startswith("model/") else None)
    with pytest.raises(CheckpointError, match=r"different values at model/0, .* \(rank 1\): average first"):
        save(tmp_path / "c", {"model": replica(rank), "other": {"x": torch.tensor(rank)}}, terms=terms)
    assert not (tmp_path / "c").exists()
    save(tmp_path / "c", {"model": replica(0)}, terms=terms)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["values", "shapes", "names"])
def test_each_rank_keeps_its_own_where_that_is_wanted(rank, tmp_path, how):
    custom = {
        "values": {"n": rank, "w": torch.full((LARGE,), float(rank))},
        "shapes": {"w": torch.full((3 + rank,), float(rank))},
        "names": {"n": rank, f"only-{rank}": torch.full((3,), float(rank))},
    }[how]
    saved = save(tmp_path / "c", {"model": replica(0), "custom": custom}, terms=Terms(own=("custom",)))
    first, own = saved.read("custom"), saved.read_local("custom", 1)
    assert saved.read_local("custom", 0) is None
    read = own if rank == 1 else first
    assert read.keys() == custom.keys()
    assert all(torch.equal(torch.as_tensor(read[key]), torch.as_tensor(custom[key])) for key in custom)


@pytest.mark.ranks(2)
def test_a_background_save_sees_that_ranks_have_come_apart(rank, tmp_path):
    terms = Terms(own=("custom",), refused=lambda place: "average first" if "model" in place else None)
    with AsyncSaver() as saver:
        for number in range(2):
            state = {"model": replica(0), "custom": replica(0)}
            saver.save(tmp_path / str(number), state, terms=terms).wait()
        with pytest.raises(CheckpointError, match="average first"):
            saver.save(tmp_path / "2", {"model": replica(rank)}, terms=terms)
        for number in range(3, 6):
            state = {"model": replica(0), "custom": replica(rank * (number > 3))}
            saver.save(tmp_path / str(number), state, terms=terms).wait()
    saved = open_checkpoint(tmp_path / "5")
    assert float(saved.read("custom")["1"][0]) == 0.0
    assert float(saved.read_local("custom", 1)["1"][0]) == 1.0


@pytest.mark.ranks(4)
def test_replicas_of_shards_are_compared(rank, tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2))
    local = torch.full((LARGE, 2), float(rank % 2))
    for number, drift in enumerate((0.0, 0.5)):
        shard = DTensor.from_local(local + drift * (rank == 3), mesh, [Replicate(), Shard(0)], run_check=False)
        with warnings_of_saves() as warned:
            read = save(tmp_path / str(number), {"model": {"w": shard}}).read("model")["w"]
        assert read.unique().tolist() == [0.0, 1.0]
    assert ("model/w (rank 3)" in "".join(warned)) == (rank == 0)


def test_row_sums_see_values_change_and_move():
    tensor = torch.randn(300, 7, generator=torch.Generator().manual_seed(0))
    changed, moved = tensor.clone(), tensor.flip(0)
    changed[299, 6] += 1e-6
    assert torch.equal(row_sums(tensor), row_sums(tensor.clone()))
    assert not torch.equal(row_sums(tensor), row_sums(changed))
    assert not torch.equal(row_sums(tensor), row_sums(moved))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_every_dtype_and_stride_has_a_digest(dtype):
    tensor = torch.zeros(40, 33).to(dtype)
    one, same, transposed = (value_digests({"x": x})["x"] for x in (tensor, tensor.clone(), tensor.t()))
    assert one == same == transposed  # zeros

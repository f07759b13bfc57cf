"""DTensors written by the ranks that hold them, and read into any other placement."""

from pathlib import Path

import pytest
import torch

import accel_ckpt
from accel_ckpt.saving import transaction
from accel_state.errors import CheckpointError, CheckpointMismatchError
from accel_testing.pytest.logs import heard


def _values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float32).reshape(shape).to(dtype)


def _placements() -> list[tuple[str, tuple[int, ...], tuple[object, ...]]]:
    from torch.distributed.tensor import Replicate, Shard

    return [
        ("rows", (4,), (Shard(0),)),
        ("columns", (4,), (Shard(1),)),
        ("replicated", (4,), (Replicate(),)),
        ("hybrid", (2, 2), (Replicate(), Shard(0))),
        ("both dims", (2, 2), (Shard(0), Shard(1))),
        ("one dim twice", (2, 2), (Shard(0), Shard(0))),
        ("second, then first", (2, 2), (Shard(1), Shard(0))),
    ]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shape", [(8, 8), (7, 5), (3, 2), (1, 3)], ids=str)
@pytest.mark.sampled(1)
def test_any_placement_reads_into_any_other(tmp_path: Path, shape: tuple[int, ...], rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    full = _values(*shape)
    meshes = {size: init_device_mesh("cpu", size) for size in ((4,), (2, 2))}
    state = {name: distribute_tensor(full, meshes[size], where) for name, size, where in _placements()}
    saved = accel_ckpt.save(tmp_path / "one", {"model": state})
    for key, value in saved.read("model").items():
        torch.testing.assert_close(value, full, rtol=0, atol=0, msg=f"{key} whole")
    for name, target in state.items():
        back = saved.read("model", like=dict.fromkeys(state, target))
        for key, value in back.items():
            assert value.placements == target.placements
            local = value.to_local()
            torch.testing.assert_close(local, target.to_local(), rtol=0, atol=0, msg=f"{key} read as {name}")


@pytest.mark.ranks(4)
def test_each_part_is_written_once_and_replicas_share_the_work(tmp_path: Path, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        f"hybrid{number}": distribute_tensor(_values(256, 256), mesh, (Replicate(), Shard(0))) for number in range(4)
    } | {f"plain{number}": _values(256, 256) for number in range(4)}
    saved = accel_ckpt.save(tmp_path / "one", {"model": state})
    sizes = [saved.manifest.files[f"tensors-{number:05d}.safetensors"].size for number in range(4)]
    assert sum(sizes) < 8 * 256 * 256 * 4 + 4 * 4096
    assert max(sizes) - min(sizes) < 4096


@pytest.mark.ranks(4)
def test_a_tensor_split_by_fsdp_over_tp_is_read_right(tmp_path: Path) -> None:
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    saved = accel_ckpt.save(tmp_path / "one", {"model": model.state_dict()})
    for name, value in saved.read("model").items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=0, msg=name)
    back = saved.read("model", like=model.state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(back[name].to_local(), value.to_local(), rtol=0, atol=0, msg=name)
    model.load_state_dict(back)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex128, torch.bool])
def test_narrow_wide_and_unusual_dtypes_are_sharded_too(tmp_path: Path, dtype: torch.dtype, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    mine = _values(3, 4)[: 2 - rank].to(dtype)
    tensor = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=torch.Size((3, 4)), stride=(4, 1))
    saved = accel_ckpt.save(tmp_path / "one", {"model": {"w": tensor}})
    back = saved.read("model", like={"w": tensor})["w"]
    assert back.dtype == dtype
    assert torch.equal(back.to_local().view(torch.uint8), mine.contiguous().view(torch.uint8))


@pytest.mark.ranks(2)
def test_each_rank_gets_back_its_own(tmp_path: Path, rank: int) -> None:
    saved = accel_ckpt.save(tmp_path / "one", {}, local={"rng": {"state": torch.tensor([rank]), "at": rank}})
    for other in range(2):
        assert saved.read_local("rng", other)["at"] == other
        assert saved.read_local("rng", other)["state"].item() == other
    assert saved.read_local("rng", 2) is None
    assert saved.read_local("loader", 0) is None
    assert saved.world_size == 2


@pytest.mark.ranks(2)
def test_ranks_may_bring_different_names(tmp_path: Path, rank: int) -> None:
    stage = {"shared": _values(200, 200), f"stage{rank}": _values(200, 300) + rank}
    saved = accel_ckpt.save(tmp_path / "one", {"model": stage, f"only{rank}": {"n": rank}})
    back = saved.read("model")
    assert sorted(back) == ["shared", "stage0", "stage1"]
    assert torch.equal(back["stage1"], _values(200, 300) + 1)
    assert [saved.read(f"only{number}") for number in range(2)] == [{"n": 0}, {"n": 1}]


@pytest.mark.ranks(2)
def test_values_that_differ_are_rank_zeros_and_said_so(tmp_path: Path, rank: int) -> None:
    with heard("accel_ckpt") as said:
        saved = accel_ckpt.save(tmp_path / "one", {"custom": {"elapsed": rank, "steps": [1, 2]}})
    assert saved.read("custom") == {"elapsed": 0, "steps": [1, 2]}
    assert [("custom/elapsed" in text) for text in said] == ([True] if rank == 0 else [])


@pytest.mark.ranks(2)
def test_shapes_that_differ_between_ranks_are_refused_on_all(tmp_path: Path, rank: int) -> None:
    with pytest.raises(CheckpointError, match=r"model/w is .* on rank 0 and .* on rank 1"):
        accel_ckpt.save(tmp_path / "one", {"model": {"w": torch.zeros(2 + rank)}})
    torch.distributed.barrier()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks(2)
def test_what_one_rank_cannot_save_fails_on_all_and_leaves_nothing(tmp_path: Path, rank: int) -> None:
    before = accel_ckpt.save(tmp_path / "one", {"model": {"w": torch.ones(2)}})
    state = {"model": {"w": object() if rank == 1 else torch.zeros(2)}}
    with pytest.raises(CheckpointError, match=r"model/w is a builtins\.object"):
        accel_ckpt.save(tmp_path / "one", state)
    torch.distributed.barrier()
    assert torch.equal(accel_ckpt.open_checkpoint(before.path).read("model")["w"], torch.ones(2))
    assert [entry.name for entry in tmp_path.iterdir()] == ["one"]


@pytest.mark.ranks(2)
def test_a_partial_sum_is_refused(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    tensor = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
    with pytest.raises(CheckpointError, match="model/w is a DTensor with placement"):
        accel_ckpt.save(tmp_path / "one", {"model": {"w": tensor}})


@pytest.mark.ranks(2)
def test_a_sharded_tensor_of_another_shape_is_a_mismatch(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    saved = accel_ckpt.save(tmp_path / "one", {"model": {"w": distribute_tensor(_values(4, 2), mesh, [Shard(0)])}})
    other = {"w": distribute_tensor(_values(6, 2), mesh, [Shard(0)])}
    with pytest.raises(CheckpointMismatchError, match=r"w \(shape \(4, 2\) saved, shape \(6, 2\) wanted\)"):
        saved.read("model", like=other)


@pytest.mark.ranks(2)
def test_places_without_a_model_are_placed_by_the_caller(tmp_path: Path, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    parameter = distribute_tensor(_values(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    state = {"state": {"w": {"exp_avg": parameter + 1, "step": torch.tensor(3.0)}}}
    saved = accel_ckpt.save(tmp_path / "one", {"optimizer": state})
    back = saved.read(
        "optimizer",
        like={"state": {}},
        strict=False,
        place=lambda path, dtype, shape: parameter if shape == tuple(parameter.shape) else None,
    )
    moment = back["state"]["w"]["exp_avg"]
    assert moment.placements == parameter.placements
    assert torch.equal(moment.to_local(), parameter.to_local() + 1)
    assert type(back["state"]["w"]["step"]) is torch.Tensor


@pytest.mark.ranks(2)
def test_every_rank_hears_of_damage_in_another_ranks_share(tmp_path: Path, rank: int) -> None:
    import torch.distributed as dist

    saved = accel_ckpt.save(tmp_path / "one", {"model": {f"w{i}": _values(200, 200) for i in range(2)}})
    if rank == 0:
        file = saved.path / "tensors-00001.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"tensors-00001\.safetensors"):
        accel_ckpt.open_checkpoint(saved.path, group=dist.group.WORLD)


@pytest.mark.ranks(2)
def test_a_folder_that_ranks_do_not_share_is_named_with_what_to_do(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank == 1:  # on another machine, whose disk has the same paths
        original = transaction.locate
        monkeypatch.setattr(transaction, "locate", lambda place: original(str(place).replace("one", "other")))
    (tmp_path / "one").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match=r"a place that all ranks share\?.*save_on_each_node"):
        accel_ckpt.save(tmp_path / "one" / "saved", {"w": torch.zeros(3)}, local={"rank": rank})

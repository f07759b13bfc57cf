"""Two ranks on one GPU, over NCCL or over gloo with tensors of the GPU; on the CPU the same over gloo.

NCCL refuses two ranks of one machine on one device. Each rank names another host here, so that they connect through
sockets of the loopback interface.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, FullyShardedDataParallelPlugin
from accel.utils import InitProcessGroupKwargs

pytestmark = pytest.mark.ranks(2, group=False, timeout=120)
CPU = pytest.param("cpu")
NCCL = pytest.param("nccl", marks=pytest.mark.gpu_ranks)
GLOO = pytest.param("gloo", marks=pytest.mark.gpu_ranks)
OVER_SOCKETS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
}


OPENED: list[Accelerator] = []


def ends_training(test: Callable[..., None]) -> Callable[..., None]:
    """Ends what the test has opened; after a failure the rank does so itself."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        test(*args, **kwargs)
        while OPENED:
            OPENED.pop().end_training()

    return run


def opened(kind: str, rank: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Accelerator:
    """The Accelerator of this rank; the variables are set before NCCL reads them, and while the test runs."""
    if kind != "cpu":
        for name, value in {**OVER_SOCKETS, "NCCL_HOSTID": f"host{rank}", "ACCEL_TORCH_DEVICE": "cuda:0"}.items():
            monkeypatch.setenv(name, value)
        options["kwargs_handlers"] = [InitProcessGroupKwargs(backend=kind)]
    OPENED.append(Accelerator(cpu=kind == "cpu", **options))
    return OPENED[-1]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)), nn.Linear(16, 1))


def rows(count: int = 48) -> torch.Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(1))


def reference(data: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Weights of one process on the CPU that takes the ranks' rows together."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in data.chunk(steps):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def train(accelerator: Accelerator, steps: int = 6) -> tuple[nn.Module, Any, Any]:
    own = net()
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9))
    for batch in rows().chunk(steps):
        mine = batch.chunk(2)[accelerator.process_index].to(accelerator.device)
        accelerator.backward(model(mine).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return own, model, optimizer


def full(model: nn.Module) -> list[torch.Tensor]:
    values = (parameter.detach() for parameter in model.parameters())
    return [getattr(value, "full_tensor", lambda value=value: value)().cpu().clone() for value in values]


@pytest.mark.parametrize("kind", [CPU, NCCL, GLOO])
@ends_training
def test_ddp_is_one_process_on_the_global_batch(kind: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = opened(kind, rank, monkeypatch)
    own, _, _ = train(accelerator)
    for found, wanted in zip(full(own), reference(rows(), 6), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [CPU, NCCL])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@ends_training
def test_fsdp_is_one_process_on_the_global_batch(
    kind: str, precision: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = FullyShardedDataParallelPlugin()
    accelerator = opened(kind, rank, monkeypatch, fsdp_plugin=plugin, mixed_precision=precision)
    own, _, _ = train(accelerator)
    tolerance = 1e-5 if precision == "no" else 0.02
    for found, wanted in zip(full(own), reference(rows(), 6), strict=True):
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("kind", [CPU, NCCL, GLOO])
@ends_training
def test_nested_values_are_gathered_reduced_and_broadcast(
    kind: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = opened(kind, rank, monkeypatch)
    mine = {
        "float": torch.full((2, 3), float(rank), device=accelerator.device),
        "nested": [torch.arange(4, device=accelerator.device) + rank, (torch.ones(1, device=accelerator.device),)],
    }
    gathered = accelerator.gather(mine)
    assert gathered["float"].device.type == accelerator.device.type
    assert gathered["float"].cpu().tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert gathered["nested"][0].cpu().tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    assert accelerator.reduce(mine, "sum")["nested"][0].cpu().tolist() == [1, 3, 5, 7]
    padded = accelerator.pad_across_processes(torch.ones(2 + rank, device=accelerator.device))
    assert padded.shape == (3,)
    assert accelerator.gather(padded).sum().item() == 5.0


@pytest.mark.parametrize("kind", [CPU, NCCL, GLOO])
@ends_training
def test_an_overflow_on_one_rank_skips_the_step_on_both(kind: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = opened(kind, rank, monkeypatch, mixed_precision="fp16")
    own = net()
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.05))
    before = full(own)
    factor = float("inf") if rank == 1 else 1.0
    accelerator.backward(model(rows(8).to(accelerator.device)).square().mean() * factor)
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    assert all(torch.equal(a, b) for a, b in zip(full(own), before, strict=True))


@pytest.mark.parametrize(("kind", "strategy"), [("cpu", "ddp"), ("cpu", "fsdp")], ids=["cpu-ddp", "cpu-fsdp"])
@ends_training
def test_a_checkpoint_of_two_ranks_loads_on_both_cpu(
    kind: str, strategy: str, rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_checkpoint(kind, strategy, rank, monkeypatch, tmp_path)


@pytest.mark.gpu_ranks
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("nccl", "ddp"), ("nccl", "fsdp"), ("gloo", "ddp")],
    ids=["nccl-ddp", "nccl-fsdp", "gloo-ddp"],
)
@ends_training
def test_a_checkpoint_of_two_ranks_loads_on_both(
    kind: str, strategy: str, rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_checkpoint(kind, strategy, rank, monkeypatch, tmp_path)


def check_checkpoint(kind: str, strategy: str, rank: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    options = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if strategy == "fsdp" else {}
    accelerator = opened(kind, rank, monkeypatch, **options)
    own, model, optimizer = train(accelerator)
    before = full(own)
    for name, asynchronous in (("now", False), ("later", True)):
        accelerator.save_state(folder / name, asynchronous=asynchronous)
        accelerator.backward(model(rows(8).to(accelerator.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if asynchronous:
            accelerator.last_save.wait(60)
        assert not all(torch.equal(a, b) for a, b in zip(full(own), before, strict=True))
        accelerator.load_state(folder / name)
        assert all(torch.equal(a, b) for a, b in zip(full(own), before, strict=True))


@pytest.mark.parametrize("kind", [CPU, NCCL, GLOO])
@ends_training
def test_a_dispatched_loader_gives_each_rank_its_rows(kind: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from accel import DataLoaderConfiguration

    options = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = opened(kind, rank, monkeypatch, dataloader_config=options)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(32.0)), batch_size=4))
    seen = []
    for (batch,) in loader:
        assert batch.device.type == accelerator.device.type
        seen.append(accelerator.gather_for_metrics(batch))
    assert sorted(torch.cat(seen).cpu().tolist()) == list(range(32))

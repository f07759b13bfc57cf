"""This layer in other people's training loops: plain torch with DDP, and Lightning Fabric.

    python other_loops.py torch|fabric

trains on one process, on two, and on one again, each run going on where the one before stopped inside the epoch. What
was trained on, and the weights at the end, must be those of one plain run that was never stopped. It needs torch,
accel-state and accel-data only (and lightning-fabric), so that it also tells whether the layer is whole by itself.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from accel_data import LoaderOptions, prepare_loader
from accel_state.parallelism.config import DataShard

SIZE, GLOBAL_BATCH = 103, 12
RUNS = [(1, 4, 2), (2, 6, 3), (1, 12, None)]
"""Processes, rows of one process at once, optimizer steps until it stops (None: to the end)."""


@dataclass(frozen=True)
class Run:
    """One process of one run of the story."""

    rank: int
    ranks: int
    batch: int
    stop: int | None
    folder: Path
    number: int

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def loader(self):
        x = torch.linspace(-1, 1, SIZE)[:, None]
        data = TensorDataset(x, torch.sin(3 * x), torch.arange(SIZE))
        return prepare_loader(
            DataLoader(data, batch_size=self.batch, shuffle=True, num_workers=1),
            DataShard(self.rank, self.ranks),
            options=LoaderOptions(data_seed=7, global_batch_size=GLOBAL_BATCH),
        )

    def saw(self, loader, indices):
        """Writes down which samples this process has trained on."""
        with (self.folder / f"seen{self.number}.{self.rank}").open("a") as file:
            file.write(json.dumps(indices[: loader.real_counts[self.rank]].tolist()) + "\n")


def model_and_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(run, loader, optimizer, backward):
    """The loop itself; ``backward`` makes gradients of a batch and its share of the step."""
    steps = 0
    for x, y, indices in loader:
        backward(x, y, loader.window.share)
        run.saw(loader, indices)
        if loader.window.index + 1 == loader.window.size:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == run.stop:
                break


def torch_loop(run):
    model, optimizer = model_and_optimizer()
    loader = run.loader()
    if run.checkpoint.exists():
        saved = torch.load(run.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    wrapped = DistributedDataParallel(model) if run.ranks > 1 else model
    train(run, loader, optimizer, lambda x, y, share: ((wrapped(x) - y).square().mean() * share).backward())
    if run.rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save(state, run.checkpoint)


def fabric_loop(run):
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    several = {"strategy": "ddp", "plugins": [TorchElasticEnvironment()]} if run.ranks > 1 else {}
    fabric = Fabric(accelerator="cpu", devices=run.ranks, **several)
    fabric.launch()
    model, optimizer = fabric.setup(*model_and_optimizer())
    loader = run.loader()
    if run.checkpoint.exists():
        rest = fabric.load(run.checkpoint, {"model": model, "optimizer": optimizer})
        loader.load_state_dict(rest["loader"])
    train(run, loader, optimizer, lambda x, y, share: fabric.backward((model(x) - y).square().mean() * share))
    fabric.save(run.checkpoint, {"model": model, "optimizer": optimizer, "loader": loader.state_dict()})


LOOPS = {"torch": torch_loop, "fabric": fabric_loop}


def process(kind, run):
    """One rank; the group is opened beforehand, without a port, and adopted by whatever runs in it."""
    places = {"RANK": run.rank, "LOCAL_RANK": run.rank, "WORLD_SIZE": run.ranks, "LOCAL_WORLD_SIZE": run.ranks}
    os.environ.update({name: str(value) for name, value in places.items()})
    if run.ranks > 1:
        store = f"file://{run.folder}/store{run.number}"
        dist.init_process_group("gloo", init_method=store, rank=run.rank, world_size=run.ranks)
    LOOPS[kind](run)
    if run.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def story(kind, folder):
    """Carries out the runs one after the other; the samples of each, and the weights at the end."""
    forking = multiprocessing.get_context("fork")  # torch has been imported once, and has no threads yet
    seen = []
    for number, (ranks, batch, stop) in enumerate(RUNS):
        runs = [Run(rank, ranks, batch, stop, folder, number) for rank in range(ranks)]
        processes = [forking.Process(target=process, args=(kind, run)) for run in runs]
        try:
            for one in processes:
                one.start()
            for one in processes:
                one.join(120)
            assert [one.exitcode for one in processes] == [0] * ranks
        finally:
            for one in processes:
                one.kill()
        lines = [line for rank in range(ranks) for line in (folder / f"seen{number}.{rank}").read_text().splitlines()]
        seen.append(sorted(index for line in lines for index in json.loads(line)))
    return seen, torch.load(folder / "checkpoint.pt")["model"]


def main(kind):
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # imports what every process would import for itself
    with tempfile.TemporaryDirectory() as scratch:
        seen, weights = story(kind, Path(scratch))
    with tempfile.TemporaryDirectory() as scratch:
        alone = Run(0, 1, 5, None, Path(scratch), 0)
        torch_loop(alone)
        expected = torch.load(alone.checkpoint)["model"]
    assert sorted(index for part in seen for index in part) == list(range(SIZE)), seen
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
    print(f"{kind}: {' + '.join(str(len(part)) for part in seen)} samples, each once; weights as if never stopped")


if __name__ == "__main__":
    main(*sys.argv[1:])

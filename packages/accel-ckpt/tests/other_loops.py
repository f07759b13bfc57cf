"""This layer in other people's training loops: plain torch on one process, and torch's own sharding on two.

    python other_loops.py

trains on one process, on two with every parameter sharded, on one, and on two again, each run going on from the
checkpoint of the one before. The weights at the end must be those of one run that was never stopped. It needs torch,
accel-state and accel-ckpt only, so that it also tells whether the layer is whole by itself.
"""

import multiprocessing
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from accel_ckpt import CheckpointDirectory, keep_last, open_checkpoint

RANKS, STEPS = (1, 2, 1, 2), 3
NOTES = {"names": ("a", "b"), "table": torch.arange(7), 3: {"rate": 0.1, "best": None}}


def model_and_optimizer(ranks):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3)).double()
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    assert all(isinstance(parameter, DTensor) == (ranks > 1) for parameter in model.parameters())
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model, optimizer, steps):
    for step in steps:
        x = torch.linspace(-1, 1, 60, dtype=torch.float64).view(10, 6) + step  # the same on every rank
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def resume(saved, model, optimizer):
    """Puts a checkpoint's values where this run has them, and tells how many steps it has seen."""
    model.load_state_dict(saved.read("model", like=model.state_dict()))
    parameters = list(model.parameters())

    def place(path, dtype, shape):
        """Moments of a parameter go where it is."""
        parameter = parameters[path[1]] if path[0] == "state" else None
        return parameter if parameter is not None and tuple(parameter.shape) == shape else None

    optimizer.load_state_dict(saved.read("optimizer", like={}, strict=False, place=place))
    return saved.read("steps")


def process(rank, ranks, folder, number):
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store{number}", rank=rank, world_size=ranks)
    model, optimizer = model_and_optimizer(ranks)
    series = CheckpointDirectory(folder / "series", retention=keep_last(2))
    latest = series.latest()
    begin = 0 if latest is None else resume(latest, model, optimizer)
    assert begin == STEPS * number
    train(model, optimizer, range(begin, begin + STEPS))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": begin + STEPS, "notes": NOTES}
    series.save(state)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def story(folder):
    """Carries out the runs one after the other."""
    forking = multiprocessing.get_context("fork")  # torch has been imported once, and has no threads yet
    for number, ranks in enumerate(RANKS):
        processes = [forking.Process(target=process, args=(rank, ranks, folder, number)) for rank in range(ranks)]
        try:
            for one in processes:
                one.start()
            for one in processes:
                one.join(120)
            assert [one.exitcode for one in processes] == [0] * ranks
        finally:
            for one in processes:
                one.kill()


def main():
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # imports what every process would import for itself
    with tempfile.TemporaryDirectory() as scratch:
        story(Path(scratch))
        saved = open_checkpoint(Path(scratch) / "series" / f"checkpoint_{len(RANKS) - 1}")
        weights, notes, moments = saved.read("model"), saved.read("notes"), saved.read("optimizer")["state"]
        parts = [len(entry.parts) for entry in saved.manifest.tensors.values()]
    model, optimizer = model_and_optimizer(1)
    train(model, optimizer, range(STEPS * len(RANKS)))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-12)
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(moments[index][key], value, rtol=1e-10, atol=1e-12)
    assert torch.equal(notes.pop("table"), NOTES["table"])
    assert notes == {key: value for key, value in NOTES.items() if key != "table"}
    assert max(parts) == 2, "no tensor was sharded, so nothing was tried"
    assert not {"accel", "accel_backends", "accel_data", "accel_precision"} & set(sys.modules)
    print(f"on {' -> '.join(map(str, RANKS))} processes: weights and moments as if never stopped")


if __name__ == "__main__":
    main()

"""Training of two ranks in which rank 1 fails in the way that the first argument names."""

import os
import signal
import sys

import torch

from accel import Accelerator

KIND = sys.argv[1]
CULPRIT = 0 if KIND == "first" else 1


def prepare_data() -> None:
    if KIND == "first" and int(os.environ["RANK"]) == CULPRIT:
        raise KeyError("no such column")  # line: first


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        if KIND == "worker" and int(os.environ["RANK"]) == CULPRIT and index > 8:
            raise KeyError("no such row")  # line: worker
        return torch.full((4,), float(index))


def save_hook(models: list, weights: list, folder: str) -> None:
    if int(os.environ["RANK"]) == CULPRIT:
        raise KeyError("no such tokenizer")  # line: hook


def main() -> None:
    accelerator = Accelerator(cpu=True)
    with accelerator.main_process_first():
        prepare_data()
    model = torch.nn.Linear(4, 1)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=int(KIND == "worker"))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
    for step, rows in enumerate(loader):
        if step == 1 and accelerator.process_index == CULPRIT:
            if KIND == "killed":
                os.kill(os.getpid(), signal.SIGKILL)  # line: killed
            if KIND.startswith("exit"):
                sys.exit(int(KIND.removeprefix("exit")))  # line: exit
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.gather(rows)
    accelerator.register_save_state_pre_hook(save_hook)
    accelerator.save_state("saved")


if __name__ == "__main__":
    main()
